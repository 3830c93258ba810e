"""A drafter that knows the texts, and is right as often as a test wants."""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from random import Random
from typing import Any


class KnowingDrafter:
    """Proposes the tokens that follow in the text of each request, each right with probability `right`.

    texts       request id -> its tokens, without the prompt. Other requests get no drafts, and 0 follows a text
    asked       ids of the requests that it was asked for
    accepted    ids of the requests that grew by more tokens than iterations
    odd         probability of an answer that breaks the contract: an exception, or nonsense; `num_odd` counts them
    iteration   () -> number of the iteration
    """

    def __init__(self, texts: Mapping[int, Sequence[int]], vocab_size: int, right: float = 0.7, seed: int = 0,
                 odd: float = 0.0, iteration: Callable[[], int] = lambda: 0) -> None:
        self.texts, self._vocab_size, self._right, self._odd = texts, vocab_size, right, odd
        self._draw, self._iteration = Random(seed), iteration
        self._seen: dict[int, tuple[int, int]] = {}
        self.accepted: set[int] = set()
        self.asked: set[int] = set()
        self.num_odd = 0

    def propose(self, requests: Sequence[Any], max_lengths: list[int]) -> Any:
        if self._draw.random() < self._odd:
            self.num_odd += 1
            return self._draw.choice([self._raise, lambda: None, lambda: repeat([0]),
                                      lambda: [[]] * (len(requests) + 1),
                                      lambda: [[self._vocab_size]] * len(requests),
                                      lambda: [[0.5]] * len(requests), lambda: 5,
                                      lambda: [[0] * (most + 1) for most in max_lengths]])()
        self.asked.update(request.request_id for request in requests)
        answer = [self._tokens(request, most) for request, most in zip(requests, max_lengths)]
        for request in requests:
            request.tokens[0].append(0)                    # they are the drafter's own
        max_lengths.clear()
        return answer

    @staticmethod
    def _raise() -> None:
        raise SystemExit("planted")

    def _tokens(self, request: Any, most: int) -> list[int]:
        text = self.texts.get(request.request_id)
        if text is None:
            return []
        place, now = request.num_tokens - request.orig_prompt_len, self._iteration()
        before, then = self._seen.get(request.request_id, (place, now))
        self._seen[request.request_id] = place, now
        if place - before > now - then > 0:
            self.accepted.add(request.request_id)
        return self.guesses([*text[place : place + most], *[0] * most][:most])

    def guesses(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens, each right with the probability `right`."""
        return [token if self._draw.random() < self._right
                else (token + self._draw.randrange(1, self._vocab_size)) % self._vocab_size for token in tokens]
