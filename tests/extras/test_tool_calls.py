"""Text, reasoning and tool calls of an output are the same however its text is cut, in every format.

tool_call_texts.py makes the outputs. This file runs a few hundred cuttings; more:

    python tests/campaigns/tool_calls.py --cuttings 10000
"""

import json
import random

import pytest

from batch_manager.extras.tool_calls import (
    FORMATS,
    REASONING_FORMATS,
    CallParser,
    format_of_template,
    reasoning_of_template,
)
from batch_manager.extras.tool_calls.formats import with_reasoning
from tests.extras import tool_call_texts as texts

SEEDS = 20


def called(events):
    """Return (name, arguments) of each call of the events, which are whole."""
    assert all(event.is_whole for event in events)
    begun = [event for event in events if event.kind == "begins"]
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


def test_names_that_are_not_in_the_list():
    """A call with a mark of its own is the client's to answer; without one, the text is no call."""
    (begins, *_) = texts.parsed("hermes", ['<tool_call>{"name": "other", "arguments": {}}</tool_call>'], {"f": {}})
    assert (begins.kind, begins.name) == ("begins", "other")
    for name, text in (("llama3_json", '{"name": "Emma", "parameters": {}}'), ("pythonic", "[print(1)]")):
        assert [tuple(event)[:2] for event in texts.parsed(name, [text], {"f": {}})] == [("text", text)]
    text = f"<tool_call>{' ' * 100}f</tool_call>x"       # far from its mark
    assert [tuple(event)[:2] for event in texts.parsed("glm", [text], {"f": {}})] == [("text", text)]


def test_a_call_that_is_cut_off_says_so():
    for name, text in (("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b'), ("pythonic", "[f(a='b"),
                       ("qwen3_coder", "<tool_call><function=f><parameter=a>b"), ("hermes", '<tool_call>{"name": "f"'),
                       ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a')):
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
