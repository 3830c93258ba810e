"""The second product of LoRA adapters, added to a layer's outputs: B times the result of lora_shrink.

    y[t, first output of k + o] += sum of B[o, r] * (sum of shrunk[p, k, t, r] over p) over the ranks r

Shapes      y               [T, O]          outputs of the layer; contiguous rows, any row stride
            shrunk          [pieces, K, T, R] float32, from lora_shrink
            pages           [P, E]          pages of adapters, each with one rank of every projection of a model
            tiles           [W, 3] int32    first row, end, adapter: at most ROWS adjacent rows of one adapter
            adapter_pages   [D, R] int32    page of each rank of each adapter
            ranks           [D, N] int32    rank of each adapter in each projection of the model; 0: it has none there
            projections     [K, 5] int32    number (column of `ranks`), A's place in a page and B's place, both in units
                                            of UNIT entries, first output in the layer, number of outputs
            most_outputs    largest number of outputs in `projections`
            aligned         whether every first output and number of outputs is a multiple of UNIT
Mutates     y, of rows in `tiles` and of projections that their adapter changes.
Returns     y.
"""

import torch

from .lora_shrink import UNIT


def lora_expand_add(y, shrunk, pages, tiles, adapter_pages, ranks, projections, most_outputs,
                    aligned=False):
    """Add the outputs of adapters to y, in place. See the module docstring for shapes."""
    wide = torch.promote_types(y.dtype, torch.float32)
    for first, end, adapter in tiles.tolist():
        for k, (number, _, place, first_output, outputs) in enumerate(projections.tolist()):
            rank = int(ranks[adapter, number])
            b = pages[adapter_pages[adapter, :rank].long(), place * UNIT : place * UNIT + outputs].to(wide)
            added = shrunk[:, k, first:end, :rank].sum(0).to(wide) @ b
            columns = y[first:end, first_output : first_output + outputs]
            columns.copy_(columns.to(wide) + added)
    return y
