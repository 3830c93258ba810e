"""Which continuations of beams end a stop word. On the host, where the search is: numpy only."""

from collections.abc import Sequence

import numpy as np


class BeamStopWords:
    """The stop words of one sequence with beams.

    words    each a tuple of tokens, the last of which is one that is drawn; the others may be of the prompt
    prompt   [n] int32; may be empty where no word has others
    """

    def __init__(self, words: Sequence[Sequence[int]], prompt: np.ndarray) -> None:
        self._others: dict[int, list[np.ndarray]] = {}         # last token -> what stands before it, of each word
        for *others, last in words:
            self._others.setdefault(last, []).append(np.array(others, np.int32))
        self._last_tokens = np.array(list(self._others), np.int32)
        longest = max(len(word) for word in words) - 1
        self._prompt_end = prompt[max(len(prompt) - longest, 0) :]

    @property
    def last_tokens(self) -> set[int]:
        return set(self._others)

    def ended(self, texts: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[k] bool: whether tokens[i], behind the text parents[i], is the last one of a word.

        texts   [beams, n] int32, generated so far
        """
        ended = np.zeros(len(tokens), np.bool_)
        for place in np.flatnonzero(np.isin(tokens, self._last_tokens)).tolist():
            text = texts[parents[place]]
            ended[place] = any(self._is_end(others, text) for others in self._others[int(tokens[place])])
        return ended

    def _is_end(self, others: np.ndarray, text: np.ndarray) -> bool:
        if len(others) > len(text):
            text = np.concatenate([self._prompt_end, text])
        return len(others) <= len(text) and bool((text[len(text) - len(others) :] == others).all())
