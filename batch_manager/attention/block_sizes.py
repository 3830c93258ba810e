"""Block sizes of the KV cache with which the Triton kernels of attention run on a GPU.

A page of the kernels is a block of one kv head. Decode attention multiplies whole pages: a page must not be smaller
than a matrix instruction, and the pages of a program must fit into the GPU's shared memory. Context attention reads at
most 64 tokens of a page at a time, which fit. Triton's interpreter has no such limits.
"""

import torch

from ..config import BLOCK_SIZES
from ..errors import ConfigError
from .interface import HeadLayout

SMALLEST_GPU_BLOCK = 16         # a matrix instruction adds up at least 16 products, here over the tokens of a page


def gpu_block_sizes() -> tuple[int, ...]:
    """Return the values of `tokens_per_block` that a GPU accepts if the blocks fit into its shared memory."""
    return tuple(size for size in BLOCK_SIZES if size >= SMALLEST_GPU_BLOCK)


def refuse_small_blocks(tokens_per_block: int, device_name: str) -> None:
    """Raise ConfigError if blocks of this size are too small for the kernels to compile on any GPU."""
    if tokens_per_block < SMALLEST_GPU_BLOCK:
        raise ConfigError(
            f"KvCacheConfig.tokens_per_block is {tokens_per_block} and the device is {device_name}",
            f"on a GPU, attention needs blocks of at least {SMALLEST_GPU_BLOCK} tokens",
            f"set tokens_per_block to one of {', '.join(map(str, gpu_block_sizes()))}; 64 is the default")


def refuse_large_blocks(spec: HeadLayout, tokens_per_block: int, dtype: torch.dtype, device_name: str) -> None:
    """Raise ConfigError if a program of decode attention needs more shared memory than the current GPU has.

    spec    the layout of the model's heads
    dtype   of the KV cache
    """
    from ..triton_kernels.device_limits import device_limits
    from ..triton_kernels.paged_attention_decode import decode_shared_bytes

    limits, group = device_limits(), spec.num_heads // spec.num_kv_heads

    def shared_bytes(size: int) -> int:
        return decode_shared_bytes(spec.head_size, group, size, dtype.itemsize, limits)

    if shared_bytes(tokens_per_block) <= limits.shared_bytes:
        return
    smaller = [size for size in gpu_block_sizes()
               if size < tokens_per_block and shared_bytes(size) <= limits.shared_bytes]
    narrow = "a dtype of two bytes" if dtype.itemsize > 2 else "the CPU"
    raise ConfigError(
        f"KvCacheConfig.tokens_per_block is {tokens_per_block}: with {group} query heads per kv head, a head size of "
        f"{spec.head_size} and {str(dtype).removeprefix('torch.')}, a thread block of the attention kernel takes "
        f"{shared_bytes(tokens_per_block):,} bytes of shared memory",
        f"{device_name} has {limits.shared_bytes:,} bytes for a thread block",
        f"lower tokens_per_block to at most {smaller[-1]}, or use {narrow}" if smaller else f"use {narrow}")
