"""Which implementation of attention runs on a device."""

import logging
from functools import partial

import torch

from ..triton_kernels import dispatch
from .interface import Attention, HeadLayout

logger = logging.getLogger(__name__)


def make_attention(spec: HeadLayout, kv_pool: torch.Tensor, sink: int = 0, deterministic: bool = False) -> Attention:
    """The attention over `kv_pool` for the device it is on. Logs what was chosen.

    sink            first tokens of a sequence that stay visible outside the windows of `spec`; see windows.py
    deterministic   a row's bits do not depend on the step it is computed in
    """
    if dispatch.use_triton(kv_pool.device):
        from .triton_paged import TritonPagedAttention

        implementation = partial(TritonPagedAttention, deterministic=deterministic)
    elif deterministic:
        from .torch_fixed_tiles import FixedTileAttention as implementation
    else:
        from .torch_paged import TorchPagedAttention as implementation
    attention = implementation(spec, kv_pool, sink)
    logger.info("attention on %s runs in %s", kv_pool.device, attention.dispatch)
    return attention
