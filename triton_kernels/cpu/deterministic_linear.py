"""A deterministic linear layer on a CPU: the bits of a row depend on that row alone.

Same contract as triton_kernels/deterministic_linear.py; the weight can also be packed for oneDNN.

Torch multiplies the rows in pieces. The size of a piece is its number of rows. A size is used only if, in a
measurement on this machine, pieces of this size gave the same bits as pieces of the largest size. The sizes that
may be used depend on the shape, dtype and layout of the weight, on whether there is a bias, and on the number of
threads. The first call in a process with a new combination of these measures the sizes and caches the result.
"""

import torch
from torch.nn import functional

from .fixed_pieces import agreeing_sizes, in_pieces

SIZES = (1, 2, 4, 8, 16, 32, 64)
DISTINCT_COLUMNS = 509          # columns of the measured weight; prime, so that it does not align with column blocks

# Usable sizes by everything that affects the library: shape, dtype, packed or not, bias, threads.
_sizes: dict[tuple, tuple[int, ...]] = {}


class NoAgreeingSizeError(RuntimeError):
    """No piece size is usable on this machine; the module docstring explains pieces.

    Even in pieces of the largest size, the bits of a row of the product depend on the index of the row or on the
    other rows.
    """


def deterministic_linear(x, weight, bias=None, out=None):
    """Compute x W^T + bias. Returns out. Raises NoAgreeingSizeError.

    See triton_kernels/deterministic_linear.py for shapes.
    """
    key = (*weight.shape, weight.dtype, weight.is_mkldnn, bias is None, torch.get_num_threads())
    sizes = _sizes.get(key)
    if sizes is None:
        sizes = _sizes[key] = _find_sizes(x, weight, bias)
    if not sizes:
        raise NoAgreeingSizeError(
            f"the product of {SIZES[-1]} rows with a weight of {tuple(weight.shape)} in {weight.dtype} "
            f"depends on the row index, and torch.get_num_threads() is {torch.get_num_threads()}")
    result = in_pieces(lambda piece: _product(piece, weight, bias), x, sizes=sizes)
    return result if out is None else out.copy_(result)


def _find_sizes(x, weight, bias):
    """Measure which piece sizes give every row of a product the same bits as the largest size, and return them.

    A piece is a group of rows that are multiplied at once, and its size is the number of rows. The engine runs this
    measurement at startup, with the number of threads of all later steps.
    """
    rows, tried = cancelling(x.shape[1], weight.shape[0], x.dtype)
    if weight.is_mkldnn:
        tried = torch.ops.mkldnn._reorder_linear_weight(tried)
    zeros = None if bias is None else torch.zeros_like(bias)
    return agreeing_sizes(lambda piece: _product(piece, tried, zeros), rows, sizes=SIZES)


def cancelling(size, columns, dtype):
    """Return rows [r, size] and a weight [columns, size] whose products are 0 except for rounding errors.

    Each term of a sum is canceled by another term. Only rounding errors remain, and every bit of them depends on the
    order of summation. If the sum were far from zero, rounding it to 16 bits would hide this order.
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
