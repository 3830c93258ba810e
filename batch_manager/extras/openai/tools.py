"""Read the tools of a request body, and which of them its output may or must call."""

import re
from dataclasses import dataclass
from typing import Any

from ...errors import type_name
from ..tool_calls.parser import LONGEST_NAME
from .errors import refused
from .json_object import JsonObject
from .unread_fields import log_once

MOST_TOOLS = 1024
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{LONGEST_NAME}}}")
_CHOICES = ("none", "auto", "required")


@dataclass(slots=True)
class ToolChoice:
    """The tools of a request.

    given         the tools as the chat template gets them
    schemas       name of each tool that may be called -> JSON schema of its arguments
    strict        names of those that are strict: a schema that no grammar can hold refuses the request
    is_forced     whether the output must call a tool
    is_parallel   whether it may have several calls
    """

    given: list[dict[str, Any]]
    schemas: dict[str, Any]
    strict: frozenset[str]
    is_forced: bool = False
    is_parallel: bool = True


def read_tools(fields: JsonObject) -> ToolChoice | None:
    """Return the tools of a chat; None: it has none, or may call none of them. Raises OpenAIError."""
    tools = fields.take("tools", list, [])
    choice = fields.take("tool_choice", (str, dict), "auto" if tools else "none")
    is_parallel = fields.take("parallel_tool_calls", bool, True)
    if len(tools) > MOST_TOOLS:
        raise refused("tools", f"got {len(tools)}; expected at most {MOST_TOOLS}")
    schemas: dict[str, Any] = {}
    strict = set()
    for number, tool in enumerate(tools):
        name, schema, is_strict = _tool(tool, f"tools[{number}]")
        if name in schemas:
            raise refused(f"tools[{number}].function.name", f"{name[:64]!r} occurs twice; expected each name once")
        schemas[name] = schema
        strict |= {name} if is_strict else set()
    if type(choice) is dict:
        is_forced, names = _chosen(JsonObject(choice, "tool_choice."), schemas)
    elif choice in _CHOICES:
        is_forced, names = choice == "required", list(schemas)
        if choice == "none" or not schemas and choice == "auto":
            return None
        if not schemas:
            raise refused("tool_choice", "got 'required' without tools; expected tools to call")
    else:
        raise refused("tool_choice", f"got {choice[:64]!r}; expected none, auto, required, or an object with the name "
                                     "of a tool")
    return ToolChoice(tools, {name: schemas[name] for name in names}, frozenset(strict), is_forced, is_parallel)


def _tool(given: Any, path: str) -> tuple[str, Any, bool]:
    """Return the name, the schema and whether it is strict, of a tool."""
    if type(given) is not dict:
        raise refused(path, f"got {type_name(given)}; expected an object")
    tool = JsonObject(given, f"{path}.")
    if (kind := tool.take("type", str, "function")) != "function":
        raise tool.refused("type", f"got {kind[:64]!r}; expected function, the only kind of tool here")
    function = tool.object("function")
    if function is None:
        raise tool.refused("function", "missing; expected an object with a name and parameters")
    name = function.take("name", str)
    if name is None or _NAME.fullmatch(name) is None:
        raise function.refused("name", f"{'missing' if not name else f'got {len(name)} characters'}; expected 1 to "
                                       f"{LONGEST_NAME} letters, digits and _ . : / -")
    function.take("description", str)
    schema = function.take("parameters", dict, {"type": "object", "properties": {}, "additionalProperties": False})
    is_strict = function.take("strict", bool, False)
    function.check_rest()
    for key in ("cache_control", "defer_loading"):
        tool.take(key, (dict, bool))
    tool.check_rest()
    return name, schema, is_strict


def _chosen(choice: JsonObject, schemas: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a call is forced, and the names that may be called, of a `tool_choice` that is an object."""
    kind = choice.take("type", str, "function")
    if kind == "allowed_tools":
        allowed = choice.object("allowed_tools")
        if allowed is None:
            raise choice.refused("allowed_tools", "missing; expected an object with mode and tools")
        mode = allowed.take("mode", str, "auto")
        if mode not in ("auto", "required"):
            raise allowed.refused("mode", f"got {mode[:64]!r}; expected auto or required")
        names = [_name_of(tool, "tool_choice.allowed_tools.tools") for tool in allowed.take("tools", list, [])]
        allowed.check_rest()
    elif kind == "function":
        mode, names = "required", [_name_of({"function": choice.take("function", dict)}, "tool_choice")]
    else:
        raise choice.refused("type", f"got {kind[:64]!r}; expected function or allowed_tools")
    choice.check_rest()
    for name in names:
        if name not in schemas:
            raise refused("tool_choice", f"there is no tool {name[:64]!r}; the tools are "
                                         f"{', '.join(each[:64] for each in list(schemas)[:20]) or 'none'}")
    if not names:
        raise refused("tool_choice", "it allows no tool; expected the name of at least one")
    return mode == "required", names


def _name_of(tool: Any, path: str) -> str:
    function = tool.get("function") if type(tool) is dict else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str:
        raise refused(f"{path}.function.name", "missing; expected the name of a tool")
    return name


def note_not_held(name: str, fact: str) -> None:
    """Log once that the arguments of a tool that is not strict are not held to their schema."""
    log_once(f"the parameters of a tool such as {name[:64]!r}", f"{fact}; the model writes the arguments freely",
             "cannot be enforced")
