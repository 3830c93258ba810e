"""Runs the whole engine with a small model in each of MODES, with requests of many kinds, and prints the answers.

    TRITON_INTERPRET=1 python -m tests.integration.engine_modes FOLDER [MODE ...]      one line of JSON for each mode

A mode is a configuration of the engine, such as beams or run-ahead. The checkpoints of the models are written to
FOLDER, unless they exist. With TRITON_INTERPRET=1, the engine runs all of its Triton kernels, interpreted on the CPU.
Otherwise it runs in torch. test_whole_engine_interpreted.py runs this program.
"""

import contextlib
import json
import random
import sys
from pathlib import Path
from unittest import mock

from batch_manager import InferenceRequest, KvCacheConfig, SchedulerPolicy, TrtGptModelType
from batch_manager.attention import triton_paged
from batch_manager.triton_kernels import context_work_list
from tests.deterministic.differential import CONFIGS, make_checkpoint
from tests.harness.client import Client
from tests.harness.warm_up import without_warm_up
from tests.harness.world import build_world

VOCAB, MOST_ITERATIONS = 60, 200
SMALL = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 128}

# (prompt length, options) of each request. Only the mode "beams" has requests with `beam_width`.
REQUESTS = [
    (19, {}),
    (5, {"temperature": 0.9, "runtime_top_k": 20, "random_seed": 5, "return_top_log_probs": 3}),
    (12, {"temperature": 1.1, "runtime_top_p": 0.8, "runtime_min_p": 0.02, "random_seed": 77}),
    (25, {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2, "no_repeat_ngram_size": 2,
          "return_top_log_probs": 5, "raw_log_probs": True}),
    (3, {"bad_words_list": [[7], [8, 9]], "stop_words_list": [[11, 12]], "min_length": 4, "end_id": 3}),
]
# Requests that need only the sampling kernel. Attention splits the second one into parts. It splits nothing in the step
# with the prompt of the last one, because the second one has ended.
PLAIN = [(19, {}), (84, {}), (5, {"temperature": 0.9, "runtime_top_k": 20, "random_seed": 5}),
         (12, {"temperature": 1.1, "runtime_top_p": 0.8, "random_seed": 2**63 + 9}), (30, {"end_id": 3}),
         (6, {})]
BEAMS = [(6, {"beam_width": 3}), (17, {"beam_width": 2, "len_penalty": 1.0})]

# mode -> options of the engine; `pool` is the number of KV cache blocks, of 16 tokens each.
MODES = {
    "plain": {"pool": 40},
    "beams": {"pool": 40, "max_beam_width": 3},
    "run_ahead": {"pool": 40, "run_ahead": True, "kv_cache_dtype": "fp8_e4m3"},
    "reuse": {"pool": 40, "enable_block_reuse": True},
    "windows": {"pool": 40, "max_attention_window": 18, "sink_token_length": 2, "enable_trt_overlap": True},
    "v1": {"pool": 40, "model_type": TrtGptModelType.V1},
    "deterministic": {"pool": 40, "deterministic": True},
    "plain_rows": {"pool": 40, "run_ahead": True},
}
KEYS_PER_PART = 8                   # minimum number in context attention; low, so that it splits short prompts
WARMED_UP = ("plain", "beams")      # the warm-up of the other modes launches the same kernels


def make_requests(mode):
    """Yield the requests of a mode in order of arrival."""
    draw = random.Random(1)
    asked = PLAIN if mode in ("plain_rows", "run_ahead") else [*REQUESTS, *(BEAMS if mode == "beams" else [])]
    if mode == "reuse":                                # prompts that share full blocks
        asked = [(33, {}), (20, {"temperature": 0.9, "runtime_top_k": 20, "random_seed": 5}), (33, {})]
    num_tokens = 7 if mode == "plain_rows" else 3
    shared = [draw.randrange(VOCAB) for _ in range(33)]
    for index, (length, options) in enumerate(asked):
        prompt = shared[:length] if mode == "reuse" else [draw.randrange(VOCAB) for _ in range(length)]
        yield InferenceRequest(index, {"input_ids": prompt, "request_output_len": num_tokens + index % 2,
                                       "return_log_probs": True, **options}, is_streaming=index == 1)


