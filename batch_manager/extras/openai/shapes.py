"""The JSON of answers and chunks. The constant parts of chunks are serialized once per answer."""

from collections.abc import Sequence
from typing import Any

import orjson

from ...names import FinishReason
from ..token_bytes import SpelledPositions, TokenPositions
from ..tool_calls.output import Collected
from ..tool_calls.parser import ARGUMENTS, BEGINS, REASONING, TEXT, Event
from .token_names import TokenNames

DONE = b"data: [DONE]\n\n"
LEAST_LOG_PROB = -9999.0     # OpenAI's value for an impossible token; JSON has no infinity
_REASONS = {FinishReason.LENGTH: "length", FinishReason.NOT_FINISHED: None}


def finish_reason(reason: FinishReason, has_whole_calls: bool = False) -> str | None:
    """Return OpenAI's name of a finish reason. Clients run the calls of an output that ends with `tool_calls`."""
    return _REASONS.get(reason, "tool_calls" if has_whole_calls else "stop")


def delta_of(event: Event) -> dict[str, Any] | None:
    """Return the `delta` of a chunk with an event; None: it has none."""
    if event.kind == TEXT:
        return {"content": event.text}
    if event.kind == REASONING:
        return {"reasoning_content": event.text, "reasoning": event.text}
    if event.kind == BEGINS:
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.call, "id": event.identity, "type": "function", "function": function}]}
    if event.kind == ARGUMENTS:
        return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
    return None


def message_of(output: Collected) -> dict[str, Any]:
    """Return the message of a chat's whole output. Its content is null if it has calls and no text."""
    message: dict[str, Any] = {"role": "assistant", "content": output.text or (None if output.calls else "")}
    if reasoning := output.reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if output.calls:
        message["tool_calls"] = [call.message() for call in output.calls]
    return message


