"""Constrained output: JSON from a schema, and sentences from a regular expression, with the included model.

    pip install -e ".[guided,examples]" && python examples/constrained_output.py

llguidance compiles the grammars. In each step, `GuidedDecoding` masks the tokens that the grammars do not allow. As the
post-processor "batched", it does this for all requests at once. The requests of this example use sampling. Greedy
decoding works too.

The program prints the cost of the grammars. On 2026-11-21, the command above took 45 to 65 microseconds per token
(medians of five runs), with 16 requests in a step and a vocabulary of 4,096 tokens, on two busy cores of a virtual
machine (AMD EPYC, no GPU), with llguidance 1.9.1, torch 2.13.0 and Python 3.11.7. The first tokens of a grammar may
take milliseconds longer.
"""

import json
import queue
import re
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from tokenizers import Tokenizer

from batch_manager import (
    BatchManagerError,
    GptManager,
    InferenceRequest,
    Parts,
    SchedulerPolicy,
    TrtGptModelType,
)
from batch_manager.extras.guided_decoding import GuidedDecoding
from batch_manager.tools.command_parser import CommandParser

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "temper", "age", "friends"],
    "properties": {
        "name": {"type": "string", "pattern": "^(Mr|Mrs|Miss) [A-Z][a-z]{3,9}$"},
        "temper": {"enum": ["cheerful", "proud", "anxious"]},
        "age": {"type": "integer", "minimum": 16, "maximum": 90},
        "friends": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, "maxItems": 3}}}
SENTENCE = r' "[A-Z][a-z]+( [a-z]{2,9}){3,8}[.!?]" said (Emma|Mr\. Knightley|Miss Bates)\.'
COPIES, LAST = 8, 1000      # requests per kind; a request with the id LAST makes the worker finish and end

parser = CommandParser(description=__doc__)
parser.add_argument("model", nargs="?", default=str(Path(__file__).parent / "models" / "austen-4m"),
                    help="folder of a checkpoint with a tokenizer.json; default: the included model")
model = parser.parse_args().model
if not Path(model, "tokenizer.json").is_file():
    parser.error(f"there is no tokenizer.json in {model}; expected a folder of a checkpoint; pass another one")
tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
end_id = tokenizer.token_to_id("</s>")
guided = GuidedDecoding(f"{model}/tokenizer.json", vocab_size=tokenizer.get_vocab_size(), end_id=end_id)

# A grammar is compiled once, for any number of requests. It constrains the output, not the prompt.
kinds = [("The lady, in a few words:\n", guided.json_schema(SCHEMA)), ("They walked on.", guided.regex(SENTENCE))]
requests, texts, calls = queue.Queue(), {}, []
for request_id in range(2 * COPIES):
    prompt, grammar = kinds[request_id % 2]
    guided.constrain(request_id, grammar)
    requests.put(InferenceRequest(request_id, {
        "input_ids": tokenizer.encode(prompt).ids, "request_output_len": 160, "end_id": end_id, "temperature": 0.8,
        "runtime_top_k": 40, "random_seed": request_id}, logits_post_processor="batched"))
requests.put(InferenceRequest(LAST))


def timed(request_ids, logits, token_ids):
    """Call the post-processor, and record the number of requests and the time of the call in seconds."""
    start = perf_counter()
    guided(request_ids, logits, token_ids)
    calls.append((len(request_ids), perf_counter() - start))


def get_inference_requests(max_num_requests):
    return [requests.get() for _ in range(min(max_num_requests, requests.qsize()))]


def send_response(request_id, tensors, final_response, error_message):
    guided.release(request_id)
    if error_message:
        print(f"[{request_id}] {error_message}", file=sys.stderr)
    else:
        texts[request_id] = tokenizer.decode(tensors[0].array[0, 0].tolist())


try:
    with GptManager(model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
                    get_inference_requests, send_response, terminate_req_id=LAST, exclude_input_in_output=True,
                    parts=Parts(logits_post_processor_batched=timed)) as manager:
        manager.wait_until_terminate()
except BatchManagerError as error:
    parser.error(str(error))

for request_id, text in sorted(texts.items()):
    if request_id % 2 == 0:
        print(json.loads(text))
    else:
        assert re.fullmatch(SENTENCE, text), text
        print(text.strip())
tokens, cost = sum(count for count, _ in calls), median(spent / count for count, spent in calls)
print(f"{len(texts)} outputs, {tokens} tokens; the grammars took {1e6 * cost:.0f} microseconds per token (median)")
