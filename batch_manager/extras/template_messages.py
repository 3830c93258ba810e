"""What a chat template gets, and what it makes of that: messages in the form that templates read, and unread input."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

from ..contained_log import log
from ..errors import printable, type_name
from .template_sandbox import Arguments, Message

# The names of a message's reasoning in templates and APIs. If several are given, the first one counts.
REASONING = ("reasoning_content", "thinking", "reasoning")
PART_KEYS = {"type": str, "text": str, "cache_control": Mapping, "prompt_cache_breakpoint": Mapping}
MOST_CHECKS = 8          # of one call; rendering a prompt again costs as much as the prompt
MOST_NAMES = 256         # of one template; clients choose them
LONGEST_NAME = 64
MOST_MESSAGES, LONGEST_PROMPT = 1000, 1_000_000    # of a conversation that is checked


class PartError(Exception):
    """A content part that cannot be joined to a text.

    name      its name, such as `messages[0].content[1].type`
    message   what is wrong with it, and what is expected
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)
        self.name, self.message = name, message


def text_of_parts(parts: Sequence[Any], path: str) -> str:
    """Return the joined texts of the parts of a content. Hints for a cache have no effect: every prompt uses it.

    path   name of the content in errors, such as `messages[0].content`

    Raises PartError for a part that is not of type text, and for an unknown key.
    """
    texts = []
    for number, part in enumerate(parts):
        where = f"{path}[{number}]"
        if not isinstance(part, Mapping):
            raise PartError(where, f"got {type_name(part)}; expected an object")
        for key, value in part.items():
            if value is None:
                continue
            expected = PART_KEYS.get(key)
            if expected is None:
                raise PartError(f"{where}.{str(key)[:64]}", f"unknown name; expected {', '.join(sorted(PART_KEYS))}")
            if not isinstance(value, expected):
                raise PartError(f"{where}.{key}", f"got {type_name(value)}; expected {expected.__name__.lower()}")
        if (kind := part.get("type")) != "text":
            raise PartError(f"{where}.type", f"got {'nothing' if kind is None else repr(kind[:64])}; expected a "
                                             "content part of type text; others are not supported")
        if part.get("text") is None:
            raise PartError(f"{where}.text", "missing; expected a string")
        texts.append(part["text"])
    return "".join(texts)


def template_message(message: dict[str, Any], read: set[Any]) -> Message:
    """Return a message as templates read it, as transformers does, and with parsed arguments.

    The arguments of a tool call are a JSON string in OpenAI's API and an object in templates. A string that is not
    JSON stays a string, and missing ones are an empty object. The set `read` gets the keys of the message that the
    template asks for. The reasoning gets the names that templates read: `reasoning_content`, and `thinking` if the
    message has no other `thinking`.
    """
    null = {key for key, value in message.items() if value is None}
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_parsed_call(call) for call in calls]
    if isinstance(call := message.get("function_call"), dict):    # OpenAI's older form
        message["function_call"] = _parsed_call(call)
    return Message(message, null, read)


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _parsed_call(function)}
    if (arguments := call.get("arguments")) is None and "name" in call:    # as for a function without parameters
        return {**call, "arguments": Arguments({}, "{}")}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
            return {**call, "arguments": Arguments(parsed, arguments) if isinstance(parsed, dict) else parsed}
        except (ValueError, RecursionError):
            pass
    return call


# Every template reads a role and a content. Templates need not read ids, and a call's type and index.
_KEYS_OF_MESSAGES = {"role", "content", "tool_call_id"}
_KEYS_OF_CALLS = {"id", "type", "index", "function", "name", "arguments"}


def _calls(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the tool calls of a message, and their functions."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield call
            if isinstance(function := call.get("function"), dict):
                yield function


def _without_key_of_calls(message: dict[str, Any], name: str) -> dict[str, Any]:
    copy = deepcopy(message)
    for call in _calls(copy):
        call.pop(name, None)
    return copy


class UnreadInput:
    """Finds the input of a template that has no effect on the prompt, and logs it once.

    source   path of the template's folder or file, for the log
    names    names of keys and string constants in the template
    loaded   names of the variables that the template reads
    """

    def __init__(self, source: str, names: frozenset[str], loaded: frozenset[str]) -> None:
        self._source, self._names, self._loaded = source, names, loaded
        self._seen: set[tuple[str, str]] = set()

    def check(self, prompt: str, given: dict[str, Any], variables: Iterable[str], read: set[Any],
              render: Callable[[dict[str, Any]], str]) -> None:
        """Log what the template leaves out of a prompt: variables, keys of messages and calls, messages with a role.

        A key that the template asked a message for is read, and so is a variable, role or key of a call that its text
        mentions. Any other input is read if the prompt is another one without it.
        Long conversations are not checked, because rendering them again takes long.

        given       variables of the template, with `messages` before `template_message`
        variables   the names among them that the caller has chosen
        read        the keys that the template asked messages for
        render      returns the prompt for other variables
        """
        messages = given["messages"]
        if len(self._seen) >= MOST_NAMES or len(messages) > MOST_MESSAGES or len(prompt) > LONGEST_PROMPT:
            return
        for kind, name in islice(self._unread(messages, variables, read), MOST_CHECKS):
            self._seen.add((kind, name[:LONGEST_NAME]))
            without = dict(given)
            if kind == "variable":
                del without[name]
            elif kind == "key":
                without["messages"] = [{key: message[key] for key in message if key != name} for message in messages]
            elif kind == "call":
                without["messages"] = [_without_key_of_calls(message, name) for message in messages]
            else:
                without["messages"] = [message for message in messages if message.get("role") != name]
            if not has_effect(render, without, prompt):
                shown = repr(printable(name[:LONGEST_NAME]))
                what = {"variable": f"the variable {shown}", "key": f"{shown} of messages",
                        "call": f"{shown} of tool calls", "role": f"messages with the role {shown}"}[kind]
                log.warning("the chat template of %r leaves out %s, which has no effect on the prompt; pass what the "
                            "template reads; this is logged once", self._source, what)

    def _unread(self, messages: list[dict[str, Any]], variables: Iterable[str],
                read: set[Any]) -> Iterator[tuple[str, str]]:
        """Yield (kind, name) of input that the template does not ask for and that was not checked before."""
        for kind, name in self._unmentioned(messages, variables, read):
            if type(name) is str and (kind, name[:LONGEST_NAME]) not in self._seen:
                yield kind, name

    def _unmentioned(self, messages: list[dict[str, Any]], variables: Iterable[str],
                     read: set[Any]) -> Iterator[tuple[str, Any]]:
        yield from (("variable", name) for name in variables if name not in self._loaded)
        for message in messages:
            if type(role := message.get("role")) is str and role not in self._names:
                yield "role", role
            yield from (("key", key) for key, value in message.items() if value is not None
                        and key not in _KEYS_OF_MESSAGES
                        and read.isdisjoint((*REASONING[:2], key) if key in REASONING else (key,)))
            for call in _calls(message):
                yield from (("call", key) for key in call if key not in _KEYS_OF_CALLS and key not in self._names)


def has_effect(render: Callable[[dict[str, Any]], str], without: dict[str, Any], prompt: str) -> bool:
    """Return whether the prompt is another one with the variables `without`."""
    try:
        return render(without) != prompt
    except Exception:    # a template can raise anything
        return True
