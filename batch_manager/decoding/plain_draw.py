"""Drawing for rows that are sampled by their numbers alone: the same launches whatever the numbers are."""

from collections.abc import Callable, Mapping

import torch

from .slots import SlotState


def draw_plainly(state: SlotState, sample_token: Callable[..., object], sampled_by: Mapping[str, str],
                 logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor | None,
                 results: torch.Tensor) -> None:
    """Draw a token for each row and keep it as its sequence's newest. Nothing is read from the host.

    sampled_by       fields of SamplingConfig -> their names as arguments of `sample_token`
    counts           zeros, see `sample_token`; None: no row is sampled
    Shapes           logits [r, vocab]; slots [r] int64; positions [r] int32: of the tokens that are drawn; results
                     [4, r] int32
    Mutates          results: tokens, 1 where a token is the end id of its sequence, 1 where logits are finite, the bits
                     of float32 log-probs; state.last_tokens; counts
    """
    tokens, finish, finite, log_prob_bits = results.unbind(0)
    sample_token(logits, position=positions, tokens=tokens, log_probs=log_prob_bits.view(torch.float32), finite=finite,
                 only_greedy=counts is None, slots=slots, end_id=state.column("end_id"), finish=finish,
                 last_tokens=state.last_tokens.values, counts=counts,
                 **{argument: state.column(name) for name, argument in sampled_by.items()})
