"""Combine the partial results of a split attention.

    out[s, h] = sum_i w_i * partial_out[i, h],   w_i = 2^lse_i / sum_j 2^lse_j,   lse = partial_lse[:, h]
    over the partial results i = part_starts[s] .. part_starts[s + 1] - 1 of sequence s

Shapes      partial_out              [P, HQ, D] float32   P partial results of HQ heads, each normalized by its own sum
                                                          of weights; rows that belong to no sequence are not read
            partial_lse              [P, HQ] float32   base-2 logarithm of this sum
            part_starts              [S + 1] int32   ascending
            out                      [S, HQ, D]
            merged_rows              [S] int32   row of out for each sequence s; out may then have any number of rows.
                                                  None: row s
Needs       for each sequence with partial results, and each head, at least one partial_lse above -inf. Partial results
            with -inf are ignored.
Mutates     out, except for sequences without partial results.
Returns     out.
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
