"""The first product of LoRA adapters: rows of a step times the A of their adapters, for all projections of a layer.

    out[p, k, t, r] = sum of x[t, i] * A[r, i] over the inputs i of piece p;  A is that of row t's adapter, projection k

Shapes      x               [T, I]          rows of I inputs; contiguous rows, any row stride
            pages           [P, E]          pages of adapters, each with one rank of every projection of a model
            tiles           [W, 3] int32    first row, end, adapter: at most ROWS adjacent rows of one adapter
            adapter_pages   [D, R] int32    page of each rank of each adapter
            ranks           [D, N] int32    rank of each adapter in each projection of the model; 0: it has none there
            projections     [K, 5] int32    number (column of `ranks`), A's place in a page and B's place, both in units
                                            of UNIT entries, first output in the layer, number of outputs
            out             [pieces, K, T, R] float32; None: allocated
Mutates     out, of rows in `tiles` and of ranks that their adapter has.
Returns     out.
"""

import torch

UNIT, PIECE = 32, 1024


def lora_shrink(x, pages, tiles, adapter_pages, ranks, projections, out=None):
    """Multiply rows by the A of their adapters. See the module docstring for shapes."""
    num_rows, size = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    if out is None:
        out = torch.empty(-(-size // PIECE), len(projections), num_rows, adapter_pages.shape[1], dtype=wide,
                          device=x.device)
    for first, end, adapter in tiles.tolist():
        for k, (number, place, *_) in enumerate(projections.tolist()):
            rank = int(ranks[adapter, number])
            a = pages[adapter_pages[adapter, :rank].long(), place * UNIT : place * UNIT + size].to(wide)
            for piece, (inputs, columns) in enumerate(zip(x[first:end].to(wide).split(PIECE, 1), a.split(PIECE, 1))):
                out[piece, k, first:end, :rank] = inputs @ columns.t()
    return out
