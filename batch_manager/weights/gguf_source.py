"""Tensors of GGUF files, decoded a few rows at a time."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch

from ..errors import ModelLoadError
from ..loading_thread import check_interruption
from .folder import CheckpointFile
from .gguf_header import GgufHeader, GgufTensor, changed, open_again
from .gguf_names import Location
from .json_file import READABLE, shown
from .matrices import (
    RANGES_ALIGNED,
    WHOLE_MATRIX,
    Blocks,
    DenseSource,
    Part,
    Shape,
    Share,
    StoredMatrix,
    changed_rows,
)

BLOCK_NUMBERS = 2**17                # elements decoded at a time, at least one row; small enough for a CPU cache
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_FACTORS = 2**20


def numbers_of(headers: Sequence[GgufHeader], name: str) -> list[float]:
    """Return the elements of a small F32 tensor that belongs to the configuration. Raises ModelLoadError."""
    header = next(header for header in headers if name in header.tensors)
    tensor = header.tensors[name]
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        raise ModelLoadError(f"{header.file}: tensor {shown(name)} has shape {list(tensor.shape)} and type "
                             f"{tensor.kind}", f"expected one dimension of at most {MAX_FACTORS:,} elements in F32")
    with _Files(headers).reading(name) as read:
        return np.frombuffer(read(0, tensor.end - tensor.begin), "<f4").tolist()


class GgufWeights(DenseSource):
    """The StoredWeights of one model's GGUF files: tensors under Hugging Face's names, on one device in one dtype.

    A tensor is read and converted when it is requested. This takes memory for the tensor and a few of its rows. The
    matrices of linear layers are not converted if all their tensors have types of `kept_types`. `finish` raises
    ModelLoadError if a tensor was never requested.
    """

    def __init__(self, headers: Sequence[GgufHeader], locations: Mapping[str, Location], device: torch.device,
                 dtype: torch.dtype, kept_types: Collection[str] = ()) -> None:
        super().__init__(device, dtype)
        self._kept_types = kept_types
        self._locations = locations
        self._tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
        self._first = headers[0].file
        self._files = _Files(headers)
        self._used: set[str] = set()
        examples = {tensor.kind: name for name, tensor in self._tensors.items()}
        self._decoders = {kind: _decoder(kind, self._files.of(name)) for kind, name in examples.items()}

    @property
    def num_weights(self) -> int:
        """Number of elements in all tensors of the files."""
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    @property
    def loaded_bytes(self) -> int:
        return sum(tensor.end - tensor.begin if self._is_kept(tensor) else math.prod(tensor.shape) * self.dtype.itemsize
                   for tensor in self._tensors.values())

    def keeps(self, name: str) -> bool:
        return name in self._locations and self._is_kept(self._tensors[self._locations[name].tensor])

    def _is_kept(self, tensor: GgufTensor) -> bool:
        return tensor.kind in self._kept_types and len(tensor.shape) > 1

    @property
    def stored_types(self) -> Counter[str]:
        return Counter(tensor.kind for tensor in self._tensors.values())

    def has(self, name: str) -> bool:
        return name in self._locations

    def tied(self, name: str, to: str) -> None:
        if name in self._locations:
            raise ModelLoadError(f"{self._file_of(name)} contains tensor {self._locations[name].tensor!r}",
                                 f"expected no such tensor, because the model class uses {to!r} in its place",
                                 "correct the model class")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Raise ModelLoadError if a tensor was never requested.

        `harmless`, patterns of tensors that may stay unrequested, is ignored: converters write only tensors that a
        model needs.
        """
        left = sorted(self._locations.keys() - self._used)
        if left:
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise ModelLoadError(f"{self._file_of(left[0])} contains tensor {shown(self._locations[left[0]].tensor)}"
                                 f"{more}, which the model does not use",
                                 "expected only tensors of the model that the metadata describes",
                                 "convert the model again with a current version of llama.cpp")

    def linear(self, names: Sequence[str], in_size: int, sizes: Sequence[int], *, bias: bool = False,
               transposed: bool = False, row_order: torch.Tensor | None = None, scale: float | None = None,
               share: Share = WHOLE_MATRIX) -> StoredMatrix:
        weights, biases = self._parts(names, in_size, sizes, transposed, share)
        types = self._types_of(weights)
        if not types or row_order is not None and types[1:]:
            return super().linear(names, in_size, sizes, bias=bias, transposed=transposed, row_order=row_order,
                                  scale=scale, share=share)
        added = changed_rows(self._joined(biases), row_order, scale) if bias else None
        output_of = None if row_order is None else np.argsort(row_order.numpy())
        return Blocks(types, in_size, partial(self._stored_rows, weights, output_of), added,
                      1.0 if scale is None else scale)

    def _types_of(self, parts: Sequence[Part]) -> list[tuple[str, int]]:
        """Return `Blocks.types` of a stack of tensors; [] if they cannot be kept as they are."""
        types: list[tuple[str, int]] = []
        for part in parts:
            location = self._locations[self._check(part.name, part.shape)]
            kind, rows = self._tensors[location.tensor].kind, part.loaded_shape[0]
            if (not self.keeps(part.name) or not part.is_whole or location.transposed != part.transposed
                    or location.offset or location.is_one_row):
                return []
            if types and types[-1][0] == kind:
                rows += types.pop()[1]
            elif types and types[-1][1] % RANGES_ALIGNED:
                return []
            types.append((kind, rows))
        return types

    def _stored_rows(self, parts: Sequence[Part], output_of: np.ndarray | None
                     ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all rows of a stack of tensors, as `Blocks.read`. Row i of the stack is output output_of[i]."""
        start = 0
        for part in parts:
            location = self._locations[part.name]
            self._used.add(part.name)
            stored = self._tensors[location.tensor]
            with self._files.reading(location.tensor) as read:
                for some, targets in _some_rows(location, None, stored):
                    data = read(some.start * stored.row_bytes, len(some) * stored.row_bytes)
                    rows = start + (np.arange(targets.start, targets.stop) if isinstance(targets, slice)
                                    else targets.numpy())
                    self.num_bytes += len(data)
                    yield (rows if output_of is None else output_of[rows],
                           np.frombuffer(data, np.uint8).reshape(len(some), stored.row_bytes))
            start += part.loaded_shape[0]

    def _file_of(self, name: str) -> CheckpointFile:
        return self._files.of(self._locations[name].tensor)

    def _check(self, name: str, shape: Shape) -> str:
        if name not in self._locations:
            raise ModelLoadError(f"{self._first} has no tensor for {name!r}",
                                 f"expected a tensor of shape {list(shape)}",
                                 "check that the file is complete, with all of its shards")
        location = self._locations[name]
        stored = self._tensors[location.tensor]
        found = stored.shape[::-1] if location.transposed else stored.shape
        if len(found) == 3 and location.rows is not None:              # of all experts
            found = (found[0] * found[1], found[2])
        if found == tuple(shape[1:]) and shape[:1] == (1,):            # a matrix of one row, without this dimension
            found = (1, *found)
        if location.rows is not None:
            found = (len(location.rows), *found[1:]) if location.rows.stop <= found[0] else ()
        if location.is_one_row:
            found = found[1:]
        if found != tuple(shape):
            raise ModelLoadError(f"{self._file_of(name)}: tensor {location.tensor!r} has shape {list(stored.shape)}",
                                 f"expected {list(shape)} for {name!r}, by the metadata",
                                 "check that the file is complete")
        return name

    def _load(self, target: torch.Tensor, stored_name: str, part: Part) -> None:
        """Read a part of a tensor into `target`. On the device "meta" nothing is read."""
        self._used.add(stored_name)
        if target.device.type == "meta":
            return
        location = self._locations[stored_name]
        with self._files.reading(location.tensor) as read:
            stored = self._tensors[location.tensor]
            decode = self._decoders[stored.kind]

            def rows(begin: int, count: int) -> torch.Tensor:
                """Return the decoded rows from row `begin` on, [count, columns]."""
                block = decode(read(begin * stored.row_bytes, count * stored.row_bytes), count)
                return block + location.offset if location.offset else block

            if location.is_one_row or len(stored.shape) == 1:
                _load_vector(target, location, part, rows)
            else:
                _load_rows(target, location, part, rows, stored)


def _load_vector(target: torch.Tensor, location: Location, part: Part,
                 rows_of: Callable[[int, int], torch.Tensor]) -> None:
    """Read a bias or norm. Each of its elements counts as a row for `rows` and `order` of `location`."""
    if location.is_one_row:
        assert location.rows is not None
        vector = rows_of(location.rows.start, 1)[0]
    else:
        vector = rows_of(0, 1)[0]
        vector = vector if location.rows is None else vector[location.rows.start : location.rows.stop]
        vector = vector if location.order is None else vector[location.order()]
    _copy(target, vector.view(part.shape)[part.index])


def _load_rows(target: torch.Tensor, location: Location, part: Part, rows_of: Callable[[int, int], torch.Tensor],
               stored: GgufTensor) -> None:
    rows, columns = part.rows, part.columns
    if location.transposed != part.transposed:         # rows in the file are columns of the target
        target, rows, columns = target.t(), columns, rows
    else:
        target = target.view(-1, target.shape[-1])
    for some, targets in _some_rows(location, rows, stored):
        block = rows_of(some.start, len(some))
        block = block if columns is None else block[:, columns.start : columns.stop]
        if isinstance(targets, slice):
            _copy(target[targets], block)
        else:
            _copy(target, block, targets)


def _some_rows(location: Location, rows: range | None, stored: GgufTensor
               ) -> Iterator[tuple[range, slice | torch.Tensor]]:
    """Yield rows of the tensor `stored`, a few at a time, each with the places of its rows among those that are wanted.

    rows   the wanted rows of the Hugging Face tensor; None: all
    """
    stored_rows = location.rows or range(math.prod(stored.shape[:-1]))
    wanted = slice(None) if rows is None else slice(rows.start, rows.stop)
    runs: Iterable[tuple[range, torch.Tensor | None]] = [(stored_rows[wanted], None)]
    if location.order is not None:
        runs = _runs(location.order()[wanted] + stored_rows.start)
    step = max(1, BLOCK_NUMBERS // stored.shape[-1])
    for run, targets in runs:
        for first in range(0, len(run), step):
            check_interruption()
            here = slice(first, min(first + step, len(run)))
            yield run[here], here if targets is None else targets[here]


def _runs(order: torch.Tensor) -> Iterator[tuple[range, torch.Tensor]]:
    """Yield the rows of `order` as ranges of consecutive rows, each with the places of its rows in `order`."""
    rows, places = order.sort()
    ends = [*((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    for begin, end in zip([0, *ends], ends):
        first = int(rows[begin])
        yield range(first, first + end - begin), places[begin:end]


def _copy(target: torch.Tensor, block: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Copy a block of decoded rows into `target`, or into the given rows of `target`.

    On the CPU, numpy copies in one thread. On busy cores, torch's threads would take longer to synchronize than to copy
    a small block.
    """
    if target.device.type == "cpu" and torch.bfloat16 not in (target.dtype, block.dtype):
        with np.errstate(all="ignore"):         # numbers beyond the range of the dtype become infinite, as in torch
            if rows is None:
                np.copyto(target.numpy(), block.numpy(), casting="same_kind")
            else:
                target.numpy()[rows.numpy()] = block.numpy()
    elif rows is None:
        target.copy_(block)
    else:
        target[rows.to(target.device)] = block.to(target)


Decoder = Callable[[bytearray, int], torch.Tensor]


def _decoder(kind: str, file: CheckpointFile) -> Decoder:
    """Return the decoder of a tensor type: (bytes, number of rows) -> [rows, columns] on the CPU.

    Raises ModelLoadError, which names `file`, for a type that cannot be decoded.
    """
    if kind in _PLAIN:
        return lambda data, rows: torch.frombuffer(data, dtype=_PLAIN[kind]).view(rows, -1)
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ModelLoadError(f"{file} has tensors of type {kind}, and the gguf library cannot be imported ({error})",
                             "expected an installed gguf library, which decodes quantised tensors",
                             'pip install "batch-manager[gguf]"') from error
    known: Any = GGMLQuantizationType.__members__.get(kind)
    try:
        if known is None:
            raise NotImplementedError
        dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except NotImplementedError:
        raise ModelLoadError(f"{file} has tensors of type {kind}", "expected a type that the gguf library decodes",
                             "quantise the model in another way, for example as Q4_K_M or Q8_0") from None

    def decoded(data: bytearray, rows: int) -> torch.Tensor:
        with np.errstate(all="ignore"):         # without warnings: scales can be NaN or infinite
            # As one row: blocks do not depend on their row, and the library takes time for each row.
            return torch.from_numpy(dequantize(np.frombuffer(data, np.uint8).reshape(1, -1), known)).view(rows, -1)

    return decoded


class _Files:
    """The files of one model. Each file is open only while one of its tensors is read.

    The files are not mapped into memory. A file that shrinks while it is mapped kills the process, and mapped pages
    count as the process's memory.
    """

    def __init__(self, headers: Sequence[GgufHeader]) -> None:
        self._headers = {name: header for header in headers for name in header.tensors}

    def of(self, name: str) -> CheckpointFile:
        return self._headers[name].file

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Callable[[int, int], bytearray]]:
        """Context manager: yield a function (offset, number of bytes) -> bytes of the tensor `name`.

        Raises ModelLoadError if the file has changed.
        """
        header = self._headers[name]
        try:
            with open_again(header) as file:
                yield partial(_read, header, file, header.tensors[name].begin)
        except OSError as fault:
            raise ModelLoadError(f"{header.file} cannot be read ({fault.strerror})", *READABLE) from None


def _read(header: GgufHeader, file: BinaryIO, begin: int, offset: int, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    while done < num_bytes:
        count = os.preadv(file.fileno(), [view[done:]], begin + offset + done)
        if not count:
            raise changed(header.file)
        done += count
    return data
