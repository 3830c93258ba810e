"""The second product of LoRA adapters, added to a layer's outputs: B times the result of lora_shrink.

Arguments, results and rules are those of the kernel, in triton_kernels/lora_expand_add.py.
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
