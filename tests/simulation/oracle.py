"""Computes the expected output of one request in plain integers, without batches, blocks or the engine's code.

It is a second implementation of the scripted backend's model (testing/scripted_tokens.py) and of the rules that the
simulated device adds (drawing.py):

    candidate j   of a history: the token (first + j) % vocab_size. Without beams, the first candidate that is not
                  forbidden is sampled. With a penalty, the first four such candidates are considered, and the first of
                  the four that is not in the sequence is sampled, if there is one. If all candidates are forbidden,
                  candidate 0 is sampled
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

END_ID, STOP_WORDS, LENGTH = 1, 2, 3
WORD, A, B = 2**64 - 1, 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
FIRST_FOUR = 4


@dataclass(slots=True)
class Text:
    """The output of a request or of one beam, possibly unfinished.

    reason   END_ID, STOP_WORDS, LENGTH, or 0 if the output can go on
    total    hash of the visible tokens of the sequence
    sum      sum of the log-probabilities, including that of an end id
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: int = 0
    total: int = 0
    sum: float = 0.0
    worth: np.float32 = np.float32(0)


def mix(word: int) -> int:
    word &= WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & WORD
    return word ^ word >> 31


class Oracle:
    """Computes the expected outputs of requests to one scripted model. A request is a `history.Handed` object."""

    def __init__(self, *, vocab_size: int, key: int, window: int | None = None, sink: int = 0) -> None:
        self._vocab_size, self._key, self._window, self._sink = vocab_size, key, window, sink
        self._mark = 0                                    # of the request that is computed

    def _seen_with(self, total: int, history: Sequence[int], place: int, token: int) -> int:
        """Return the hash `total` of the visible tokens after `token` is added at the position `place`.

        The token that leaves the window is removed from the hash.
        """
        total += mix(self._key + (place + 1) * A + (token + 1) * B + self._mark)
        if self._window is not None and place - self._window >= self._sink:
            leaving = place - self._window
            total -= mix(self._key + (leaving + 1) * A + (history[leaving] + 1) * B + self._mark)
        return total

    def _of_prompt(self, prompt: Sequence[int]) -> int:
        total = 0
        for place, token in enumerate(prompt):
            total = self._seen_with(total, prompt, place, token)
        return total

    def _candidates(self, word: int) -> Iterator[tuple[int, float]]:
        for j in range(self._vocab_size):
            yield ((word >> 16) + j) % self._vocab_size, -((mix(word + j * A) if j else word) & 0xFFFF) / 4096

    def text(self, item, limit: int, count: int) -> Text:
        """Return the first `count` tokens of the request's output. `limit` is the largest output length."""
        self._mark = item.mark
        history, text = list(item.prompt), Text(total=self._of_prompt(item.prompt))
        draw = 0 if item.seed is None else mix(item.seed ^ A)
        is_free = not (item.bad_words or item.no_repeat_ngram_size or item.min_length or item.penalizes)
        while len(text.tokens) < count:
            word = mix(self._key ^ draw ^ (text.total & WORD))
            if is_free:
                token, log_prob = (word >> 16) % self._vocab_size, -(word & 0xFFFF) / 4096
            else:
                token, log_prob = self._best_allowed(item, word, history)
            if token in item.end_ids:
                text.reason = END_ID
                return text
            text.total = self._seen_with(text.total, history, len(history), token)
            history.append(token)
            text.tokens.append(token)
            text.log_probs.append(log_prob)
            if any(ends_with(history, stop) for stop in item.stop_words):
                text.reason = STOP_WORDS
                return text
        text.reason = LENGTH if len(text.tokens) == limit else 0
        return text

    def _best_allowed(self, item, word: int, history: list[int]) -> tuple[int, float]:
        allowed = (candidate for candidate in self._candidates(word) if not forbidden(item, history, candidate[0]))
        best = list(islice(allowed, FIRST_FOUR if item.penalizes else 1)) or [next(self._candidates(word))]
        return next((candidate for candidate in best if candidate[0] not in history), best[0])

    # beams

    def beams(self, item, limit: int) -> list[Text]:
        """Return the finished hypotheses of a beam search, best first. There may be fewer than the beam width."""
        *_, (_, finished) = self._search(item, limit)
        return finished

    def live_beams(self, item, limit: int, steps: int) -> list[Text] | None:
        """Return the live beams after `steps` steps, best first; None if the search is over by then."""
        found = list(islice(self._search(item, limit), steps + 1))
        return sorted(found[steps - 1][0], key=lambda text: -text.sum) if len(found) > steps else None

    def _search(self, item, limit: int) -> Iterator[tuple[list[Text], list[Text]]]:
        """Yield (live beams, finished hypotheses) after each step, until the search is over."""
        self._mark = item.mark
        width, ways = item.beam_width, {word[-1] for word in item.stop_words} | item.end_ids
        wanted = max(2, 1 + len(ways)) * width
        live, finished = [Text(total=self._of_prompt(item.prompt))], []
        for length in range(1, limit + 1):
            divisor, going_on = np.float32(float(length) ** item.len_penalty), []
            found = [candidate for place, text in enumerate(live)
                     for candidate in self._continuations(item, text, place, wanted)]
            for rank, (_, text, history, token, log_prob) in enumerate(sorted(found, key=lambda it: it[0])[:wanted]):
                after = Text([*text.tokens, token], [*text.log_probs, log_prob], sum=text.sum + log_prob)
                after.worth = np.float32(after.sum) / divisor
                if token in item.end_ids:
                    after.reason = END_ID
                    del after.tokens[-1], after.log_probs[-1]
                elif item.stop_words and any(ends_with([*history, token], stop) for stop in item.stop_words):
                    after.reason = STOP_WORDS
                else:
                    after.reason = LENGTH if length == limit else 0
                    after.total = self._seen_with(text.total, history, len(history), token)
                    going_on.append(after)
                if after.reason and rank < width:
                    finished.append(after)
            finished = sorted(finished, key=lambda text: -text.worth)[:width]
            live = going_on[:width]
            yield live, finished
            if not live or (len(finished) == width and self._gets_no_better(item, live, finished, length, limit)):
                return

    def _continuations(self, item, text: Text, place: int, wanted: int) -> list[tuple]:
        """Return the `wanted` likeliest continuations of a live beam.

        Each is (sort key, output so far, sequence so far, next token, log-probability of the next token).
        """
        word, history = mix(self._key ^ (text.total & WORD)), [*item.prompt, *text.tokens]
        best_first = sorted(islice(self._candidates(word), wanted), key=lambda candidate: (-candidate[1], candidate[0]))
        return [((item.diversity_rate * rank - text.sum - log_prob, place, rank), text, history, token, log_prob)
                for rank, (token, log_prob) in enumerate(best_first)]

    @staticmethod
    def _gets_no_better(item, live: list[Text], finished: list[Text], length: int, limit: int) -> bool:
        if item.early_stopping == 1:
            return True
        reach = limit if item.early_stopping and item.len_penalty > 0 else length
        best = np.float32(max(text.sum for text in live)) / np.float32(float(reach) ** item.len_penalty)
        return best <= finished[-1].worth


def ends_with(history: list[int], word: Sequence[int]) -> bool:
    return len(word) <= len(history) and history[-len(word):] == list(word)


def forbidden(item, history: list[int], token: int) -> bool:
    """Whether the rules of a request forbid `token` after `history`."""
    if token in item.end_ids and len(history) - len(item.prompt) < item.min_length:
        return True
    grown, size = [*history, token], item.no_repeat_ngram_size
    if any(ends_with(grown, word) for word in item.bad_words):
        return True
    return bool(size) and any(grown[i:i + size] == grown[-size:] for i in range(len(grown) - size))
