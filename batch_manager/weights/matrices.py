"""Matrices as a source hands them to a layer: what is stored, and which part of it this rank has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from ..loading_thread import check_interruption

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a matrix [out, in] that one of several ranks has.

    rank, size   index of the rank, and number of ranks
    of           "outputs": an equal part of the outputs of each projection. "inputs": an equal part of the inputs, and
                 the whole bias. None: the whole matrix
    by_head      how one tensor stores several projections. True: head after head, each with its queries, key and value,
                 so that a part is one piece of the tensor. False: projection after projection
    copies       for each projection, the number of ranks that have the same part of it, which follow each other; None:
                 each rank has a part of its own
    """

    rank: int = 0
    size: int = 1
    of: Literal["outputs", "inputs"] | None = None
    by_head: bool = False
    copies: tuple[int, ...] | None = None


WHOLE_MATRIX = Share()


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix of numbers: contiguous weight [out, in], and bias [out] or None, in the dtype of the source."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class GroupedType(NamedTuple):
    """Levels in groups of inputs, each with a scale and a zero point: a weight is (level - zero point) * scale.

    name     "INT4": levels 0 to 15, zero points 0 to 255; "INT8": levels -128 to 127, zero points -255 to 255
    group    inputs of a group: a multiple of 32, or at least as many as the matrix has
    scales   dtype of the scales
    """

    name: str
    group: int
    scales: torch.dtype


