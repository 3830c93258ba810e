"""A linear map on a CPU whose bits, row by row, depend on that row alone. The contract is that of
triton_kernels/deterministic_linear.py; the weight may also be packed for oneDNN.

The rows go to torch's library in pieces of those sizes that were seen to give the same bits, with a weight of this
shape, on this machine, with this number of threads. The sizes are found at the first call and kept for the process.
"""

import torch
from torch.nn import functional

from .fixed_pieces import agreeing_sizes, in_pieces

SIZES = (1, 2, 4, 8, 16, 32, 64)
DISTINCT_COLUMNS = 509          # of the weight that sizes are tried with; no divisor of a library's block of columns

# Sizes by what the library sees: shape, dtype, bias, packed or not, threads. Found once in a process.
_sizes: dict[tuple, tuple[int, ...]] = {}


class NoAgreeingSizeError(RuntimeError):
    """On this machine a row's product has other bits at another place, in pieces of every size that was tried."""


def deterministic_linear(x, weight, bias=None, out=None):
    """x W^T + bias; see the kernel's docstring for shapes. Returns out. Raises NoAgreeingSizeError."""
    key = (*weight.shape, weight.dtype, weight.is_mkldnn, bias is None, torch.get_num_threads())
    sizes = _sizes.get(key)
    if sizes is None:
        sizes = _sizes[key] = _find_sizes(x, weight, bias)
    if not sizes:
        raise NoAgreeingSizeError(
            f"the product of {SIZES[-1]} rows with a weight of {tuple(weight.shape)} in {weight.dtype} on "
            f"{torch.get_num_threads()} threads depends on a row's place")
    result = in_pieces(lambda piece: _product(piece, weight, bias), x, sizes=sizes)
    return result if out is None else out.copy_(result)


def _find_sizes(x, weight, bias):
    """At the first call, which is the engine's own before it serves a request, on the threads it computes with."""
    rows, tried = cancelling(x.shape[1], weight.shape[0], x.dtype)
    if weight.is_mkldnn:
        tried = torch.ops.mkldnn._reorder_linear_weight(tried)
    zeros = None if bias is None else torch.zeros_like(bias)
    return agreeing_sizes(lambda piece: _product(piece, tried, zeros), rows, sizes=SIZES)


def cancelling(size, columns, dtype):
    """Rows [r, size] and a weight [columns, size] whose products are all 0 but for what was rounded on the way.

    Every term of a sum meets its negative somewhere else in it. What is left over shows the order of the sum in every
    bit; a sum of another size would hide it when it is rounded to 16 bits.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(size, generator=generator, dtype=torch.int64, device="cpu")
    half = size // 2

    def paired(count, sign):
        values = torch.randn((count, half), generator=generator, dtype=torch.float32, device="cpu")
        rows = torch.zeros((count, size), dtype=torch.float32, device="cpu")
        rows[:, order[:half]], rows[:, order[half : 2 * half]] = values, sign * values
        return rows.to(dtype)

    distinct = paired(min(columns, DISTINCT_COLUMNS), -1)
    weight = distinct.repeat(-(-columns // len(distinct)), 1)[:columns].contiguous()
    return paired(SIZES[-1], 1), weight


def _product(x, weight, bias):
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)
