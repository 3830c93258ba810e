"""Requests as arrival times and lengths, for trace replays and simulations."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, without its tokens.

    arrival_s       seconds since the first arrival
    input_tokens    tokens of the prompt, at least 1
    output_tokens   tokens generated, at least 1
    prefix_ids      ids of the prompt's blocks of `PREFIX_TOKENS` tokens, in order; prompts that begin with the same ids
                    begin with the same tokens. Empty: the prompt shares no prefix
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


PREFIX_TOKENS = 512    # as in the traces that Mooncake published
