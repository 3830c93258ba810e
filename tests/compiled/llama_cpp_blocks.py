"""Quantises with llama.cpp's own code. Needs its library libggml-base.so, which the package llama-cpp-python builds.

    python -m tests.compiled.llama_cpp_blocks .../llama_cpp/lib/libggml-base.so

writes llama_cpp_blocks.npz: for each type of blocks, rows of a file, and the numbers that llama.cpp decodes from them.
"""

import ctypes
import sys
from pathlib import Path

import gguf
import numpy as np

BLOCKS = Path(__file__).with_suffix(".npz")
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


class Quantiser:
    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def quantised(self, weights: np.ndarray, kind: str) -> np.ndarray:
        """Return weights [outputs, inputs] float32 as rows of a file, [outputs, bytes of a row] uint8."""
        weights = np.ascontiguousarray(weights, np.float32)
        number = gguf.GGMLQuantizationType[kind]
        size, num_bytes = gguf.GGML_QUANT_SIZES[number]
        outputs, inputs = weights.shape
        rows = np.zeros((outputs, inputs // size * num_bytes), np.uint8)
        written = self._library.ggml_quantize_chunk(
            ctypes.c_int(number), ctypes.c_void_p(weights.ctypes.data), ctypes.c_void_p(rows.ctypes.data),
            *map(ctypes.c_int64, (0, outputs, inputs)), None)
        assert written == rows.size and inputs % size == 0
        return rows

    def decoded(self, rows: np.ndarray, kind: str) -> np.ndarray:
        """Return rows of a file as numbers [outputs, inputs] float32."""
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        numbers = np.zeros((len(rows), rows.shape[1] // num_bytes * size), np.float32)
        decode = getattr(self._library, f"dequantize_row_{kind.lower().replace('_k', '_K')}")
        decode.restype = None
        decode(ctypes.c_void_p(rows.ctypes.data), ctypes.c_void_p(numbers.ctypes.data), ctypes.c_int64(numbers.size))
        return numbers


def main(library: str) -> None:
    quantiser, found = Quantiser(library), {}
    weights = np.random.default_rng(0).standard_normal((3, 512)) * 0.02
    weights[1, 7], weights[1, 256:] = 3.0, np.abs(weights[1, 256:])
    weights[2, 32:64], weights[2, 256:] = 0, weights[2, 256:] * 1e-4
    for kind in KINDS:
        found[kind] = quantiser.quantised(weights, kind)
        found[f"{kind} decoded"] = quantiser.decoded(found[kind], kind)
    np.savez_compressed(BLOCKS, **found)


if __name__ == "__main__":
    main(sys.argv[1])
