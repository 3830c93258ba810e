"""Format messages as a prompt with the model's chat template. Needs jinja2: the extra `text`.

A template is a program that is shipped with the weights. It runs in jinja2's immutable sandbox, which contains only
copies of plain data and the functions and filters that transformers provides to templates.
"""

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InvalidRequestError, printable, type_name
from ..weights.file_keys import SPECIAL_TOKENS
from .gguf_tokenizer import is_gguf_file, load_gguf_chat
from .template_messages import UnreadInput, has_effect, template_message
from .template_sandbox import template_environment

# The name of an additional file is the template's name, as in transformers' save_pretrained.
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
LONGEST_QUOTE = 300
SHORTEST_SECRET = 16    # characters of a message that an error does not quote; roles are shorter


def chat_prompt(folder: str | os.PathLike, messages: list[dict[str, Any]], /,
                tools: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    """Format `messages` as a prompt with the model's chat template.

    folder      a tokenizer folder with a template, or a `.gguf` file with templates in its metadata. In a folder, the
                default template is chat_template.jinja, and named templates are additional_chat_templates/NAME.jinja.
                Without such files, `chat_template` in tokenizer_config.json is read: a string or a list of named
                templates. If there are tools, the template named `tool_use` is used if it exists. Otherwise the
                default template is used
    messages    dictionaries with `role`, `content` and other keys that the template reads. The template does not get
                keys whose value is None; if it asks, they are none. The arguments of tool calls may be JSON strings:
                the template gets them parsed. A `reasoning` is also named `reasoning_content` and `thinking`
    tools       JSON schemas of functions, as the template expects them. Refused if they do not change the prompt
    variables   variables of the template, such as `documents` or `enable_thinking`. `add_generation_prompt` defaults to
                True (False in transformers), which ends the prompt where the model's answer begins. The special tokens
                of the folder (`bos_token`, `eos_token`, ...) are also set

    Other input that does not change the prompt is logged once per template and name: variables, keys of messages, and
    messages with a role that the template leaves out.

    Encode the result with `add_special_tokens=False`, because the template has already inserted the special tokens.
    User text that looks like a special token becomes a special token. A host that must prevent this has to filter the
    text first.

    The arguments are not mutated. Templates get copies made of dictionaries, lists, strings, numbers, booleans and
    None; any other type is refused. The run time of a template is not limited.

    A template is compiled once, and again when its files change. A call takes some tens of microseconds for a short
    chat.

    Raises ConfigError if jinja2 >= 3.1.6 is missing, if there is no usable template, or if the template violates the
    sandbox. Raises InvalidRequestError if the template rejects the messages, fails on them, or leaves out the tools.
    """
    check_variables(variables)
    files = folder_files(Path(folder))
    template = folder_template(*files, has_tools=tools is not None)
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True, **variables}
    plain: dict[str, Any] = {}
    try:
        plain = {name: _plain(value, name) for name, value in given.items()}
        if not isinstance(plain["messages"], list) or not all(type(each) is dict for each in plain["messages"]):
            raise InvalidRequestError("messages is not a list of dictionaries", "expected one dictionary per message",
                                      'pass [{"role": "user", "content": "..."}]')
        tokens = folder_special_tokens(*files)
        read: set[Any] = set()

        def render(given: dict[str, Any]) -> str:
            chosen = template if given["tools"] is not None else folder_template(*files, has_tools=False)
            readable = [template_message(message, read) for message in given["messages"]]
            return chosen.render({**tokens, **given, "messages": readable})

        prompt = render(plain)
        if tools and not has_effect(render, {**plain, "tools": None}, prompt):
            have = "1 tool has" if len(tools) == 1 else f"{len(tools)} tools have"
            raise InvalidRequestError(f"{have} no effect: the chat template leaves them out",
                                      "expected a template that reads tools",
                                      "describe the tools in a message, or use a model with a template for tools")
        template.unread.check(prompt, plain, variables, read, render)
        return prompt
    except (ConfigError, InvalidRequestError):
        raise
    except Exception as error:    # a template can raise anything
        if type(error).__name__ == "SecurityError":
            raise ConfigError(f"the chat template violated the sandbox: {_quoted(error)}",
                              "expected a template that only formats messages",
                              f"review the template in {os.fspath(folder)!r} before you use it") from error
        told = _without_prompt(error, plain.get("messages", []))
        parts = next((n for n, message in enumerate(plain.get("messages", ())) if type(message.get("content")) is list),
                     None)
        if parts is not None:
            raise InvalidRequestError(f"the content of messages[{parts}] is a list of parts, and the chat template "
                                      f"fails on it: {told}", "expected a string",
                                      'join the parts: {"content": "".join(...)}') from error
        raise InvalidRequestError(f"the chat template cannot be applied: {told}",
                                  "expected messages in the order and with the keys that the template expects",
                                  "see the template of the model") from error


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a name that an argument of `chat_prompt` has, for example from a client."""
    for name in ("messages", "tools"):
        if name in variables:
            raise InvalidRequestError(f"a template variable is named {name}", f"the name {name} is reserved",
                                      "rename the variable")


def compile_templates(folder: str | os.PathLike) -> None:
    """Compile the templates of the folder, as the first call of `chat_prompt` would. Raises ConfigError."""
    files = folder_files(Path(folder))
    folder_special_tokens(*files)
    for has_tools in (False, True):
        folder_template(*files, has_tools=has_tools)


def template_text(folder: str | os.PathLike, *, has_tools: bool) -> str:
    """Return the text of the template that `chat_prompt` uses; "" if there is none. Raises ConfigError."""
    templates = _templates(folder_files(Path(folder)))
    return (has_tools and templates.get("tool_use")) or templates.get("default", "")


def _quoted(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}"[:LONGEST_QUOTE])


def _without_prompt(error: Exception, messages: list[dict[str, Any]]) -> str:
    """Return the type of an exception that a template raised, and the text of jinja2's own exceptions.

    Texts of other exceptions may quote the messages.
    """
    if not type(error).__module__.startswith("jinja2"):
        return type(error).__name__
    text = str(error)
    for content in {value for message in messages if isinstance(message, dict) for value in message.values()
                    if isinstance(value, str)}:
        if len(content) >= SHORTEST_SECRET:
            text = text.replace(content, "...")
    return printable(f"{type(error).__name__}: {text}"[:LONGEST_QUOTE])


_WITHOUT_SUBCLASS = {str: str.__str__, int: int.__int__, float: float.__float__}


def _plain(value: Any, where: str) -> Any:
    """Return a copy made of JSON types, so that a template cannot call methods of the host's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base, plain in _WITHOUT_SUBCLASS.items():    # enumerations, for example
        if isinstance(value, base):
            return plain(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(each, f"{where}[{key!r:.40}]") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{n}]") for n, each in enumerate(value)]
    raise InvalidRequestError(f"{where} is of type {type_name(value)}",
                              "expected dictionaries, lists, strings, numbers, booleans or None",
                              "convert it first, for example a Pydantic model with model_dump()")


