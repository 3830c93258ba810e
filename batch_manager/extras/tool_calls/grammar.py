"""Grammars, in llguidance's Lark syntax, that hold tool calls to their schemas. See `extras/guided_decoding.py`.

A free output may be any text up to the begin of a call; from there on, it is calls. A forced output is calls at once.
Both may begin with reasoning.
"""

import json
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .field_values import resolved, types_of
from .formats import Format, ReasoningFormat, Written
from .python_values import DEFINITIONS, SAYS_NOTHING, PythonValues
from .raw_strings import HELD, CannotTranslate, conditions

MOST_NAMES_OF_FIELDS = re.compile(r"[^\W\d]\w*")    # a key that every format can write without quotes
_EMPTY = '""'
_BLANK = "␣"            # in a text of the table: a blank may stand here
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OF_OBJECTS = {"properties", "required", "additionalProperties", *DEFINITIONS}


class CannotForce(Exception):
    """The format has no grammar for a schema. The message has the fact, and `tool` the tool's name."""

    def __init__(self, tool: str, fact: str) -> None:
        super().__init__(fact)
        self.tool = tool


@dataclass(frozen=True)
class Called:
    """Which calls an output may have.

    tools        name -> JSON schema of the arguments; only these may be called
    free         names of those whose arguments are not held to their schema
    is_forced    whether the output has to call
    is_parallel  whether it may have several calls
    """

    tools: Mapping[str, Any]
    is_forced: bool = False
    is_parallel: bool = True
    free: Collection[str] = ()


