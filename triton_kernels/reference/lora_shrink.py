"""The first product of LoRA adapters: rows of a step times the A of their adapters, for all projections of a layer.

Arguments, results and rules are those of the kernel, in triton_kernels/lora_shrink.py.
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
