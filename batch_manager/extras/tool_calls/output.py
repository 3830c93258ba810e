"""The output of one request as it arrives: its text, reasoning and tool calls."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...aio.mailbox import Delta
from ...names import FinishReason
from ..stop_strings import StopStrings, stop_strings
from ..text import TextStream
from .parser import ARGUMENTS, BEGINS, ENDS, REASONING, TEXT, CallParser, Event


@dataclass(slots=True)
class ToolCall:
    """A call of a tool.

    identity        id of the call, which the message with the tool's result names as `tool_call_id`
    name            name of the tool
    arguments_json  the arguments as the model wrote them, as JSON; of a call that was cut off, a part
    is_whole        whether the arguments are whole
    """

    identity: str
    name: str
    arguments_json: str = ""
    is_whole: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments. Raises ValueError if they are not the JSON of an object, as those that were cut off."""
        found = json.loads(self.arguments_json)
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of the call of {self.name!r} are no object")
        return found

    def message(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls` in a message."""
        return {"id": self.identity, "type": "function",
                "function": {"name": self.name, "arguments": self.arguments_json}}


class Collected:
    """The events of a whole output, joined."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {TEXT: [], REASONING: []}
        self._arguments: list[list[str]] = []
        self.calls: list[ToolCall] = []

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind in self._texts:
                self._texts[event.kind].append(event.text)
            elif event.kind == BEGINS:
                self.calls.append(ToolCall(event.identity, event.name))
                self._arguments.append([])
            elif event.kind == ARGUMENTS:
                self._arguments[event.call].append(event.text)
            elif event.kind == ENDS:
                self.calls[event.call].is_whole = event.is_whole

    def finish(self) -> None:
        """Join the arguments. Called once, after the last event."""
        for call, parts in zip(self.calls, self._arguments, strict=True):
            call.arguments_json = "".join(parts)

    @property
    def text(self) -> str:
        return "".join(self._texts[TEXT])

    @property
    def reasoning(self) -> str:
        return "".join(self._texts[REASONING])


class ParsedOutput:
    """Turns the deltas of one request into events, as GeneratedText turns them into text.

    Stop strings end the output where they stand in the visible text: not in reasoning, and not in arguments.

    parser       a new CallParser
    dropped      ids of the special tokens that the parser need not see
    most_calls   calls after which the output ends; None: any number

    tokens, log_probs, top_log_probs, finish_reason   as those of GeneratedText
    reasoning_tokens   number of tokens of the reasoning
    has_whole_calls    whether calls have begun, and all of them are whole
    stopped_by         the stop string that ended the text; None: none did
    """

    __slots__ = ("tokens", "log_probs", "top_log_probs", "finish_reason", "reasoning_tokens", "stopped_by", "_stream",
                 "_parser", "_stop", "_held", "_dropped", "_most_calls", "_num_begun", "_num_ended",
                 "_num_whole", "_is_over")

    def __init__(self, tokenizer: Any, prompt_ids: Iterable[int], stop: str | Sequence[str] | StopStrings | None,
                 parser: CallParser, dropped: frozenset[int], most_calls: int | None = None) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[dict[int, float]] = []
        self.finish_reason = FinishReason.NOT_FINISHED
        self.reasoning_tokens = 0
        self.stopped_by: str | None = None
        self._stream = TextStream(tokenizer, prompt_ids, (), skip_special_tokens=False)
        self._parser, self._stop, self._held = parser, stop_strings(stop), ""
        self._dropped = dropped
        self._most_calls, self._is_over = most_calls, False
        self._num_begun = self._num_ended = self._num_whole = 0

    def add(self, delta: Delta) -> list[Event]:
        """Add a delta, and return the events that it makes certain. Removes tokens after the end from `delta`."""
        events: list[Event] = []
        parser, tokens = self._parser, delta.tokens
        if self._stop is None and self._most_calls is None and not parser.may_reason:
            events += self._up_to_a_stop(parser.push(self._text_of(tokens)))
        else:
            for position, token in enumerate(tokens, 1):
                self.reasoning_tokens += parser.is_reasoning
                events += self._up_to_a_stop(parser.push(self._text_of([token])))
                if self._is_over:
                    del delta.tokens[position:], delta.log_probs[position:], delta.top_log_probs[position:]
                    break
        self.tokens += delta.tokens
        self.log_probs += delta.log_probs
        self.top_log_probs += delta.top_log_probs
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is not FinishReason.NOT_FINISHED and not self._is_over:
            events += self.rest()
        if self._is_over:
            self.finish_reason = FinishReason.STOP_WORDS
        return events

    def add_token(self, token: int) -> None:
        """Add a token without its events, to follow where the reasoning is."""
        self.reasoning_tokens += self._parser.is_reasoning
        self._parser.push(self._text_of([token]))

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    @property
    def has_whole_calls(self) -> bool:
        return 0 < self._num_begun == self._num_whole

    def rest(self) -> list[Event]:
        """Return the last events of an output that gets no further delta."""
        self._most_calls = None                  # the end of a call that is cut off ends nothing else
        events = self._up_to_a_stop([*self._parser.push(self._stream.finish()), *self._parser.finish()])
        if self._held and not self._is_over:
            events.append(Event(TEXT, self._held))
            self._held = ""
        return events

    def _text_of(self, tokens: list[int]) -> str:
        if not self._dropped.isdisjoint(tokens):
            tokens = [token for token in tokens if token not in self._dropped]
        return self._stream.push(tokens)

    def _up_to_a_stop(self, events: list[Event]) -> list[Event]:
        if self._is_over:
            return []
        passed: list[Event] = []
        for event in events:
            if event.kind == TEXT and self._stop is not None:
                text, num_seen = self._held + event.text, len(self._held)
                found = self._stop.first(text, num_seen)
                kept = self._stop.begun(text) if found is None else found[0]
                self._held = text[kept:] if found is None else ""
                passed += [Event(TEXT, text[:kept])] if kept else []
                if found is not None:
                    self._is_over, self.stopped_by = True, found[1]
            else:
                if self._held:
                    passed.append(Event(TEXT, self._held))
                    self._held = ""
                passed.append(event)
                self._num_begun += event.kind == BEGINS
                self._num_ended += event.kind == ENDS
                self._num_whole += event.kind == ENDS and event.is_whole
                self._is_over = self._num_ended == self._most_calls
            if self._is_over:
                break
        return passed
