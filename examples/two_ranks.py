"""One model on two processes, and the callbacks on both, as in TensorRT-LLM: each prints the same text with its rank.

    torchrun --nproc-per-node 2 examples/two_ranks.py [MODEL]
    mpirun -n 2 python examples/two_ranks.py [MODEL]
"""

import os
import sys

from tokenizers import Tokenizer

from batch_manager import (
    GptManager,
    InferenceRequest,
    ParallelConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.extras.launch import rank_of

model = sys.argv[1] if len(sys.argv) > 1 else f"{sys.path[0]}/models/austen-4m"  # in the folder of this file
# torchrun sets MASTER_ADDR. For mpirun on one machine, any free port will do.
leader = None if "MASTER_ADDR" in os.environ else "127.0.0.1:29500"
config = ParallelConfig(tensor_parallel_size=2, leader=leader)
tokenizer, rank = Tokenizer.from_file(f"{model}/tokenizer.json"), rank_of(config)
PROMPTS, LAST = ["It is a truth universally acknowledged", "Emma smiled, and"], 1000
requests = [InferenceRequest(number, {"input_ids": tokenizer.encode(prompt).ids, "request_output_len": 32,
                                      "temperature": 0.7, "runtime_top_k": 40, "random_seed": 7})
            for number, prompt in enumerate(PROMPTS)]
requests.append(InferenceRequest(LAST))  # ends the worker once the others have ended


def get_inference_requests(max_num_requests):
    """Called on both ranks with the same number. Both must return the same requests."""
    return [requests.pop(0) for _ in range(min(max_num_requests, len(requests)))]


def send_response(request_id, tensors, final_response, error_message):
    """Called on both ranks with the same responses."""
    text = error_message or repr(tokenizer.decode(tensors[0].array[0, 0].tolist()))
    print(f"rank {rank} [{request_id}] {text}", flush=True)


with GptManager(model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
                get_inference_requests, send_response, terminate_req_id=LAST,
                optional_params=TrtGptModelOptionalParams(parallel_config=config)) as manager:
    manager.wait_until_terminate()
