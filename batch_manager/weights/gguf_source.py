"""Tensors of GGUF files, each made of its blocks a few rows at a time."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch

from ..errors import ModelLoadError
from ..loading_thread import check_interruption
from .folder import CheckpointFile
from .gguf_header import GgufHeader, GgufTensor, changed, open_again
from .gguf_names import Place
from .json_file import shown
from .source import Shape

BLOCK_NUMBERS = 2**17                # made at a time, unless one row is longer: small enough for a cache
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_FACTORS = 2**20


def numbers_of(headers: Sequence[GgufHeader], name: str) -> list[float]:
    """A small tensor of F32 that belongs to the configuration. Raises ModelLoadError."""
    header = next(header for header in headers if name in header.tensors)
    tensor = header.tensors[name]
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        raise ModelLoadError(f"{header.file}: {shown(name)} has shape {list(tensor.shape)} and type {tensor.kind}",
                             f"one dimension of at most {MAX_FACTORS:,} numbers in F32")
    with _Files(headers).reading(name) as read:
        return np.frombuffer(read(0, tensor.end - tensor.begin), "<f4").tolist()


class GgufWeights:
    """The tensors of one model's GGUF files under Hugging Face's names, converted to one dtype on one device as they
    are asked for.

    Beside the tensor that is handed out there is never more in memory than a few rows of it. `finish` raises when
    tensors are left that the model did not ask for.
    """

    def __init__(self, headers: Sequence[GgufHeader], places: Mapping[str, Place], device: torch.device,
                 dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.num_bytes = 0
        self._places = places
        self._tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
        self._first = headers[0].file
        self._files = _Files(headers)
        self._used: set[str] = set()
        holders = {tensor.kind: name for name, tensor in self._tensors.items()}
        self._makers = {kind: _maker(kind, self._files.of(name)) for kind, name in holders.items()}

    @property
    def num_weights(self) -> int:
        """Numbers in all tensors that the files say they hold."""
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    @property
    def stored_types(self) -> Counter[str]:
        return Counter(tensor.kind for tensor in self._tensors.values())

    def has(self, name: str) -> bool:
        return name in self._places

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.stacked([(name, shape)])

    def stacked(self, parts: Sequence[tuple[str, Shape]]) -> torch.Tensor:
        for name, shape in parts:
            self._check(name, shape)
        rows = sum(shape[0] for _, shape in parts)
        result = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in parts:
            self._fill(result[start : start + shape[0]], self._places[name])
            start += shape[0]
            self._used.add(name)
        self.num_bytes += result.nbytes
        return result

    def tied(self, name: str, to: str) -> None:
        if name in self._places:
            raise ModelLoadError(f"{self._file_of(name)} holds {self._places[name].tensor!r}",
                                 f"nothing of the kind where the model's class takes {to!r} in its place",
                                 "correct the class")

    def count_copy(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Raises when a tensor was not asked for. (No converter writes what is `harmless`.)"""
        left = sorted(self._places.keys() - self._used)
        if left:
            more = f" and {len(left) - 1} more tensors" if left[1:] else ""
            raise ModelLoadError(f"{self._file_of(left[0])} holds {shown(self._places[left[0]].tensor)}{more}, which "
                                 "the model has not", "every tensor belongs to the model that the metadata describes",
                                 "check that the file is complete")

    def _file_of(self, name: str) -> CheckpointFile:
        return self._files.of(self._places[name].tensor)

    def _check(self, name: str, shape: Shape) -> None:
        if name not in self._places:
            raise ModelLoadError(f"{self._first} has no tensor for {name!r}", f"one of shape {list(shape)}",
                                 "check that the file is complete, with all of its shards")
        place = self._places[name]
        stored = self._tensors[place.tensor]
        found = stored.shape[::-1] if place.transposed else stored.shape
        if place.rows is not None:
            found = (len(place.rows), *found[1:]) if place.rows.stop <= found[0] else ()
        if place.is_one_row:
            found = found[1:]
        if found != tuple(shape):
            raise ModelLoadError(f"{self._file_of(name)}: {place.tensor!r} has shape {list(stored.shape)}",
                                 f"{list(shape)} for {name!r}, as the metadata asks for",
                                 "check that the file is complete")

    def _fill(self, target: torch.Tensor, place: Place) -> None:
        """Write the tensor into `target`, which has its shape; on the device "meta" there is nothing to write."""
        if target.device.type == "meta":
            return
        with self._files.reading(place.tensor) as read:
            stored = self._tensors[place.tensor]
            make = self._makers[stored.kind]

            def rows(begin: int, count: int) -> torch.Tensor:
                """[count, columns]"""
                block = make(read(begin * stored.row_bytes, count * stored.row_bytes), count)
                return block + place.offset if place.offset else block

            if len(stored.shape) == 1:
                _fill_row(target, place, rows(0, 1)[0])
            else:
                _fill_rows(target, place, rows, stored)


