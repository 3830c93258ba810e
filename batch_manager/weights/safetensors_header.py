"""The header of a safetensors file: what it says of each tensor, checked before the library opens the file.

The library checks it too. It names neither tensor nor field, takes any text into its message, keeps the last of two
equal names, and parses a header of any size up to 100 MB.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError
from .folder import CheckpointFile
from .json_file import MAX_JSON_BYTES, Fields, parse_json, shown

LENGTH_BYTES = 8                     # the file begins with the length of its header
MAX_RANK = 8                         # no weight has so many dimensions; their product stays small
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """dtype as the file spells it: any, also one that cannot be loaded. `begin` and `end` are bytes of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(checkpoint_file: CheckpointFile) -> dict[str, StoredTensor]:
    """The tensors of the file, which lie one after the other up to its end. Raises ModelLoadError naming file and
    field."""
    where = checkpoint_file.path
    try:
        with checkpoint_file.real_path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes < LENGTH_BYTES:
                raise incomplete(where, f"it has {file_bytes} bytes; the first {LENGTH_BYTES} are a length")
            (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
            if length > file_bytes - LENGTH_BYTES:
                raise incomplete(where, f"it has {file_bytes:,} bytes, and a header of {length:,}")
            header = file.read(min(length, MAX_JSON_BYTES + 1))
    except OSError as fault:
        raise ModelLoadError(f"{where} cannot be read ({fault.strerror})") from None
    fields = Fields(parse_json(header, f"the header of {where}"), f"the header of {where}")
    tensors = {name: _stored(where, name, fields.fields(name)) for name in fields.values if name != "__metadata__"}
    _check_places(where, tensors, file_bytes - LENGTH_BYTES - length)
    return tensors


def incomplete(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is not a complete safetensors file ({reason})",
                          "header and data as the format describes", "copy or download the file again")


def _stored(path: Path, name: str, fields: Fields) -> StoredTensor:
    """The tensor, as large as its dtype and shape say; a dtype that cannot be loaded is left to the library."""
    dtype, shape = fields.text("dtype"), fields.counts("shape", range(MAX_RANK + 1))
    begin, end = fields.counts("data_offsets", range(2, 3))
    if dtype in ELEMENT_BYTES and (size := math.prod(shape) * ELEMENT_BYTES[dtype]) != end - begin:
        raise incomplete(path, f"shape of {shown(name)} is {shape}, which is {size:,} bytes in {dtype}; its "
                               f"data_offsets are {begin:,} and {end:,}")
    return StoredTensor(dtype, tuple(shape), begin, end)


def _check_places(path: Path, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    """Without gaps and without overlap."""
    place = 0
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != place or stored.end < place:
            raise incomplete(path, f"data_offsets of {shown(name)} are {stored.begin:,} and {stored.end:,}, the tensor "
                                   f"before it ends at {place:,}")
        place = stored.end
    if place != data_bytes:
        raise incomplete(path, f"data_offsets end at {place:,}, there are {data_bytes:,} bytes")
