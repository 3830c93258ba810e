"""Runs the whole engine in each of its modes, with a small model and requests of every kind, and prints the answers.

    TRITON_INTERPRET=1 python -m tests.integration.engine_modes FOLDER [MODE ...]      one line of JSON for each mode

The checkpoints of the models are made in FOLDER, unless they exist. With TRITON_INTERPRET=1 the engine runs all of its
Triton kernels, interpreted on the CPU; without it, the engine runs in torch. test_whole_engine_interpreted.py runs
this.
"""

import contextlib
import json
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from batch_manager import (
    InferenceRequest,
    KvCacheConfig,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.build import build_loop
from batch_manager.clock import SystemClock
from batch_manager.kv.audit import audit
from batch_manager.runtime.native_backend import NativeBackend
from tests.deterministic.differential import CONFIGS, make_checkpoint

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
# Requests that need only the sampling kernel. Attention splits the second one into parts.
PLAIN = [(19, {}), (84, {}), (5, {"temperature": 0.9, "runtime_top_k": 20, "random_seed": 5}),
         (12, {"temperature": 1.1, "runtime_top_p": 0.8, "random_seed": 2**63 + 9}), (30, {"end_id": 3})]
BEAMS = [(6, {"beam_width": 3}), (17, {"beam_width": 2, "len_penalty": 1.0})]

# mode -> options of the engine; `pool` is the number of KV cache blocks, of 16 tokens each.
MODES = {
    "plain": {"pool": 40},
    "beams": {"pool": 40, "max_beam_width": 3},
    "overlap": {"pool": 40, "enable_trt_overlap": True},
    "run_ahead": {"pool": 40, "run_ahead": True},
    "reuse": {"pool": 40, "enable_block_reuse": True},
    "windows": {"pool": 40, "max_attention_window": 18, "sink_token_length": 2},
    "v1": {"pool": 40, "model_type": TrtGptModelType.V1},
    "deterministic": {"pool": 40, "deterministic": True},
    "plain_rows": {"pool": 40, "run_ahead": True},
}
WARMED_UP = ("plain", "beams")      # the warm-up of the other modes launches the same kernels


def make_requests(mode):
    """Yield the requests of a mode in order of arrival. `run` hands over two first, then one in every second
    iteration."""
    draw = random.Random(1)
    asked = PLAIN if mode == "plain_rows" else [*REQUESTS, *(BEAMS if mode == "beams" else [])]
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


def run(folder, mode):
    """Run the requests of a mode. Return the mode, the dispatch, the answers by request and the maxima of some
    statistics."""
    options = dict(MODES[mode])
    pool, kv_names = options.pop("pool"), ("enable_block_reuse", "max_attention_window", "sink_token_length")
    kv = KvCacheConfig(tokens_per_block=16, max_tokens=16 * pool,
                       **{name: options.pop(name) for name in kv_names if name in options})
    arguments = {"model_type": TrtGptModelType.InflightFusedBatching, "max_beam_width": 1,
                 "scheduler_policy": SchedulerPolicy.GUARANTEED_NO_EVICT}
    arguments |= {name: options.pop(name) for name in arguments if name in options}
    waiting, records, answers = list(make_requests(mode)), [], {}

    def get(most):
        count = min(len(waiting), 2 if not records else len(records) % 2, *([most] if most >= 0 else []))
        taken, waiting[:count] = waiting[:count], []
        return taken

    def send(request_id, tensors, is_final, error):
        found = {tensor.name: np.asarray(tensor.tensor) for tensor in tensors}
        answer = answers.setdefault(request_id, {"tokens": [], "log_probs": [], "error": "", "finals": 0})
        answer["finals"] += is_final
        answer["error"] += error
        if not error:
            for beam, length in enumerate(found["sequence_length"][0].tolist()):
                answer["tokens"] += [beam, *found["output_ids"][0, beam, :length].tolist()]
            answer["log_probs"] += found["output_log_probs"].ravel().tolist()
            if "top_log_probs" in found:
                answer["log_probs"] += found["top_log_probs"].ravel().tolist()
                answer["tokens"] += found["top_log_prob_ids"].ravel().tolist()

    static = arguments["model_type"] is TrtGptModelType.V1
    with contextlib.nullcontext() if mode in WARMED_UP else mock.patch.object(NativeBackend, "warm_up"):
        loop = build_loop(
            model_path=checkpoint(folder, 2 if mode == "plain" else 1), get_inference_requests_cb=get,
            send_response_cb=send, poll_stop_signal_cb=None,
            return_batch_manager_stats_cb=lambda record: records.append(json.loads(record)),
            optional_params=TrtGptModelOptionalParams(
                device="cpu", dtype="float32", num_threads=1, cpu_compile=False, max_batch_size=4, max_num_tokens=48,
                enable_chunked_context=not static, kv_cache_config=kv, **options),
            terminate_req_id=None, exclude_input_in_output=True, parts=Parts(clock=SystemClock()), **arguments)
    try:
        for _ in range(MOST_ITERATIONS):
            if not loop.step(accept_new=True) and not waiting:
                break
            audit(loop.kv)
        else:
            raise AssertionError(f"still busy after {MOST_ITERATIONS} iterations")
    finally:
        loop.backend.close()
    return {"mode": mode, "dispatch": loop.backend.info.dispatch, "requests": answers,
            **{name: max(record.get(name, 0) for record in records) for name in (
                "MicroBatch ID", "Reused KV cache blocks", "Iterations In Flight")}}


if __name__ == "__main__":
    for name in sys.argv[2:] or MODES:
        print(json.dumps(run(sys.argv[1], name)), flush=True)
