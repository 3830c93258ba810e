"""T24: tool calls and reasoning: more of what tests/extras/test_tool_calls.py proves, templates of trl, and the time.

    python -m tests.campaigns --tier F --suite T24            # cuttings, schemas and time
    python tests/campaigns/tool_calls.py --cuttings 10000     # of each format: the events of the whole text
    python tests/campaigns/tool_calls.py --templates          # trl's chat templates (pip install --no-deps trl)
    python tests/campaigns/tool_calls.py --schemas 2000       # forced calls at temperature 1.5, checked by jsonschema
    python tests/campaigns/tool_calls.py --harmony 1000       # what openai-harmony writes and reads
    python tests/campaigns/tool_calls.py --time               # microseconds of CPU time per token

`--harmony` needs openai-harmony, and its vocabulary o200k_base.tiktoken in the folder TIKTOKEN_ENCODINGS_BASE.
`--record FILE` writes what it saw, for tests/extras/harmony.json.

The exit status is 1 if anything differed. Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from batch_manager.extras.chat_template import chat_prompt
from batch_manager.extras.tool_calls import (
    FORMATS,
    REASONING_FORMATS,
    CallParser,
    format_of_template,
    reasoning_of_template,
)
from tests.campaigns.registry import Options, Summary
from tests.extras import tool_call_texts as texts

MOST_US = 5

def run(options: Options) -> Summary:
    """Run the cuttings of a tier in half of the time, its schemas in the other half, and the time of tokens."""
    num_cuttings, num_schemas = {"Q": (20, 14), "F": (10_000, 2_000), "C": (100_000, 20_000)}[options.tier]
    half = float("inf") if options.seconds is None else options.seconds / 2
    summary, script, told = Summary(""), "python tests/campaigns/tool_calls.py", []
    if cuttings(num_cuttings, options.first_seed, half):
        summary.failures.append(f"{script} --cuttings {num_cuttings} --first-seed {options.first_seed}")
    if schemas(num_schemas, options.first_seed, half, told.append):
        summary.failures.append(f"{script} --schemas {num_schemas} --first-seed {options.first_seed}")
    if cost():
        summary.failures.append(f"{script} --time")
    summary.ran = f"T24: {len(FORMATS)} formats, up to {num_cuttings:,} cuttings each; {told[-1]}"
    if options.seconds is not None:
        summary.short.append("the time was limited")
    return summary


def cuttings(count: int, first_seed: int, seconds: float = float("inf")) -> int:
    """Compare the events of cut texts with those of the whole; half of the texts are damaged."""
    wrong, each_s = 0, seconds / len(FORMATS)
    for name in FORMATS:
        bad, end = 0, time.monotonic() + each_s
        for seed in range(first_seed, first_seed + count):
            if time.monotonic() > end:
                break
            draw = random.Random(seed)
            text, tools, calls = texts.output(name, seed // 2)
            reasoning, is_inside = "harmony" if name == "harmony" else "think", False
            if seed % 2:
                text = texts.damaged(text, name, draw)
                reasoning, is_inside = texts.reasoning_for(name, draw), draw.random() < 0.2
            whole = texts.parsed(name, [text], tools, reasoning, is_inside)
            if texts.parsed(name, texts.cut(text, draw), tools, reasoning, is_inside) != whole:
                bad += 1
                print(f"{name}, seed {seed}: the events of a cutting differ")
            elif not seed % 2 and read_back(whole) != calls:
                bad += 1
                print(f"{name}, seed {seed}: the calls differ")
        print(f"{name}: {seed + 1 - first_seed:,} cuttings, {bad} wrong", flush=True)
        wrong += bad
    return wrong


def read_back(events: list) -> list[tuple[str, dict]]:
    begun = [event for event in events if event.kind == "begins"]
    return [(event.name, json.loads("".join(part.text for part in events if part.kind == "arguments"
                                            and part.call == number))) for number, event in enumerate(begun)]


def templates() -> int:
    """Let each chat template of trl that reads tools write a call, and read the call back."""
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
    given = {"city": 'Paris "x"\n</tool_call>é 😀', "days": 3, "deep": {"a": [1, True]}, "flag": False, "list": ["u"]}
    kinds = {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"},
             "flag": {"type": "boolean"}, "list": {"type": "array"}}
    parameters = {"type": "object", "properties": kinds}
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": parameters}}]
    read = wrong = 0
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text()
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / "chat_template.jinja").write_text(template)
            (Path(model) / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
            call = {"id": "abcdefghi", "type": "function",
                    "function": {"name": "get_weather", "arguments": json.dumps(given)}}
            messages = [{"role": "user", "content": "Rain?"},
                        {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                begin = chat_prompt(model, messages[:1], tools)
                text = chat_prompt(model, messages, tools, add_generation_prompt=False)
            except Exception as error:
                print(f"{path.name}: reads no tools here: {str(error)[:60]}")
                continue
        if "get_weather" not in text[text.rindex("Rain?"):]:
            print(f"{path.name}: does not write calls")
            continue
        same = next((at for at in range(min(len(begin), len(text))) if begin[at] != text[at]), len(begin))
        name, reasoning = format_of_template(template), reasoning_of_template(template)
        events = texts.parsed(name, [text[same:]], {"get_weather": parameters}, reasoning,
                              reasoning is not None and REASONING_FORMATS[reasoning].is_open_in(text[:same]))
        is_good = read_back(events) == [("get_weather", given)]
        read, wrong = read + 1, wrong + (not is_good)
        print(f"{path.name}: {name}, {reasoning}: {'read back' if is_good else f'WRONG {read_back(events)}'}")
    print(f"{read} templates write calls, {wrong} wrong")
    return wrong


def harmony(count: int, first_seed: int, record: str | None) -> int:
    """Let openai-harmony write outputs of gpt-oss, and read them and damaged ones; compare what our parser reads."""
    from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

    library = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    seen, wrong = [], 0
    for seed in range(first_seed, first_seed + count):
        draw = random.Random(seed)
        text, messages = texts.harmony_of(library, draw)
        read = library.parse_messages_from_completion_tokens(library.encode(text, allowed_special="all"),
                                                             Role.ASSISTANT)
        told = [(message.channel, message.recipient, message.content[0].text) for message in read]
        events = texts.parsed("harmony", texts.cut(text, draw), {}, "harmony")
        if told != messages or texts.of_harmony(events) != texts.expected_of_harmony(messages):
            wrong += 1
            print(f"harmony, seed {seed}: {text!r}: {messages}, {told}, {texts.of_harmony(events)}")
        seen.append({"text": text, "messages": messages})
    if record:
        Path(record).write_text(json.dumps(seen, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{count:,} outputs by openai-harmony, {wrong} wrong")
    return wrong


def schemas(count: int, first_seed: int, seconds: float, tell: Callable[[str], None] = print) -> int:
    from tests.extras import forced_calls

    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = forced_calls.run(folder, range(first_seed, first_seed + count), seconds)
    for each in wrong:
        print(each)
    tell(f"seeds from {first_seed} on: {', '.join(f'{number:,} {what}' for what, number in sorted(counts.items()))}; "
         f"{len(wrong)} wrong")
    return len(wrong)


def cost() -> int:
    """Print the microseconds of CPU time per token of 4 characters: the least of seven runs. Return how many exceed 5.

    `worst` is the costliest of texts of 100 kB that are all marks, begins of marks, brackets, blanks or one word.
    """
    wrong = 0
    plain = "We walked to the village, then home again, and so on. " * 400
    given = {"a": plain, "b": [[1, 2, {"x": "y"}]] * 500}
    kinds = {"f": texts.tool_of(given)}
    for name in ("none", *FORMATS):
        draw = random.Random(1)
        of_calls = texts.written(name, [("f", given)], draw) if name in FORMATS else plain
        of_text = "<|channel|>final<|message|>" + plain if name == "harmony" else plain
        figures = [_cost(name, text, kinds, 7) for text in (of_text, of_calls)]
        worst = max((_cost(name, text, kinds, 2), kind) for kind, text in texts.tiresome(name, 100_000).items())
        wrong += max(*figures, worst[0]) > MOST_US
        print(f"{name:16} text {figures[0]:5.2f} us a token, calls {figures[1]:5.2f} us a token, worst {worst[0]:5.2f} "
              f"us a token ({worst[1]})", flush=True)
    return wrong


def _cost(name: str, text: str, tools: dict, num_runs: int) -> float:
    pieces, runs = [text[at:at + 4] for at in range(0, len(text), 4)], []
    for _ in range(num_runs):
        parser = CallParser(FORMATS.get(name), REASONING_FORMATS["think"], tools)
        began = time.process_time()
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        runs.append((time.process_time() - began) / len(pieces) * 1e6)
    return min(runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuttings", type=int, help="of each format")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--templates", action="store_true")
    parser.add_argument("--schemas", type=int, help="number of seeds; the formats take turns")
    parser.add_argument("--harmony", type=int, help="number of outputs")
    parser.add_argument("--record", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of --schemas")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    wrong = 0
    if options.cuttings:
        wrong += cuttings(options.cuttings, options.first_seed)
    if options.templates:
        wrong += templates()
    if options.schemas:
        wrong += schemas(options.schemas, options.first_seed, options.seconds)
    if options.harmony:
        wrong += harmony(options.harmony, options.first_seed, options.record)
    if options.time:
        wrong += cost()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
