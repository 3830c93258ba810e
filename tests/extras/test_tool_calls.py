"""T24: text, reasoning and tool calls of an output are the same however its text is cut, in every format.

tool_call_texts.py makes the outputs. This file runs a few hundred cuttings; more:

    python tests/campaigns/tool_calls.py --cuttings 10000
"""

import ast
import contextlib
import json
import random
import re
from pathlib import Path

import pytest

from batch_manager.errors import InvalidRequestError
from batch_manager.extras.tool_calls import (
    FORMATS,
    REASONING_FORMATS,
    CallParser,
    format_of_template,
    reasoning_of_template,
)
from batch_manager.extras.tool_calls.formats import with_reasoning
from batch_manager.extras.tool_calls.grammar import Called, CallGrammar, CannotForce
from batch_manager.extras.tool_calls.raw_strings import CannotTranslate, conditions, whole_regex
from tests.extras import tool_call_texts as texts

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"
SEEDS = 20


def called(events):
    """Return (name, arguments) of each call of the events, which are whole."""
    assert all(event.is_whole for event in events)
    begun = [event for event in events if event.kind == "begins"]
    assert sum(event.kind == "ends" for event in events) == len(begun)
    joined = ["".join(event.text for event in events if event.call == number and event.kind == "arguments")
              for number in range(len(begun))]
    return [(event.name, json.loads(text)) for event, text in zip(begun, joined, strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_written_calls_are_read_back_however_they_are_cut(name):
    for seed in range(SEEDS):
        text, tools, calls = texts.output(name, seed)
        draw = random.Random(seed)
        reasoning = "harmony" if name == "harmony" else "think"
        whole = texts.parsed(name, [text], tools, reasoning)
        assert called(whole) == calls, text
        assert texts.parsed(name, texts.cut(text, draw), tools, reasoning) == whole, text
        assert texts.parsed(name, list(text), tools, reasoning) == whole, text


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_calls_have_the_same_events_however_they_are_cut(name):
    for seed in range(SEEDS):
        text, tools, _ = texts.output(name, seed)
        draw = random.Random(seed)
        text = texts.damaged(text, name, draw)
        reasoning, in_reasoning = texts.reasoning_for(name, draw), draw.random() < 0.2
        whole = texts.parsed(name, [text], tools, reasoning, in_reasoning)
        assert texts.parsed(name, texts.cut(text, draw), tools, reasoning, in_reasoning) == whole, text


@pytest.mark.parametrize("name", FORMATS)
def test_no_mark_of_a_state_is_a_part_of_another(name):
    for reasoning in (None, *REASONING_FORMATS.values()):
        for state in with_reasoning(FORMATS[name], reasoning).values():
            marks = list(getattr(state, "marks", ()))
            assert not [(one, other) for one in marks for other in marks if one is not other and one in other]


def test_a_text_without_marks_stays_as_it_is():
    for name in (*FORMATS, "none"):
        for text in ("", "Hello. ", "a < b and [c] = {d}\n\n", "<tool_cal", "12 ", "  \n"):
            if name != "harmony":                    # there, a header comes first
                assert "".join(event.text for event in texts.parsed(name, list(text), {}, "think")) == text


def guided_of(special=()):
    """Return a GuidedDecoding whose tokenizer has special tokens. `matches` tells whether a grammar has a text."""
    pytest.importorskip("torch")
    pytest.importorskip("llguidance")
    from batch_manager.extras.guided_decoding import GuidedDecoding

    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(list(special))
    guided = GuidedDecoding(tokenizer, vocab_size=tokenizer.get_vocab_size(), end_id=1)

    def matches(grammar, text):
        matcher = grammar.matcher.deep_copy()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    guided.matches, guided.special = matches, {each: tokenizer.token_to_id(each) for each in special}
    return guided


@pytest.fixture(scope="module")
def guided():
    return guided_of()


@pytest.mark.parametrize("name, special", [
    *((name, ()) for name in FORMATS), ("hermes", ("<tool_call>", "</tool_call>")), ("mistral", ("[TOOL_CALLS]",)),
    ("gemma", ('<|"|>', "<|tool_call>", "<tool_call|>")), ("glm", ("<tool_call>", "<arg_key>", "</arg_value>"))])
def test_a_forced_call_is_written_as_the_template_writes_it(name, special, guided):
    class First:                         # of all ways in which a template may write JSON
        choice, random = staticmethod(lambda options: options[0]), staticmethod(lambda: 1)

    given = {"city": "Bath", "days": 3, "now": True}
    tool = {"type": "object", "required": list(given), "properties": {
        "city": {"type": "string", "maxLength": 9, "pattern": "^B"}, "days": {"type": "integer"},
        "now": {"type": "boolean"}}}
    calls = [("get_weather", given), ("f", {})]
    text = texts.written(name, calls if name != "harmony" else calls[:1], First())
    text = text.replace(', "id": "abcdefghi"', "").removesuffix("<|call|>").replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    text = text.replace("end｜>\n", "end｜>") if name == "deepseek_v31" else text
    tools = {"get_weather": tool, "f": {"type": "object", "properties": {}, "additionalProperties": False}}
    guided = guided_of(special) if special else guided
    held = guided.lark(CallGrammar(guided.special).lark(FORMATS[name], Called(tools, True), None))
    assert guided.matches(held, text), text
    assert not guided.matches(held, text.replace("Bath", "Rome").replace("3", "x"))
    free = guided.lark(CallGrammar(guided.special).lark(FORMATS[name], Called(tools, False), None))
    if name != "harmony":
        assert guided.matches(free, text) and guided.matches(free, "No call.")


STRING, FLAG = {"type": "string"}, {"type": "boolean"}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"], "additionalProperties": False}


@pytest.mark.parametrize("schema, good, bad", [
    (FLAG, "True|False", "true|1"),
    ({}, """True|None|"x"|'x'|[1, {'a': None, "b": [True]}]|3.5|[]|{}""", "null|x"),
    (STRING, r"""'it\'s'|'a"b'|"it's"|''""", "x|'a"),
    (STRING | {"maxLength": 2}, """"x"|'xy'|''""", "'xyz'"),
    (STRING | {"pattern": "^a/b$"}, """"a/b"|'a/b'""", "'ab'"),
    ({"enum": ["it's", None, 3, True, [1, "x"], {"k": None}]}, """"it's"|None|3|True|[1, 'x']|{'k': None}""",
     "null|4|[1, 2]"),
    ({"type": "number", "enum": [1, 2.5]}, "1|2.5", "3"),
    ({"type": ["string", "null"]}, "'x'|None", "null|True"),
    ({"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]}, "3|None", "null|10"),
    ({"type": "array", "items": FLAG, "minItems": 1, "maxItems": 2}, "[True]|[True, False]",
     "[]|[true]|[True, True, True]"),
    ({"type": "array", "items": FLAG, "maxItems": 1}, "[]|[False]", "[True, True]"),
    ({"type": "object", "properties": {"x": FLAG, "y": STRING}, "required": ["y"]},
     """{'y': 'a'}|{"x": True, "y": "a"}""", "{'x': True}|{'x': true, 'y': 'a'}"),
    ({"type": "object", "additionalProperties": FLAG}, "{}|{'k': True, 'z': False}", "{'k': 3}"),
    ({"$ref": "#/$defs/node"}, "{'next': {'next': None}}", "{'next': 3}"),
    ({"allOf": [FLAG]}, "true", "True"),                              # held as JSON, which is read, too
])
def test_values_of_a_forced_call_are_literals_of_python(schema, good, bad, guided):
    tool = {"properties": {"a": schema}, "required": ["a"], "additionalProperties": False, "$defs": {"node": NODE}}
    held = guided.lark(CallGrammar({}).lark(FORMATS["pythonic"], Called({"f": tool}, True), None))
    for value in good.split("|"):
        assert guided.matches(held, f"[f(a={value})]"), value
        (call,) = called(texts.parsed("pythonic", [f"[f(a={value})]"], {"f": tool}))
        assert call == ("f", {"a": True if value == "true" else ast.literal_eval(value)})
    assert not [value for value in bad.split("|") if guided.matches(held, f"[f(a={value})]")]


def test_what_is_no_schema_is_refused_as_such(guided):
    deep = FLAG
    for _ in range(950):
        deep = {"type": "array", "items": deep}
    for wrong in (5, {"a": 5}, {"a": {"enum": 5}}, {"a": {"type": {"x": 1}}}, {"a": deep},
                  {"a": {"anyOf": 5}}, {"a": {"type": "object", "properties": [1]}}):
        for name in FORMATS:
            with contextlib.suppress(CannotForce, InvalidRequestError):     # and not another exception
                guided.lark(CallGrammar({}).lark(FORMATS[name], Called({"f": {"properties": wrong}}, True), None))


def test_patterns_and_formats_of_strings_without_quotes(guided):
    words = ("", "a", "b", "abc", "xay", "aa/b", "12-3", "1_", "x y", "[&]", "é", "caab", "a\nb", "A.b", "z|")
    for pattern in ("^a", "a$", "b", "^a|b$", "^[ab]+$", r"^\d+-\d$", r"\w\s\w", "^(?:a|xa)b?", "a/b", r"[\[&]",
                    "^[^a]*$", "^.{2,4}$", "", r"^\u0061\x62", r"\.", r"z\|$"):
        held = guided.regex(whole_regex(pattern))
        for word in words:
            assert guided.matches(held, word) == bool(re.search(pattern, word)), (pattern, word)
    for pattern in ("(?=a)b", r"(a)\1", r"\bword", "a(^b|c)", "x$y", "(?<name>a)", "[]a]", r"\p{L}"):
        with pytest.raises(CannotTranslate):
            whole_regex(pattern)
    for kind, good, bad in (
            ("date", ("2024-02-29", "1999-12-31", "2000-02-29"), ("2023-02-29", "1900-02-29", "2024-04-31", "24-3-01")),
            ("time", ("23:59:59Z", "00:00:00.5+02:00"), ("24:00:00Z", "12:00:00")),
            ("date-time", ("2024-02-29T00:00:00Z",), ("2024-02-29",)),
            ("ipv4", ("10.0.255.1",), ("256.1.1.1", "1.1.1")),
            ("email", ("a.b@c.org",), ("a@b", "@c.org")), ("hostname", ("a-b.c",), ("-a", "a..b"))):
        held = guided.regex(conditions({"type": "string", "format": kind})[0])
        assert all(guided.matches(held, each) for each in good) and not any(guided.matches(held, each) for each in bad)
    with pytest.raises(CannotTranslate):
        conditions({"type": "string", "format": "color"})


def test_what_openai_harmony_writes_is_read_as_it_reads_it():
    """harmony.json was written by openai-harmony 0.0.8: `python tests/campaigns/tool_calls.py --harmony 12`."""
    for output in json.loads((Path(__file__).parent / "harmony.json").read_text(encoding="utf-8")):
        for pieces in ([output["text"]], list(output["text"])):
            events = texts.parsed("harmony", pieces, {}, "harmony")
            assert texts.of_harmony(events) == texts.expected_of_harmony(output["messages"])
            assert all(event.is_whole for event in events)


def test_harmony_outputs_that_are_not_as_they_should_be():
    call = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    for text, expected in (("No header.", [("text", "No header.")]), ("word " * 200, [("text", "word " * 200)]),
                           (call, [("begins", ""), ("ends", "")]), ("<|channel|>final", [])):
        assert [tuple(event)[:2] for event in texts.parsed("harmony", list(text), {}, "harmony")] == expected
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'               # where no call is allowed
    assert [tuple(event)[:2] for event in texts.parsed("none", list(text), {}, "harmony")] == [("text", '{"a": 1}')]


@pytest.mark.parametrize("size", [1, 7, 999])
def test_a_text_behind_another_one_begins_a_line(size):
    text = 'Sure.\n<tool_call>{"name": "f", "arguments": {}}</tool_call> Bye.'
    found = texts.parsed("hermes", [text[at:at + size] for at in range(0, len(text), size)], {"f": {}})
    assert [event.text for event in found if event.kind == "text"] == ["Sure.", "\nBye."]


@pytest.mark.parametrize("text, expected", [("Use </tool_call> here.", "Use  here."), ("a</tool_call>b", "ab"),
                                            ("a\n</tool_call>\nb\n", "a\n\nb\n"), ("</tool_call> a", " a")])
def test_an_end_mark_without_a_call_is_left_out_and_nothing_is_added(text, expected):
    for pieces in ([text], list(text)):
        assert [event.text for event in texts.parsed("hermes", pieces, {})] == [expected]


def test_names_that_are_not_in_the_list():
    """A call with a mark of its own is the client's to answer; without one, the text is no call."""
    (begins, *_) = texts.parsed("hermes", ['<tool_call>{"name": "other", "arguments": {}}</tool_call>'], {"f": {}})
    assert (begins.kind, begins.name) == ("begins", "other")
    for name, text in (("llama3_json", '{"name": "Emma", "parameters": {}}'), ("pythonic", "[print(1)]")):
        assert [tuple(event)[:2] for event in texts.parsed(name, [text], {"f": {}})] == [("text", text)]
    text = f"<tool_call>{' ' * 100}f</tool_call>x"       # far from its mark
    assert [tuple(event)[:2] for event in texts.parsed("glm", [text], {"f": {}})] == [("text", text)]


def test_a_call_that_is_cut_off_or_no_object_says_so():
    for name, text in (("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b'), ("pythonic", "[f(a='b"),
                       ("qwen3_coder", "<tool_call><function=f><parameter=a>b"), ("hermes", '<tool_call>{"name": "f"'),
                       ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a'),
                       ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1,}}</tool_call>')):
        *_, last = texts.parsed(name, [text], {"f": {}})
        assert last.kind == "ends" and not last.is_whole, name
    *_, last = texts.parsed("harmony", ["<|channel|>commentary to=functions.f<|message|>{}"], {})     # at <|call|>
    assert last.kind == "ends" and last.is_whole


def test_long_arguments_take_time_in_proportion():
    text = "".join(['<tool_call>{"name": "f", "arguments": {"a": "', "word \\n" * 15_000, '"}}</tool_call>'])
    (_, arguments, end) = texts.parsed("hermes", [text[at:at + 4] for at in range(0, len(text), 4)], {})
    assert len(arguments.text) > 100_000 and end.is_whole


def test_reasoning_that_the_prompt_opened_and_that_has_no_end():
    for pieces, is_open, expected in ((["so\n", "\n</think>", "\n\nHi."], True, [("reasoning", "so"), ("text", "Hi.")]),
                                      (["<thi", "nk>so"], False, [("reasoning", "so")])):
        assert [tuple(event)[:2] for event in texts.parsed("hermes", pieces, {}, "think", is_open)] == expected
    parser = CallParser(None, REASONING_FORMATS["think"], in_reasoning=True)
    seen = [parser.is_reasoning]
    for piece in ("a", "</think>", "b"):
        parser.push(piece)
        seen.append(parser.is_reasoning)
    assert seen == [True, True, False, False]


def test_the_chat_template_chooses_the_formats():
    for text, calls, reasoning in (
            ("{{ '<tool_call>' }}{{ '</tool_call>' }}", "hermes", None),
            ("<tool_call>\n<function= <parameter= <think>", "qwen3_coder", "think"),
            ("[TOOL_CALLS] [THINK]", "mistral", "magistral"), ("[TOOL_CALLS][ARGS]", "mistral_args", None),
            ("<｜tool▁calls▁begin｜>```json </think>", "deepseek_v3", "think"),
            ("<|channel|>analysis<|message|>", "harmony", "harmony"),
            ('{"name": function name, "parameters": dictionary}', "llama3_json", None),
            ("{% for m in messages %}{{ m.content }}{% endfor %}", None, None)):
        assert (format_of_template(text), reasoning_of_template(text)) == (calls, reasoning)
