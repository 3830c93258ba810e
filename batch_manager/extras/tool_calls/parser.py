"""Parse the text of a model into visible text, reasoning and tool calls, while it arrives.

    parser = CallParser(FORMATS["hermes"], REASONING_FORMATS["think"], tools)
    for piece in pieces:
        for event in parser.push(piece): ...
    for event in parser.finish(): ...
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import uuid4

from .field_values import as_json, resolved, types_of
from .formats import (
    END_OF_CALL,
    FORMATS,
    HEADER,
    KEY,
    NAME,
    NOTHING,
    ONLY_TEXT,
    REASONING,
    REASONING_FORMATS,
    TEXT,
    VALUE,
    Arguments,
    Envelope,
    Format,
    Go,
    ReasoningFormat,
    Start,
    State,
    Until,
    with_reasoning,
)
from .values import JSON, ValueReader, begun, escaped

BEGINS, ARGUMENTS, ENDS = "begins", "arguments", "ends"
LONGEST_NAME = 256
MOST_BLANKS = 64        # on each side of a name
LONGEST_HEADER = 512
_NAME = re.compile(rf"\s{{0,{MOST_BLANKS}}}[^\s<>(){{}}\[\]\"'=,;]{{0,{LONGEST_NAME}}}\s{{0,{MOST_BLANKS}}}")
_KEYS_OF_ARGUMENTS = ("arguments", "parameters")
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class Event(NamedTuple):
    """What a piece of output means.

    kind        `text`, `reasoning`, `begins` (a call), `arguments` (more of the JSON of its arguments), or `ends`
    text        text, reasoning, or a part of the arguments
    call        number of the call in this output, from 0
    name, identity   name of the called function, and id of the call; of `begins` alone
    is_whole    of `ends`: whether the call's arguments are whole, and the JSON of an object
    """

    kind: str
    text: str = ""
    call: int = -1
    name: str = ""
    identity: str = ""
    is_whole: bool = True


class CallParser:
    """Parses one output. Its events do not depend on how the text is cut, except for the lengths of their texts.

    calls           format of tool calls; None: there are no calls, only reasoning
    reasoning       format of reasoning; None: reasoning stays in the text
    tools           name of a tool -> JSON schema of its arguments. Formats without types in the text take them from
                    here. In formats whose calls have no mark of their own, only these names begin a call
    in_reasoning    whether the prompt has opened the reasoning
    new_id          () -> id of the next call; None: as the format's templates expect it

    Text that only looks like the begin of a call is text. Blank characters between text, reasoning and calls belong to
    none; a text that follows another one after them begins with a line break. `is_reasoning` tells whether the next
    character may be reasoning.
    """

    def __init__(self, calls: Format | None, reasoning: ReasoningFormat | None = None,
                 tools: Mapping[str, Any] | None = None, *, in_reasoning: bool = False,
                 new_id: Callable[[], str] | None = None) -> None:
        self._has_calls = calls is not None
        calls = ONLY_TEXT if calls is None else calls
        self._states = _machine(calls.name, None if reasoning is None else reasoning.name)
        self._tools, self._is_bare = tools or {}, calls.is_bare
        self._new_id = new_id or (lambda: _new_id(calls.id_length))
        self._events: list[Event] = []
        self._kind, self._parts = "", []         # of the event that is being made
        self._held = ""                          # characters that may begin a mark
        self._blank, self._skips_blank, self._has_text = "", in_reasoning, False
        self._count = 0                          # calls that have begun
        self._end_call()
        self._go(Go("reasoning" if in_reasoning and "reasoning" in self._states else "begin"))

    def push(self, text: str) -> list[Event]:
        """Add a piece of text, and return the events that it makes certain."""
        machine = self._machine
        if machine.is_plain and not (self._held or self._skips_blank or machine.first.search(text)):   # the usual case
            stripped = text.rstrip()
            blank, self._blank = self._blank, text[len(stripped):]
            if stripped:
                self._has_text |= machine.kind == TEXT
                return [Event(machine.kind, blank + stripped)]
            self._blank = blank + self._blank
            return []
        text, self._held, pos = self._held + text, "", 0
        while pos < len(text):
            pos = self._reader(self._state, text, pos)
        return self._taken()

    def finish(self) -> list[Event]:
        """End the text, and return the last events."""
        held, self._held = self._held, ""
        state = self._state
        if self._name is not None:
            self._emit_end()
        elif isinstance(state, Until) and state.sink in (TEXT, REASONING):
            if not (self._count and self._skips_blank):      # otherwise, the end of the call is cut off
                self._sink(state, held)
        elif isinstance(state, Until) and state.sink == HEADER:
            if state is self._states["begin"].state and "<|" not in self._word + held:     # an output without a header
                self._emit_text(self._word + held)
        else:
            self._emit_text(self._raw + held)
        if not self._skips_blank and self._kind_of_state != REASONING:
            self._add(TEXT, self._blank)
        return self._taken()

    @property
    def is_reasoning(self) -> bool:
        return self._kind_of_state == REASONING

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may begin, or end, with the next characters."""
        return self._kind_of_state == REASONING or self._state is self._states["begin"].state or (
            "header" in self._states)

    # ---------------------------------------------------------------- events

    def _add(self, kind: str, text: str) -> None:
        if text:
            if kind != self._kind:
                self._flush()
                self._kind = kind
            self._parts.append(text)
            if kind == ARGUMENTS:
                self._written.append(text)

    def _flush(self) -> None:
        if self._parts:
            self._events.append(Event(self._kind, "".join(self._parts),
                                      self._count - 1 if self._kind == ARGUMENTS else -1))
            self._parts = []

    def _taken(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _emit_text(self, text: str, kind: str = TEXT) -> None:
        """Add visible text or reasoning, without the blank characters at its start and end."""
        if self._skips_blank:
            text = text.lstrip()
            self._skips_blank = not text
            if text and kind == TEXT and self._has_text:
                text = "\n" + text
        if not text:
            return
        stripped = text.rstrip()
        if stripped:
            self._has_text |= kind == TEXT
            self._add(kind, self._blank + stripped)
            self._blank = text[len(stripped):]
        else:
            self._blank += text

    def _begin_call(self, name: str) -> None:
        self._flush()
        self._blank = self._raw = ""
        self._name, self._count = name, self._count + 1
        self._events.append(Event(BEGINS, "", self._count - 1, name, self._identity or self._new_id()))
        self._kind = ""

    def _emit_end(self) -> None:
        self._flush()
        is_whole = self._is_whole and _is_object("".join(self._written))
        self._events.append(Event(ENDS, call=self._count - 1, is_whole=is_whole))
        self._end_call()
        self._kind, self._skips_blank = "", True

    def _end_call(self) -> None:
        self._name: str | None = None
        self._raw = self._key = self._identity = self._phase = self._word = ""
        self._value: ValueReader | None = None
        self._is_whole, self._num_fields = False, 0
        self._parts_of_value: list[str] = []
        self._waiting: list[str] = []            # arguments that came before the name
        self._written: list[str] = []            # all arguments
        self._types: set[str] = set()
        self._tail = ""                          # what may be the blank end of a field's value
        self._is_string, self._is_first = False, True
        self._is_key = self._is_arguments = False

    # ---------------------------------------------------------------- states

    def _go(self, go: Go, mark: str = "") -> None:
        state = self._states[go.state]
        self._enter(state)
        if go.ends == END_OF_CALL and self._name is not None:
            self._emit_fields_end()
        if isinstance(self._state, Envelope):
            self._phase, self._value = "key", None
        elif isinstance(self._state, Arguments):
            self._value = None
            if self._state.opening:
                self._open_value(self._state)
        elif self._kind_of_state == VALUE:
            self._begin_field()
        elif self._kind_of_state == REASONING:
            self._skips_blank, self._blank = True, ""
        elif go.state in ("text", "header") and self._name is not None:
            self._emit_end()

    def _enter(self, machine: "_State") -> None:
        self._machine, self._state, self._kind_of_state = machine, machine.state, machine.kind
        self._reader = getattr(self, machine.reader)     # (state, text, position) -> the next position

    def _read_until(self, state: Until, text: str, pos: int) -> int:
        machine = self._machine
        found = machine.pattern.search(text, pos)
        if found is not None:
            stop = found.start()
        else:
            stop = len(text) if machine.first.search(text, pos) is None else begun(text, pos, machine.marks)
        failed = self._sink(state, text[pos:stop])
        if failed is not None:
            return self._fall_back(pos + failed)
        if found is None:
            self._held = text[stop:]
            return len(text)
        mark = found[0]
        go = state.marks[mark]
        if state.sink == HEADER:
            next_state, name = state.route(self._word)
            if name and not self._has_calls:
                next_state, name = "text", ""
            self._word, go = "", Go(next_state)
            if name:
                self._begin_call(name)
        elif state.sink == TEXT:
            if go.state not in ("text", "header"):
                self._raw += mark
        elif state.sink == REASONING:
            self._blank, self._skips_blank = "", True
        elif state.sink == NAME:
            if not self._has_name(self._word):
                self._raw += mark
                self._fall_back(0)
                return found.end()
            name, self._word = self._word.strip(), ""
            self._begin_call(name)
        elif state.sink == VALUE:
            self._end_field(state)
        elif self._name is None:
            self._raw += mark
        self._go(go, mark)
        return found.end()

    def _sink(self, state: Until, text: str) -> int | None:
        """Use characters as the state does. Return the position of the first that cannot stand there; None: none."""
        kind = state.sink
        if kind in (TEXT, REASONING):
            self._emit_text(text, kind)
        elif kind == VALUE:
            self._add_to_field(text, state)
        elif kind == NAME:
            word = self._word + text
            good = _NAME.match(word).end()
            if good < len(word):
                good -= len(self._word)
                self._raw += text[:max(good, 0)]
                return max(good, 0)
            self._word = word
            self._raw += text
        elif kind == HEADER:
            word = self._word + text
            if state is self._states["begin"].state and len(word) > LONGEST_HEADER:    # it is none
                self._raw, good = word[:LONGEST_HEADER], LONGEST_HEADER - len(self._word)
                return good
            self._word = word[-LONGEST_HEADER:]
        elif kind == KEY:
            self._word += text
        elif self._name is None:
            self._raw += text
        return None

    def _fall_back(self, pos: int) -> int:
        """Return to text: what looked like a call was none."""
        raw, count = self._raw, self._count
        self._end_call()
        self._count = count
        self._skips_blank = False
        self._emit_text(raw)
        self._enter(self._states["text"])
        return pos

    def _has_name(self, name: str) -> bool:
        name = name.strip()
        return bool(name) and (not self._is_bare or name in self._tools)

    def _read_start(self, state: Start, text: str, pos: int) -> int:
        start = pos
        while pos < len(text) and text[pos] in state.skip:
            pos += 1
        self._raw += text[start:pos]
        if pos == len(text):
            return pos
        for mark, go in state.marks.items():
            if text.startswith(mark, pos):
                self._raw += mark
                if go.state in ("text", "reasoning"):
                    self._raw = ""
                self._go(go, mark)
                return pos + len(mark)
        rest = text[pos:]
        if any(mark.startswith(rest) for mark in state.marks):
            self._held = rest
            return len(text)
        if state.otherwise == "broken":
            return self._fall_back(pos)
        if state.otherwise in ("text", "answer"):
            raw, self._raw = self._raw, ""
            if state.otherwise == "text":
                self._emit_text(raw)
            else:
                self._raw = raw
                if self._states["answer"].kind == TEXT:
                    self._emit_text(raw)
                    self._raw = ""
        self._go(Go(state.otherwise))
        return pos

    # ---------------------------------------------------------------- arguments as one value

    def _open_value(self, state: Arguments) -> None:
        self._value = ValueReader(state.dialect, state.opening or "{")
        self._add(ARGUMENTS, "{")

    def _read_arguments(self, state: Arguments, text: str, pos: int) -> int:
        if self._value is None:
            while pos < len(text) and text[pos].isspace():
                pos += 1
            if pos == len(text):
                return pos
            if text[pos] != "{":                 # no arguments
                self._leave_arguments(state, is_whole=False)
                return pos
            self._open_value(state)
            pos += 1
            if pos == len(text):
                return pos
        pos = self._feed(text, pos)
        if self._value.is_done:
            self._leave_arguments(state, is_whole=not self._value.is_broken)
        return pos

    def _leave_arguments(self, state: Arguments, is_whole: bool) -> None:
        self._is_whole, then = is_whole, state.then
        if then == "close":                      # what stands before the mark of the end is no text
            self._go(Go(then))
            return
        self._emit_end()
        self._go(Go(then if is_whole else "text"))

    def _feed(self, text: str, pos: int) -> int:
        out: list[str] = []
        pos = self._value.feed(text, pos, out)
        if self._name is None:
            self._waiting += out
        else:
            self._add(ARGUMENTS, "".join(out))
        return pos

    # ---------------------------------------------------------------- arguments field by field

    def _begin_field(self) -> None:
        schema = self._schema_of(self._word.strip())
        self._key, self._word = self._word.strip(), ""
        types = types_of(schema)
        self._is_string = types == {"string"}
        self._types, self._is_first, self._tail = types, True, ""
        lead = ", " if self._num_fields else "{"
        self._num_fields += 1
        self._add(ARGUMENTS, f"{lead}{json.dumps(self._key, ensure_ascii=False)}: " + ('"' if self._is_string else ""))

    def _schema_of(self, key: str) -> Any:
        root = self._tools.get(self._name)
        properties = root.get("properties") if isinstance(root, Mapping) else None
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return resolved(schema, root)

    def _add_to_field(self, text: str, state: Until) -> None:
        if not text:
            return
        if self._is_first and state.blank:
            text = text.removeprefix(state.blank)
        self._is_first = False
        text = self._tail + text
        self._tail = ""
        if state.blank and text.endswith(state.blank):
            text, self._tail = text[:-len(state.blank)], state.blank
        if self._is_string:
            self._add(ARGUMENTS, escaped(text))
        else:
            self._parts_of_value.append(text)

    def _end_field(self, state: Until) -> None:
        self._tail = ""
        if self._is_string:
            self._add(ARGUMENTS, '"')
        else:
            self._add(ARGUMENTS, as_json("".join(self._parts_of_value), self._types))
            self._parts_of_value = []

    def _emit_fields_end(self) -> None:
        self._add(ARGUMENTS, "}" if self._num_fields else "{}")
        self._is_whole = True

    # ---------------------------------------------------------------- a call as one JSON object

    def _read_envelope(self, state: Envelope, text: str, pos: int) -> int:
        start, is_named = pos, self._name is not None
        pos = self._envelope_step(state, text, pos)
        if self._name is None and not is_named and self._phase:
            self._raw += text[start:pos]
            if self._phase == "broken":
                return self._fall_back(pos)
        elif self._phase == "broken":
            self._emit_end()
            self._go(Go("text"))
        if self._phase == "done":
            if self._name is None:
                return self._fall_back(pos)
            if not self._is_whole and self._value is None:
                self._add(ARGUMENTS, "{}")
                self._is_whole = True
            self._emit_end()
            self._go(Go(state.then))
        return pos

    def _envelope_step(self, state: Envelope, text: str, pos: int) -> int:
        phase, char = self._phase, text[pos]
        if phase == "string":
            return self._read_string(state, text, pos)
        if phase == "nested":
            pos = self._feed(text, pos) if self._is_arguments else self._value.feed(text, pos, [])
            if self._value.is_done:
                if self._is_arguments:
                    self._is_whole = not self._value.is_broken
                elif self._name is not None and not self._is_whole:
                    self._value = None
                self._phase = "broken" if self._value is not None and self._value.is_broken else "next"
            return pos
        if phase == "scalar":
            found = _SCALAR_END.search(text, pos)
            if found is not None:
                self._phase = "next"
            return len(text) if found is None else found.start()
        if char.isspace():
            return pos + 1
        if phase == "key" and char == "}" or phase == "next" and char == "}":
            self._phase = "done"
            return pos + 1
        if phase == "next" and char == ",":
            self._phase = "key"
            return pos + 1
        if phase == "key" and char == '"':
            self._phase, self._word, self._is_key = "string", "", True
            return pos + 1
        if phase == "colon" and char == ":":
            self._phase = "value"
            return pos + 1
        if phase != "value":
            self._phase = "broken"
            return pos
        self._is_arguments = self._key in _KEYS_OF_ARGUMENTS
        if char == '"':
            self._phase, self._word, self._is_key = "string", "", False
            return pos + 1
        if char in "{[":
            self._phase, self._value = "nested", ValueReader(JSON, char)
            if self._is_arguments:
                self._waiting.append(char) if self._name is None else self._add(ARGUMENTS, char)
            return pos + 1
        self._phase = "scalar"
        return pos

    def _read_string(self, state: Envelope, text: str, pos: int) -> int:
        if self._word.endswith("\\") and (len(self._word) - len(self._word.rstrip("\\"))) % 2:
            self._word += text[pos]              # an escaped character
            return pos + 1
        found = _STRING_END.search(text, pos)
        if found is None:
            self._word += text[pos:]
            return len(text)
        if found[0] == "\\":
            self._word += text[pos:found.end()]
            return found.end()
        self._word += text[pos:found.start()]
        try:
            word = json.loads(f'"{self._word}"', strict=False)
        except ValueError:
            self._phase = "broken"
            return found.end()
        self._word = ""
        if self._is_key:
            self._key, self._phase = word, "colon"
            return found.end()
        self._phase = "next"
        if self._key == "name" and self._name is None:
            if not self._has_name(word) or len(word) > LONGEST_NAME:
                self._phase = "broken"
                return found.end()
            self._begin_call(word.strip())
            self._add(ARGUMENTS, "".join(self._waiting))
            self._waiting = []
        elif self._key == "id" and self._name is None:
            self._identity = word[:64]
        elif self._is_arguments:                 # JSON in a string
            self._value, self._is_whole = ValueReader(JSON), True
            self._waiting.append(word) if self._name is None else self._add(ARGUMENTS, word)
        return found.end()


class _State(NamedTuple):
    """A state with what the parser needs of it.

    pattern    finds a mark; `first` finds a first character of one
    is_plain   whether the characters are visible text or reasoning
    """

    state: State
    pattern: re.Pattern[str]
    first: re.Pattern[str]
    marks: tuple[str, ...]
    kind: str
    is_plain: bool
    reader: str


_NEVER = re.compile(r"(?!)")
_READERS = {Until: "_read_until", Start: "_read_start", Envelope: "_read_envelope", Arguments: "_read_arguments"}


@lru_cache(maxsize=64)
def _machine(calls: str, reasoning: str | None) -> dict[str, _State]:
    states = with_reasoning(FORMATS.get(calls, ONLY_TEXT), REASONING_FORMATS.get(reasoning or ""))
    machine = {}
    for name, state in states.items():
        marks = tuple(getattr(state, "marks", ()))
        pattern = re.compile("|".join(map(re.escape, marks))) if marks else _NEVER
        first = re.compile("[" + re.escape("".join({mark[0] for mark in marks})) + "]") if marks else _NEVER
        kind = state.sink if isinstance(state, Until) else NOTHING
        machine[name] = _State(state, pattern, first, marks, kind, kind in (TEXT, REASONING), _READERS[type(state)])
    return machine


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _new_id(length: int) -> str:
    return uuid4().hex[:length] if length else f"call_{uuid4().hex[:24]}"
