"""An attention kernel of others that is at hand, such as FA3's: `attention.py` in the folder of peers.

The file is a Python module of the reader's own around whatever library it carries. It has

    NAME                                                                  what the report calls it
    decode(query, kv_pool, block_table, kv_lengths, scale) -> tensor
    context(query, kv_pool, block_table, cu_seqlens, kv_lengths, scale) -> tensor, causal

with the shapes of `triton_kernels.paged_attention_decode` and `_context`. Queries come rotated, and the newest keys and
values are in the pool: what the kernel does of that a peer need not do. What it lays out differently, it
lays out in its first call with a pool, and keeps. It runs while a graph is captured. Its results are checked before.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from .pages import PagedSequences

FILE = "attention.py"


class AttentionPeer:
    """The module of the folder, called with what the kernels here are called with."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self.name = module, str(module.NAME)

    def decode(self, sequences: PagedSequences) -> Callable[[int], torch.Tensor]:
        return lambda number: self._module.decode(
            sequences.rotated, sequences.layer(number), sequences.block_table, sequences.kv_lengths,
            sequences.heads.scale)

    def context(self, sequences: PagedSequences) -> Callable[[int], torch.Tensor]:
        return lambda number: self._module.context(
            sequences.query, sequences.layer(number), sequences.block_table, sequences.cu_seqlens,
            sequences.kv_lengths, sequences.heads.scale)


def attention_peer(folder: Path | None) -> AttentionPeer | None:
    """The one in the folder; None where there is none. Raises whatever the module raises."""
    if folder is None or not (folder / FILE).exists():
        return None
    spec = importlib.util.spec_from_file_location("batch_manager_attention_peer", folder / FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return AttentionPeer(module)