def checkpoint(folder, num_layers=1):
    """Return the folder, within `folder`, of a small model with this many layers. Make it if it does not exist."""
    CONFIGS["qwen3"] |= SMALL | {"num_hidden_layers": num_layers}
    parent = Path(folder) / f"{num_layers} layers"
    parent.mkdir(exist_ok=True)
    return make_checkpoint("qwen3", parent)


class Arrivals(Client):
    """A client that hands over two requests at first, then one request in every second iteration."""

    has_poll = False

    def __init__(self, requests):
        super().__init__()
        self.pending = list(requests)

    def items(self, max_num_requests):
        due = len(self.stats) % 2 if self.stats else 2
        return super().items(due if max_num_requests < 0 else min(due, max_num_requests))


def answer(responses):
    """Return what all responses to one request contain, as JSON data: tokens, log-probs, error, number of finals."""
    tokens, log_probs = [], []
    for response in responses:
        if response.error:
            continue
        found = response.tensors
        for beam in range(found["sequence_length"].shape[1]):
            tokens += [beam, *response.tokens(beam)]
        log_probs += found["output_log_probs"].ravel().tolist()
        if "top_log_probs" in found:
            log_probs += found["top_log_probs"].ravel().tolist()
            tokens += found["top_log_prob_ids"].ravel().tolist()
    return {"tokens": tokens, "log_probs": log_probs, "error": "".join(response.error for response in responses),
            "finals": sum(response.final for response in responses)}


def run(folder, mode, device="cpu", **more):
    """Run the engine in a mode with the mode's requests. Return the results as JSON data.

    more   options of the engine in addition to those of the mode

    The results are the mode, what runs the kernels ("dispatch": "triton" or "torch"), the answer to each request, the
    number of steps with a context whose keys attention split into parts, and the maxima of statistics that show whether
    the mode took effect.
    """
    options = dict(MODES[mode])
    pool, kv_names = options.pop("pool"), ("enable_block_reuse", "max_attention_window", "sink_token_length",
                                           "kv_cache_dtype")
    kv = KvCacheConfig(tokens_per_block=16, max_tokens=16 * pool,
                       **{name: options.pop(name) for name in kv_names if name in options})
    static = options.get("model_type") is TrtGptModelType.V1
    has_warm_up = mode in WARMED_UP or device != "cpu"
    no_warm_up = contextlib.nullcontext() if has_warm_up else without_warm_up()
    with (no_warm_up, mock.patch.object(context_work_list, "MIN_KEYS_PER_PART", KEYS_PER_PART),
          mock.patch.object(triton_paged, "FIXED_PART_KEYS", 16)):
        world = build_world(
            client=Arrivals(make_requests(mode)), model_path=checkpoint(folder, 2 if mode == "plain" else 1),
            policy=SchedulerPolicy.GUARANTEED_NO_EVICT, device=device, dtype="float32", num_threads=1,
            cpu_compile=False, max_batch_size=4, max_num_tokens=48, enable_chunked_context=not static,
            kv_cache_config=kv, exclude_input=True, **options, **more)
    attention, split = world.backend._parts.attention, []
    if world.backend.info.dispatch == "triton":
        plan_contexts = attention.plan_contexts
        attention.plan_contexts = lambda *lengths: split.append(plan_contexts(*lengths)) or split[-1]
    try:
        with mock.patch.object(context_work_list, "MIN_KEYS_PER_PART", KEYS_PER_PART):
            world.run(MOST_ITERATIONS)
    finally:
        world.backend.close()
    records = [json.loads(record) for record in world.client.stats]
    return {"mode": mode, "dispatch": world.backend.info.dispatch,
            "split contexts": sum(bool(of.part_starts[-1]) for work in split for of in work.values()),
            "requests": {request_id: answer(got) for request_id, got in world.client.responses.items()},
            **{name: max(record.get(name, 0) for record in records) for name in (
                "MicroBatch ID", "Reused KV cache blocks", "Iterations In Flight")}}


if __name__ == "__main__":
    for name in sys.argv[2:] or MODES:
        print(json.dumps(run(sys.argv[1], name)), flush=True)
