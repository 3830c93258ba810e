"""Measure what rounding costs: bits per byte of text that the shipped model has not seen, and logits.

    python -m tests.benchmarks.rounding_loss [MODEL] [--pieces N] [--threads 2]
    python -m tests.benchmarks.rounding_loss [MODEL] --quantized-activations int8 [--quantization int8]

MODEL is a folder or a .gguf file; left out: the shipped model. The KV cache is rounded to FP8, in torch steps, or the
activations to int8. Prints rows of a table in Markdown: for float32 and bfloat16, the loss without and with this, and
the mean and largest change of a logit.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batch_manager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.config import QUANTIZATIONS, QUANTIZED_ACTIVATIONS
from batch_manager.extras.tokenizer import encode, load_tokenizer
from tests.harness.client import Client

from .quantised_loss import MODEL, PIECE, held_out, nats


def logits_of(model: Path, pieces: Sequence[Sequence[int]], **options: Any) -> list[torch.Tensor]:
    """Return the logits after each token of each piece but its last. options: of TrtGptModelOptionalParams."""
    client = Client()
    client.pending = [InferenceRequest(number, {
        "input_ids": np.array([piece[:-1]], np.int32), "request_output_len": np.array([[1]], np.int32),
        "return_context_logits": np.array([[True]])}) for number, piece in enumerate(pieces)]
    params = TrtGptModelOptionalParams(device="cpu", **options)
    with GptManager(model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, client.get,
                    client.send, optional_params=params):
        client.wait_for_finals(*range(len(pieces)))
    return [torch.from_numpy(client.final(number).tensors["context_logits"][0].astype(np.float32))
            for number in range(len(pieces))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--pieces", type=int, help="first pieces of the text only (all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantized-activations", choices=QUANTIZED_ACTIVATIONS)
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    texts, shipped = held_out()[0][:options.pieces], load_tokenizer(MODEL)
    texts = [shipped.decode(piece) for piece in texts]
    tokenizer = load_tokenizer(options.model)
    pieces = [encode(tokenizer, text)[:PIECE + 1] for text in texts]
    num_bytes = sum(len(tokenizer.decode(piece).encode()) for piece in pieces)
    common = {"num_threads": options.threads, "quantization": options.quantization}
    rounds: dict[str, Any] = {"quantized_activations": options.quantized_activations}
    if not options.quantized_activations:
        common["cpu_compile"], rounds = False, {"kv_cache_config": KvCacheConfig(kv_cache_dtype="fp8_e4m3")}
    for dtype in ("float32", "bfloat16"):
        exact, rounded = (logits_of(options.model, pieces, dtype=dtype, **common, **more) for more in ({}, rounds))
        losses = [sum(map(nats, found, pieces)) / math.log(2) / num_bytes for found in (exact, rounded)]
        change = torch.cat([(one - other).abs() for one, other in zip(exact, rounded)])
        print(f"| {dtype} | {losses[0]:.4f} | {losses[1]:.4f} | {change.mean():.3f} | {change.max():.2f} |", flush=True)


if __name__ == "__main__":
    main()
