"""Read the messages of a chat. The chat template gets them with all their keys."""

from typing import Any

from ...errors import type_name
from .errors import refused
from .json_object import JsonObject

LONGEST_ARGUMENTS = 2**18    # characters; parsing them holds the interpreter's lock for tens of milliseconds


def read_messages(fields: JsonObject) -> list[dict[str, Any]]:
    """Return the messages for the chat template, with each content as one string.

    The template gets every key. `template_messages` logs the keys that it leaves out.
    """
    messages = fields.take("messages", list)
    if not messages:
        raise refused("messages", "missing or empty; expected a list of at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(given: Any, path: str) -> dict[str, Any]:
    message = _element(given, path)
    if not message.take("role", str):
        raise message.refused("role", "missing or empty; expected a string")
    content = message.take("content", (str, list))
    for number, call in enumerate(message.take("tool_calls", list, [])):
        _check_call(_element(call, f"{path}.tool_calls[{number}]"))
    if type(content) is list:
        return {**given, "content": "".join(_text(_element(part, f"{path}.content[{number}]"))
                                            for number, part in enumerate(content))}
    return given


def _element(given: Any, path: str) -> JsonObject:
    if type(given) is not dict:
        raise refused(path, f"got {type_name(given)}; expected an object")
    return JsonObject(given, f"{path}.")


def _text(part: JsonObject) -> str:
    """Return the text of a content part. Hints for a cache have no effect: every prompt uses the cache."""
    if (kind := part.take("type", str)) != "text":
        raise part.refused("type", f"got {'nothing' if kind is None else repr(kind[:64])}; expected a content part of "
                                   "type text; others are not supported")
    text = part.take("text", str)
    if text is None:
        raise part.refused("text", "missing; expected a string")
    for hint in ("cache_control", "prompt_cache_breakpoint"):
        part.take(hint, dict)
    part.check_rest()
    return text


def _check_call(call: JsonObject) -> None:
    """Check a tool call of an earlier message. The template gets it with its other keys, too."""
    if (kind := call.take("type", str, "function")) != "function":
        raise call.refused("type", f"got {kind[:64]!r}; expected function")
    function = call.object("function")
    if function is None:
        raise call.refused("function", "missing; expected an object with name and arguments")
    if not function.take("name", str):
        raise function.refused("name", "missing or empty; expected a string")
    arguments = function.take("arguments", (str, dict))
    if type(arguments) is str and len(arguments) > LONGEST_ARGUMENTS:
        raise function.refused("arguments", f"got {len(arguments):,} characters; expected at most "
                                            f"{LONGEST_ARGUMENTS:,}")
    call.take("id", str)
