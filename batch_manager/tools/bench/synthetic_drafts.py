"""Drafts with a chosen acceptance, which measure steps with drafts without a good drafter."""

from collections.abc import Mapping, Sequence
from random import Random

from ...requests.llm_request import LlmRequest


class SyntheticDrafter:
    """A Drafter that knows the outputs, and is right at each place of a step with a probability of its own.

    rates   probability of a right draft at each place, whatever the drafts before it are

    texts   request id -> output, without the prompt. Other requests get no drafts
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates, self._draw = rates, Random(0)
        self.texts: Mapping[int, Sequence[int]] = {}

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> list[list[int]]:
        return [[token if self._draw.random() < rate else token - 1 if token else 1
                 for token, rate in zip(self._next(request, most), self._rates)]
                for request, most in zip(requests, max_lengths)]

    def _next(self, request: LlmRequest, most: int) -> Sequence[int]:
        num_generated = request.num_tokens - request.orig_prompt_len
        return self.texts.get(request.request_id, ())[num_generated : num_generated + most]
