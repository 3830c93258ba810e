"""The formats in which models write tool calls and reasoning, each as a table of states.

A state reads text up to one of its marks, and the mark determines the next state. No mark of a state is a part of
another one of the same state, so the first complete mark is the same however the text is cut.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from .values import GEMMA, JSON, PYTHON, Dialect

# What becomes of the characters that a state reads.
TEXT, REASONING, NOTHING, HEADER, NAME, KEY, VALUE = ("text", "reasoning", "nothing", "header", "name", "key", "value")
END_OF_CALL = "end of call"


class Go(NamedTuple):
    """A transition: the next state, and what ends with the mark."""

    state: str
    ends: str = ""


@dataclass(frozen=True)
class Until:
    """Reads characters as `sink` up to a mark.

    route   function of the read header -> (next state, name of the called function or ""); for HEADER only
    blank   characters of the format at the start and the end of a VALUE, at most one on each side
    """

    sink: str
    marks: Mapping[str, Go]
    route: Callable[[str], tuple[str, str]] | None = None
    blank: str = ""


@dataclass(frozen=True)
class Start:
    """Skips the characters of `skip`, and goes to the state of the mark that follows, or else to `otherwise`."""

    marks: Mapping[str, Go]
    otherwise: str = "text"
    skip: str = " \t\r\n"


@dataclass(frozen=True)
class Envelope:
    """Reads a JSON object with the name and the arguments of a call, whose opening bracket the mark has read.

    is_bare   whether other JSON may stand here, so that only the names of known tools begin a call
    """

    then: str
    is_bare: bool = False


@dataclass(frozen=True)
class Arguments:
    """Reads the arguments of a call. `opening`: the bracket that the mark before has read; "": it is still to come."""

    dialect: Dialect
    then: str
    opening: str = ""


State = Until | Start | Envelope | Arguments


class Written(NamedTuple):
    """How a grammar writes calls in a format. The character `␣` stands for a blank that may be left out.

    trigger     text with which every call begins
    begin       text of a call up to its arguments, with {name}
    end         text after the arguments
    between     text between two calls
    before, after   text before the first and after the last call
    field       (before the first, between the key and the value, after a value, between two fields, after the last):
                texts around the fields of the arguments; None: the arguments are one JSON object
    raw         text that ends a string written without quotes, and without `quote` other values, too; "": strings are
                those of JSON
    quote       text before a string that `raw` ends
    """

    trigger: str
    begin: str
    end: str
    between: str = ""
    before: str = ""
    after: str = ""
    field: tuple[str, str, str, str, str] | None = None
    raw: str = ""
    quote: str = ""


@dataclass(frozen=True)
class Format:
    """A format of tool calls.

    states     name -> state. An output begins in `answer`; `text` is the state of visible text
    written    how a grammar writes calls
    seen_in    texts that are all in the chat templates of models that write the format
    not_in     texts that are not
    is_bare    whether calls begin without a mark of their own, so that a grammar must compare the names
    id_length  number of letters and digits of an id; 0: `call_` and 24 digits
    """

    name: str
    states: Mapping[str, State]
    written: Written
    seen_in: tuple[tuple[str, ...], ...] = ()
    not_in: tuple[str, ...] = ()
    is_bare: bool = False
    id_length: int = 0
    marks: frozenset[str] = field(init=False)    # texts that the parser must see, even if they are special tokens

    def __post_init__(self) -> None:
        marks = {mark for state in self.states.values() if isinstance(state, Until | Start) for mark in state.marks}
        for state in self.states.values():
            if isinstance(state, Arguments):
                marks.update(state.dialect.quotes)
        object.__setattr__(self, "marks", frozenset({*marks, *_PARTS_OF_MARKS} if self.name == "harmony" else marks))


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning, which stands at the start of an output.

    end   what ends reasoning whose budget is used up
    """

    name: str
    open: str
    close: str
    end: str

    def is_open_in(self, prompt: str) -> bool:
        """Whether the output after `prompt` begins within reasoning."""
        return prompt.rstrip().endswith(self.open.rstrip())