class Shapes:
    """Serializes one answer.

    identity     id of the answer
    with_usage   whether the usage follows the chunks, which then have a null usage, as at OpenAI
    """

    def __init__(self, is_chat: bool, identity: str, created: int, model: str, names: TokenNames,
                 with_usage: bool) -> None:
        self._is_chat, self._names = is_chat, names
        self._no_usage = b',"usage":null' if with_usage else b""
        self._head = {"id": identity, "object": "chat.completion" if is_chat else "text_completion",
                      "created": created, "model": model}
        self._of_chunks = {**self._head, "object": "chat.completion.chunk"} if is_chat else self._head
        self._start = b"data: " + orjson.dumps(self._of_chunks)[:-1] + b',"choices":[{"index":'
        self._text = b',"delta":{"content":' if is_chat else b',"text":'
        self._after_text = (b"}" if is_chat else b"") + b',"logprobs":'

    def role(self, index: int, usage: dict[str, Any] | None) -> bytes:
        """Return the first chunk of a chat's output, which has the role."""
        delta = b'%d,"delta":{"role":"assistant","content":""},"logprobs":null' % index
        return self._start + delta + self._end(b"null", usage)

    def chunk(self, index: int, text: str, log_probs: dict[str, Any] | None, usage: dict[str, Any] | None) -> bytes:
        """Return a chunk with a piece of text."""
        return b"".join((self._start, b"%d" % index, self._text, orjson.dumps(text), self._after_text,
                         b"null" if log_probs is None else orjson.dumps(log_probs), self._end(b"null", usage)))

    def events(self, index: int, events: Sequence[Event], log_probs: dict[str, Any] | None,
               usage: dict[str, Any] | None) -> bytes:
        """Return the chunks of events, one each; the first one has the log-probabilities."""
        deltas = [delta for event in events if (delta := delta_of(event)) is not None]
        if log_probs is not None and not deltas:
            deltas = [{"content": ""}]
        parts = []
        for delta in deltas:
            parts += (self._start, b'%d,"delta":' % index, orjson.dumps(delta), b',"logprobs":',
                      b"null" if log_probs is None else orjson.dumps(log_probs), self._end(b"null", usage))
            log_probs = None
        return b"".join(parts)

    def end(self, index: int, reason: str | None, usage: dict[str, Any] | None) -> bytes:
        """Return the chunk with the finish reason of a chat's output."""
        return self._start + b'%d,"delta":{},"logprobs":null' % index + self._end(orjson.dumps(reason), usage)

    def last(self, index: int, text: str, log_probs: dict[str, Any] | None, reason: FinishReason,
             usage: dict[str, Any] | None) -> bytes:
        """Return the end of a streamed output: its last text and its finish reason.

        A chat gets two chunks, one with `text` and one with the finish reason. Other outputs get one chunk with both.
        """
        if self._is_chat:
            before = self.chunk(index, text, log_probs, usage) if text or log_probs else b""
            return before + self.end(index, finish_reason(reason), usage)
        return b"".join((self._start, b"%d" % index, self._text, orjson.dumps(text), self._after_text,
                         b"null" if log_probs is None else orjson.dumps(log_probs),
                         self._end(orjson.dumps(finish_reason(reason)), usage)))

    def usage(self, usage: dict[str, Any] | None, timings: dict[str, float | None] | None) -> bytes:
        """Return the chunk with usage and timings, which follows the last chunks of all outputs."""
        more = {"usage": usage} if timings is None else {"usage": usage, "timings": timings}
        return b"data: " + orjson.dumps({**self._of_chunks, "choices": [], **more}) + b"\n\n"

    def whole(self, texts: Sequence[tuple[str | dict[str, Any], bytes, str | None]], usage: dict[str, Any],
              timings: dict[str, float | None] | None, transfer: dict[str, Any] | None = None) -> bytes:
        """Return the body of a non-streaming answer.

        texts      (text or message, JSON of its log-probabilities, finish reason) of each output
        transfer   where another server finds the blocks of the prompt, or None
        """
        before = b'"message":' if self._is_chat else b'"text":'
        parts = [orjson.dumps(self._head)[:-1], b',"choices":[']
        for index, (text, log_probs, reason) in enumerate(texts):
            text = {"role": "assistant", "content": text} if self._is_chat and isinstance(text, str) else text
            parts += (b'%s{"index":%d,' % (b"," if index else b"", index), before, orjson.dumps(text),
                      b',"logprobs":', log_probs, b',"finish_reason":', orjson.dumps(reason), b"}")
        more = {} if timings is None else {"timings": timings}
        more |= {} if transfer is None else {"kv_transfer_params": transfer}
        return b"".join((*parts, b"],", orjson.dumps({"usage": usage, **more})[1:]))

    def log_probs(self, tokens: Sequence[int], values: Sequence[float | None],
                  likeliest: Sequence[dict[int, float] | None],
                  positions: TokenPositions | SpelledPositions) -> dict[str, Any]:
        """Return the `logprobs` object of a list of tokens, in the format of completions or chats.

        The joined bytes of a chat's tokens are those of its text. A special token has no bytes, because the text omits
        it.

        values      log-probability of each token; None for the first token of a prompt
        likeliest   for each position, the likeliest tokens and their log-probabilities; empty: not requested
        positions   gives the position of each token in the text. The method advances it past `tokens`
        """
        if self._is_chat:
            likeliest = likeliest or [{}] * len(tokens)
            content = []
            for token, value, others in zip(tokens, values, likeliest, strict=True):
                top = [self._entry(*pair, positions) for pair in others.items()]
                content.append({**self._entry(token, value, positions), "top_logprobs": top})
                positions.next(token)
            return {"content": content, "refusal": None}
        top = [None if others is None else self._by_text(token, value, others)
               for token, value, others in zip(tokens, values, likeliest, strict=True)] if likeliest else None
        return {"tokens": [self._names[token] for token in tokens], "top_logprobs": top,
                "text_offset": [positions.next(token) for token in tokens],
                "token_logprobs": [None if value is None else max(value, LEAST_LOG_PROB) for value in values]}

    def _entry(self, token: int, value: float, positions: TokenPositions) -> dict[str, Any]:
        return {"token": self._names[token], "logprob": max(value, LEAST_LOG_PROB),
                "bytes": list(positions.content(token))}

    def _by_text(self, token: int, value: float, others: dict[int, float]) -> dict[str, float]:
        """Return text -> log-probability of `token` and of the likeliest tokens `others`, as OpenAI's API does.

        If several tokens have the same text, the likeliest determines the value.
        """
        by_text: dict[str, float] = {}
        for other, log_prob in (*others.items(), (token, value)):
            by_text.setdefault(self._names[other], max(log_prob, LEAST_LOG_PROB))
        return by_text

    def _end(self, reason: bytes, usage: dict[str, Any] | None) -> bytes:
        usage_json = self._no_usage if usage is None else b',"usage":' + orjson.dumps(usage)
        return b',"finish_reason":' + reason + b"}]" + usage_json + b"}\n\n"


class WholeLogProbs:
    """The `logprobs` object of an output that is sent whole. Each part is serialized at once, as in a stream."""

    def __init__(self) -> None:
        self._lists: dict[str, bytearray | None] = {}

    def add(self, part: dict[str, Any]) -> None:
        """Add an object of `Shapes.log_probs`."""
        for name, values in part.items():
            if values is None:
                self._lists.setdefault(name, None)
            else:
                so_far = self._lists.get(name) or bytearray()
                so_far += (b"," if so_far and values else b"") + orjson.dumps(values)[1:-1]
                self._lists[name] = so_far

    def json(self) -> bytes:
        parts = [b'"%s":%s' % (name.encode(), b"null" if items is None else b"[%s]" % items)
                 for name, items in self._lists.items()]
        return b"{%s}" % b",".join(parts)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None,
          reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage object. `cached_tokens` and `reasoning_tokens` are None if unknown."""
    counts: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
                              "total_tokens": prompt_tokens + completion_tokens}
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts
