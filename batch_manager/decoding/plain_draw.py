"""Drawing for rows that are sampled by their numbers alone: the same launches whatever the numbers are."""

from collections.abc import Callable, Mapping

import torch

from .slots import Plane, SlotState


def draw_plainly(state: SlotState, sample_token: Callable[..., object], sampled_by: Mapping[str, str],
                 logits: torch.Tensor, slots: torch.Tensor, draw_positions: torch.Tensor, kv_lengths: torch.Tensor,
                 results: torch.Tensor) -> None:
    """Draw a token for each row and keep it as its sequence's newest. Nothing is read from the host.

    sampled_by       fields of SamplingConfig -> their names as arguments of `sample_token`
    Shapes           logits [r, vocab]; slots, draw_positions [r] int64; kv_lengths [r] int32, equal to draw_positions
                     where a row is not padding; results [4, r] int32
    Mutates          results: tokens, 1 where a token is the end id of its sequence, 1 where logits are finite, the bits
                     of float32 log-probs; state.last_tokens, last of all
    """
    tokens, finish, finite, log_prob_bits = results.unbind(0)
    gathered: dict[Plane, torch.Tensor] = {}

    def column(name: str) -> torch.Tensor:
        plane, index, is_float = state.place(name)
        if plane not in gathered:                        # all columns of a plane in one launch
            gathered[plane] = plane.there.index_select(1, slots)
        return gathered[plane][index].view(torch.float32) if is_float else gathered[plane][index]

    sample_token(logits, position=kv_lengths, tokens=tokens, log_probs=log_prob_bits.view(torch.float32), finite=finite,
                 **{argument: column(name) for name, argument in sampled_by.items()})
    finish.copy_(tokens == column("end_id"))
    state.last_tokens.put(slots, draw_positions, tokens.long())
