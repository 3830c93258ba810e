"""Random outputs with text, reasoning and tool calls in each format, for test_tool_calls.py and its campaign."""

import codecs
import json
import random
from itertools import count

from batch_manager.extras.tool_calls import FORMATS, REASONING_FORMATS, CallParser

NAMES = ("f", "get_weather", "mcp.server-1_search", "n" * 200)
STRINGS = ("", "Paris", 'say "hi"', "it's", "line\n\nline\n", "\\n \\", "😀 e\u0301 中文", "</tool_call>",
           "[TOOL_CALLS]", "{[(", "}])", "<think>", "a, b: c=d",
           " blank ", "3", "true", "None", "<", "\u2028\x7f\t", "<|call", "```")
SPLICES = ('"', "\\", "{", "}", "[", "]", "<", "😀", " ", "\n", "'", ",", "f(", "<think>", "</think>", "None",
           "\\u12", "\\x4", "=", ":", "e\u0301")


def value(draw: random.Random, depth: int = 2, plain_keys: bool = False):
    kind = draw.randrange(8 if depth else 6)
    if kind < 2:
        return draw.choice(STRINGS)
    if kind < 6:
        return draw.choice([0, -7, 10**15, 2.5, -1e-7, 1e20, True, False, None])
    if kind == 6:
        return [value(draw, depth - 1, plain_keys) for _ in range(draw.randrange(4))]
    keys = ("a", "key_2", "été") if plain_keys else ("a", "key 2", 'k"', "")
    return {draw.choice(keys): value(draw, depth - 1, plain_keys) for _ in range(draw.randrange(3))}


def arguments(draw: random.Random, name: str) -> dict:
    is_plain = name in ("gemma", "function_gemma")
    names = draw.sample(("city", "days", "x_1", "deep"), draw.randrange(5))
    return {key: value(draw, plain_keys=is_plain) for key in names}


_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
          type(None): "null"}


def tool_of(given: dict) -> dict:
    return {"type": "object", "properties": {key: {"type": _KINDS[type(each)]} for key, each in given.items()}}


def _gemma(each, quote: str) -> str:
    if isinstance(each, str):
        return f"{quote}{each}{quote}"
    if isinstance(each, list):
        return "[" + ",".join(_gemma(one, quote) for one in each) + "]"
    if isinstance(each, dict):
        return "{" + ",".join(f"{key}:{_gemma(one, quote)}" for key, one in each.items()) + "}"
    return json.dumps(each)


def _xml(given: dict, before: str, middle: str, after: str) -> str:
    return "".join(before + key + middle + (each if isinstance(each, str) else json.dumps(each)) + after
                   for key, each in given.items())


