"""The header of a GGUF file: its metadata and the byte ranges of its tensors, read and checked.

The file is not trusted. Every count, length, type and offset is checked against the file's size and a bound of this
module before memory is allocated for it. Arrays, such as the vocabulary, are checked entry by entry but left in the
file; `read_gguf_array` reads an array. Source: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3.
"""

import math
import os
import struct
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from ..errors import ModelLoadError, counted
from .folder import CheckpointFile
from .json_file import MAX_COUNT, READABLE, shown, shown_entry

MAGIC = b"GGUF"
CONVERT = "download the file again, or convert the model again"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 * 2**20        # a vocabulary of a million tokens takes 40 MiB
MAX_TEXT_BYTES = 8 * 2**20           # total of all strings outside arrays: names, licence, chat templates
MAX_ENTRIES = 65_536                 # limit for metadata entries, and for tensors
MAX_KEY_BYTES, MAX_NAME_BYTES = 1024, 64
MAX_TEXTS = 2**21                    # strings in one array: a vocabulary, or its merges
MAX_RANK = 4
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32
_READ_BYTES = 2**20                  # bytes per read; the header does not state its own length

# Tensor types: number -> name, elements per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}
_REMOVED_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
                  37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}

# Value types of metadata: number -> name, layout.
_VALUE_TYPES = {0: ("uint8", "<u1"), 1: ("int8", "<i1"), 2: ("uint16", "<u2"), 3: ("int16", "<i2"),
                4: ("uint32", "<u4"), 5: ("int32", "<i4"), 6: ("float32", "<f4"), 7: ("bool", "<u1"),
                10: ("uint64", "<u8"), 11: ("int64", "<i8"), 12: ("float64", "<f8")}
_TEXT, _ARRAY, _BOOL = 8, 9, 7
_LENGTH, _SHORT_LENGTH = struct.Struct("<Q"), struct.Struct("<I")


@dataclass(frozen=True, slots=True, repr=False)
class GgufArray:
    """An array of the metadata, left in the file.

    kind         "text", "bool", or a numeric type such as "uint32"
    count        number of entries
    begin, end   byte range of the entries in the file
    """

    kind: str
    count: int
    begin: int
    end: int

    def __repr__(self) -> str:
        return f"an array of {self.count:,} {self.kind}"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The description of a tensor of the file.

    kind         name of the tensor type, such as "Q4_K"
    shape        shape in torch's order: rows first
    row_bytes    bytes of one row, the elements along the last dimension
    begin, end   byte range in the file
    """

    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The checked header of a GGUF file.

    identity   device, inode, size and modification time of the file, which show whether the file was replaced
    metadata   key -> bool, int, float, str or GgufArray
    tensors    name -> GgufTensor
    """

    file: CheckpointFile
    identity: tuple[int, ...]
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(default_factory=dict)


def read_gguf_header(checkpoint_file: CheckpointFile) -> GgufHeader:
    """Read and check the header of a file, such as one from `folder.gguf_file(path)`.

    Raises ModelLoadError, which names the file and the key or tensor.
    """
    try:
        with checkpoint_file.real_path.open("rb") as file:
            return _Reader(checkpoint_file, file).header()
    except OSError as fault:
        raise ModelLoadError(f"{checkpoint_file} cannot be read ({fault.strerror})", *READABLE) from None


