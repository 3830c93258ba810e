"""The JSON of an argument whose format has no types in its text, from the tool's schema."""

import json
from collections.abc import Mapping
from typing import Any

from .values import PYTHON, ValueReader


def resolved(schema: Any, root: Any) -> Any:
    """Return a schema with its reference into `root` followed, if it is one of `#/...`."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema


def types_of(schema: Any) -> set[str]:
    """Return the names of the JSON types that a schema allows, as far as it states them; empty: unknown."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_NAMES.get(type(value), "null") for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            each = [types_of(one) for one in schema[name]]
            return set().union(*each) if all(each) else set()
    return set()


_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def as_json(text: str, types: set[str]) -> str:
    """Return the text of a field's value as JSON: what it spells if the types allow that, and else a string."""
    word = text.strip()
    value = _spelled(word)
    if value is not None:
        kind = _NAMES.get(type(json.loads(value)), "null")
        if not types or kind in types or kind == "integer" and "number" in types or "string" not in types:
            return value
    return json.dumps(text, ensure_ascii=False)


def _spelled(word: str) -> str | None:
    try:
        json.loads(word, parse_constant=_no_constant)
        return word
    except (ValueError, RecursionError):
        pass
    if word in ("True", "False", "None"):
        return {"True": "true", "False": "false", "None": "null"}[word]
    if word[:1] in ("{", "["):                   # Python's literals
        reader, out = ValueReader(PYTHON, word[0]), [word[0]]
        if len(word) > 1 and reader.feed(word, 1, out) == len(word) and reader.is_done and not reader.is_broken:
            try:
                json.loads("".join(out))
                return "".join(out)
            except (ValueError, RecursionError):
                pass
    return None


def _no_constant(name: str) -> None:
    raise ValueError(name)
