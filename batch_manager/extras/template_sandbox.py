"""The sandbox in which chat templates run: jinja2's, with the extensions, filters and globals of transformers."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from ..errors import ConfigError

OLDEST_JINJA2 = (3, 1, 6)    # older versions have known sandbox escapes


class Message(dict):
    """A message as a template sees it: without the keys that are null.

    A template that asks whether such a key is none gets the answer yes, and a template that adds it to a text adds
    nothing. Otherwise the key is missing, as in transformers. OpenAI's API makes no difference between `content: null`
    and no content in an assistant's message, so a missing content of the assistant counts as null.

    read   gets the keys that the template asks for
    """

    def __init__(self, fields: dict[str, Any], null: set[str], read: set[Any]) -> None:
        super().__init__(fields)
        self._null = null | {"content"} if fields.get("role") == "assistant" and "content" not in fields else null
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._read.add(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)


class Arguments(dict):
    """The arguments of a tool call, parsed from `text`. A template that adds or prints them gets `text`.

    Templates read arguments as an object (Qwen, Llama, gpt-oss) or add them to a text (DeepSeek V3).
    """

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


@lru_cache(maxsize=1)
def template_environment() -> Any:
    """Return a sandboxed jinja2 environment, with the extensions, filters and globals of transformers."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as error:
        raise ConfigError("jinja2 is not installed", "it is required for chat templates",
                          'pip install "batch-manager[text]"') from error
    if _version(jinja2.__version__) < OLDEST_JINJA2:
        raise ConfigError(f"jinja2 is version {jinja2.__version__}",
                          f"expected at least {'.'.join(map(str, OLDEST_JINJA2))}, because older versions have "
                          "sandbox escapes",
                          "pip install -U jinja2")

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %} ... {% endgeneration %}`, which marks the model's answer for training.

        The content of the block is rendered unchanged.
        """

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """A namespace that refuses attribute names with a leading underscore."""

        def __init__(*arguments: Any, **attributes: Any) -> None:
            self, *given = arguments    # not a parameter: an attribute may be named self
            attributes = dict(*given, **attributes)
            for name in attributes:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def _check_name(name: object) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise jinja2.sandbox.SecurityError(f"{name!r:.60} is not a valid namespace attribute, expected a string "
                                               "without a leading underscore")

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Dict:
        """Replaces `dict` in templates: it can be called and has `fromkeys`, but not the other attributes of `dict`."""

        def __call__(self, *arguments: Any, **items: Any) -> dict:
            return dict(*arguments, **items)

        def fromkeys(self, *arguments: Any) -> dict:
            return dict.fromkeys(*arguments)

    def is_null(value: Any) -> bool:
        return (isinstance(value, Missing) and isinstance(value._undefined_obj, Message)
                and value._undefined_exception is jinja2.UndefinedError
                and isinstance(name := value._undefined_name, str) and name in value._undefined_obj._null)

    class Missing(jinja2.Undefined):
        """A name or key that is missing. A null key of a message is an empty text to string operations."""

        __slots__ = ()
        __hash__ = jinja2.Undefined.__hash__

        def __getattr__(self, name: str) -> Any:
            return getattr("", name) if not name.startswith("_") and is_null(self) else super().__getattr__(name)

        def __add__(self, other: Any) -> Any:
            return other if is_null(self) else super().__add__(other)

        def __radd__(self, other: Any) -> Any:
            return other if is_null(self) else super().__radd__(other)

        def __eq__(self, other: object) -> bool:
            return is_null(self) if other is None else super().__eq__(other)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols], undefined=Missing)
    environment.tests["none"] = lambda value: value is None or is_null(value)
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, dict=Dict(),
                               namespace=Namespace)
    return environment


def _version(text: str) -> tuple[int, ...]:
    """Return the leading numeric components of a version."""
    parts = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)
