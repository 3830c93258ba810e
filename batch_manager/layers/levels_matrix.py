"""Quantised matrices on a device, whose products are the kernel `quantised_linear`."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..triton_kernels import dispatch
from ..triton_kernels.reference.quantised_linear import decoded
from ..weights.matrices import Blocks, GroupedType

CHUNK_BYTES = 32                    # see quantised_linear
BLOCK = 32                          # inputs of a block of a GGUF file
ROWS_OF_TILES = (1, 17, 65)         # of x: one number for each tile of the kernel

# numpy's uint8 levels [outputs, inputs], scales [outputs, groups], and zero points or None, of rows of a file
Unpacked = tuple[np.ndarray, torch.Tensor, np.ndarray | None]


def _q4_0(rows: np.ndarray) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 18)
    halves = [blocks[..., 2:] & 15, blocks[..., 2:] >> 4]                    # of the 32 inputs of a block
    return np.concatenate(halves, -1).reshape(len(rows), -1), _halves(blocks), None


def _q8_0(rows: np.ndarray) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 34)
    return blocks[..., 2:].reshape(len(rows), -1) ^ 128, _halves(blocks), None


def _halves(blocks: np.ndarray) -> torch.Tensor:
    """Return the half floats with which blocks [outputs, groups, bytes] begin."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0])


# Type of blocks -> (bits of a level, reader of rows). Levels are stored without a sign: 0 is the middle one.
_BLOCKS: Mapping[str, tuple[int, Callable[[np.ndarray], Unpacked]]] = {"Q4_0": (4, _q4_0), "Q8_0": (8, _q8_0)}
LEVEL_TYPES = (*_BLOCKS, "INT4", "INT8")


