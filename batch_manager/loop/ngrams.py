"""Drafts from a request's own text: what followed an earlier occurrence of its last tokens."""

from collections.abc import Iterable, Sequence

from ..requests.llm_request import LlmRequest

MOST_INDEXED = 4096    # tokens of long prompts that one call reads, so that no step waits for the index of a prompt
MOST_COMPARED = 64     # earlier occurrences of the last tokens that a proposal compares


class Ngrams:
    """Where each n-gram of a request's tokens ended, for n = shortest. Grows with the request.

    Holds about 0.2 KB for each token.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._newest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []             # of each end, from `shortest` on: that of the same n-gram before; or 0
        self._known = 0

    def read(self, tokens: Sequence[int], most: int) -> int:
        """Index up to `most` of the tokens that are not indexed yet, and return how many they were.

        tokens   prompt and output; those of the call before, and more
        """
        first, n, newest, before = self._known, self._shortest, self._newest, self._before
        end = self._known = min(len(tokens), first + most)
        start = first if first > n else n        # the ends of n-grams, without that of the last one, which is looked up
        ngrams: Iterable[tuple[int, ...]]
        if end - start > 8:
            ngrams = zip(*[tokens[start - n + place : end - n + place] for place in range(n)])
        else:                                    # nearly always; this way is faster then
            ngrams = [tuple(tokens[place - n : place]) for place in range(start, end)]
        for place, ngram in enumerate(ngrams, start):
            before.append(newest.get(ngram, 0))
            newest[ngram] = place
        return end - first

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return `most` tokens or none: those after the earlier occurrence of the last tokens that agrees with the most
        of them, up to `longest`; of several, after the newest.

        Compares the newest MOST_COMPARED occurrences. If fewer tokens follow, the text repeats itself, and the drafts
        go on with that.

        tokens   as `read` got them
        """
        n, longest = self._shortest, self._longest
        best = end = self._newest.get(tuple(tokens[-n:]), 0)
        if not end:
            return ()
        agreed, compared = 0, 0
        while end and agreed < longest and compared < MOST_COMPARED:
            length = n
            while length < longest and length < end and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > agreed:
                best, agreed = end, length
            end = self._before[end - n]
            compared += 1
        period = len(tokens) - best
        if period >= most:
            return tokens[best : best + most]
        return [tokens[best + place % period] for place in range(most)]


class NgramDrafter:
    """A Drafter of n-grams. Tokens of one request never become drafts of another one."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._of: dict[LlmRequest, Ngrams] = {}

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        left, proposed = MOST_INDEXED, []
        for request, most in zip(requests, max_lengths):
            ngrams, tokens = self._ngrams_of(request), request.tokens[0]
            left -= ngrams.read(tokens, left)
            proposed.append(ngrams.propose(tokens, most))
        return proposed

    def _ngrams_of(self, request: LlmRequest) -> Ngrams:
        ngrams = self._of.get(request)
        if ngrams is None:
            ngrams = self._of[request] = Ngrams(self._shortest, self._longest)
        return ngrams

    def goes_on(self, request: LlmRequest) -> bool:
        """Whether the last tokens of a request have occurred before, in what is indexed. Indexes a little more."""
        ngrams, tokens = self._ngrams_of(request), request.tokens[0]
        ngrams.read(tokens, MOST_INDEXED // 32)
        return bool(ngrams.propose(tokens, 1))

    def release(self, request: LlmRequest) -> None:
        self._of.pop(request, None)
