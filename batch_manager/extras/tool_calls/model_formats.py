"""The formats of one model: chosen by its chat template, or by name."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from ...aio.mailbox import Delta
from ...errors import BatchManagerError, ConfigError
from ..chat_template import template_text
from ..stop_strings import StopStrings
from ..text import kind_of
from .formats import FORMATS, REASONING_FORMATS, Format, ReasoningFormat, format_of_template, reasoning_of_template
from .output import ParsedOutput
from .parser import CallParser

AUTO, NONE = "auto", "none"


def check_format_names(calls: str, reasoning: str) -> None:
    """Raise ConfigError for a name that is none of a format, `auto` or `none`."""
    for option, name, known in (("tool_call_parser", calls, FORMATS),
                                ("reasoning_parser", reasoning, REASONING_FORMATS)):
        if name not in (*known, AUTO, NONE):
            raise ConfigError(f"{option} is {name!r:.80}", f"expected {AUTO}, {NONE}, or one of {', '.join(known)}",
                              f"leave it out to use the format in the chat template, which is {AUTO}")


class ModelFormats:
    """How a model writes tool calls and reasoning.

    source      folder or `.gguf` file with the chat template
    calls       name of a format of calls; `auto`: the one that the template writes; `none`: no calls
    reasoning   likewise of reasoning; `none`: reasoning stays in the text

    Raises ConfigError for unknown names.
    """

    def __init__(self, source: str | os.PathLike, tokenizer: Any, calls: str = AUTO, reasoning: str = AUTO) -> None:
        check_format_names(calls, reasoning)
        self._source, self._tokenizer, self._names = source, tokenizer, (calls, reasoning)

    @cached_property
    def calls(self) -> Format | None:
        name = self._names[0]
        return FORMATS.get(format_of_template(self._template(True)) or "" if name == AUTO else name)

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        name = self._names[1]
        return REASONING_FORMATS.get(reasoning_of_template(self._template(False)) or "" if name == AUTO else name)

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Special token -> id."""
        return {content: token for token, content in kind_of(self._tokenizer, skips=True).omitted.items()}

    @cached_property
    def _dropped(self) -> frozenset[int]:
        return self._without(self._marks())

    def prepare(self) -> None:
        """Compute what outputs need of the template and the tokenizer: up to 50 ms for a vocabulary of 200,000."""
        for tools, has_reasoning in product((None, {}), (False, True)):
            self.output("", (0,), None, tools, has_reasoning=has_reasoning).add(Delta([0]))

    def output(self, prompt: str, prompt_ids: Sequence[int], stop: str | Sequence[str] | StopStrings | None,
               tools: Mapping[str, Any] | None = None, most_calls: int | None = None,
               has_reasoning: bool = True) -> ParsedOutput:
        """Return the object that collects the output of a request.

        prompt      the text of the prompt
        tools       name -> schema of the arguments; None: no calls
        has_reasoning   False: reasoning stays in the text
        """
        reasoning = self.reasoning if has_reasoning else None
        parser = CallParser(None if tools is None else self.calls, reasoning, tools,
                            in_reasoning=reasoning is not None and reasoning.is_open_in(prompt))
        strings = [stop] if isinstance(stop, str) else stop if isinstance(stop, list | tuple) else []
        has_special = any(token in text for text in strings for token in self.special)
        dropped = self._without([*self._marks(), *strings]) if has_special else self._dropped
        return ParsedOutput(self._tokenizer, prompt_ids, stop, parser, dropped, most_calls)

    def _marks(self) -> list[str]:
        reasoning = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        calls = FORMATS["harmony"] if self.reasoning is REASONING_FORMATS["harmony"] else self.calls
        return [*reasoning, *(() if calls is None else calls.marks)]

    def _without(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of the special tokens that are in none of the texts."""
        texts = list(texts)
        return frozenset(token for content, token in self.special.items() if not any(content in text for text in texts))

    def _template(self, has_tools: bool) -> str:
        try:
            return template_text(self._source, has_tools=has_tools)
        except BatchManagerError:    # no folder of a model; a chat is refused where its prompt is made
            return ""
