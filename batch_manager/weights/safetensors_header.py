"""The header of a safetensors file, checked before the safetensors library opens the file.

The library checks the header too, but its errors name neither tensor nor field and quote the file unescaped. The
library also keeps the last of two tensors with the same name, and parses headers of up to 100 MB.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError, counted
from .folder import CheckpointFile
from .json_file import MAX_JSON_BYTES, READABLE, Fields, parse_json, shown

LENGTH_BYTES = 8                     # the file begins with the length of its header
MAX_RANK = 8                         # no weight has more dimensions
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}                         # of weights
QUANTISED_BYTES = {"I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}           # of what quantised weights are stored in
KNOWN_BYTES = ELEMENT_BYTES | QUANTISED_BYTES


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor in the header.

    dtype        name of the dtype in the file; the dtype may be one that cannot be loaded
    begin, end   byte range in the data, which follows the header
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(checkpoint_file: CheckpointFile) -> dict[str, StoredTensor]:
    """Return name -> description of a file's tensors, and check that the tensors fill the file without gaps or overlap.

    Raises ModelLoadError, which names file and field.
    """
    where = checkpoint_file.path
    try:
        with checkpoint_file.real_path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes < LENGTH_BYTES:
                raise incomplete(where, f"it has {counted(file_bytes, 'byte')}; "
                                        f"the length field alone takes {LENGTH_BYTES}")
            (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
            if length > file_bytes - LENGTH_BYTES:
                raise incomplete(where, f"it has {counted(file_bytes, 'byte')}; "
                                        f"its length field gives a header of {length:,} bytes")
            header = file.read(min(length, MAX_JSON_BYTES + 1))
    except OSError as fault:
        raise ModelLoadError(f"{where} cannot be read ({fault.strerror})", *READABLE) from None
    fields = Fields(parse_json(header, f"the header of {where}"), f"the header of {where}")
    tensors = {name: _stored(where, name, fields.fields(name)) for name in fields.values if name != "__metadata__"}
    _check_ranges(where, tensors, file_bytes - LENGTH_BYTES - length)
    return tensors


def incomplete(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is not a complete safetensors file ({reason})",
                          "expected header and data as the format describes", "copy or download the file again")


def _stored(path: Path, name: str, fields: Fields) -> StoredTensor:
    """Return the description of tensor `name`. Checks its number of bytes, unless its dtype cannot be loaded."""
    dtype, shape = fields.text("dtype"), fields.counts("shape", range(MAX_RANK + 1))
    begin, end = fields.counts("data_offsets", range(2, 3))
    if dtype in KNOWN_BYTES and (size := math.prod(shape) * KNOWN_BYTES[dtype]) != end - begin:
        raise incomplete(path, f"tensor {shown(name)} has shape {shape}, which takes {counted(size, 'byte')} in "
                               f"{dtype}, but its data_offsets are {begin:,} and {end:,}")
    return StoredTensor(dtype, tuple(shape), begin, end)


def _check_ranges(path: Path, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    """Raise ModelLoadError unless the tensors fill the `data_bytes` bytes of data without gaps or overlap."""
    end = 0
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != end or stored.end < end:
            raise incomplete(path, f"tensor {shown(name)} has data_offsets {stored.begin:,} and {stored.end:,}, but "
                                   f"the data before it ends at {end:,}")
        end = stored.end
    if end != data_bytes:
        raise incomplete(path, f"the last data_offsets end at {end:,}, but the data has {counted(data_bytes, 'byte')}")