def _fill_row(target: torch.Tensor, place: Place, row: torch.Tensor) -> None:
    """Of a bias or a norm, which is made whole: its rows are its numbers."""
    row = row if place.rows is None else row[place.rows.start : place.rows.stop]
    _copy(target, row if place.order is None else row[place.order()])


def _fill_rows(target: torch.Tensor, place: Place, rows_of: Callable[[int, int], torch.Tensor],
               stored: GgufTensor) -> None:
    columns = stored.shape[-1]
    rows = place.rows or range(math.prod(stored.shape[:-1]))
    goes_to = None if place.order is None else _inverse(place.order())
    target = target if place.transposed else target.view(-1, columns)
    step = max(1, BLOCK_NUMBERS // columns)
    for begin in range(rows.start, rows.stop, step):
        check_interruption()
        block = rows_of(begin, min(step, rows.stop - begin))
        first = begin - rows.start
        if place.transposed:
            _copy(target[:, first : first + len(block)], block.t())
        elif goes_to is None:
            _copy(target[first : first + len(block)], block)
        else:
            _copy(target, block, goes_to[first : first + len(block)])


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return inverse


def _copy(target: torch.Tensor, block: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Write the block over `target`, or over those rows of it.

    Of small blocks, torch's threads take longer to meet than to copy, where others use the cores: numpy has none.
    """
    if target.device.type == "cpu" and torch.bfloat16 not in (target.dtype, block.dtype):
        with np.errstate(all="ignore"):         # of numbers beyond the range of the dtype: infinite, as torch has it
            if rows is None:
                np.copyto(target.numpy(), block.numpy(), casting="same_kind")
            else:
                target.numpy()[rows.numpy()] = block.numpy()
    elif rows is None:
        target.copy_(block)
    else:
        target[rows.to(target.device)] = block.to(target)


Maker = Callable[[bytearray, int], torch.Tensor]


def _maker(kind: str, file: CheckpointFile) -> Maker:
    """(bytes, rows) -> [rows, columns] on the CPU. Raises ModelLoadError for a type that nothing here can decode."""
    if kind in _PLAIN:
        return lambda data, rows: torch.frombuffer(data, dtype=_PLAIN[kind]).view(rows, -1)
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ModelLoadError(f"{file} has tensors of type {kind}, and the gguf library cannot be imported ({error})",
                             "the library that decodes quantised tensors",
                             'pip install "batch-manager[gguf]"') from error
    known: Any = GGMLQuantizationType.__members__.get(kind)
    try:
        if known is None:
            raise NotImplementedError
        dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except NotImplementedError:
        raise ModelLoadError(f"{file} has tensors of type {kind}", "a type that the gguf library decodes",
                             "quantise the model in another way, for example as Q4_K_M or Q8_0") from None

    def decoded(data: bytearray, rows: int) -> torch.Tensor:
        with np.errstate(all="ignore"):         # of scales that are no numbers: what they make is the model's business
            # Blocks are decoded one by one, whatever row they are in, and the library takes time for each row.
            return torch.from_numpy(dequantize(np.frombuffer(data, np.uint8).reshape(1, -1), known)).view(rows, -1)

    return decoded


class _Files:
    """The files of one model.

    They are read, not mapped: a file that shrinks while it is mapped ends the process, and pages of a map count as the
    process's memory. Each is open for as long as one tensor is read.
    """

    def __init__(self, headers: Sequence[GgufHeader]) -> None:
        self._headers = {name: header for header in headers for name in header.tensors}

    def of(self, name: str) -> CheckpointFile:
        return self._headers[name].file

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Callable[[int, int], bytearray]]:
        """(offset, bytes) -> so many bytes of the tensor. Raises ModelLoadError where the file has changed."""
        header = self._headers[name]
        try:
            with open_again(header) as file:
                yield partial(_read, header, file, header.tensors[name].begin)
        except OSError as fault:
            raise ModelLoadError(f"{header.file} cannot be read ({fault.strerror})") from None


def _read(header: GgufHeader, file: BinaryIO, begin: int, offset: int, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    while done < num_bytes:
        count = os.preadv(file.fileno(), [view[done:]], begin + offset + done)
        if not count:
            raise changed(header.file)
        done += count
    return data