class CallGrammar:
    """Makes grammars of one model.

    special   special token -> its id. A special token matches no text, so a grammar names it by its id
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def lark(self, calls: Format | None, called: Called | None, reasoning: ReasoningFormat | None,
             in_reasoning: bool = False, answer: str | None = None) -> str:
        """Return the grammar of an output.

        called   None: no calls
        answer   JSON schema of the text of the answer; None: any text

        Raises CannotForce.
        """
        rules = _Rules(self._literal)
        if calls is not None and calls.name == "harmony" or reasoning is not None and reasoning.name == "harmony":
            return self._harmony(rules, called, answer)
        starts = []
        trigger = "" if called is None or calls is None else calls.written.trigger
        if called is None or not called.is_forced:
            starts.append(rules.json(answer) if answer is not None else
                          rules.free(self._parts(trigger), self._bare_heads(calls, called)))
        if called is not None and calls is not None:
            block, begin = self._block(rules, calls.written, called, starts=not called.is_forced)
            if not called.is_forced and trigger and answer is None:
                block = rules.text_up_to(self._parts(trigger)) + " " + block
            elif begin:
                block = self._literal(begin) + " " + block
            starts.append(block)
        return rules.whole(rules.reasoning(reasoning, in_reasoning, self._parts) + f"({' | '.join(starts)})")

    # ---------------------------------------------------------------- parts

    def _block(self, rules: "_Rules", written: Written, called: Called, starts: bool) -> tuple[str, str]:
        """Return the grammar of all calls after the trigger, and the trigger."""
        before, begin, trigger = written.before, written.begin, written.trigger
        rest = trigger if before.startswith(trigger) and before else ""
        before = before.removeprefix(trigger)
        in_begin = "" if rest else trigger

        def one(lead: str) -> str:               # what comes before is of one lexeme with the name: see `free`
            return rules.add("call", " | ".join(
                self._call(rules, written, lead + begin.removeprefix(in_begin), name, schema, name in called.free)
                for name, schema in called.tools.items()))
        more = f"{one(written.between + in_begin)}*" if called.is_parallel else ""
        return f"{one(before)} {more} {self._literal(written.after)}", trigger

    def _call(self, rules: "_Rules", written: Written, begin: str, name: str, schema: Any, is_free: bool) -> str:
        head, end = self._literal(begin.replace("{name}", name)), self._literal(written.end)
        if is_free and written.field is not None:
            if not written.raw:
                raise CannotForce(name, "free arguments have no mark at their end in the format of the model's calls")
            return f"{head} {rules.text_up_to(self._parts(written.end))}"
        schema = {} if is_free else schema
        arguments = _held(name, partial(rules.json, schema, is_arguments=True) if written.field is None
                          else partial(self._fields, rules, written, name, schema))
        return f"{head} {arguments} {end}"

    def _fields(self, rules: "_Rules", written: Written, name: str, schema: Any) -> str:
        """Return the grammar of the arguments of a call, field by field, in the order of the schema."""
        root = schema if isinstance(schema, Mapping) else {}
        if wrong := sorted(root.keys() - SAYS_NOTHING - _OF_OBJECTS):
            raise CannotForce(name, f"its parameters have {wrong[0]}, which the format of the model's calls cannot "
                                    "hold")
        properties, required = root.get("properties") or {}, set(root.get("required") or ())
        if missing := sorted(required - properties.keys()):
            raise CannotForce(name, f"its required parameter {missing[0]!r:.80} has no schema")
        if not properties and root.get("additionalProperties") is not False and "properties" not in root:
            raise CannotForce(name, "its parameters name no properties")
        _, after_key, after_value, separator, _ = written.field
        literals, fields = PythonValues(rules, root), []
        for key, value in properties.items():
            if not MOST_NAMES_OF_FIELDS.fullmatch(key):
                raise CannotForce(name, f"its parameter {key!r:.80} has a name that the format of the model's calls "
                                        "cannot hold")
            of_value = self._value(rules, written, name, key, value, root) if written.raw else literals.of(value)
            fields.append((" ".join((self._literal(written.field[0] + key + after_key), of_value,
                                     self._literal(after_value))), key in required))
        return rules.fields(fields, separator)

    def _value(self, rules: "_Rules", written: Written, tool: str, key: str, schema: Any, root: Mapping) -> str:
        schema = resolved(schema, root)
        kinds, end = types_of(schema), self._parts(written.raw)
        if kinds and "string" not in kinds:
            after = "" if written.quote else self._literal(written.raw)
            return f"{rules.json(_with_definitions(schema, root))} {after}"
        if is_plain(schema, root):
            return f"{self._literal(written.quote)} {rules.text_up_to(end)}"
        if isinstance(schema, Mapping) and kinds == {"string"}:
            values = schema.get("enum", [schema["const"]] if "const" in schema else None)
            if values is not None and not schema.keys() - SAYS_NOTHING - {"enum", "const"}:
                texts = " | ".join(self._literal(each + written.raw) for each in values)
                return f"{self._literal(written.quote)} ({texts})"
            if not schema.keys() - SAYS_NOTHING - {*HELD} and len(end) == 1:
                try:
                    return f"{self._literal(written.quote)} {rules.held(conditions(schema), end[0])}"
                except CannotTranslate as error:
                    raise CannotForce(tool, f"its parameter {key!r:.80} cannot be held: {error}") from None
        raise CannotForce(tool, f"its parameter {key!r:.80} has a schema that the format of the model's calls cannot "
                                f"hold: strings may have enum, const, {', '.join(HELD)}")

    def _harmony(self, rules: "_Rules", called: Called | None, answer: str | None) -> str:
        lit, text = self._literal, rules.text()
        again = lit("<|end|><|start|>assistant")
        lead = (f"({lit('<|channel|>analysis<|message|>')} {text} {again}"
                f" | {lit('<|channel|>commentary<|message|>')} {text} {again})*")
        starts = []
        if called is None or not called.is_forced:
            starts.append(f"{lit('<|channel|>final<|message|>')} {text if answer is None else rules.json(answer)}")
        for name, schema in () if called is None else called.tools.items():
            head = " | ".join(lit(each) for each in (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
                f" to=functions.{name}<|channel|>commentary json<|message|>"))
            schema = {} if name in called.free else schema
            starts.append(f"({head}) {_held(name, partial(rules.json, schema, is_arguments=True))}")
        return rules.whole(f"{lead} ({' | '.join(starts)})")

    def _bare_heads(self, calls: Format | None, called: Called | None) -> list[str]:
        """Return the texts that begin a call without a mark, as far as they show that it is one."""
        if called is None or calls is None or not calls.is_bare:
            return []
        head = calls.written.before + calls.written.begin
        end = '"name": "{name}"' if '"name": "{name}"' in head else "{name}("
        return [head[:head.index(end) + len(end)].replace("{name}", name) for name in called.tools]

    def _parts(self, text: str) -> list[str | int]:
        """Return a text as texts and ids of special tokens."""
        parts: list[str | int] = []
        at = 0
        for found in self._split.finditer(text):
            parts += [text[at:found.start()]] if found.start() > at else []
            parts.append(self._special[found[0]])
            at = found.end()
        return parts + ([text[at:]] if at < len(text) else [])

    def _literal(self, text: str) -> str:
        pieces = []
        for number, piece in enumerate(text.split(_BLANK)):
            pieces += ['" "?'] if number else []
            pieces += [f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in self._parts(piece)]
        return " ".join(pieces)


class _Rules:
    """The rules of one grammar. Methods return an expression."""

    def __init__(self, literal: Callable[[str], str]) -> None:
        self._rules: list[str] = []
        self._names: dict[str, str] = {}

    def add(self, kind: str, body: str) -> str:
        """Return the name of a rule. The same body is one rule."""
        if body not in self._names:
            self._names[body] = f"{kind}_{len(self._rules)}"
            self._rules.append(f"{self._names[body]}: {body or _EMPTY}")
        return self._names[body]

    def later(self, kind: str) -> tuple[str, Callable[[str], None]]:
        """Return the name of a rule, and what takes its body."""
        name, at = f"{kind}_{len(self._rules)}", len(self._rules)
        self._rules.append("")
        return name, lambda body: operator.setitem(self._rules, at, f"{name}: {body}")

    def fields(self, fields: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the fields in their order. A field is (expression, whether it is needed)."""
        if not separator:
            return " ".join(self.add("field", body) + ("" if is_needed else "?") for body, is_needed in fields)
        first, later = "", ""               # the fields from one on, if no field came before, and if one did
        for body, is_needed in reversed(fields):
            one = self.add("field", body)
            new_later, new_first = f"{json.dumps(separator)} {one} {later}", f"{one} {later}"
            later, first = (
                self.add("later", new_later if is_needed else f"({new_later}) | ({later or _EMPTY})"),
                self.add("first", new_first if is_needed else f"({new_first}) | ({first or _EMPTY})"))
        return first

    def text(self) -> str:
        self._once("TEXT", "TEXT: /(?s:.*)/")
        return "TEXT"

    def free(self, trigger: list[str | int], heads: Sequence[str]) -> str:
        """Return any text without the trigger, and not beginning with one of `heads`.

        The lexer goes on with this text as long as it can be one. A head that is several lexemes would lose to it.
        """
        texts = [part for part in trigger if isinstance(part, str)]
        without = f"(?s:.*{_regex(texts[0])}.*)" if texts and len(trigger) == 1 else ""
        if heads:
            without = rf"(?s:\s*({'|'.join(map(_regex, heads))}).*)"
        if not without:
            return self.text()
        self._once("FREE", f"FREE: /(?s:.*)/ & ~/{without}/")
        return "FREE"

    def text_up_to(self, end: list[str | int]) -> str:
        """Return any text up to `end`, with it."""
        text = self.text()
        if len(end) == 1 and isinstance(end[0], str):
            name = f"up_to_{len(self._rules)}"
            body = f'{text} {json.dumps(end[0])}'
            if ("lazy", body) not in self._names:
                self._names["lazy", body] = name
                self._rules.append(f"{name}[lazy]: {body}")
            return self._names["lazy", body]
        if isinstance(end[0], str):                  # blanks before a special token
            self._once("TEXT", "TEXT: /(?s:.*)/")
            end = end[1:]
        return " ".join([text, *(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in end)])

    def held(self, conditions: Sequence[str], end: str | int) -> str:
        """Return a text that all regular expressions match, with its end.

        The end is part of the lexeme, because the lexer goes on with a text as long as it can be one.
        """
        whole = [*conditions, *([] if isinstance(end, int) else [f"(?s:.*{_regex(end.strip())}.*)"])]
        parts = [f"{'~' if number == len(conditions) else ''}/{each}/" for number, each in enumerate(whole)]
        name = f"HELD_{len(self._rules)}"
        self._rules.append(f"{name}: ({' & '.join(parts)}){'' if isinstance(end, int) else ' ' + json.dumps(end)}")
        return f"{name} <[{end}]>" if isinstance(end, int) else name

    def json(self, schema: Any, is_arguments: bool = False) -> str:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if is_arguments:
            schema = dict(schema) if isinstance(schema, Mapping) else {}
            schema.setdefault("type", "object")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return self.add("json", "%json " + json.dumps({**schema, "x-guidance": _OPTIONS}))

    def reasoning(self, form: ReasoningFormat | None, is_open: bool, parts: Callable[[str], list[str | int]]) -> str:
        if form is None:
            return ""
        begin = "" if is_open else " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part)
                                            for part in parts(form.open))
        self._once("WS", "WS: /[ \\n\\r\\t]+/")
        body = f"{begin} {self.text_up_to(parts(form.close))} WS?"
        return self.add("think", body) + (" " if is_open else "? ")

    def whole(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def _once(self, name: str, rule: str) -> None:
        if rule not in self._rules:
            self._rules.append(rule)


def _held(tool: str, grammar: Callable[[], str]) -> str:
    try:
        return grammar()
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise CannotForce(tool, "its parameters are not a JSON schema, or are nested too deep") from None


def is_plain(schema: Any, root: Any) -> bool:
    """Whether every text is a valid value of the schema, as `as_json` reads it."""
    if schema is None or schema is True or schema == {}:
        return True
    if not isinstance(schema, Mapping):
        return False
    alternatives = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    if len(alternatives) == 1 and not schema.keys() - SAYS_NOTHING - {"anyOf"} and "type" not in schema:
        kinds = [types_of(resolved(each, root)) for each in alternatives[0]]
        return {"string"} in kinds and all(is_plain_of_type(resolved(each, root)) for each in alternatives[0])
    return is_plain_of_type(schema) and ("type" not in schema or "string" in types_of(schema))


def is_plain_of_type(schema: Any) -> bool:
    return isinstance(schema, Mapping) and not schema.keys() - SAYS_NOTHING


def _with_definitions(schema: Any, root: Mapping) -> Any:
    """Return the schema of a field with the definitions that it may refer to."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    if isinstance(schema, Mapping) and definitions:
        return {**schema, **definitions}
    return {} if schema is None else schema


def _regex(text: str) -> str:
    """Return a regular expression of Lark that matches the text."""
    return "".join(char if char.isalnum() or char in ' _"' else f"\\x{{{ord(char):x}}}" for char in text)
