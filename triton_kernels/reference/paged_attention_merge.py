"""Combine the partial results of a split attention.

Arguments, results and rules are those of the kernel, in triton_kernels/paged_attention_merge.py.
"""

import torch


def paged_attention_merge(partial_out, partial_lse, part_starts, out, merged_rows=None):
    """Compute the weighted mean of the parts. See the module docstring for shapes."""
    starts = part_starts.tolist()
    for sequence, (begin, end) in enumerate(zip(starts, starts[1:])):
        if begin == end:
            continue
        lse = partial_lse[begin:end]
        weight = torch.exp2(lse - lse.amax(0))
        weight = weight / weight.sum(0)
        row = sequence if merged_rows is None else int(merged_rows[sequence])
        out[row] = (weight[..., None] * partial_out[begin:end]).sum(0)
    return out
