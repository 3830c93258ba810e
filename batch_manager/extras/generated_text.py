"""One text as it is generated: tokens, text and log-probabilities up to its end or its first stop string."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..aio.mailbox import Delta
from ..names import FinishReason
from .text import TextStream


class GeneratedText:
    """What the deltas of one request add up to. Any cutting into deltas gives the same.

    end_is_told   the request's end ids are stop words of one token: the last token ends the text and is no part of it
    tokens, log_probs, top_log_probs   up to the token that completed a stop string, if one did; see Delta
    finish_reason       STOP_WORDS where a stop string ended the text; NOT_FINISHED while it goes on
    """

    __slots__ = ("tokens", "log_probs", "top_log_probs", "finish_reason", "_stream", "_has_stop", "_end_is_told")

    def __init__(self, tokenizer: Any, prompt_ids: Iterable[int], stop: str | Sequence[str] | None,
                 end_is_told: bool = False) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[dict[int, float]] = []
        self.finish_reason = FinishReason.NOT_FINISHED
        self._stream, self._has_stop = TextStream(tokenizer, prompt_ids, stop), bool(stop)
        self._end_is_told = end_is_told

    def add(self, delta: Delta) -> str:
        """The text that is certain now. Mutates `delta`: what comes after a stop string is cut off."""
        stream = self._stream
        tokens = delta.tokens
        if self._end_is_told and delta.finish_reason is FinishReason.STOP_WORDS:
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
        """What was kept back, where no further delta comes: the request failed, or its end has no reader."""
        return self._stream.finish()

    def _up_to_a_stop(self, delta: Delta, tokens: Sequence[int]) -> str:
        """Token by token, so that the same token is the last one however the tokens came."""
        pieces = []
        for position, token in enumerate(tokens, 1):
            pieces.append(self._stream.push([token]))
            if self._stream.stopped_by is not None:
                del delta.tokens[position:], delta.log_probs[position:], delta.top_log_probs[position:]
                break
        return "".join(pieces)