_AGAIN = Go("text")


def _marks(*pairs: tuple[str, str | Go]) -> Mapping[str, Go]:
    return MappingProxyType({mark: go if isinstance(go, Go) else Go(go) for mark, go in pairs})


def _xml(open_call: str, open_name: str, close_name: str, open_key: str, close_key: str, close_value: str,
         end_call: str, dropped: tuple[str, ...], blank: str = "") -> dict[str, State]:
    """Return the states of a format that writes each field between tags."""
    return {
        "text": Until(TEXT, _marks((open_name, "name"), *((mark, _AGAIN) for mark in (open_call, *dropped) if mark))),
        "name": Until(NAME, _marks((close_name, "fields"))),
        "fields": Until(NOTHING, _marks((open_key, "key"), (end_call, Go("text", END_OF_CALL)))),
        "key": Until(KEY, _marks((close_key, "value"))),
        "value": Until(VALUE, _marks((close_value, "fields")), blank=blank),
    }


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_CALLS, _DEEPSEEK_LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_TEXT = ((_DEEPSEEK_CALLS, _AGAIN), (_DEEPSEEK_LAST, _AGAIN), (_DEEPSEEK_END, _AGAIN))

_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]{1,256})")


def _harmony_route(header: str) -> tuple[str, str]:
    if found := _TO.search(header):
        return "arguments", found[1]
    return ("reasoning" if "analysis" in header else "text"), ""


_PARTS_OF_MARKS = ("<|constrain|>",)
_HARMONY_ENDS = _marks(*((mark, "header") for mark in ("<|end|>", "<|call|>", "<|return|>", "<|start|>",
                                                       "<|channel|>")))

_GEMMA: dict[str, State] = {
    "text": Until(TEXT, _marks(("<|tool_call>", "open"), ("<start_function_call>", "open"), ("<tool_call|>", "text"),
                               ("<end_function_call>", "text"), ("<|tool_response>", "text"))),
    "open": Start(_marks(("call:", "name")), otherwise="broken"),
    "name": Until(NAME, _marks(("{", "arguments"))),
    "arguments": Arguments(GEMMA, "text", "{"),
}


def _pythonic(open_calls: Mapping[str, Go], **states: State) -> dict[str, State]:
    """Return the states of a format that writes calls as a list of Python's calls."""
    return {
        **states,
        "name": Until(NAME, _marks(("(", "arguments"))),
        "arguments": Arguments(PYTHON, "next", "("),
        "next": Start(_marks(("]", "text")), otherwise="name", skip=" \t\r\n,"),
        "text": Until(TEXT, open_calls),
    }


FORMATS: dict[str, Format] = {each.name: each for each in (
    Format("hermes", {
        "text": Until(TEXT, _marks(("<tool_call>", "open"), ("</tool_call>", "text"))),
        "open": Start(_marks(("{", "call")), otherwise="broken"),
        "call": Envelope("text"),
    }, Written("<tool_call>", '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n"),
        seen_in=(("<tool_call>", "</tool_call>"),), not_in=("<function=", "<arg_key>")),
    Format("qwen3_coder", _xml("<tool_call>", "<function=", ">", "<parameter=", ">", "</parameter>", "</function>",
                               ("</tool_call>",), "\n"),
           Written("<tool_call>", "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", between="\n",
                   field=("<parameter=", ">\n", "\n", "", ""), raw="\n</parameter>"),
           seen_in=(("<function=", "<parameter="),)),
    Format("glm", {
        **_xml("", "<tool_call>", "<arg_key>", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", ()),
        "name": Until(NAME, _marks(("<arg_key>", "key"), ("</tool_call>", Go("text", END_OF_CALL)))),
        "key": Until(KEY, _marks(("</arg_key>", "gap"))),
        "gap": Until(NOTHING, _marks(("<arg_value>", "value"))),
    }, Written("<tool_call>", "<tool_call>{name}\n", "</tool_call>", between="\n",
               field=("<arg_key>", "</arg_key>\n<arg_value>", "\n", "", ""), raw="</arg_value>"),
        seen_in=(("<arg_key>", "<arg_value>"),)),
    Format("mistral", {
        "text": Until(TEXT, _marks(("[TOOL_CALLS]", "open"))),
        "open": Start(_marks(("[", "list"), ("{", "call")), otherwise="broken"),
        "list": Start(_marks(("{", "call"), ("]", "text")), skip=" \t\r\n,"),
        "call": Envelope("list"),
    }, Written("[TOOL_CALLS]", '{"name": "{name}", "arguments": ', "}", between=", ", before="[TOOL_CALLS]␣[",
               after="]"),
        seen_in=(("[TOOL_CALLS]",),), not_in=("[ARGS]",), id_length=9),
    Format("mistral_args", {
        "text": Until(TEXT, _marks(("[TOOL_CALLS]", "name"))),
        "name": Until(NAME, _marks(("[ARGS]", "arguments"), ("[CALL_ID]", "id"))),
        "id": Until(NOTHING, _marks(("[ARGS]", "arguments"))),
        "arguments": Arguments(JSON, "text"),
    }, Written("[TOOL_CALLS]", "[TOOL_CALLS]{name}[ARGS]", ""), seen_in=(("[TOOL_CALLS]", "[ARGS]"),), id_length=9),
    Format("deepseek_v3", {
        "text": Until(TEXT, _marks((_DEEPSEEK_BEGIN, "kind"), *_DEEPSEEK_TEXT)),
        "kind": Until(NOTHING, _marks((_DEEPSEEK_SEP, "name"))),
        "name": Until(NAME, _marks(("\n```json\n", "arguments"))),
        "arguments": Arguments(JSON, "close"),
        "close": Until(NOTHING, _marks((_DEEPSEEK_END, "text"))),
    }, Written(_DEEPSEEK_CALLS, _DEEPSEEK_BEGIN + "function" + _DEEPSEEK_SEP + "{name}\n```json\n",
               "\n```" + _DEEPSEEK_END, between="\n", before=_DEEPSEEK_CALLS, after=_DEEPSEEK_LAST),
        seen_in=((_DEEPSEEK_CALLS, "```json"),)),
    Format("deepseek_v31", {
        "text": Until(TEXT, _marks((_DEEPSEEK_BEGIN, "name"), *_DEEPSEEK_TEXT)),
        "name": Until(NAME, _marks((_DEEPSEEK_SEP, "arguments"))),
        "arguments": Arguments(JSON, "close"),
        "close": Until(NOTHING, _marks((_DEEPSEEK_END, "text"))),
    }, Written(_DEEPSEEK_CALLS, _DEEPSEEK_BEGIN + "{name}" + _DEEPSEEK_SEP, _DEEPSEEK_END, before=_DEEPSEEK_CALLS,
               after=_DEEPSEEK_LAST),
        seen_in=((_DEEPSEEK_CALLS,),), not_in=("```json",)),
    Format("harmony", {
        "answer": Until(HEADER, _marks(("<|message|>", "header")), route=_harmony_route),
        "header": Until(HEADER, _marks(("<|message|>", "header")), route=_harmony_route),
        "text": Until(TEXT, _HARMONY_ENDS),
        "reasoning": Until(REASONING, _HARMONY_ENDS),
        "arguments": Arguments(JSON, "close"),
        "close": Until(NOTHING, _HARMONY_ENDS),
    }, Written("<|channel|>commentary to=functions.",
               "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>"),
        seen_in=(("<|channel|>", "<|message|>", "analysis"),)),
    Format("gemma", _GEMMA, Written("<|tool_call>", "<|tool_call>call:{name}{", "}<tool_call|>",
                                    field=("", ":", "", ",", ""), raw='<|"|>', quote='<|"|>'),
           seen_in=(("<|tool_call>", "call:"),)),
    Format("function_gemma", _GEMMA, Written("<start_function_call>", "<start_function_call>call:{name}{",
                                             "}<end_function_call>", field=("", ":", "", ",", ""),
                                             raw="<escape>", quote="<escape>"),
           seen_in=(("<start_function_call>", "call:"),)),
    Format("llama3_json", {
        "answer": Start(_marks(("<|python_tag|>", "answer"), ("{", "call"))),
        "call": Envelope("next", is_bare=True),
        "next": Start(_marks(("{", "call")), skip=" \t\r\n;,"),
        "text": Until(TEXT, _marks(("<|python_tag|>", "answer"))),
    }, Written("", '{"name": "{name}", "parameters": ', "}", between="; "),
        seen_in=(('{"name": function name, "parameters"',), ("<|python_tag|>", '"parameters"')), is_bare=True),
    Format("pythonic", _pythonic(
        _marks(("<|python_start|>", "answer"), ("<|python_end|>", "text")),
        answer=Start(_marks(("<|python_start|>", "answer"), ("<|python_tag|>", "answer"), ("[", "name")))),
        Written("", "{name}(", ")", between=", ", before="[", after="]", field=("", "=", "", ", ", "")),
        seen_in=(("<|python_start|>",), ("[func_name1(", "params_name1")), is_bare=True),
    Format("lfm2", _pythonic(_marks(("<|tool_call_start|>", "open"), ("<|tool_call_end|>", "text")),
                             open=Start(_marks(("[", "name")), otherwise="broken")),
           Written("<|tool_call_start|>", "{name}(", ")", between=", ", before="<|tool_call_start|>[",
                   after="]<|tool_call_end|>", field=("", "=", "", ", ", "")), seen_in=(("<|tool_call_start|>",),)),
    Format("invoke", _xml("<atem:function_calls>", '<atem:invoke name="', '">', '<atem:parameter name="', '">',
                          "</atem:parameter>", "</atem:invoke>", ("</atem:function_calls>",)),
           Written("<atem:function_calls>", '<atem:invoke name="{name}">\n', "</atem:invoke>\n",
                   before="<atem:function_calls>\n", after="</atem:function_calls>",
                   field=('<atem:parameter name="', '">', "\n", "", ""), raw="</atem:parameter>"),
           seen_in=(('<atem:invoke name="',),)),
)}

REASONING_FORMATS: dict[str, ReasoningFormat] = {each.name: each for each in (
    ReasoningFormat("think", "<think>", "</think>", "\n</think>\n\n"),
    ReasoningFormat("magistral", "[THINK]", "[/THINK]", "[/THINK]"),
    ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>", "\n<channel|>"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", "\n</seed:think>"),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:", "\nHere is my response:"),
    ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>",
                    "<|end|><|start|>assistant<|channel|>final<|message|>"),
)}

ONLY_TEXT = Format("none", {"text": Until(TEXT, _marks())}, Written("", "", ""))


def with_reasoning(tools: Format, reasoning: ReasoningFormat | None) -> dict[str, State]:
    """Return the states of a format of calls, in which an output may begin with reasoning: in the state `begin`."""
    states = {"answer": tools.states.get("answer", tools.states["text"]), **tools.states}
    if tools.name == "harmony" or reasoning is None:
        return {**states, "begin": states["answer"]}
    if reasoning.name == "harmony":
        return with_reasoning(FORMATS["harmony"], None)
    return {**states, "begin": Start(_marks((reasoning.open, "reasoning")), otherwise="answer"),
            "reasoning": Until(REASONING, _marks((reasoning.close, "answer")))}


def format_of_template(template: str) -> str | None:
    """Return the name of the format in which a chat template writes tool calls; None: it is none of the table."""
    return next((each.name for each in FORMATS.values() if not any(text in template for text in each.not_in)
                 and any(all(text in template for text in texts) for texts in each.seen_in)), None)


def reasoning_of_template(template: str) -> str | None:
    """Return the name of the format of reasoning in a chat template; None: it has none of the table."""
    if "<|channel|>" in template and "analysis" in template:
        return "harmony"
    return next((each.name for each in REASONING_FORMATS.values() if each.name != "harmony"
                 and (each.open in template or each.close in template)), None)
