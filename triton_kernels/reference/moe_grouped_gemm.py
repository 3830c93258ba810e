"""One product for all experts of a layer: each row is multiplied by the matrix of its own expert.

Arguments, results and rules are those of the kernel, in triton_kernels/moe_grouped_gemm.py.
"""

import torch


def moe_grouped_gemm(x, weight, ends, in_rows=None, out_rows=None, factors=None, out=None):
    """Multiply each row by the matrix of its expert. See the module docstring for shapes."""
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = torch.arange(len(x) if in_rows is None else len(in_rows), dtype=torch.int64, device=x.device)
    in_rows = numbers if in_rows is None else in_rows
    out_rows = numbers if out_rows is None else out_rows
    if out is None:
        out = torch.empty(len(numbers), weight.shape[1], dtype=x.dtype if factors is None else wide, device=x.device)
    begin = 0
    for matrix, end in zip(weight, ends.tolist()):
        rows = out_rows[begin:end]
        product = (x[in_rows[begin:end]].to(wide) @ matrix.to(wide).T).to(x.dtype)
        out[rows] = (product if factors is None else product * factors[rows, None]).to(out.dtype)
        begin = end
    return out