def _grouped(kind: GroupedType, in_size: int, rows: np.ndarray) -> Unpacked:
    """Read rows of `grouped_rows`. The levels and zero points of INT8 are moved to 0 .. 255."""
    groups = -(-in_size // kind.group)
    levels, scales, zeros = np.split(rows, [rows.shape[1] - groups * (kind.scales.itemsize + 2),
                                            rows.shape[1] - groups * 2], 1)
    shift = 128 if kind.name == "INT8" else 0
    return (levels ^ np.uint8(shift), torch.from_numpy(np.ascontiguousarray(scales)).view(kind.scales),
            np.ascontiguousarray(zeros).view(np.int16) + np.int16(shift))


def packed(levels: np.ndarray, bits: int) -> np.ndarray:
    """Return levels [outputs, inputs] uint8 as the kernel reads them, [chunks, outputs, 32]."""
    per_chunk = CHUNK_BYTES * 8 // bits
    levels = np.pad(levels, ((0, 0), (0, -levels.shape[1] % per_chunk)))
    levels = levels.reshape(len(levels), -1, 8 // bits, CHUNK_BYTES)
    return (levels[:, :, 0] if bits == 8 else levels[:, :, 0] | levels[:, :, 1] << 4).swapaxes(0, 1)


class _Range(NamedTuple):
    """A range of outputs with one type, and the arguments of `quantised_linear` for it."""

    outputs: slice
    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | float
    bits: int
    group: int


class LevelsMatrix:
    """Products with W [outputs, inputs], of types in LEVEL_TYPES, and a bias b [outputs] or None, on a device.

    Nothing of W is rounded. The order of sums depends on the number of rows.

    stored    a matrix that was not read yet; its bias is on the device
    device    with Triton kernels
    dtype     of the rows that are multiplied
    """

    def __init__(self, stored: Blocks, device: torch.device, dtype: torch.dtype) -> None:
        self.inputs, self.dtype, self._bias, self._factor = stored.in_size, dtype, stored.bias, stored.factor
        self.outputs, self._ranges = sum(count for _, count in stored.types), _read(stored, device)
        self._kernel = dispatch.kernel("quantised_linear", device)
        if device.type != "cpu":                       # compile what steps of any size launch
            for rows in ROWS_OF_TILES:
                x = torch.zeros((rows, self.inputs), dtype=dtype, device=device)
                self.add_product(x, self.multiply(x))

    def sharing(self, bias: torch.Tensor | None, factor: float) -> "LevelsMatrix":
        """Return a matrix with the same levels, and another bias and factor on the products."""
        other = object.__new__(LevelsMatrix)
        vars(other).update(vars(self), _bias=bias, _factor=factor)
        return other

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [T, outputs] for x [T, inputs]."""
        result = torch.empty((len(x), self.outputs), dtype=self.dtype, device=x.device)
        for one in self._ranges:
            self._kernel(x, *one[1:], self._bias_of(one), self._factor, out=result[:, one.outputs])
        return result

    def add_product(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual [T, outputs] + x W^T + b, rounded once. Overwrites `residual`."""
        for one in self._ranges:
            self._kernel(x, *one[1:], self._bias_of(one), self._factor, residual=residual[:, one.outputs])
        return residual

    def _bias_of(self, one: _Range) -> torch.Tensor | None:
        return None if self._bias is None else self._bias[one.outputs]

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return rows of W, outputs [T] int64, as a new tensor [T, inputs]. All outputs must have one type."""
        (one,) = self._ranges
        zeros = one.zeros[outputs] if isinstance(one.zeros, torch.Tensor) else one.zeros
        return decoded(one.levels[:, outputs], one.scales[outputs], zeros, one.bits, one.group, self.inputs
                       ).to(self.dtype)


def _read(stored: Blocks, device: torch.device) -> Sequence[_Range]:
    """Read the rows of a matrix, and send them to the device as the kernel reads them, some at a time."""
    ranges, first = [], 0
    for kind, count in stored.types:
        bits = _BLOCKS[kind][0] if isinstance(kind, str) else 4 if kind.name == "INT4" else 8
        whole = BLOCK if isinstance(kind, str) else kind.group
        # The kernel's groups are 32 times a power of two: others are divided into equal ones.
        group = 0 if whole >= stored.in_size else whole & -whole
        groups = -(-stored.in_size // group) if group else 1
        levels = torch.empty((-(-stored.in_size * bits // (8 * CHUNK_BYTES)), count, CHUNK_BYTES), dtype=torch.uint8,
                             device=device)
        scales = torch.empty((count, groups), device=device,
                             dtype=torch.float16 if isinstance(kind, str) else kind.scales)
        zeros = None if isinstance(kind, str) else torch.empty((count, groups), dtype=torch.int16, device=device)
        ranges.append((slice(first, first + count), levels, scales, zeros, bits, group, whole // group if group else 1))
        first += count
    starts = [outputs.start for outputs, *_ in ranges]
    for at, rows in stored.read():
        index = int(np.searchsorted(starts, at[0], "right")) - 1
        (kind, _), (outputs, levels, scales, zeros, bits, _, repeats) = stored.types[index], ranges[index]
        of_rows = _BLOCKS[kind][1](rows) if isinstance(kind, str) else _grouped(kind, stored.in_size, rows)
        place = torch.from_numpy(np.ascontiguousarray(at) - outputs.start).to(device)
        levels[:, place] = torch.from_numpy(packed(of_rows[0], bits)).to(device)
        scales[place] = _repeated(of_rows[1], repeats, scales).to(device)
        if of_rows[2] is not None:
            zeros[place] = _repeated(torch.from_numpy(of_rows[2]), repeats, zeros).to(device)
    return [_Range(outputs, levels, scales, 2.0 ** (bits - 1) if zeros is None else _one_or_all(zeros), bits, group)
            for outputs, levels, scales, zeros, bits, group, _ in ranges]


def _repeated(values: torch.Tensor, repeats: int, target: torch.Tensor) -> torch.Tensor:
    return values.repeat_interleave(repeats, 1)[:, : target.shape[1]]


def _one_or_all(zeros: torch.Tensor) -> torch.Tensor | float:
    """Return the zero point that all groups share, or all of them."""
    least, most = zeros.aminmax()
    return float(least) if least == most else zeros
