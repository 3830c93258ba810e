"""Put the parts of a split attention together.

    out[s, h] = sum_i w_i * partial_out[s, h, i],   w_i = 2^lse_i / sum_j 2^lse_j,   lse = partial_lse[s, h]

Shapes      partial_out              [S, HQ, P, D] float32   P parts, each normalised by its own sum
            partial_lse              [S, HQ, P] float32   base-2 logarithm of that sum; -inf = empty part, whose
                                                          partial_out is never looked at
            out                      [S, HQ, D]
Mutates     out. Where all parts are empty it is zero.
Returns     out.
"""

import torch


def paged_attention_merge(partial_out, partial_lse, out):
    """Weighted mean of the parts; see the module's docstring for shapes."""
    empty = partial_lse == -torch.inf
    top = partial_lse.amax(-1, keepdim=True).clamp(min=torch.finfo(partial_lse.dtype).min)
    weight = torch.exp2(partial_lse - top)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(partial_lse.dtype).tiny)
    parts = partial_out.masked_fill(empty[..., None], 0)
    out.copy_((weight[..., None] * parts).sum(-2))
    return out
