"""The tensor behind block ids: [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size].

All layers of a block lie together, so that a block moves as one piece; the page of one head is contiguous. Zeroed once,
because attention multiplies what lies behind a sequence's last token by zero and that must be a finite number.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import InsufficientMemoryError
from ..models.model_spec import ModelSpec
from .device import is_out_of_memory

ALIGNMENT = 64                     # bytes; a cache line, and the widest vector


def block_bytes(spec: ModelSpec, tokens_per_block: int, dtype: torch.dtype) -> int:
    """Of one block over all layers."""
    return math.prod(_block_shape(spec, tokens_per_block)) * dtype.itemsize


def make_kv_pool(spec: ModelSpec, num_blocks: int, tokens_per_block: int, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
    """The pool, all zeros. Raises InsufficientMemoryError."""
    shape = (num_blocks, *_block_shape(spec, tokens_per_block))
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy asks the system for zeroed pages, which take no memory until they are touched; torch would write them.
        memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(
            f"the KV cache of {num_blocks:,} blocks takes {num_bytes:,} bytes, and {device} does not give them",
            fix="lower KvCacheConfig.max_tokens or KvCacheConfig.free_gpu_memory_fraction") from error


def clear_blocks(pool: torch.Tensor, block_ids: Sequence[int]) -> None:
    """Fill blocks with zeros."""
    if len(block_ids):
        pool.index_fill_(0, torch.tensor(block_ids, dtype=torch.int64, device=pool.device), 0)


def _block_shape(spec: ModelSpec, tokens_per_block: int) -> tuple[int, ...]:
    return (spec.num_layers, 2, spec.num_kv_heads, tokens_per_block, spec.head_size)
