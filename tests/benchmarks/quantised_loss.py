"""Measure what quantised weights cost in loss: bits per byte of held-out text, by format, for the shipped model.

    python -m tests.benchmarks.quantised_loss --threads 2 --ggml .../llama_cpp/lib/libggml-base.so

Each row has the loss in the engine, and the difference from the loss of transformers in float32 with the same decoded
weights. The matrices of the layers are quantised, embedding and head are not: by the option `quantization`, or by
llama.cpp's library to types of GGUF files; without it, by the gguf library, which lacks K types and IQ4. As in
llama.cpp, a matrix whose inputs are no multiple of 256 gets a type with blocks of 32. Prints a table in Markdown.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM

from batch_manager import GptManager, InferenceRequest, SchedulerPolicy, TrtGptModelOptionalParams, TrtGptModelType
from batch_manager.layers import linear
from batch_manager.layers.weight_form import QUANTIZATIONS
from batch_manager.triton_kernels.cpu.native.matrix import quantised_rows
from batch_manager.weights.matrices import Blocks, Dense
from tests.compiled.llama_cpp_blocks import Quantiser
from tests.harness.client import Client

MODEL = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
IN_BLOCKS_OF_32 = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
                   "IQ4_XS": "IQ4_NL"}
FORMATS = ("", "int8", "int4", "Q8_0", "Q6_K", "Q5_1", "Q5_K", "Q5_0", "Q4_1", "Q4_K", "Q4_0", "IQ4_NL", "IQ4_XS",
           "Q3_K", "Q2_K")
Quantise = Callable[[np.ndarray, str], np.ndarray]
PIECE = 1024                         # tokens that are evaluated from their start


def type_of(kind: str, inputs: int) -> str:
    """Return the type of blocks for a format and a number of inputs."""
    return (IN_BLOCKS_OF_32 if inputs % 256 else {}).get(kind) or QUANTIZATIONS.get(kind, kind)


def rows_of(weight: torch.Tensor, kind: str, quantise: Quantise) -> np.ndarray:
    """Return a weight as rows of a file, [outputs, bytes of a row] uint8."""
    if kind in QUANTIZATIONS:
        return quantised_rows(weight, QUANTIZATIONS[kind])
    padded = np.pad(weight.float().numpy(), ((0, 0), (0, -weight.shape[1] % 32)))
    return quantise(padded, type_of(kind, weight.shape[1]))


def in_blocks(kind: str, quantise: Quantise, stored: Dense, *rest: object) -> Blocks:
    """Return a matrix in blocks of a type, in place of `weight_form.quantised`."""
    outputs, inputs = stored.weight.shape

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield np.arange(outputs), rows_of(stored.weight, kind, quantise)

    return Blocks([(type_of(kind, inputs), outputs)], inputs, read, stored.bias)


def in_transformers(kind: str, quantise: Quantise) -> tuple[torch.nn.Module, float]:
    """Return the model in float32 with decoded weights, and the mean number of bits of a quantised weight."""
    num_bytes = num_weights = 0
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if kind and isinstance(module, torch.nn.Linear) and name != "lm_head":
            number = gguf.GGMLQuantizationType[type_of(kind, module.in_features)]
            rows = rows_of(module.weight.data, kind, quantise)
            found = dequantize(rows, number)
            num_bytes, num_weights = num_bytes + rows.nbytes, num_weights + found.size
            module.weight.data = torch.from_numpy(found)[:, : module.weight.shape[1]].contiguous()
    return model, num_bytes * 8 / num_weights if kind else 16


def held_out() -> tuple[list[list[int]], int]:
    """Return the pieces of the text that the model was not trained with, and their number of bytes."""
    sys.path.insert(0, str(MODEL.parents[1]))
    from train_tiny_model import read_passages, split_passages

    _, passages = split_passages(read_passages(MODEL.parents[1] / "data" / "austen.txt.xz"))
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokens = [tokenizer.encode(passage).ids for passage in passages]
    pieces = [each[first : first + PIECE + 1] for each in tokens for first in range(0, len(each) - 1, PIECE)]
    return pieces, sum(len(passage.encode()) for passage in passages)


def nats(logits: torch.Tensor, piece: Sequence[int]) -> float:
    return functional.cross_entropy(logits.double(), torch.tensor(piece[1:]), reduction="sum").item()


def nats_of_engine(kind: str, dtype: str, threads: int, pieces: Sequence[Sequence[int]], quantise: Quantise) -> float:
    client = Client()
    client.pending = [InferenceRequest(number, {
        "input_ids": np.array([piece[:-1]], np.int32), "request_output_len": np.array([[1]], np.int32),
        "return_context_logits": np.array([[True]])}) for number, piece in enumerate(pieces)]
    params = TrtGptModelOptionalParams(device="cpu", dtype=dtype, num_threads=threads,
                                       quantization=kind and ("int8" if kind not in QUANTIZATIONS else kind) or None)
    own = partial(in_blocks, kind, quantise) if kind and kind not in QUANTIZATIONS else linear.quantised
    with mock.patch.object(linear, "quantised", own), GptManager(
            MODEL, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, client.get,
            client.send, optional_params=params):
        client.wait_for_finals(*range(len(pieces)))
    return sum(nats(torch.from_numpy(client.final(number).tensors["context_logits"][0].astype(np.float32)), piece)
               for number, piece in enumerate(pieces))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", choices=FORMATS[1:], default=FORMATS)
    parser.add_argument("--ggml", metavar="LIBRARY", help="llama.cpp's library libggml-base.so")
    options = parser.parse_args(argv)
    quantise = Quantiser(options.ggml).quantised if options.ggml else lambda weight, kind: quantize(
        weight, gguf.GGMLQuantizationType[kind])
    torch.set_num_threads(options.threads)
    pieces, num_bytes = held_out()
    print("| weights | bits per weight | float32 | bfloat16 | float32, less transformers with the decoded weights |")
    print("|---|---|---|---|---|")
    for kind in options.formats:
        model, bits = in_transformers(kind, quantise)
        with torch.inference_mode():
            expected = sum(nats(model(torch.tensor([piece[:-1]])).logits[0], piece) for piece in pieces)
        found = [nats_of_engine(kind, dtype, options.threads, pieces, quantise) for dtype in ("float32", "bfloat16")]
        to_bits = 1 / math.log(2) / num_bytes
        print(f"| {kind or 'as stored, bfloat16'} | {bits:.3g} | {found[0] * to_bits:.4f} | {found[1] * to_bits:.4f} | "
              f"{(found[0] - expected) * to_bits:+.1e} |", flush=True)


if __name__ == "__main__":
    main()
