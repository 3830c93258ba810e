"""Write GGUF files of models with random weights, in the types of llama.cpp's own quantiser.

    python -m tests.benchmarks.random_gguf FOLDER --llama-cpp PYTHON [--shapes llama-0.5B] [--types Q4_0 Q4_K_M]

PYTHON is an interpreter that has llama-cpp-python. A file is first written with its matrices in F16, then quantised by
llama.cpp, which chooses a type for each tensor, and removed. Its tokenizer has the bytes and tokens that no text has.
Prints the path of each quantised file. They serve tests.benchmarks.quantised_speed.
"""

import argparse
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "BF16": 32}   # the numbers of llama.cpp's enum llama_ftype
QUANTISE = """
import ctypes, sys
import llama_cpp.llama_cpp as llama
whole, quantised, kind, threads = sys.argv[1:]
silent = llama.llama_log_callback(lambda level, text, user: None)
llama.llama_log_set(silent, ctypes.c_void_p(0))
how = llama.llama_model_quantize_default_params()
how.ftype, how.nthread = int(kind), int(threads)
sys.exit(llama.llama_model_quantize(whole.encode(), quantised.encode(), ctypes.byref(how)))
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a decoder with a gated network and an embedding that is also its head."""

    architecture: str
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_size: int = 64
    rope_base: float = 1e6

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors, rows first. Those of one dimension are norms and biases."""
        rows, key_rows = self.heads * self.head_size, self.key_heads * self.head_size
        yield "token_embd.weight", (self.vocabulary, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        for layer in range(self.layers):
            for name, shape in {
                    "attn_norm": (self.hidden,), "attn_q": (rows, self.hidden), "attn_k": (key_rows, self.hidden),
                    "attn_v": (key_rows, self.hidden), "attn_output": (self.hidden, rows), "ffn_norm": (self.hidden,),
                    "ffn_gate": (self.inner, self.hidden), "ffn_up": (self.inner, self.hidden),
                    "ffn_down": (self.hidden, self.inner)}.items():
                yield f"blk.{layer}.{name}.weight", shape
                if self.architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                    yield f"blk.{layer}.{name}.bias", shape[:1]


SHAPES = {"qwen2-0.5B": Shape("qwen2", 151_936, 896, 4_864, 24, 14, 2),              # Qwen2.5-0.5B
          "llama-0.5B": Shape("llama", 32_000, 1_024, 4_096, 30, 16, 4)}             # inputs for K types


def write_whole(path: Path, shape: Shape) -> None:
    """Write a file with random matrices in F16 [out, in], standard deviation 0.02."""
    writer, draw = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(0)
    for key, value in {"block_count": shape.layers, "context_length": 4_096, "embedding_length": shape.hidden,
                       "feed_forward_length": shape.inner, "attention.head_count": shape.heads,
                       "attention.head_count_kv": shape.key_heads, "rope.dimension_count": shape.head_size,
                       "vocab_size": shape.vocabulary}.items():
        writer.add_uint32(f"{shape.architecture}.{key}", value)
    writer.add_float32(f"{shape.architecture}.rope.freq_base", shape.rope_base)
    writer.add_float32(f"{shape.architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]        # GPT-2 writes the other bytes after these
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(256 - len(printable))]
    tokens = [*letters, "aa", "<|end|>"]
    kinds = [*[gguf.TokenType.NORMAL] * 257, gguf.TokenType.CONTROL]
    unused = shape.vocabulary - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *(f"<|unused {number}|>" for number in range(unused))])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * unused])
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(257)
    writer.add_add_bos_token(False)
    for name, sizes in shape.tensors():
        if len(sizes) > 1:
            writer.add_tensor(name, (draw.standard_normal(sizes, np.float32) * np.float32(0.02)).astype(np.float16))
        else:
            writer.add_tensor(name, np.full(sizes, name.endswith("norm.weight"), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-cpp", metavar="PYTHON", required=True)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--types", nargs="+", choices=FILE_TYPES, default=["Q4_0", "Q8_0", "Q4_K_M"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.shapes:
        whole = options.folder / f"{name}-F16.gguf"
        write_whole(whole, SHAPES[name])
        for kind in options.types:
            quantised = options.folder / f"{name}-{kind}.gguf"
            subprocess.run([options.llama_cpp, "-c", QUANTISE, str(whole), str(quantised), str(FILE_TYPES[kind]),
                            str(options.threads)], check=True)
            print(quantised, flush=True)
        whole.unlink()


if __name__ == "__main__":
    main()
