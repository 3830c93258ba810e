"""Read the messages of a chat. The chat template gets them with all their keys."""

import json
from typing import Any

import orjson

from ...errors import type_name
from ..repeated_names import repeated_name
from ..template_messages import PartError, text_of_parts
from .errors import refused
from .json_object import TWICE, JsonObject
from .unread_fields import log_once

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
    if (function := message.object("function_call")) is not None:     # OpenAI's older form
        _check_arguments(function)
    if type(content) is list:
        try:
            return {**given, "content": text_of_parts(content, f"{path}.content")}
        except PartError as error:
            raise refused(error.name, error.message) from None
    return given


def _element(given: Any, path: str) -> JsonObject:
    if type(given) is not dict:
        raise refused(path, f"got {type_name(given)}; expected an object")
    return JsonObject(given, f"{path}.")


def _check_call(call: JsonObject) -> None:
    """Check a tool call of an earlier message. The template gets it with its other keys, too."""
    if (kind := call.take("type", str, "function")) != "function":
        raise call.refused("type", f"got {kind[:64]!r}; expected function")
    function = call.object("function")
    if function is None:
        raise call.refused("function", "missing; expected an object with name and arguments")
    if not function.take("name", str):
        raise function.refused("name", "missing or empty; expected a string")
    _check_arguments(function)
    call.take("id", str)


def _check_arguments(function: JsonObject) -> None:
    """Refuse JSON that is no object. Templates get a string that is not JSON as it is; the first one is logged."""
    arguments = function.take("arguments", (str, dict))
    if type(arguments) is not str:
        return
    if len(arguments) > LONGEST_ARGUMENTS:
        raise function.refused("arguments", f"got {len(arguments):,} characters; expected at most "
                                            f"{LONGEST_ARGUMENTS:,}")
    try:
        parsed = orjson.loads(arguments)
    except ValueError:
        try:                                 # what orjson does not read: half a surrogate pair, deep lists, NaN
            parsed = json.loads(arguments)
            json.dumps(parsed, allow_nan=False)
        except (json.JSONDecodeError, RecursionError):
            log_once("the arguments of a tool call", "the template gets it as it is", "is not JSON")
            return
        except ValueError:
            raise function.refused("arguments", "got JSON with NaN or an infinite number; expected JSON") from None
    if not isinstance(parsed, dict):
        raise function.refused("arguments", f"got JSON of type {type_name(parsed)}; expected the JSON of an object")
    if (name := repeated_name(arguments.encode("utf-8", "surrogatepass"), parsed)) is not None:
        raise function.refused(f"arguments.{name}", TWICE)
