"""Writes valid and invalid GGUF files byte by byte, without the code of batch_manager.

A `Draft` is the content of a file before it is written, so that tests can damage it.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?", UINT64: "<Q",
           11: "<q", 12: "<d"}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value_bytes(kind: int, value) -> bytes:
    """Return the bytes of a metadata value in a file, without the number of its type.

    kind    number of the GGUF type, such as UINT32
    value   for an ARRAY: (kind of its entries, entries)
    """
    if kind == TEXT:
        return text(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(value_bytes(inner, item) for item in items)
    return struct.pack(SCALARS[kind], value)


@dataclass
class Entry:
    """An entry of the metadata. `raw`, if given, replaces the bytes of the value."""

    key: str | bytes
    kind: int
    value: object = None
    raw: bytes | None = None

    def to_bytes(self) -> bytes:
        return text(self.key) + struct.pack("<I", self.kind) + (
            value_bytes(self.kind, self.value) if self.raw is None else self.raw)


@dataclass
class Tensor:
    """A tensor of a file.

    dims     sizes in the order of the file: columns before rows
    kind     number of the GGUF type of the entries
    offset   position in the data section in bytes; None: directly after the preceding tensor
    """

    name: str | bytes
    dims: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Draft:
    entries: list[Entry]
    tensors: list[Tensor]
    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_entries: int | None = None
    tail: bytes = b""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        count = len(self.tensors) if self.num_tensors is None else self.num_tensors
        entries = len(self.entries) if self.num_entries is None else self.num_entries
        header = self.magic + struct.pack("<IQQ", self.version, count, entries)
        header += b"".join(entry.to_bytes() for entry in self.entries)
        place, data = 0, b""
        for tensor in self.tensors:
            offset = place if tensor.offset is None else tensor.offset
            header += text(tensor.name) + struct.pack("<I", len(tensor.dims))
            header += b"".join(struct.pack("<Q", size) for size in tensor.dims)
            header += struct.pack("<IQ", tensor.kind, offset)
            data += tensor.data + bytes(-len(tensor.data) % self.alignment)
            place += len(tensor.data) + -len(tensor.data) % self.alignment
        return header + bytes(-len(header) % self.alignment) + data + self.tail


def small(architecture: str = "llama", extra: Iterable[Entry] = ()) -> Draft:
    """Return a valid file that is not a model: two tensors and some metadata."""
    return Draft([Entry("general.architecture", TEXT, architecture), Entry(f"{architecture}.block_count", UINT32, 1),
                  Entry("tokenizer.ggml.tokens", ARRAY, (TEXT, ["<s>", "a", "\N{GRINNING FACE}"])),
                  Entry("tokenizer.ggml.scores", ARRAY, (FLOAT32, [0.0, -1.0, -2.5])),
                  Entry("flags", ARRAY, (BOOL, [True, False])), Entry("flag", BOOL, True), *extra],
                 [Tensor("token_embd.weight", [4, 3], 0, np.arange(12, dtype=np.float32).tobytes()),
                  Tensor("output_norm.weight", [4], 1, np.ones(4, np.float16).tobytes())])
