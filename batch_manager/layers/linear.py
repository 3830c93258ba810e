"""Linear maps, with the weight in the form the device multiplies fastest.

On a CPU the weight is packed once for oneDNN, which is 1.5 to 2.4 times as fast as multiplying with the plain one, and
the plain one is dropped. On other devices the product is torch's.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..triton_kernels.cpu.deterministic_linear import NoAgreeingSizeError
from ..weights.source import Weights


class Linear:
    """y = x W^T + b, over one or several stacked projections of the checkpoint.

    names        prefixes whose `.weight` and `.bias` are stacked, in order
    sizes        rows of each
    transposed   the checkpoint stores [in, out] (GPT-2's Conv1D); one name then
    """

    def __init__(self, weights: Weights, names: Sequence[str], in_size: int, sizes: Sequence[int], *,
                 bias: bool = False, transposed: bool = False) -> None:
        if transposed:
            (name,), (size,) = names, sizes
            weight = weights.tensor(f"{name}.weight", (in_size, size)).t().contiguous()
        else:
            weight = weights.stacked([(f"{name}.weight", (size, in_size)) for name, size in zip(names, sizes)])
        self.bias = weights.stacked([(f"{name}.bias", (size,)) for name, size in zip(names, sizes)]) if bias else None
        self.weight = pack(weight, weights.deterministic)
        self._by_row = row_product(self.weight, self.bias) if weights.deterministic else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._by_row is not None:
            return self._by_row(x)
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b, the sum rounded once (with deterministic weights the product is rounded before it too).

        May overwrite `residual`.
        """
        if self._by_row is not None:
            return residual.add_(self._by_row(x))
        if self.weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight.t())


def row_product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, in] -> x W^T + b [T, out], a row's bits from that row alone. The weight is as `pack` left it."""
    kernel = dispatch.kernel("deterministic_linear", weight.device)

    def product(x: torch.Tensor) -> torch.Tensor:
        try:
            return kernel(x, weight, bias)
        except NoAgreeingSizeError as fault:
            raise ConfigError(f"deterministic was asked for, and on this machine {fault}",
                              "the same bits wherever a row stands",
                              "try another dtype or num_threads, or leave deterministic out") from fault

    return product


def pack(weight: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    """The weight packed for oneDNN where that is possible and pays, else the weight.

    Deterministic products are a kernel's where Triton runs, on a CPU too when it is interpreted: that takes it plain.
    """
    if deterministic and dispatch.use_triton(weight.device):
        return weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)
