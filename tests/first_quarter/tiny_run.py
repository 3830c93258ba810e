"""Runs a tiny engine with few kernel launches, because a sanitizer slows each launch a hundredfold.

    python -m tests.first_quarter.tiny_run --device cuda

Blocks have 16 tokens. The last prompt is so long that decode attention splits its sequence into parts and merges them,
and that its context takes several steps.
"""

import argparse
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from batch_manager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu"}
TOKENS_PER_BLOCK, NEW_TOKENS = 16, 4
# (tokens of the prompt, options)
REQUESTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}), (37, {"temperature": 0.8, "runtime_top_p": 0.9, "random_seed": 3}), (54, {"repetition_penalty": 1.3}),
    (200, {}))


def run(device: str) -> dict[int, list[int]]:
    """Run the requests and return id -> tokens. Raises RuntimeError if a request fails."""
    waiting = [InferenceRequest(number, {"input_ids": list(range(3, 3 + length)), "request_output_len": NEW_TOKENS,
                                         "end_id": -1, **options})
               for number, (length, options) in enumerate(REQUESTS)]
    tokens: dict[int, list[int]] = {}
    errors: list[str] = []
    done = threading.Event()

    def send(request_id: int, tensors: list, final: bool, error: str) -> None:
        if error:
            errors.append(error)
        else:
            tokens[request_id] = {one.name: one.array for one in tensors}["output_ids"][0, 0].tolist()
        if len(tokens) + len(errors) == len(REQUESTS):
            done.set()

    def get(count: int) -> list[InferenceRequest]:
        return [waiting.pop(0) for _ in range(min(count, len(waiting)))]

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        with GptManager(folder, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, get,
                        send, optional_params=TrtGptModelOptionalParams(
                            device=device, dtype="float32" if device == "cpu" else "bfloat16", load_format="dummy",
                            max_batch_size=4, enable_chunked_context=True, max_num_tokens=64,
                            kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=TOKENS_PER_BLOCK)),
                        exclude_input_in_output=True):
            done.wait(600)
    if errors or len(tokens) < len(REQUESTS):
        raise RuntimeError(f"{len(tokens)} of {len(REQUESTS)} requests were answered; errors: {errors}")
    return tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    print(json.dumps(run(parser.parse_args().device)))
