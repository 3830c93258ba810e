"""A server in forty lines: a queue of requests, four callbacks, and three prompts that the model continues."""

import queue
import sys

from tokenizers import Tokenizer

from batch_manager import GptManager, InferenceRequest, SchedulerPolicy, TrtGptModelType

model = sys.argv[1] if len(sys.argv) > 1 else f"{sys.path[0]}/models/austen-4m"  # in the folder of this file
tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
requests, stopped, statistics = queue.Queue(), set(), []
LAST = 1000  # a request with this id makes the worker finish the others and end


def get_inference_requests(max_num_requests):
    """Called at the start of every iteration; the returned requests join the batch at once."""
    return [requests.get() for _ in range(min(max_num_requests, requests.qsize()))]


def send_response(request_id, tensors, final_response, error_message):
    """Called when a request ends; with `is_streaming=True`, for every new token."""
    if error_message:
        print(f"[{request_id}] {error_message}", file=sys.stderr)
    else:
        output_ids = tensors[0].array  # the prompt and the output, as a NumPy array; .tensor is a torch tensor
        print(f"[{request_id}] {tokenizer.decode(output_ids[0, 0].tolist())}\n")


with GptManager(model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
                get_inference_requests, send_response, lambda: stopped, statistics.append,
                terminate_req_id=LAST) as manager:
    for request_id, prompt in enumerate(["It is a truth universally acknowledged", "Emma smiled, and", "The ball"]):
        requests.put(InferenceRequest(request_id, {
            "input_ids": tokenizer.encode(prompt).ids, "request_output_len": 48,
            "end_id": manager.info.end_ids or None, "temperature": 0.7, "runtime_top_k": 40, "random_seed": 7}))
    requests.put(InferenceRequest(LAST))
    manager.wait_until_terminate()
print(f"{len(statistics)} iterations")
