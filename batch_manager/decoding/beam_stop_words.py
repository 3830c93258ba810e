"""Stop words of sequences with beams. The module runs on the host, like beam search, and uses numpy only."""

from collections.abc import Sequence

import numpy as np


class BeamStopWords:
    """The stop words of one sequence with beams.

    words    a sequence of tokens for each word; the last token must be sampled, the others may be in the prompt
    prompt   [n] int32; may be empty if all words have one token
    """

    def __init__(self, words: Sequence[Sequence[int]], prompt: np.ndarray) -> None:
        # last token -> number of tokens before it -> those tokens, one tuple for each word
        self._others: dict[int, dict[int, set[tuple[int, ...]]]] = {}
        for *others, last in words:
            self._others.setdefault(last, {}).setdefault(len(others), set()).add(tuple(others))
        # A word of one token ends any output. Longer words are compared for each candidate.
        alone = [last for last, others in self._others.items() if 0 in others]
        self._alone = np.array(alone, np.int32)
        self._last_tokens = np.array(list(self._others.keys() - alone), np.int32)
        longest = max(len(word) for word in words) - 1
        self._prompt_end = prompt[max(len(prompt) - longest, 0) :]

    def ended(self, outputs: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return [k] bool: whether tokens[i], appended to outputs[parents[i]], ends a stop word.

        outputs   [beams, n] int32, the tokens that each beam generated so far
        """
        ended = np.isin(tokens, self._alone)
        for index in np.flatnonzero(np.isin(tokens, self._last_tokens)).tolist():
            output = outputs[parents[index]]
            ended[index] = any(self._end(output, length) in others
                               for length, others in self._others[int(tokens[index])].items())
        return ended

    def _end(self, output: np.ndarray, length: int) -> tuple[int, ...]:
        """Return the last `length` tokens of prompt and `output`, or all tokens if there are fewer."""
        if length > len(output):
            output = np.concatenate([self._prompt_end, output])
        return tuple(output[max(len(output) - length, 0) :].tolist())
