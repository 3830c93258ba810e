"""The KV cache pool: a tensor [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size], indexed by block id.

The layers of a block are contiguous, so that a block is copied as one piece. A page, which is the keys or the values of
one head in a block, is contiguous too. The pool is filled with zeros at the start: attention multiplies the entries
after a sequence's last token by zero, and these entries must be finite.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..attention.fp8 import FP8
from ..config import FP8_CACHE
from ..errors import InsufficientMemoryError, counted
from ..handover import BlockClear, BlockCopy
from ..models.spec import ModelSpec
from ..triton_kernels.cpu.large_pages import allocate
from .device.running import is_out_of_memory, pinned


def pool_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the pool for KvCacheConfig.kv_cache_dtype and the dtype of the activations."""
    return FP8 if kv_cache_dtype == FP8_CACHE else dtype


def kv_cache_dtype_of(dtype: torch.dtype) -> str:
    """Return the name of the dtype of a pool, for BackendInfo."""
    return FP8_CACHE if dtype == FP8 else str(dtype).removeprefix("torch.")


def block_bytes(spec: ModelSpec, tokens_per_block: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers."""
    return math.prod(_block_shape(spec, tokens_per_block)) * dtype.itemsize


def make_kv_pool(spec: ModelSpec, num_blocks: int, tokens_per_block: int, dtype: torch.dtype,
                 device: torch.device) -> torch.Tensor:
    """Allocate the pool, filled with zeros. Raises InsufficientMemoryError."""
    shape = (num_blocks, *_block_shape(spec, tokens_per_block))
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(allocate(num_bytes)).view(dtype).view(shape)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(
            f"the KV cache of {counted(num_blocks, 'block')} takes {counted(num_bytes, 'byte')}",
            f"{device} cannot allocate them",
            "lower KvCacheConfig.max_tokens or KvCacheConfig.free_gpu_memory_fraction") from error


def make_host_pool(spec: ModelSpec, num_blocks: int, tokens_per_block: int, dtype: torch.dtype,
                   device: torch.device) -> list[torch.Tensor]:
    """Allocate host blocks, each of the shape of a block of the pool. They are pinned if `device` is a GPU.

    Raises InsufficientMemoryError.
    """
    if device.type == "cpu":
        return list(make_kv_pool(spec, num_blocks, tokens_per_block, dtype, device)) if num_blocks else []
    shape, one_block = _block_shape(spec, tokens_per_block), block_bytes(spec, tokens_per_block, dtype)
    try:
        return [block for count in pinned_pieces(num_blocks, one_block) for block in pinned((count, *shape), dtype)]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(
            f"the host pool of {counted(num_blocks, 'KV cache block')} takes "
            f"{counted(num_blocks * one_block, 'byte')}",
            "the system cannot pin them", "lower KvCacheConfig.host_cache_size") from error


def pinned_pieces(num_blocks: int, block_bytes: int) -> list[int]:
    """Divide `num_blocks` blocks into allocations. Returns the number of blocks in each allocation.

    torch rounds each pinned allocation up to a power of two bytes, which can double its size. The allocations are
    chosen so that rounding adds less than one block to each.
    """
    pieces = []
    while num_blocks:
        power = 1 << max((num_blocks * block_bytes).bit_length() - 1, (block_bytes - 1).bit_length())
        pieces.append(min(power // block_bytes, num_blocks))
        num_blocks -= pieces[-1]
    return pieces


def clear_block(pool: torch.Tensor, block_id: int, first_token: int = 0) -> None:
    """Zero a block from token `first_token` on."""
    pool[block_id, :, :, :, first_token:].zero_()


def block_operations(pool: torch.Tensor, host_pool: Sequence[torch.Tensor]
                     ) -> dict[type, Callable[[Any], None]]:
    """Return type -> handler of the operations on blocks of the two pools, see operations.py."""

    on_cpu = pool.device.type == "cpu"

    def copy(operation: BlockCopy) -> None:                # a block is contiguous, so the copy allocates nothing
        source = (host_pool if operation.from_host else pool)[operation.source]
        destination = (host_pool if operation.to_host else pool)[operation.destination]
        if on_cpu:    # torch would divide the copy among threads: while they wait for a busy core, so does the step
            np.copyto(_bytes_of(destination), _bytes_of(source))
        else:
            destination.copy_(source, non_blocking=True)

    def clear(operation: BlockClear) -> None:
        clear_block(pool, operation.block_id, operation.first_token)
    return {BlockCopy: copy, BlockClear: clear}


def _bytes_of(block: torch.Tensor) -> np.ndarray:
    return block.view(torch.uint8).numpy()


def _block_shape(spec: ModelSpec, tokens_per_block: int) -> tuple[int, ...]:
    return (spec.num_layers, 2, spec.num_kv_heads, tokens_per_block, spec.head_size)