# ---------------------------------------------------------------------- the files of the folder


def folder_files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return (path, mtime in ns, size in bytes) of each file with templates or special tokens.

    The result is the key of the caches in this file. If `folder` is a directory, the first item is
    (path of the directory, 0, 0). If `folder` is a .gguf file, the result has only this file.
    """
    if is_gguf_file(folder):
        return (_gguf_state(folder),)
    try:
        named = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
        found = []
        for path in (*(folder / name for name in CONFIG_FILES), folder / TEMPLATE_FILE, *named):
            if path.is_file():
                state = path.stat()
                found.append((str(path), state.st_mtime_ns, state.st_size))
        if found or folder.is_dir():
            return tuple([(str(folder), 0, 0), *found])
    except (OSError, ValueError) as error:
        raise ConfigError(f"the folder {os.fspath(folder)!r} cannot be read: {_quoted(error)}",
                          "expected the folder of a tokenizer",
                          "pass the folder that has tokenizer_config.json") from error
    raise ConfigError(f"there is no folder {os.fspath(folder)!r}", "expected the folder of a tokenizer",
                      "pass the folder that has tokenizer_config.json")


def _gguf_state(file: Path) -> tuple[str, int, int]:
    try:
        state = file.stat()
    except OSError as error:
        raise ConfigError(f"the file {os.fspath(file)!r} cannot be read: {_quoted(error)}", "expected a GGUF file",
                          "pass the path of an existing file") from error
    return str(file), state.st_mtime_ns, state.st_size


@lru_cache(maxsize=16)
def _gguf_chat(file: tuple[str, int, int]) -> tuple[dict[str, str], dict[str, str]]:
    return load_gguf_chat(file[0])


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} cannot be read: {_quoted(error)}", "expected a UTF-8 file",
                          "download or save it again") from error


def _configs(files: tuple[tuple[str, int, int], ...]) -> list[dict[str, Any]]:
    configs = []
    for path, *_ in files[1:]:
        if Path(path).name in CONFIG_FILES:
            try:
                config = json.loads(_read(path))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path!r} is not JSON: {_quoted(error)}", "expected a JSON object",
                                  "download or save it again") from error
            if not isinstance(config, dict):
                raise ConfigError(f"{path!r} contains a value of type {type_name(config)}", "expected a JSON object",
                                  "download or save it again")
            configs.append(config)
    return configs


@lru_cache(maxsize=16)
def folder_special_tokens(*files: tuple[str, int, int]) -> dict[str, str]:
    if is_gguf_file(files[0][0]):
        return _gguf_chat(files[0])[1]
    tokens: dict[str, str] = {}
    for config in _configs(files):
        for name in SPECIAL_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens.setdefault(name, token)
    return tokens


@lru_cache(maxsize=32)
def folder_template(*files: tuple[str, int, int], has_tools: bool) -> Any:
    """Return the compiled template: `tool_use` if it exists and there are tools, otherwise `default`."""
    folder, templates = files[0][0], _templates(files)
    wanted = "tool_use" if has_tools and "tool_use" in templates else "default"
    if wanted not in templates:
        names = printable(", ".join(map(repr, sorted(templates)))[:LONGEST_QUOTE])
        has = f"templates {names} and no default" if templates else "no chat template"
        if is_gguf_file(folder):
            raise ConfigError(f"the file {folder!r} has {has}", "expected tokenizer.chat_template in its metadata",
                              "format the prompt yourself")
        raise ConfigError(f"the folder {folder!r} has {has}", 
                          f"expected {TEMPLATE_FILE}, or chat_template in {CONFIG_FILES[0]}",
                          f"write the model's template into {TEMPLATE_FILE}, or format the prompt yourself")
    environment = template_environment()
    try:
        return _Template(environment, folder, templates[wanted])
    except Exception as error:    # jinja2 compiles to Python, which can fail in many ways
        raise ConfigError(f"the chat template of {folder!r} cannot be compiled: {_quoted(error)}",
                          "expected a jinja2 template, as in transformers",
                          "download it again") from error


class _Template:
    """A compiled template, and what it is known to leave out."""

    def __init__(self, environment: Any, source: str, text: str) -> None:
        import jinja2.nodes as nodes

        self.render = environment.from_string(text).render
        tree = environment.parse(text)
        names = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        names.update(node.attr for node in tree.find_all(nodes.Getattr))
        loaded = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
        self.unread = UnreadInput(source, frozenset(names), frozenset(loaded))


def _templates(files: tuple[tuple[str, int, int], ...]) -> dict[str, str]:
    """Return name -> template; an unnamed template is `default`.

    Template files take precedence over tokenizer_config.json.
    """
    if is_gguf_file(files[0][0]):
        return _gguf_chat(files[0])[0]
    own = {"default" if Path(path).name == TEMPLATE_FILE else Path(path).stem: _read(path)
           for path, *_ in files[1:] if path.endswith(".jinja")}
    if own:
        return own
    for config in _configs(files):
        templates = config.get("chat_template")
        if isinstance(templates, str):
            return {"default": templates}
        if isinstance(templates, list):
            try:
                named = {each["name"]: each["template"] for each in templates}
            except (TypeError, LookupError):
                named = {0: None}
            if not all(type(part) is str for pair in named.items() for part in pair):
                raise ConfigError(f"chat_template in {CONFIG_FILES[0]} is a list with wrong entries",
                                  "expected objects with a name and a template, both strings",
                                  "download or save it again")
            return named
    return {}