def written(name: str, calls: list[tuple[str, dict]], draw: random.Random) -> str:
    """Return the calls as a chat template of the format writes them."""
    def js(each):
        return json.dumps(each, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 1]))

    if name == "hermes":
        pairs = [draw.choice([{"name": n, "arguments": a}, {"arguments": a, "name": n}]) for n, a in calls]
        return "\n".join(f"<tool_call>\n{js(pair)}\n</tool_call>" for pair in pairs)
    if name == "qwen3_coder":
        fields = [_xml(a, "<parameter=", ">\n", "\n</parameter>\n") for _, a in calls]
        return "\n".join(f"<tool_call>\n<function={n}>\n{each}</function>\n</tool_call>"
                         for (n, _), each in zip(calls, fields, strict=True))
    if name == "glm":
        fields = [_xml(a, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n") for _, a in calls]
        return "\n".join(f"<tool_call>{n}\n{each}</tool_call>" for (n, _), each in zip(calls, fields, strict=True))
    if name == "invoke":
        return "<atem:function_calls>\n" + "".join(
            f'<atem:invoke name="{n}">\n' + _xml(a, '<atem:parameter name="', '">', "</atem:parameter>\n")
            + "</atem:invoke>\n" for n, a in calls) + "</atem:function_calls>"
    if name == "mistral":
        return "[TOOL_CALLS] " + js([{"name": n, "arguments": a, "id": "abcdefghi"} for n, a in calls])
    if name == "mistral_args":
        return "".join(f"[TOOL_CALLS]{n}{draw.choice(['', '[CALL_ID]abcdefghi'])}[ARGS]{js(a)}" for n, a in calls)
    if name in ("deepseek_v3", "deepseek_v31"):
        begin, end = (("function<｜tool▁sep｜>", "\n```json\n"), "\n```") if name[-1] == "3" else (
            ("", "<｜tool▁sep｜>"), "")
        return "<｜tool▁calls▁begin｜>" + "\n".join(
            f"<｜tool▁call▁begin｜>{begin[0]}{n}{begin[1]}{js(a)}{end}<｜tool▁call▁end｜>" for n, a in calls
        ) + "<｜tool▁calls▁end｜>"
    if name == "harmony":
        return "<|start|>assistant".join(
            draw.choice([f" to=functions.{n}<|channel|>commentary json<|message|>",
                         f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>"]) + js(a) + "<|call|>"
            for n, a in calls)
    if name in ("gemma", "function_gemma"):
        begin, end, quote = (("<|tool_call>", "<tool_call|>", '<|"|>') if name == "gemma" else
                             ("<start_function_call>", "<end_function_call>", "<escape>"))
        return "".join(f"{begin}call:{n}{_gemma(a, quote)}{end}" for n, a in calls)
    if name == "llama3_json":
        return "; ".join(js({"name": n, "parameters": a}) for n, a in calls)
    inside = ", ".join(f"{n}({', '.join(f'{key}={each!r}' for key, each in a.items())})" for n, a in calls)
    return {"pythonic": f"[{inside}]", "lfm2": f"<|tool_call_start|>[{inside}]<|tool_call_end|>"}[name]


def output(name: str, seed: int) -> tuple[str, dict, list[tuple[str, dict]]]:
    """Return a random output, name -> schema of its tools, and its calls."""
    draw = random.Random(f"{name} {seed}")
    calls = [(called, arguments(draw, name)) for called in draw.sample(NAMES, draw.randrange(1, 4))]
    text = written(name, calls, draw)
    if name == "harmony":
        lead = draw.choice(["", "<|channel|>analysis<|message|>so\n😀 it<|end|><|start|>assistant",
                            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"])
    elif FORMATS[name].is_bare:
        lead = draw.choice(["", "\n", "<think>\nso 😀 it\n</think>\n\n"])
    else:
        lead = draw.choice(["", "Let me < see. ", "<think>\nso 😀 it\n</think>\n\n", "<think>so</think>I call.\n"])
    return lead + text, {called: tool_of(given) for called, given in calls}, calls


def damaged(text: str, name: str, draw: random.Random) -> str:
    for _ in range(draw.randrange(1, 5)):
        at, kind = draw.randint(0, len(text)), draw.randrange(5)
        if kind == 0:
            text = text[:at] + text[at + draw.randint(1, 6):]
        elif kind == 1:
            text = text[:at] + draw.choice(sorted(FORMATS[name].marks)) + text[at:]
        elif kind == 2:
            text = text[:at] + draw.choice(SPLICES) + text[at:]
        elif kind == 3:
            text = text[:at]
        else:
            other = draw.randint(0, len(text))
            text = text[:at] + text[other:other + 20] + text[at:]
    return text


def cut(text: str, draw: random.Random) -> list[str]:
    """Return the text in pieces, as a detokenizer makes them of tokens that may end within a character."""
    content, decoder, pieces, at = text.encode(), codecs.getincrementaldecoder("utf-8")(), [], 0
    while at < len(content):
        size = draw.choice([1, 1, 1, 2, 3, 5, 9, 30])
        pieces.append(decoder.decode(content[at:at + size]))
        at += size
    return pieces


def parsed(name: str, pieces: list[str], tools: dict, reasoning: str | None = None, in_reasoning: bool = False):
    """Return the events of an output, neighbours of the same kind joined."""
    ids = map(str, count())
    parser = CallParser(FORMATS.get(name), REASONING_FORMATS.get(reasoning), tools, in_reasoning=in_reasoning,
                        new_id=lambda: next(ids))
    events = []
    for each in (*(event for piece in pieces for event in parser.push(piece)), *parser.finish()):
        if events and each.text and (events[-1].kind, events[-1].call) == (each.kind, each.call):
            events[-1] = events[-1]._replace(text=events[-1].text + each.text)
        else:
            events.append(each)
    return events


def reasoning_for(name: str, draw: random.Random) -> str | None:
    return "harmony" if name == "harmony" else draw.choice(["think", None])


def harmony_of(library, draw: random.Random) -> tuple[str, list[tuple[str, str | None, str]]]:
    """Return an output of gpt-oss as openai-harmony renders it, and its messages: (channel, recipient, text)."""
    from openai_harmony import Message, Role

    plain = [each for each in STRINGS if each.strip() and "<|" not in each]
    messages = []
    for kind in [*draw.choices("acp", k=draw.randrange(4)), draw.choice("fpp")]:
        name, text = draw.choice(NAMES[:3]), " ".join(draw.choices(plain, k=3))
        messages.append({"a": ("analysis", None, text), "c": ("commentary", None, text), "f": ("final", None, text),
                         "p": ("commentary", f"functions.{name}", json.dumps({"a": text}, ensure_ascii=False))}[kind])
    rendered = []
    for channel, recipient, text in messages:
        message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
        if recipient:
            kind = draw.choice(["<|constrain|>json", "json"])
            message = message.with_recipient(recipient).with_content_type(kind)
        rendered.append(library.decode_utf8(library.render(message)))
    return "".join(rendered).removeprefix("<|start|>assistant"), messages


def expected_of_harmony(messages: list) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the text, the reasoning and the calls of messages, without blanks."""
    def joined(*channels: str) -> str:
        return "".join("".join(text.split()) for channel, recipient, text in messages
                       if channel in channels and recipient is None)
    calls = [(recipient.removeprefix("functions."), text) for _, recipient, text in messages if recipient is not None]
    return joined("commentary", "final"), joined("analysis"), calls


def of_harmony(events: list) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the same of events."""
    def joined(kind: str) -> str:
        return "".join("".join(event.text.split()) for event in events if event.kind == kind)
    names = [event.name for event in events if event.kind == "begins"]
    return joined("text"), joined("reasoning"), [
        (name, "".join(event.text for event in events if event.kind == "arguments" and event.call == number))
        for number, name in enumerate(names)]


def tiresome(name: str, size: int) -> dict[str, str]:
    """Return kind -> a text of about `size` characters that may be slow to parse."""
    def of(text: str, start: str = "") -> str:
        return start + text * (size // len(text))

    if name not in FORMATS:
        return {"begins": of("<"), "blanks": of(" \n")}
    form = FORMATS[name].written
    marks = sorted(FORMATS[name].marks) or ["<"]
    text = "<|channel|>final<|message|>" if name == "harmony" else ""
    head = (form.before + form.begin.removeprefix(form.trigger if form.before == form.trigger else "")).replace("␣", "")
    called = head.replace("{name}", "f")
    kinds = {
        "begins": of(marks[0][0], text), "almost marks": of(marks[0][:-1] + " ", text), "blanks": of("  \n\n", text),
        "marks": of("".join(marks)), "a name": of("abcd", head.partition("{name}")[0]), "a word": of("abcd", called),
        "brackets": of("{[", called), "numbers": of("1, ", called + '{"a": ['), "blank arguments": of(" ", called),
        "objects": of('"b": {"c": "d"}, ', called + '{"a": {'), "strings": of('"", ', called + '{"a": ['),
        "backslashes": of("\\n", called + '{"a": "'),
    }
    if form.field is not None:
        first, middle, after, *_ = form.field
        kinds |= {"a key": of("abcd", called + first), "a value": of("abcd", called + first + "a" + middle),
                  "a blank value": of("\n", called + first + "a" + middle),
                  "fields": of(f"{first}a{middle}b{form.raw}{after or ', '}", called)}
    if "{name}" in form.begin and '"name"' in form.begin:
        before = called.partition('{"name"')[0]
        kinds |= {"JSON in a string": of("abcd", called + '"'), "another key": of("abcd", before + '{"'),
                  "another value": of("1,", before + '{"x": ['), "arguments first": of(
                      "abcd", before + '{"arguments": {"a": "')}
    return kinds
