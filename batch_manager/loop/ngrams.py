"""Drafts from a request's own text: what followed the newest earlier occurrence of its last tokens."""

from collections.abc import Sequence

from ..requests.llm_request import LlmRequest

MOST_INDEXED = 4096    # tokens of long prompts that one call reads, so that no step waits for the index of a prompt


class Ngrams:
    """What followed each n-gram of a request's tokens, for n in shortest..longest. Grows with the request.

    Holds about 0.5 KB for each token.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(longest, shortest - 1, -1)}
        self._known = 0

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Index up to `most` of the tokens that are not indexed yet, and return how many they were.

        tokens   prompt and output; those of the call before, and more
        """
        first, end = self._known, min(len(tokens), self._known + most)
        for n, ends in self._ends.items():
            start = max(first, n)                # the ends of n-grams, without that of the last one, which is looked up
            if start < end:
                rows = [tokens[start - n + place : end - n + place] for place in range(n)]
                ends.update(zip(zip(*rows), range(start, end)))
        self._known = end
        return end - first

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return `most` tokens or none: those after the newest earlier occurrence of the last n, longest n first.

        If fewer follow it, the text repeats itself, and the drafts go on with that.

        tokens   as `read` got them
        """
        for n, ends in self._ends.items():
            if n < len(tokens) and (end := ends.get(tuple(tokens[-n:]), 0)):
                period = len(tokens) - end
                return [tokens[end + place % period] for place in range(most)]
        return ()


class NgramDrafter:
    """A Drafter of n-grams. Tokens of one request never become drafts of another one."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._of: dict[LlmRequest, Ngrams] = {}

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        left, proposed = MOST_INDEXED, []
        for request, most in zip(requests, max_lengths):
            ngrams, tokens = self._of.get(request), request.tokens[0]
            if ngrams is None:
                ngrams = self._of[request] = Ngrams(self._shortest, self._longest)
            left -= ngrams.read(tokens, left)
            proposed.append(ngrams.propose(tokens, most))
        return proposed

    def release(self, request: LlmRequest) -> None:
        self._of.pop(request, None)
