"""Products of rows with a weight whose bits depend on the row alone: `TrtGptModelOptionalParams.deterministic`.

Where Triton runs, a kernel of fixed tiles does it. Elsewhere the rows go to torch's library in pieces of those sizes that
were seen to give the same bits, with this weight's shape, on this machine, with this number of threads.
"""

import torch
from torch.nn import functional

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..triton_kernels.fixed_pieces import agreeing_sizes, in_pieces

SIZES = (1, 2, 4, 8, 16, 32, 64)

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
        if self._weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return functional.linear(x, self._weight, self._bias)

    def _find_sizes(self, x: torch.Tensor) -> tuple[int, ...]:
        """At the first call, which is the engine's own before it serves anybody, on the threads it computes with."""
        threads = torch.get_num_threads()
        key = (*self._weight.shape, self._weight.dtype, self._weight.is_mkldnn, self._bias is None, threads)
        if key not in _sizes:
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn((SIZES[-1], x.shape[1]), generator=generator).to(x.device, x.dtype)
            _sizes[key] = agreeing_sizes(self._product, rows, sizes=SIZES)
        if not _sizes[key]:
            raise ConfigError(
                f"deterministic was asked for, and on this machine the product of {SIZES[-1]} rows with a weight of "
                f"{tuple(self._weight.shape)} in {self._weight.dtype} on {threads} threads depends on a row's place",
                "the same bits wherever a row stands", "try another dtype or num_threads, or leave deterministic out")
        return _sizes[key]
