"""Which continuations of beams end a stop word. On the host, where the search is: numpy only."""

from collections.abc import Sequence

import numpy as np


class BeamStopWords:
    """The stop words of one sequence with beams.

    words    each a tuple of tokens, the last of which is one that is drawn; the others may be of the prompt
    prompt   [n] int32; may be empty where no word has others
    """

    def __init__(self, words: Sequence[Sequence[int]], prompt: np.ndarray) -> None:
        # last token -> number of tokens before it -> these tokens, of each such word
        self._others: dict[int, dict[int, set[tuple[int, ...]]]] = {}
        for *others, last in words:
            self._others.setdefault(last, {}).setdefault(len(others), set()).add(tuple(others))
        # A word of one token ends any text; the others are looked for token by token.
        alone = [last for last, others in self._others.items() if 0 in others]
        self._alone = np.array(alone, np.int32)
        self._last_tokens = np.array(list(self._others.keys() - alone), np.int32)
        longest = max(len(word) for word in words) - 1
        self._prompt_end = prompt[max(len(prompt) - longest, 0) :]

    def ended(self, texts: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[k] bool: whether tokens[i], after the sequence parents[i], is the last one of a word.

        texts   [beams, n] int32, generated so far
        """
        ended = np.isin(tokens, self._alone)
        for place in np.flatnonzero(np.isin(tokens, self._last_tokens)).tolist():
            text = texts[parents[place]]
            ended[place] = any(self._end(text, length) in others
                               for length, others in self._others[int(tokens[place])].items())
        return ended

    def _end(self, text: np.ndarray, length: int) -> tuple[int, ...]:
        """The last tokens of the prompt and the text, or all of them where there are fewer."""
        if length > len(text):
            text = np.concatenate([self._prompt_end, text])
        return tuple(text[max(len(text) - length, 0) :].tolist())
