"""Selects the attention implementation for a device."""

import logging
from functools import partial

import torch

from ..triton_kernels import dispatch
from .interface import Attention, HeadLayout

logger = logging.getLogger(__name__)


def make_attention(spec: HeadLayout, kv_pool: torch.Tensor, sink: int = 0, deterministic: bool = False,
                   dtype: torch.dtype | None = None) -> Attention:
    """Build the attention over `kv_pool` with the implementation for the pool's device. Logs the choice.

    sink            number of sink tokens: the first tokens of a sequence, visible outside the windows; see windows.py
    deterministic   make the bits of a row independent of the step that computes it
    dtype           of queries, keys and values, if the pool has another one
    """
    if dispatch.use_triton(kv_pool.device):
        from .triton_paged import TritonPagedAttention

        implementation = partial(TritonPagedAttention, deterministic=deterministic)
    elif deterministic:
        from .torch_fixed_tiles import FixedTileAttention as implementation
    else:
        from .torch_paged import TorchPagedAttention as implementation
    attention = implementation(spec, kv_pool, sink, **({} if dtype is None else {"dtype": dtype}))
    logger.info("attention on %s runs in %s", kv_pool.device, attention.dispatch)
    return attention
