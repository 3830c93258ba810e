"""What positions add to attention scores (ALiBi, Press et al. 2022), in torch."""

import torch


def added_by_position(key_position: torch.Tensor, query_position: torch.Tensor, slopes: torch.Tensor,
                      bfloat16_factor: float | None) -> torch.Tensor:
    """What is added to scores, float32; see LayerAttention. All shapes broadcast; positions are integers.

    Only single elements are computed with, each operation rounded by itself: bits depend on nothing beside an element.
    """
    if bfloat16_factor is None:
        return slopes * (key_position - query_position).to(torch.float32)

    def product(position):
        return (slopes.bfloat16() * position.bfloat16()).float()

    return (product(key_position) - product(query_position)) * bfloat16_factor
