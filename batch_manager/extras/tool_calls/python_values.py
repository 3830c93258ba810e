"""Grammars of values as Python's literals, for formats that write a call as Python does: True, None, either quote."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .field_values import resolved, types_of
from .raw_strings import HELD, CannotTranslate, conditions

# Keywords of a schema that do not restrict its values.
SAYS_NOTHING = {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
                "$comment"}
DEFINITIONS = {"$defs", "definitions", "$schema", "$id", "strict"}
_ANYTHING: dict[str, Any] = {}
_KINDS = ("boolean", "null", "string", "number", "array", "object")
_WORDS = {True: '"True"', False: '"False"', None: '"None"'}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KEYWORDS = {"string": {*HELD}, "integer": _NUMBERS, "number": _NUMBERS, "array": {"items", "minItems", "maxItems"},
             "object": {"properties", "required", "additionalProperties"}}
_ANY_STRING = r'''/'([^'\\\n]|\\[\\'"nrtbf])*'/'''


class Rules(Protocol):
    """The rules of a grammar. Methods return an expression."""

    def later(self, kind: str) -> tuple[str, Callable[[str], None]]:
        """Return the name of a rule, and what takes its body."""

    def json(self, schema: Any) -> str: ...

    def held(self, conditions: Sequence[str], end: str | int) -> str: ...

    def fields(self, fields: Sequence[tuple[str, bool]], separator: str) -> str: ...


class PythonValues:
    """Grammars of the values of one tool.

    A schema with other keywords than those that are written out here is held as JSON, which the parser reads, too.
    Objects with `properties` have no others.

    rules   the rules of the grammar
    root    the tool's schema, into which references lead
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any]) -> None:
        self._rules, self._root = rules, root
        self._names: dict[int, str] = {}            # id of a part of `root`

    def of(self, schema: Any) -> str:
        """Return an expression for the values of a schema, which may refer to itself."""
        schema = resolved(schema, self._root)
        schema = _ANYTHING if schema is None or schema is True else schema
        if id(schema) not in self._names:
            self._names[id(schema)], takes = self._rules.later("value")
            takes(" | ".join(self._alternatives(schema)))
        return self._names[id(schema)]

    def _alternatives(self, schema: Any) -> list[str]:
        keys = set() if schema is False else schema.keys() - SAYS_NOTHING - DEFINITIONS
        kinds = types_of(schema)
        if keys in ({"enum"}, {"const"}):
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            allowed = kinds | ({"integer"} if "number" in kinds else set())
            if found := [text for value in values if types_of({"const": value}) <= allowed
                         for text in _literals(value)]:
                return found
        if keys in ({"anyOf"}, {"oneOf"}) and "type" not in schema:
            return [self.of(each) for each in next(schema[key] for key in keys)]
        kinds = kinds or set(_KINDS)
        if schema is False or keys and "type" not in schema or not keys <= set().union(
                *(_KEYWORDS.get(kind, ()) for kind in kinds)):
            return [self._as_json(schema)]
        return [one for kind in sorted(kinds) for one in self._of_kind(kind, {
            key: schema[key] for key in keys & _KEYWORDS.get(kind, set())})]

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> list[str]:
        match kind:
            case "boolean":
                return [_WORDS[True], _WORDS[False]]
            case "null":
                return [_WORDS[None]]
            case "string":
                return self._string(schema)
            case "array" if isinstance(schema.get("items", True), Mapping | bool):
                return self._array(schema.get("items", True), schema.get("minItems", 0), schema.get("maxItems"))
            case "object":
                return self._object(schema)
        return [self._as_json({**schema, "type": kind})]

    def _string(self, schema: Mapping[str, Any]) -> list[str]:
        in_json = self._rules.json({**schema, "type": "string"})
        if not schema:
            return [in_json, _ANY_STRING]
        try:
            return [in_json, '"\'" ' + self._rules.held([*conditions(schema), r"[^'\\\n]*"], "'")]
        except CannotTranslate:
            return [in_json]

    def _array(self, items: Any, least: int, most: int | None) -> list[str]:
        empty = [] if least else ['"[]"']
        if items is False or most == 0:
            return empty or [self._as_json(False)]
        item = self.of(items)
        more = f'(", " {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}' if most != 1 else ""
        return [*empty, f'"[" {item} {more} "]"']

    def _object(self, schema: Mapping[str, Any]) -> list[str]:
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
        required = set(schema.get("required") or ())
        if required - properties.keys():
            return [self._as_json({**schema, "type": "object"})]
        if properties or others is False:
            fields = [self._field(key, each, key in required) for key, each in properties.items()]
            return [f'"{{" {self._rules.fields(fields, ", ")} "}}"']
        field = f'({" | ".join(self._string({}))}) ": " {self.of(others)}'
        return ['"{}"', f'"{{" {field} (", " {field})* "}}"']

    def _field(self, key: str, schema: Any, is_needed: bool) -> tuple[str, bool]:
        return f'({" | ".join(_literals(key))}) ": " {self.of(schema)}', is_needed

    def _as_json(self, schema: Any) -> str:
        definitions = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        return self._rules.json({**schema, **definitions} if definitions and isinstance(schema, Mapping) else schema)


def _literals(value: Any) -> list[str]:
    """Return the ways to write a value, as expressions."""
    if value is None or isinstance(value, bool):
        return [_WORDS[value]]
    if isinstance(value, str):
        return [json.dumps(text) for text in dict.fromkeys((json.dumps(value, ensure_ascii=False), repr(value)))]
    if isinstance(value, list):
        parts = [_literals(each) for each in value]
        return ['"[" ' + ' ", " '.join(f"({' | '.join(each)})" for each in parts) + ' "]"' if parts else '"[]"']
    if isinstance(value, dict):
        return ['"{" ' + ' ", " '.join(f'({" | ".join(_literals(key))}) ": " ({" | ".join(_literals(each))})'
                                       for key, each in value.items()) + ' "}"' if value else '"{}"']
    return [json.dumps(json.dumps(value))]
