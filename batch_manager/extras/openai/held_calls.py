"""The grammar that holds an output to its tools, its response_format and its reasoning."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import orjson

from ...errors import ConfigError, InvalidRequestError
from ..tool_calls.grammar import Called, CallGrammar, CannotForce
from ..tool_calls.model_formats import ModelFormats
from .errors import OpenAIError, refused, without_paths
from .fields import ParsedBody
from .tools import note_not_held

MOST_KEPT, LONGEST_KEPT = 16, 2**16    # grammars, and characters of one. The next call of a conversation has the same


class HeldCalls:
    """Compiles grammars for one model.

    guided   () -> the GuidedDecoding of the model; raises ConfigError without llguidance; None: the model has no end
             id, so no grammar can end an output
    """

    def __init__(self, formats: ModelFormats, guided: Callable[[], Any] | None) -> None:
        self._formats, self._guided = formats, guided
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._grammar: CallGrammar | None = None

    def compiled(self, parsed: ParsedBody) -> Any:
        """Return (guided, grammar) for an output; None: it is free. Slow: call it in a thread.

        A call that is neither forced nor strict is free if no grammar can hold it.

        Raises OpenAIError for a schema that must be held and cannot.
        """
        tools = parsed.tools
        answer = None
        if parsed.response_format is not None:
            try:
                answer = orjson.dumps(parsed.response_format).decode()
            except TypeError:
                raise refused("response_format", "the schema is nested more than 254 deep; make it flatter") from None
        must = parsed.response_format is not None or tools is not None and (
            tools.is_forced or not tools.strict.isdisjoint(tools.schemas))
        param = "tools" if tools is not None else "response_format"
        if self._guided is None:
            if must:
                raise refused(param, "the model has no end id, so constrained output cannot end; omit the field")
            return None
        free: set[str] = set()
        while True:
            try:
                return self._held(parsed, answer, free)
            except CannotForce as error:
                if tools.is_forced or error.tool in tools.strict:
                    raise refused(param, f"the tool {error.tool[:64]!r} cannot be held to its schema: {error}; "
                                         "simplify it, or leave the choice to the model, without strict") from None
                note_not_held(error.tool, str(error))
                if error.tool in free:
                    return None
                free.add(error.tool)
            except (ConfigError, InvalidRequestError) as error:
                if must and isinstance(error, ConfigError):
                    raise
                if must:
                    given = "" if answer is None else answer
                    raise OpenAIError(400, f"{param}: {without_paths(str(error), given=given)}", param,
                                      error.code.value.lower()) from None
                note_not_held(next(iter(tools.schemas)), str(error))
                if isinstance(error, ConfigError) or not (wrong := self._that_fail(parsed) - free):
                    return None
                free |= wrong

    def _that_fail(self, parsed: ParsedBody) -> set[str]:
        """Return the names of the tools whose schemas alone cannot be held."""
        wrong = set()
        for name, schema in parsed.tools.schemas.items():
            try:
                self._guided().json_schema(orjson.dumps(schema).decode())
            except (InvalidRequestError, TypeError):
                wrong.add(name)
        return wrong

    def _held(self, parsed: ParsedBody, answer: str | None, free: Collection[str]) -> Any:
        guided, formats, tools = self._guided(), self._formats, parsed.tools
        reasoning = formats.reasoning if parsed.has_reasoning else None
        if tools is None and reasoning is None:
            return guided, guided.json_schema(answer)
        if self._grammar is None:
            self._grammar = CallGrammar(formats.special)
        called = None if tools is None else Called(tools.schemas, tools.is_forced, tools.is_parallel, free)
        is_open = reasoning is not None and reasoning.is_open_in(parsed.prompt_end)
        lark = self._grammar.lark(formats.calls, called, reasoning, is_open, answer)
        grammar = self._kept.pop(lark, None) or guided.lark(lark)
        if len(lark) <= LONGEST_KEPT:
            self._kept[lark] = grammar
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return guided, grammar