def grouped_rows(levels: np.ndarray, scales: torch.Tensor, zeros: np.ndarray) -> np.ndarray:
    """Return rows of a GroupedType, as `Blocks.read` yields them, [outputs, bytes of a row].

    levels          [outputs, inputs] uint8 or int8
    scales, zeros   [outputs, groups], zeros int16
    """
    if levels.shape[1] % INPUTS_ALIGNED:               # the numbers that these are multiplied with are zero
        levels = np.pad(levels, ((0, 0), (0, -levels.shape[1] % INPUTS_ALIGNED)))
    return np.concatenate([levels.view(np.uint8), scales.reshape(-1).view(torch.uint8).numpy().reshape(len(scales), -1),
                           np.ascontiguousarray(zeros, np.int16).view(np.uint8)], 1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix of quantised blocks or groups, as a file has them, which is not yet read.

    types     (type, number of outputs) of consecutive ranges of outputs. A type is the name of blocks, or a
              GroupedType. Each range but the last has a multiple of RANGES_ALIGNED outputs
    in_size   number of inputs
    read      read() -> all rows, some at a time: outputs [some] int64 of one range, rows [some, bytes of a row] uint8
    bias      [out] in the dtype of the source, or None
    factor    on the products, not on the bias
    """

    types: Sequence[tuple[str | GroupedType, int]]
    in_size: int
    read: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
    bias: torch.Tensor | None
    factor: float = 1.0


RANGES_ALIGNED, INPUTS_ALIGNED = 16, 32
StoredMatrix = Dense | Blocks      # a closed union: layers/weight_form.py has a maker for each type of a source


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stored tensor.

    name, shape   of the stored tensor
    rows          rows of the matrix, or elements of the vector, that belong to the part; None: all
    columns       columns of the matrix that belong to the part; None: all
    transposed    whether the tensor is stored as the transpose of the matrix
    """

    name: str
    shape: Shape
    rows: range | None = None
    columns: range | None = None
    transposed: bool = False

    @property
    def is_whole(self) -> bool:
        return self.rows is None and self.columns is None

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the part in the stored tensor."""
        rows, columns = (slice(None) if part is None else slice(part.start, part.stop)
                         for part in (self.rows, self.columns))
        return ((columns, rows) if self.transposed else (rows, columns))[: len(self.shape)]

    @property
    def loaded_shape(self) -> tuple[int, ...]:
        """The shape of the part, with the dimensions of the matrix."""
        rows, *others = reversed(self.shape) if self.transposed else self.shape
        return (rows if self.rows is None else len(self.rows),
                *(others if self.columns is None else [len(self.columns)]))


def rows_of_parts(names: Sequence[str], sizes: Sequence[int], share: Share
                   ) -> Iterator[tuple[str, int, list[range | None]]]:
    """Yield, for each stored tensor, its name, its number of rows, and the rows that this rank has of it, in order.

    sizes   number of rows that this rank has of each projection
    """
    if share.size == 1:
        for name, size in zip(names, sizes if len(names) == len(sizes) else [sum(sizes)], strict=True):
            yield name, size, [None]
        return
    copies = share.copies or (1,) * len(sizes)
    wholes = [size * share.size // count for size, count in zip(sizes, copies)]
    firsts = [share.rank // count * size for size, count in zip(sizes, copies)]
    if len(names) == len(sizes):
        for name, size, whole, first in zip(names, sizes, wholes, firsts):
            yield name, whole, [range(first, first + size)]
        return
    (name,), start = names, 0
    parts: list[range | None] = []
    if share.by_head and share.copies is None:
        parts.append(range(share.rank * sum(sizes), (share.rank + 1) * sum(sizes)))
    elif share.by_head:                                # a part of a key head's queries, this head, its value head
        most = max(copies)
        start = share.rank // most * sum(size * most // count for size, count in zip(sizes, copies))
        for size, count in zip(sizes, copies):
            first = start + share.rank % (most // count) * size
            parts.append(range(first, first + size))
            start += size * most // count
    else:
        for size, whole, first in zip(sizes, wholes, firsts):
            parts.append(range(start + first, start + first + size))
            start += whole
    yield name, sum(wholes), parts


class DenseSource:
    """Base of sources that hand out every matrix as Dense. The source defines `_check` and `_load`.

    The methods have the promises of source.Weights.
    """

    num_bytes = 0

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def _check(self, name: str, shape: Shape) -> str:
        """Return the name under which the source has the tensor `name`. Raises ModelLoadError unless it has `shape`."""
        raise NotImplementedError

    def _load(self, target: torch.Tensor, stored_name: str, part: Part) -> None:
        """Read a part of a tensor, and nothing else, into `target`, which has the part's `loaded_shape`."""
        raise NotImplementedError

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        if shape:
            return self._joined([Part(name, shape)])
        check_interruption()
        stored_name, result = self._check(name, shape), torch.empty((), dtype=self.dtype, device=self.device)
        self._load(result, stored_name, Part(name, shape))
        self.num_bytes += result.nbytes
        return result

    def stacked(self, parts: Sequence[tuple[str, Shape]]) -> torch.Tensor:
        return self._joined([Part(name, shape) for name, shape in parts])

    def linear(self, names: Sequence[str], in_size: int, sizes: Sequence[int], *, bias: bool = False,
               transposed: bool = False, row_order: torch.Tensor | None = None, scale: float | None = None,
               share: Share = WHOLE_MATRIX) -> StoredMatrix:
        weights, biases = self._parts(names, in_size, sizes, transposed, share)
        weight, added = self._joined(weights), self._joined(biases) if bias else None
        return Dense(changed_rows(weight, row_order, scale),
                     None if added is None else changed_rows(added, row_order, scale))

    @staticmethod
    def _parts(names: Sequence[str], in_size: int, sizes: Sequence[int], transposed: bool, share: Share
               ) -> tuple[list[Part], list[Part]]:
        """Return the parts of the weights and of the biases that `linear` stacks."""
        columns, whole_in_size = None, in_size
        if share.of == "inputs" and share.size > 1:
            columns = range(share.rank * in_size, (share.rank + 1) * in_size)
            whole_in_size = in_size * share.size
        weights, biases = [], []
        for name, whole, parts in rows_of_parts(names, sizes, share if share.of == "outputs" else WHOLE_MATRIX):
            shape = (whole_in_size, whole) if transposed else (whole, whole_in_size)
            for rows in parts:
                weights.append(Part(f"{name}.weight", shape, rows, columns, transposed))
                biases.append(Part(f"{name}.bias", (whole,), rows))
        return weights, biases

    def count_copy(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def cache_scales(self, name: str) -> tuple[float, float]:
        """Return the scales of keys and values in FP8 of the attention `name`; 1 if its source has none.

        Raises ModelLoadError if they are missing or wrong.
        """
        return 1.0, 1.0

    def _joined(self, parts: Sequence[Part]) -> torch.Tensor:
        """Return the parts of several tensors, concatenated along the first dimension."""
        check_interruption()
        stored_names = [self._check(part.name, part.shape) for part in parts]
        shapes = [part.loaded_shape for part in parts]
        result = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for part, stored_name, target in zip(parts, stored_names, result.split([shape[0] for shape in shapes])):
            self._load(target, stored_name, part)
        self.num_bytes += result.nbytes
        return result


def changed_rows(tensor: torch.Tensor, row_order: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    """Return the rows of a tensor in another order and with a factor. None: unchanged."""
    if tensor.is_meta:                                 # neither changes the shape; torch would import sympy for both
        return tensor
    tensor = tensor if row_order is None else tensor[row_order]
    return tensor if scale is None else tensor * scale
