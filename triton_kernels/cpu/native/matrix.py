"""Weight matrices in the layouts that the compiled C code for matrix products reads."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ..large_pages import allocate_shared
from .library import (
    INPUTS_ALIGNED,
    OPERATION_NUMBERS,
    PANEL,
    PREPARE,
    PRODUCT,
    QUANTISED_TYPES,
    SCALE_TYPES,
    TYPES,
    Matrix,
    QuantisedPart,
    Step,
    address,
    load_library,
    load_panel_kernels,
)

BLOCK = 32                          # inputs of a quantised block
WORD_BYTES = 4                      # a number has two words in a prepared row, unless it is rounded to one byte
ROW_BLOCK_BYTES = 32                # of RowBlock in quantised.h


def padded_inputs(inputs: int) -> int:
    return -(-inputs // INPUTS_ALIGNED) * INPUTS_ALIGNED


class PanelMatrix:
    """A weight W [outputs, inputs] in panels of 16 outputs, and a bias b [outputs] or None. The base of this module.

    Only one thread at a time may call its methods.

    dtype        of the rows that are multiplied
    is_uniform   the bits of a row depend on that row alone. Without it, this does not hold with AMX: there, a single
                 row is multiplied by vectors, because this takes less time
    type         number of the dtype in vectors.h
    address      address of the `Matrix` structure that the compiled code reads
    Raises       CannotCompileError if the library cannot be built; MemoryError
    """

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, bias: torch.Tensor | None,
                 is_uniform: bool = False) -> None:
        self._library = load_library()
        self.outputs, self.inputs, self.dtype, self.type = outputs, inputs, dtype, TYPES[dtype]
        self._padded = padded_inputs(inputs)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._matrix = Matrix(inputs=self._padded, outputs=outputs, type=self.type, factor=1.0,
                              bias=None if self._bias is None else self._bias.data_ptr(), is_uniform=is_uniform)
        self.address = address(self._matrix)
        self._registers = np.zeros(3, np.uintp)
        self._step = Step(registers=self._registers.ctypes.data, type=self.type)
        self._operation = np.zeros((1, OPERATION_NUMBERS), np.int64)
        self._operation[0, :8] = PRODUCT, 0, 0, 0, 1, 0, 0, self.address

    def multiply(self, x: torch.Tensor, dtype: torch.dtype | None = None, threads: int | None = None) -> torch.Tensor:
        """Return x W^T + b [T, outputs] for x [T, inputs], accumulated in float32.

        dtype    dtype of the result; None: that of the rows
        threads  number of threads; None: torch.get_num_threads()
        Raises   ValueError if x does not have the width and dtype of the rows
        """
        result = torch.empty((len(x), self.outputs), dtype=dtype or self.dtype, device="cpu")
        return self._run(x, result, adds=False, threads=threads)

    def largest(self, x: torch.Tensor, threads: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indices [T] int64, values [T] float32) of the largest value of each row of x W^T + b.

        Ties: the lowest index. The value is NaN if any value of the row is NaN.

        threads  number of threads; None: torch.get_num_threads()
        Raises   ValueError if x does not have the width and dtype of the rows; MemoryError
        """
        x = self._prepared(self._rows(x), threads)
        indices = torch.empty(len(x), dtype=torch.int64, device="cpu")
        largest = torch.empty(len(x), dtype=torch.float32, device="cpu")
        if len(x) and self._library.largest_outputs_of(
                self.address, x.data_ptr(), x.stride(0), len(x), indices.data_ptr(), largest.data_ptr(),
                threads or torch.get_num_threads()):
            raise MemoryError(f"not enough memory to find the largest output of each of {len(x):,} rows")
        return indices, largest

    def add_product(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual [T, outputs] + x W^T + b, rounded once. Overwrites `residual` if its rows are contiguous.

        Raises   the exceptions of `multiply`
        """
        if residual.stride(1) != 1:
            residual = residual.contiguous()
        return self._run(x, residual, adds=True)

    def _run(self, x: torch.Tensor, result: torch.Tensor, adds: bool, threads: int | None = None) -> torch.Tensor:
        x = self._prepared(self._rows(x), threads)
        operation = self._operation[0]
        operation[2], operation[5], operation[8] = x.stride(0), result.stride(0), adds
        operation[9] = TYPES[result.dtype]
        self._registers[0], self._registers[1] = x.data_ptr(), result.data_ptr()
        self._start(len(x), self._operation, threads)
        return result

    def _start(self, rows: int, operations: np.ndarray, threads: int | None) -> None:
        if rows:
            self._step.rows = rows
            self._library.run_step(address(self._step), operations.ctypes.data, len(operations),
                                   threads or torch.get_num_threads())

    def _prepared(self, x: torch.Tensor, threads: int | None) -> torch.Tensor:
        """Return x [T, inputs] in the form that products read."""
        return x

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with contiguous rows, padded with zeros to a multiple of INPUTS_ALIGNED columns.

        Raises   ValueError if x does not have the width and dtype of the rows
        """
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; expected {self.dtype} [rows, {self.inputs}]")
        if self.inputs != self._padded:
            return torch.nn.functional.pad(x, (0, self._padded - self.inputs))
        return x if x.stride(1) == 1 else x.contiguous()


class PackedMatrix(PanelMatrix):
    """A copy of a weight W [outputs, inputs], and of a bias b [outputs] or None. See PanelMatrix."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_uniform: bool = False) -> None:
        super().__init__(*weight.shape, weight.dtype, bias, is_uniform)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._panels = allocate_shared(-(-self.outputs // PANEL) * PANEL * self._padded * weight.itemsize)
        self._matrix.panels = self._panels.ctypes.data
        self._library.pack_matrix(self.address, weight.data_ptr(), self.inputs, weight.stride(0))


class QuantisedPanels:
    """A weight W [outputs, inputs] in the blocks of a GGUF file, repacked; see quantised.h.

    types   (type of QUANTISED_TYPES, number of outputs) of consecutive ranges of outputs. Each range but the last has a
            multiple of 16 outputs. A type in groups is a tuple of its name, the inputs of a group and the dtype of the
            scales; a group has a multiple of 32 inputs, or all
    inputs  number of inputs, in K types a multiple of 256. In the last block of a row, weights after them are zero
    rows    all rows of the file, some at a time: outputs [some] int64 of one range, in any order, and the rows
            [some, bytes of a row] uint8, see pack_quantised_rows

    num_bytes   size of the panels
    Raises      CannotCompileError if the library cannot be built; MemoryError
    """

    def __init__(self, types: Sequence[tuple[str | tuple[str, int, torch.dtype], int]], inputs: int,
                 rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        library, padded = load_library(), padded_inputs(inputs)
        self.outputs, self.inputs = sum(count for _, count in types), inputs
        self.parts, self._memory, first = (QuantisedPart * len(types))(), [], 0
        for part, (kind, count) in zip(self.parts, types):
            name, group, scales = (kind, BLOCK, torch.float16) if isinstance(kind, str) else kind
            load_panel_kernels(name)
            panels = -(-count // PANEL)
            part.first_panel, part.end_panel, part.type = first, first + panels, QUANTISED_TYPES.index(name)
            part.group_blocks, part.scale_type = -(-group // BLOCK), SCALE_TYPES[scales]
            memory = allocate_shared(panels * library.quantised_panel_bytes(address(part), padded))
            part.panels = memory.ctypes.data
            self._memory.append(memory)
            first += panels
        self.num_bytes = sum(len(memory) for memory in self._memory)
        starts = np.array([part.first_panel for part in self.parts]) * PANEL
        for outputs, data in rows:
            part = self.parts[int(np.searchsorted(starts, outputs[0], "right")) - 1]
            outputs, data = np.ascontiguousarray(outputs, np.int64), np.ascontiguousarray(data)
            library.pack_quantised_rows(address(part), padded, data.ctypes.data, data.shape[1], outputs.ctypes.data,
                                        len(outputs))


def quantised_rows(weight: torch.Tensor, kind: str) -> np.ndarray:
    """Return a weight [outputs, inputs], float32 or bfloat16, as rows of a GGUF file [outputs, bytes of a row] uint8.

    kind     Q8_0 or Q4_0. The last block of a row is filled up with zeros
    Raises   CannotCompileError if the library cannot be built
    """
    library, number = load_library(), QUANTISED_TYPES.index(kind)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    (outputs, inputs), stride = weight.shape, weight.stride(0)
    rows = np.empty((outputs, library.quantised_row_bytes(number, padded_inputs(inputs))), np.uint8)
    library.quantise_rows(number, weight.data_ptr(), TYPES[weight.dtype], stride, inputs, outputs, rows.ctypes.data)
    return rows


class QuantisedMatrix(PanelMatrix):
    """Products with quantised panels, and a bias b [outputs] or None. See PanelMatrix.

    Products are exact up to the rounding of float32, see quantised.h. The bits of a row depend on that row alone.

    panels          of W, which several matrices can share
    factor          on x W^T
    has_byte_rows   x is rounded to 8 bits: each 32 inputs have the scale largest / 127. Products are exact for what is
                    left of x
    """

    def __init__(self, panels: QuantisedPanels, dtype: torch.dtype, bias: torch.Tensor | None = None,
                 factor: float = 1.0, has_byte_rows: bool = False) -> None:
        super().__init__(panels.outputs, panels.inputs, dtype, bias)
        self.panels = panels
        self._matrix.parts, self._matrix.num_parts = address(panels.parts), len(panels.parts)
        self._matrix.factor, self._matrix.has_byte_rows, self.has_byte_rows = factor, has_byte_rows, has_byte_rows
        self.prepared_entries = prepared_entries(panels.inputs, dtype, has_byte_rows)
        self._prepare = np.zeros((1, OPERATION_NUMBERS), np.int64)
        self._prepare[0, :9] = PREPARE, 0, 0, 0, 2, self.prepared_entries, 0, self._padded, has_byte_rows

    def sharing(self, bias: torch.Tensor | None, factor: float) -> "QuantisedMatrix":
        """Return a matrix with the same panels, and another bias and factor."""
        return QuantisedMatrix(self.panels, self.dtype, bias, factor, self.has_byte_rows)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return rows of W, outputs [T] int64, as a new tensor [T, inputs] in the dtype of the rows.

        Raises   IndexError if an output is not one of the matrix
        """
        outputs = outputs.contiguous()
        result = torch.empty((len(outputs), self._padded), dtype=self.dtype, device="cpu")
        if self._library.decode_quantised_rows(self.address, outputs.data_ptr(), len(outputs), result.data_ptr()):
            raise IndexError(f"outputs are {int(outputs.min())} to {int(outputs.max())}; expected 0 to "
                             f"{self.outputs - 1}")
        return result if self.inputs == self._padded else result[:, : self.inputs].contiguous()

    def _prepared(self, x: torch.Tensor, threads: int | None) -> torch.Tensor:
        result = torch.empty((len(x), self.prepared_entries), dtype=self.dtype, device="cpu")
        self._prepare[0, 2] = x.stride(0)
        self._registers[0], self._registers[2] = x.data_ptr(), result.data_ptr()
        self._start(len(x), self._prepare, threads)
        return result


def prepared_entries(inputs: int, dtype: torch.dtype, has_byte_rows: bool) -> int:
    """Return the number of entries of `dtype` that a prepared row takes, see quantised.h."""
    padded = padded_inputs(inputs)
    return (padded * (1 if has_byte_rows else WORD_BYTES) + padded // BLOCK * ROW_BLOCK_BYTES) // dtype.itemsize
