"""Measure what an FP8 KV cache costs: bits per byte of text that the shipped model has not seen, and logits.

    python -m tests.benchmarks.fp8_loss [MODEL] [--pieces N] [--threads 2]

MODEL is a folder or a .gguf file; left out: the shipped model. Prints rows of a table in Markdown: for activations of
float32 and bfloat16, the loss without and with the cache in FP8, and the mean and largest change of a logit.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

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
from batch_manager.extras.tokenizer import encode, load_tokenizer
from tests.harness.client import Client

from .quantised_loss import MODEL, PIECE, held_out, nats


def logits_of(model: Path, dtype: str, kv_cache_dtype: str, threads: int, pieces: Sequence[Sequence[int]]
              ) -> list[torch.Tensor]:
    """Return the logits after each token of each piece but its last, in torch steps."""
    client = Client()
    client.pending = [InferenceRequest(number, {
        "input_ids": np.array([piece[:-1]], np.int32), "request_output_len": np.array([[1]], np.int32),
        "return_context_logits": np.array([[True]])}) for number, piece in enumerate(pieces)]
    params = TrtGptModelOptionalParams(device="cpu", dtype=dtype, num_threads=threads, cpu_compile=False,
                                       kv_cache_config=KvCacheConfig(kv_cache_dtype=kv_cache_dtype))
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
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    texts, shipped = held_out()[0][:options.pieces], load_tokenizer(MODEL)
    texts = [shipped.decode(piece) for piece in texts]
    tokenizer = load_tokenizer(options.model)
    pieces = [encode(tokenizer, text)[:PIECE + 1] for text in texts]
    num_bytes = sum(len(tokenizer.decode(piece).encode()) for piece in pieces)
    for dtype in ("float32", "bfloat16"):
        auto, fp8 = (logits_of(options.model, dtype, kind, options.threads, pieces) for kind in ("auto", "fp8_e4m3"))
        losses = [sum(map(nats, found, pieces)) / math.log(2) / num_bytes for found in (auto, fp8)]
        change = torch.cat([(one - other).abs() for one, other in zip(auto, fp8)])
        print(f"| {dtype} | {losses[0]:.4f} | {losses[1]:.4f} | {change.mean():.3f} | {change.max():.2f} |", flush=True)


if __name__ == "__main__":
    main()
