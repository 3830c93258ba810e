"""Products of rows with a weight whose bits depend on the row alone: `TrtGptModelOptionalParams.deterministic`.

Where Triton runs, a kernel of fixed tiles does it. Elsewhere the rows go to torch's library in pieces of those sizes
that were seen to give the same bits, with this weight's shape, on this machine, with this number of threads.
"""

import torch
from torch.nn import functional

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..triton_kernels.fixed_pieces import agreeing_sizes, in_pieces

SIZES = (1, 2, 4, 8, 16, 32, 64)
DISTINCT_COLUMNS = 509          # of the weight that sizes are tried with; no divisor of a library's block of columns

# Sizes by what the library sees: shape, dtype, bias, packed or not, threads. Found once in a process.
_sizes: dict[tuple, tuple[int, ...]] = {}


class RowProduct:
    """x [T, in] -> x W^T + b [T, out]. The weight is as `linear.pack` left it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        on_triton = dispatch.use_triton(weight.device)
        self._kernel = dispatch.kernel("deterministic_linear", weight.device) if on_triton else None
        self._in_pieces: tuple[int, ...] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel(x, self._weight, self._bias)
        if self._in_pieces is None:
            self._in_pieces = self._find_sizes(x)
        return in_pieces(self._product, x, sizes=self._in_pieces)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self._weight, self._bias)

    def _find_sizes(self, x: torch.Tensor) -> tuple[int, ...]:
        """At the first call, which is the engine's own before it serves anybody, on the threads it computes with."""
        threads = torch.get_num_threads()
        key = (*self._weight.shape, self._weight.dtype, self._weight.is_mkldnn, self._bias is None, threads)
        if key not in _sizes:
            rows, weight = cancelling(x.shape[1], self._weight.shape[0], x.dtype)
            if self._weight.is_mkldnn:
                weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            bias = None if self._bias is None else torch.zeros_like(self._bias)
            _sizes[key] = agreeing_sizes(lambda piece: _product(piece, weight, bias), rows, sizes=SIZES)
        if not _sizes[key]:
            raise ConfigError(
                f"deterministic was asked for, and on this machine the product of {SIZES[-1]} rows with a weight of "
                f"{tuple(self._weight.shape)} in {self._weight.dtype} on {threads} threads depends on a row's place",
                "the same bits wherever a row stands", "try another dtype or num_threads, or leave deterministic out")
        return _sizes[key]


def cancelling(size: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [r, size] and a weight [columns, size] whose products are all 0 but for what was rounded on the way.

    Every term of a sum meets its negative somewhere else in it. What is left over shows the order of the sum in every
    bit; a sum of another size would hide it when it is rounded to 16 bits.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(size, generator=generator, dtype=torch.int64, device="cpu")
    half = size // 2

    def paired(count: int, sign: int) -> torch.Tensor:
        values = torch.randn((count, half), generator=generator, dtype=torch.float32, device="cpu")
        rows = torch.zeros((count, size), dtype=torch.float32, device="cpu")
        rows[:, order[:half]], rows[:, order[half : 2 * half]] = values, sign * values
        return rows.to(dtype)

    distinct = paired(min(columns, DISTINCT_COLUMNS), -1)
    weight = distinct.repeat(-(-columns // len(distinct)), 1)[:columns].contiguous()
    return paired(SIZES[-1], 1), weight


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)
