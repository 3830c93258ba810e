"""The output of one request as it arrives: tokens, text and log-probabilities, up to the end or a stop string."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..aio.mailbox import Delta
from ..names import FinishReason
from .text import TextStream


class GeneratedText:
    """Accumulates the output of one request from its deltas, and cuts the output at a stop string.

    A `Delta` of batch_manager.aio has the output since the previous delta. The accumulated output does not depend on
    how tokens are grouped into deltas.

    ends_in_stop_words   whether the request passed its end ids as one-token stop words. If so, and a stop word ends
                         the output, the last token adds no text
    tokens, log_probs, top_log_probs   concatenated fields of the deltas, up to the token that completed a stop string
    finish_reason        STOP_WORDS after a stop string, otherwise that of the last delta; NOT_FINISHED before any delta
    """

    __slots__ = ("tokens", "log_probs", "top_log_probs", "finish_reason", "_stream", "_has_stop",
                 "_ends_in_stop_words")

    def __init__(self, tokenizer: Any, prompt_ids: Iterable[int], stop: str | Sequence[str] | None,
                 ends_in_stop_words: bool = False) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[dict[int, float]] = []
        self.finish_reason = FinishReason.NOT_FINISHED
        self._stream, self._has_stop = TextStream(tokenizer, prompt_ids, stop), bool(stop)
        self._ends_in_stop_words = ends_in_stop_words

    def add(self, delta: Delta) -> str:
        """Add a delta, and return the text that it makes final. Removes tokens after a stop string from `delta`."""
        stream = self._stream
        tokens = delta.tokens
        if self._ends_in_stop_words and delta.finish_reason is FinishReason.STOP_WORDS:
            tokens = tokens[:-1]
        if self._has_stop:
            text = self._up_to_a_stop(delta, tokens)
        else:
            text = stream.push(tokens)
        self.tokens += delta.tokens
        self.log_probs += delta.log_probs
        self.top_log_probs += delta.top_log_probs
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is not FinishReason.NOT_FINISHED:
            text += stream.finish()
        if stream.stopped_by is not None:
            self.finish_reason = FinishReason.STOP_WORDS
        return text

    def rest(self) -> str:
        """Return the text held back so far.

        Call this for a request that gets no further delta, because it failed or was abandoned.
        """
        return self._stream.finish()

    def _up_to_a_stop(self, delta: Delta, tokens: Sequence[int]) -> str:
        """Push `tokens` to the detokenizer one by one, and return the new text that no later token can change.

        If a token completes a stop string, stops after this token and removes all later tokens from `delta`.
        """
        pieces = []
        for position, token in enumerate(tokens, 1):
            pieces.append(self._stream.push([token]))
            if self._stream.stopped_by is not None:
                del delta.tokens[position:], delta.log_probs[position:], delta.top_log_probs[position:]
                break
        return "".join(pieces)
