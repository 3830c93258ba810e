"""A weight matrix, packed in the layout that the compiled C code for matrix products reads."""

import numpy as np
import torch

from ..large_pages import allocate_shared
from .library import (
    INPUTS_ALIGNED,
    OPERATION_NUMBERS,
    PANEL,
    PRODUCT,
    TYPES,
    Matrix,
    Step,
    address,
    load_library,
)


class PackedMatrix:
    """A copy of a weight W [outputs, inputs], in panels of 16 outputs, and of a bias b [outputs] or None.

    Only one thread at a time may call its methods.

    type      number of the dtype of W in vectors.h
    address   address of the `Matrix` structure that the compiled code reads
    Raises    CannotCompileError if the library cannot be built; MemoryError
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._library = load_library()
        self.outputs, self.inputs = weight.shape
        self.dtype, self.type = weight.dtype, TYPES[weight.dtype]
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        padded = -(-self.inputs // INPUTS_ALIGNED) * INPUTS_ALIGNED
        self._panels = allocate_shared(-(-self.outputs // PANEL) * PANEL * padded * weight.itemsize)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._matrix = Matrix(padded, self.outputs, self._panels.ctypes.data,
                              None if bias is None else self._bias.data_ptr(), self.type)
        self.address = address(self._matrix)
        self._library.pack_matrix(self.address, weight.data_ptr(), self.inputs, weight.stride(0))

        self._registers = np.zeros(2, np.uintp)
        self._step = Step(registers=self._registers.ctypes.data, type=self.type)
        self._operation = np.zeros(OPERATION_NUMBERS, np.int64)
        self._operation[:8] = PRODUCT, 0, 0, 0, 1, 0, 0, self.address

    def multiply(self, x: torch.Tensor, dtype: torch.dtype | None = None, threads: int | None = None) -> torch.Tensor:
        """Return x W^T + b [T, outputs] for x [T, inputs], accumulated in float32.

        dtype    dtype of the result; None: dtype of W
        threads  number of threads; None: torch.get_num_threads()
        Raises   ValueError if x does not have the width and dtype of W
        """
        result = torch.empty((len(x), self.outputs), dtype=dtype or self.dtype, device="cpu")
        return self._run(x, result, adds=False, threads=threads)

    def largest(self, x: torch.Tensor, threads: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indices [T] int64, values [T] float32) of the largest value of each row of x W^T + b.

        Ties: the lowest index. The value is NaN if any value of the row is NaN.

        threads  number of threads; None: torch.get_num_threads()
        Raises   ValueError if x does not have the width and dtype of W; MemoryError
        """
        x = self._rows(x)
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
        x = self._rows(x)
        if len(x) == 0:
            return result
        operation = self._operation
        operation[2], operation[5], operation[8] = x.stride(0), result.stride(0), adds
        operation[9] = TYPES[result.dtype]
        self._registers[0], self._registers[1] = x.data_ptr(), result.data_ptr()
        self._step.rows = len(x)
        self._library.run_step(address(self._step), operation.ctypes.data, 1, threads or torch.get_num_threads())
        return result

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with contiguous rows, padded with zeros to a multiple of INPUTS_ALIGNED columns.

        Raises   ValueError if x does not have the width and dtype of W
        """
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; expected {self.dtype} [rows, {self.inputs}]")
        if self.inputs % INPUTS_ALIGNED:
            return torch.nn.functional.pad(x, (0, self._matrix.inputs - self.inputs))
        return x if x.stride(1) == 1 else x.contiguous()
