"""The ALiBi bias of attention scores (Press et al. 2022), in torch."""

import torch


def alibi_bias(key_position: torch.Tensor, query_position: torch.Tensor, slopes: torch.Tensor,
               bfloat16_factor: float | None) -> torch.Tensor:
    """Return the float32 bias to add to scores; see LayerAttention. All shapes broadcast; positions are integers.

    Every operation is elementwise and rounds its result. The bits of an element of the bias depend only on its key
    position, its query position and its slope.
    """
    if bfloat16_factor is None:
        return slopes * (key_position - query_position).to(torch.float32)

    def product(position):
        return (slopes.bfloat16() * position.bfloat16()).float()

    return (product(key_position) - product(query_position)) * bfloat16_factor