def read_gguf_array(header: GgufHeader, key: str) -> list[str] | np.ndarray:
    """Read the array under `key`: strings as a list, numbers and flags as a 1-D array of their type.

    Raises ModelLoadError if `key` has no array, a string is not UTF-8, or the file has changed.
    """
    array, where = header.metadata.get(key), f"{header.file}: key {shown(key)}"
    if not isinstance(array, GgufArray):
        raise ModelLoadError(f"{where} is {shown_entry(header.metadata, key)}", "expected an array")
    try:
        with open_again(header) as file:
            file.seek(array.begin)
            data = file.read(array.end - array.begin)
    except OSError as fault:
        raise ModelLoadError(f"{header.file} cannot be read ({fault.strerror})", *READABLE) from None
    if len(data) != array.end - array.begin:
        raise changed(header.file)
    if array.kind != "text":
        layout = next(layout for name, layout in _VALUE_TYPES.values() if name == array.kind)
        numbers = np.frombuffer(data, layout)
        return numbers.astype(bool) if array.kind == "bool" else numbers
    texts, end = [], 0
    for _ in range(array.count):
        start = end + _LENGTH.size
        end = start + (_LENGTH.unpack_from(data, end)[0] if start <= len(data) else len(data))
        if end > len(data):
            raise changed(header.file)
        try:
            texts.append(data[start:end].decode())
        except UnicodeDecodeError:
            raise malformed(header.file, f"string {len(texts)} of key {shown(key)} is {shown(data[start:end])}",
                            "expected a UTF-8 string") from None
    return texts


def incomplete(file: CheckpointFile, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{file} is not a complete GGUF file ({reason})",
                          "expected header and data as the format describes",
                          "copy or download the file again")


def malformed(file: CheckpointFile, fact: str, expectation: str) -> ModelLoadError:
    return ModelLoadError(f"{file}: {fact}", expectation, CONVERT)


def open_again(header: GgufHeader) -> BinaryIO:
    """Open the header's file to read data. Raises OSError, or ModelLoadError if the file has changed."""
    file = header.file.real_path.open("rb", buffering=0)
    if _identity(file) != header.identity:
        file.close()
        raise changed(header.file)
    return file


def _identity(file: BinaryIO) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def changed(file: CheckpointFile) -> ModelLoadError:
    return ModelLoadError(f"{file} has changed since its header was read", "expected an unchanged file",
                          "load the model again, and replace no file meanwhile")


