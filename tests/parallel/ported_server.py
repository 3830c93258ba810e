"""A server as TensorRT-LLM's users write it: rank 0 has the queue, and broadcasts inside get. A program of every rank.

    python -m tests.parallel.ported_server PORT        with the variables of a launcher

Prints one line of JSON for each response: [rank, request id, tokens, error].
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from batch_manager import (
    GptManager,
    InferenceRequest,
    ParallelConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.extras.launch import rank_of

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
LAST = 1000


def main() -> None:
    port = int(sys.argv[1])
    config = ParallelConfig(tensor_parallel_size=2, leader=f"127.0.0.1:{port}", rank_timeout_s=20)
    rank = rank_of(config)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port + 1}", rank=rank, world_size=2,
                                   timeout=timedelta(seconds=60))
    queue = [(number, prompt, 12) for number, prompt in enumerate(PROMPTS)] if rank == 0 else []

    def get(max_num_requests: int) -> list[InferenceRequest]:
        due = [[queue.pop(0) for _ in range(min(1, max_num_requests, len(queue)))]]
        if rank == 0 and not queue and not due[0] and max_num_requests:
            due = [[(LAST, [1], 1)]]
        distributed.broadcast_object_list(due, src=0)
        return [InferenceRequest(number, {"input_ids": torch.tensor([prompt]), "request_output_len": length})
                for number, prompt, length in due[0]]

    def send(request_id, tensors, final_response, error):
        print(json.dumps([rank, request_id, tensors[0].array[0, 0].tolist() if tensors else [], error]), flush=True)

    params = TrtGptModelOptionalParams(parallel_config=config, device="cpu", dtype="float32", max_batch_size=4)
    with GptManager(MODEL, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, get, send,
                    terminate_req_id=LAST, optional_params=params) as manager:
        manager.wait_until_terminate()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
