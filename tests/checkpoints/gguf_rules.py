"""An oracle for GGUF files: parses them, and judges what batch_manager read from them, without its code."""

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY, BOOL = 8, 9, 7
MOST = 65_536
SIZES = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "gpt2": "GPT2LMHeadModel"}


class Broken(Exception):
    """Raised if bytes are no valid GGUF file."""


@dataclass(frozen=True)
class File:
    """The content of a GGUF file.

    tensors   name -> (name of the GGUF type, shape with rows before columns, bytes)
    """

    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.place:
            raise Broken
        self.place += count
        return self.data[self.place - count : self.place]

    def one(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self, most: int | None = None) -> str:
        length = self.one("<Q")
        if most is not None and not 1 <= length <= most:
            raise Broken
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise Broken from None

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner, count = self.one("<I"), self.one("<Q")
            if inner == ARRAY or inner not in LAYOUTS and inner != TEXT or count > len(self.data):
                raise Broken
            if inner == TEXT:
                return [self.take(self.one("<Q")) for _ in range(count)]
            return [self.value(inner) for _ in range(count)]
        if kind not in LAYOUTS:
            raise Broken
        value = self.one(LAYOUTS[kind])
        if kind == BOOL and value > 1:
            raise Broken
        return bool(value) if kind == BOOL else value


def read(data: bytes) -> File:
    """Parse a GGUF file. Raises Broken."""
    cursor = _Cursor(data)
    if cursor.take(4) != b"GGUF" or cursor.one("<I") not in (2, 3):
        raise Broken
    num_tensors, num_entries = cursor.one("<Q"), cursor.one("<Q")
    if max(num_tensors, num_entries) > MOST:
        raise Broken
    metadata, said = {}, {}
    for _ in range(num_entries):
        key = cursor.text(1024)
        if key in metadata:
            raise Broken
        metadata[key] = cursor.value(cursor.one("<I"))
    for _ in range(num_tensors):
        name, rank = cursor.text(64), cursor.one("<I")
        if name in said or not 1 <= rank <= 4:
            raise Broken
        shape = tuple(cursor.one("<Q") for _ in range(rank))[::-1]
        said[name] = (shape, cursor.one("<I"), cursor.one("<Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in [2**power for power in range(21)]:
        raise Broken
    start, tensors, spans = -(-cursor.place // alignment) * alignment, {}, []
    for name, (shape, kind, offset) in said.items():
        if kind not in SIZES or min(shape) < 1 or math.prod(shape) > 2**40 or offset % alignment:
            raise Broken
        kind_name, block, size = SIZES[kind]
        if shape[-1] % block:
            raise Broken
        begin, end = start + offset, start + offset + math.prod(shape) // block * size
        if end > len(data):
            raise Broken
        spans.append((begin, end))
        tensors[name] = (kind_name, shape, data[begin:end])
    spans.sort()
    if any(after[0] < before[1] for before, after in zip(spans, spans[1:])):
        raise Broken
    return File(metadata, tensors)


def verdict(data: bytes) -> str:
    """Say in words whether the bytes are a valid GGUF file. The values in its metadata are not checked."""
    try:
        return f"a GGUF file of {len(read(data).tensors)} tensors"
    except Broken:
        return "no GGUF file"


def wrong(data: bytes, honest: Collection[bytes], outcome: Any) -> tuple[str, list[str]]:
    """Judge what batch_manager made of a file. Returns (verdict, descriptions of the errors of batch_manager).

    The verdict is "good" for a valid GGUF file that was read, and "bad" for a file that was refused or is invalid.

    data      bytes of the file
    honest    bytes of all files that must not be refused
    outcome   what batch_manager returned, (ModelSpec, tensors), or the exception that it raised
    """
    from batch_manager.errors import ModelLoadError

    refused = isinstance(outcome, BaseException)
    if refused and not isinstance(outcome, ModelLoadError):
        return "bad", [f"raised {outcome!r:.300} instead of a ModelLoadError"]
    try:
        file = read(data)
    except Broken:
        return "bad", [] if refused else ["was read, although its bytes are no GGUF file"]
    if refused:
        return "bad", [f"nothing is wrong with it, and it was refused: {outcome}"] if data in honest else []
    return "good", [*_wrong_numbers(file, outcome[0]), *_wrong_tensors(file, *outcome)]


def _wrong_numbers(file: File, spec: Any) -> list[str]:
    architecture = file.metadata["general.architecture"]

    def says(key: str, default: Any = None) -> Any:
        value = file.metadata.get(key, default)
        numbers = set(value) if isinstance(value, list) and len(value) == file.metadata.get(
            f"{architecture}.block_count") else set()
        return numbers.pop() if len(numbers) == 1 and all(type(each) is int for each in value) else value

    heads = says(f"{architecture}.attention.head_count")
    size = says(f"{architecture}.attention.key_length", says(f"{architecture}.embedding_length") // heads)
    norm = "layer_norm_epsilon" if architecture == "gpt2" else "layer_norm_rms_epsilon"
    expected = {
        "architecture": ARCHITECTURES.get(architecture), "num_layers": says(f"{architecture}.block_count"),
        "num_heads": heads, "num_kv_heads": says(f"{architecture}.attention.head_count_kv", heads), "head_size": size,
        "hidden_size": says(f"{architecture}.embedding_length"),
        "intermediate_size": says(f"{architecture}.feed_forward_length"),
        "vocab_size": file.tensors["token_embd.weight"][1][0],
        "max_position_embeddings": says(f"{architecture}.context_length"),
        "norm_epsilon": float(says(f"{architecture}.attention.{norm}")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    found = [f"{name} is {getattr(spec, name)!r}, should be {value!r}" for name, value in expected.items()
             if getattr(spec, name) != value]
    theta = float(says(f"{architecture}.rope.freq_base", 10000.0))
    if spec.rotary is not None and spec.rotary.theta != theta:
        found.append(f"theta is {spec.rotary.theta}, should be {theta}")
    return found


def _wrong_tensors(file: File, spec: Any, tensors: dict[str, Any]) -> list[str]:
    architecture = file.metadata["general.architecture"]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, max(spec.num_layers, 1))
    left, found = dict(file.tensors), []
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        kind, shape, data = left.pop(f"{names.get_name(stem)}.{suffix}")
        expected = decoded(kind, shape, data)
        if architecture == "gpt2" and expected.ndim == 2 and ".h." in name:
            expected = expected.T
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = spec.num_heads if ".q_proj." in name else spec.num_kv_heads
            rows = expected.reshape(heads, spec.head_size // 2, 2, -1)
            expected = np.concatenate([rows[:, :, 0], rows[:, :, 1]], 1).reshape(expected.shape)
        if not np.array_equal(tensor.numpy(), expected, equal_nan=True):
            found.append(f"{name} has other values than the file")
    return found + [f"{name} was left out" for name in left if name != "rope_freqs.weight"]


def decoded(kind: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    with np.errstate(all="ignore"):
        return dequantize(np.frombuffer(data, np.uint8).reshape(math.prod(shape[:-1]), -1),
                          gguf.GGMLQuantizationType[kind]).astype(np.float32).reshape(shape)
