"""Whether a token ends its sequence. Lengths are counted by the host."""

import torch

from ..handover import END_ID


def finish_codes(tokens: torch.Tensor, end_ids: torch.Tensor) -> torch.Tensor:
    """FinishReason of each row, [r] uint8. An end id of -1 is no token's."""
    return (tokens == end_ids).to(torch.uint8) * END_ID
