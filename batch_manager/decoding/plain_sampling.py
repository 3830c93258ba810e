"""Samples tokens for rows without stages, beams and other features beyond the parameters of `sample_token`.

The kernel launches are the same for all values of the parameters, so that a graph can replay them.
"""

from collections.abc import Callable, Mapping

import torch

from .slots import SlotState


def sample_plain(state: SlotState, sample_token: Callable[..., object], sampled_by: Mapping[str, str],
                 logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor | None,
                 results: torch.Tensor) -> None:
    """Sample a token for each row and store it as the newest token of its sequence. Copies nothing to the host.

    sampled_by       name of a field of SamplingConfig -> name of the argument of `sample_token` that gets its values
    counts           scratch memory of `sample_token`, filled with zeros; None is allowed only if all rows are greedy
    Shapes           logits [r, vocab]; slots [r] int64; positions [r] int32, of the sampled tokens; results [4, r]
                     int32
    Mutates          state.last_tokens, counts and results. The four rows of `results` become: the tokens; 1 where a
                     token is the end id of its sequence, else 0; 1 where the logits are finite, else 0; the bits of the
                     float32 log-probs
    """
    tokens, finish, finite, log_prob_bits = results.unbind(0)
    sample_token(logits, position=positions, tokens=tokens, log_probs=log_prob_bits.view(torch.float32), finite=finite,
                 only_greedy=counts is None, slots=slots, end_id=state.column("end_id"), finish=finish,
                 last_tokens=state.last_tokens.values, counts=counts,
                 **{argument: state.column(name) for name, argument in sampled_by.items()})
