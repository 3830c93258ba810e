"""Another attention kernel to compare with, such as FA3: `attention.py` in the folder of peers.

The file is a Python module that wraps a library. It defines

    NAME                                                                  name of the kernel in the report
    decode(query, kv_pool, block_table, kv_lengths, scale) -> tensor
    context(query, kv_pool, block_table, cu_seqlens, kv_lengths, scale) -> tensor, causal

with the shapes of `triton_kernels.paged_attention_decode` and `paged_attention_context`. Queries are already rotated,
and the newest keys and values are already in the pool. The peer's decode therefore does less work than this package's
decode kernel. If a peer needs another layout, it converts the pool in the first call and caches the result. The report
checks the results of the functions, and then calls the functions during graph capture.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from .pages import PagedSequences

FILE = "attention.py"


class AttentionPeer:
    """The attention kernel to compare with.

    Its methods take the same sequences as this package's kernels. They return a function (number of a layer) that
    launches the peer's kernel for this layer.
    """

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
    """Load `attention.py`, the attention kernel to compare with, from the folder of peers.

    Returns None without a folder or file. Raises the errors of importing the file.
    """
    if folder is None or not (folder / FILE).exists():
        return None
    spec = importlib.util.spec_from_file_location("batch_manager_attention_peer", folder / FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return AttentionPeer(module)
