"""Which implementation of attention runs on a device."""

import logging

import torch

from ..triton_kernels import dispatch
from .interface import Attention, HeadLayout

logger = logging.getLogger(__name__)


def make_attention(spec: HeadLayout, kv_pool: torch.Tensor, sink: int = 0) -> Attention:
    """The attention over `kv_pool` for the device it is on. Logs what was chosen.

    sink   first tokens of a sequence that stay visible outside the windows of `spec`; see windows.py
    """
    if dispatch.use_triton(kv_pool.device):
        from .triton_paged import TritonPagedAttention as implementation
    else:
        from .torch_paged import TorchPagedAttention as implementation
    logger.info("attention on %s runs in %s", kv_pool.device, implementation.dispatch)
    return implementation(spec, kv_pool, sink)