class _Reader:
    """Reads the header of one file from its start.

    `_data` has the bytes read so far, and `_offset` is the index of the next byte to interpret.
    """

    def __init__(self, checkpoint_file: CheckpointFile, file: BinaryIO) -> None:
        self.where, self._file = checkpoint_file, file
        self.file_bytes = os.fstat(file.fileno()).st_size
        self._data = bytearray()
        self._offset = 0
        self._text_bytes = 0

    def header(self) -> GgufHeader:
        version = self._version()
        num_tensors, num_entries = self._count("tensor_count"), self._count("metadata_kv_count")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._short_text("a key", MAX_KEY_BYTES)
            if key in metadata:
                raise malformed(self.where, f"the key {shown(key)} occurs twice",
                                "expected unique keys")
            metadata[key] = self._value(f"key {shown(key)}", self._unsigned(_SHORT_LENGTH, "a value's type"))
        descriptions = {}
        for _ in range(num_tensors):
            name = self._short_text("a tensor's name", MAX_NAME_BYTES)
            if name in descriptions:
                raise malformed(self.where, f"the tensor {shown(name)} occurs twice",
                                "expected unique tensor names")
            descriptions[name] = self._description(name)
        alignment = self._alignment(metadata)
        start = -(-self._offset // alignment) * alignment
        tensors = {name: self._tensor(name, start, alignment, *description)
                   for name, description in descriptions.items()}
        self._refuse_overlap(tensors)
        return GgufHeader(self.where, _identity(self._file), version, metadata, tensors)

    def _version(self) -> int:
        magic = bytes(self._take(4, "its magic number"))
        if magic != MAGIC:
            raise ModelLoadError(f"{self.where} begins with {shown(magic)}",
                                 f"expected a GGUF file, which begins with {MAGIC}",
                                 "pass a GGUF file, or the folder of a Hugging Face checkpoint")
        version = self._unsigned(_SHORT_LENGTH, "its version")
        if version in VERSIONS:
            return version
        if version & 0xFFFF == 0 and int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise ModelLoadError(f"{self.where} is a big-endian GGUF file", "expected a little-endian one",
                                 "convert it with gguf-convert-endian of the gguf library")
        raise ModelLoadError(f"{self.where} has GGUF version {version}",
                             f"expected version {' or '.join(map(str, VERSIONS))}",
                             "convert the model again with a newer tool")

    def _count(self, name: str) -> int:
        count = self._unsigned(_LENGTH, name)
        if count > MAX_ENTRIES:
            raise ModelLoadError(f"{self.where}: {name} is {count:,}", f"expected at most {MAX_ENTRIES:,}")
        return count

    def _value(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            length = self._length(key)
            self._text_bytes += length
            if self._text_bytes > MAX_TEXT_BYTES:
                raise ModelLoadError(f"{self.where}: up to {key}, the strings in the metadata take "
                                     f"{self._text_bytes:,} bytes", f"expected at most {MAX_TEXT_BYTES:,}")
            return self._text(self._take(length, key), key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _VALUE_TYPES:
            raise malformed(self.where, f"{key} has value type {kind}",
                            "expected a value type of GGUF version 3: 0 to 12")
        layout = np.dtype(_VALUE_TYPES[kind][1])
        data = self._take(layout.itemsize, key)
        if kind == _BOOL and data[0] > 1:
            raise malformed(self.where, f"{key} is a flag with the value {data[0]}", "expected 0 or 1")
        value = np.frombuffer(data, layout)[0].item()
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str) -> GgufArray:
        kind, count = self._unsigned(_SHORT_LENGTH, key), self._length(key)
        if kind == _TEXT:
            if count > MAX_TEXTS:
                raise ModelLoadError(f"{self.where}: {key} has {count:,} strings", f"expected at most {MAX_TEXTS:,}")
            begin = self._offset
            self._skip_texts(count, key)
            return GgufArray("text", count, begin, self._offset)
        if kind == _ARRAY:
            raise malformed(self.where, f"{key} is an array of arrays",
                            "expected an array of strings, numbers or flags")
        if kind not in _VALUE_TYPES:
            raise malformed(self.where, f"{key} is an array of value type {kind}",
                            "expected a value type of GGUF version 3: 0 to 12")
        name, layout = _VALUE_TYPES[kind]
        begin = self._offset
        self._skip(count * np.dtype(layout).itemsize, key)
        if kind == _BOOL and any(self._data[begin : self._offset].translate(None, b"\0\1")):
            raise malformed(self.where, f"{key} has a flag that is neither 0 nor 1", "expected 0 or 1")
        return GgufArray(name, count, begin, self._offset)

    def _skip_texts(self, count: int, key: str) -> None:
        """Skip the `count` strings of the array `key`. Decodes nothing, because a vocabulary has many strings."""
        offset, unpack = self._offset, _LENGTH.unpack_from
        for _ in range(count):
            if offset + 8 > len(self._data):
                self._read_to(offset + 8, key)
            offset += 8 + unpack(self._data, offset)[0]
            if offset > len(self._data):
                self._read_to(offset, key)
        self._offset = offset

    def _description(self, name: str) -> tuple[str, tuple[int, ...], int, int, int]:
        """Read the description of a tensor. Returns (type, shape, bytes per row, total bytes, offset in the data)."""
        what = f"the description of tensor {shown(name)}"
        rank = self._unsigned(_SHORT_LENGTH, what)
        if not 1 <= rank <= MAX_RANK:
            raise ModelLoadError(f"{self.where}: tensor {shown(name)} has {counted(rank, 'dimension')}",
                                 f"expected 1 to {MAX_RANK}")
        shape = tuple(self._unsigned(_LENGTH, what) for _ in range(rank))[::-1]
        if not all(1 <= size <= MAX_COUNT for size in shape) or math.prod(shape) > MAX_COUNT:
            raise ModelLoadError(f"{self.where}: tensor {shown(name)} has shape {list(shape)}",
                                 f"expected sizes >= 1 with a product of at most {MAX_COUNT:,}")
        kind = self._unsigned(_SHORT_LENGTH, what)
        if kind not in TENSOR_TYPES:
            removed = f" ({_REMOVED_TYPES[kind]}, which was removed from the format)" if kind in _REMOVED_TYPES else ""
            raise ModelLoadError(f"{self.where}: tensor {shown(name)} has type {kind}{removed}",
                                 f"expected one of {', '.join(known for known, _, _ in TENSOR_TYPES.values())}",
                                 "convert or quantise the model again")
        kind_name, block, block_bytes = TENSOR_TYPES[kind]
        if shape[-1] % block:
            raise malformed(self.where, f"tensor {shown(name)} has rows of {counted(shape[-1], 'element')} "
                            f"in {kind_name}",
                            f"expected a multiple of {block}, the block size of that type")
        row_bytes = shape[-1] // block * block_bytes
        return kind_name, shape, row_bytes, row_bytes * math.prod(shape[:-1]), self._unsigned(_LENGTH, what)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise malformed(self.where, f"general.alignment is {shown(alignment)}",
                            f"expected a power of two up to {MAX_ALIGNMENT:,}")
        return alignment

    def _tensor(self, name: str, start: int, alignment: int, kind: str, shape: tuple[int, ...], row_bytes: int,
                num_bytes: int, offset: int) -> GgufTensor:
        if offset % alignment:
            raise malformed(self.where, f"tensor {shown(name)} has offset {offset:,}",
                            f"expected a multiple of the alignment, {alignment}")
        if start + offset + num_bytes > self.file_bytes:
            raise incomplete(self.where, f"tensor {shown(name)} ends at byte {start + offset + num_bytes:,}; the file "
                                         f"has {self.file_bytes:,} bytes")
        return GgufTensor(kind, shape, row_bytes, start + offset, start + offset + num_bytes)

    def _refuse_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if tensor.begin < end:
                raise incomplete(self.where, f"tensor {shown(name)} begins at byte {tensor.begin:,}, but the tensor "
                                             f"before it, {shown(before)}, ends at byte {end:,}")
            end, before = tensor.end, name

    # ------------------------------------------------------------------ bytes

    def _short_text(self, what: str, max_bytes: int) -> str:
        length = self._length(what)
        if not 1 <= length <= max_bytes:
            raise ModelLoadError(f"{self.where}: {what} has {counted(length, 'byte')}", f"expected 1 to {max_bytes:,}")
        return self._text(self._take(length, what), what)

    def _text(self, data: bytearray, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise malformed(self.where, f"{what} is {shown(bytes(data))}", "expected UTF-8") from None

    def _length(self, what: str) -> int:
        """Read a length or count. Raises ModelLoadError if it exceeds the number of bytes left in the file: each entry
        takes at least one byte."""
        length = self._unsigned(_LENGTH, what)
        if length > self.file_bytes - self._offset:
            raise incomplete(self.where, f"{what}: the stated length is {length:,}, but the file has only "
                                         f"{counted(self.file_bytes - self._offset, 'byte')} left")
        return length

    def _unsigned(self, layout: struct.Struct, what: str) -> int:
        return layout.unpack(self._take(layout.size, what))[0]

    def _take(self, num_bytes: int, what: str) -> bytearray:
        self._skip(num_bytes, what)
        return self._data[self._offset - num_bytes : self._offset]

    def _skip(self, num_bytes: int, what: str) -> None:
        end = self._offset + num_bytes
        if end > len(self._data):
            self._read_to(end, what)
        self._offset = end

    def _read_to(self, end: int, what: str) -> None:
        """Read on until `_data` has the first `end` bytes of the file.

        Raises ModelLoadError if the file is shorter, or if the header would exceed MAX_HEADER_BYTES.
        """
        if end > self.file_bytes:
            raise incomplete(self.where, f"{what} ends at byte {end:,}; the file has {self.file_bytes:,} bytes")
        if end > MAX_HEADER_BYTES:
            raise ModelLoadError(f"{self.where}: {what} ends at byte {end:,} of the header",
                                 f"expected a header of at most {MAX_HEADER_BYTES:,} bytes")
        self._data += self._file.read(max(end - len(self._data), _READ_BYTES))
        if end > len(self._data):
            raise changed(self.where)
