"""Random schemas of tools, and the check that calls that the OpenAI service forces are valid for them."""

import asyncio
import json
import random
import re
import shutil
import time
from collections import Counter
from datetime import date

import jsonschema

from batch_manager import TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine
from batch_manager.extras.openai import OpenAIError, OpenAIService
from batch_manager.extras.tool_calls import FORMATS
from tests.extras.calling_model import MODEL, folder_of

AT_ONCE = 16
KEYS = ("city", "days", "unit", "x_1", "deep", "flag")
PATTERNS = ("^[a-c]{1,4}$", "b+", r"^\d{3}-\w\/?$|^x", "^(ab?|[^a-z<])*$")


# jsonschema reads dates with Python's, which have no year 0; RFC 3339 has it.
CHECKER = jsonschema.FormatChecker()
CHECKER.checks("date", raises=ValueError)(
    lambda text: not isinstance(text, str) or date.fromisoformat(re.sub("^0000", "2000", text)))


def schema(draw: random.Random, depth: int = 2) -> dict:
    kind = draw.choice(["string", "string", "integer", "number", "boolean", "enum", "const", "union",
                        *(["array", "object"] if depth else [])])
    if kind == "string":
        return draw.choice([{"type": "string"}, {"type": "string", "maxLength": draw.randrange(1, 9)},
                            {"type": "string", "minLength": 1, "maxLength": 6},
                            {"type": "string", "pattern": draw.choice(PATTERNS)},
                            {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 9},
                            {"type": "string", "format": draw.choice(["date", "date-time", "ipv4", "uuid", "email"])}])
    if kind in ("integer", "number"):
        return draw.choice([{"type": kind}, {"type": kind, "minimum": -5, "maximum": 40},
                            {"type": kind, "exclusiveMinimum": 0, "maximum": 7}])
    if kind == "enum":
        return {"enum": draw.choice([["a", "b c"], [1, 2], ["x", None, 3], [True], ["😀", 'say "hi"']])}
    if kind == "const":
        return {"const": draw.choice(["only", 5, None, "a\nb"])}
    if kind == "union":
        return draw.choice([{"type": ["string", "null"]}, {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                            {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]}])
    if kind == "array":
        return {"type": "array", "items": schema(draw, depth - 1), "minItems": draw.randrange(2), "maxItems": 3}
    if kind == "object":
        return tool_schema(draw, depth - 1)
    return {"type": kind}


def tool_schema(draw: random.Random, depth: int = 2) -> dict:
    names = draw.sample(KEYS, draw.randrange(4))
    return {"type": "object", "properties": {name: schema(draw, depth) for name in names},
            "required": [name for name in names if draw.random() < 0.7], "additionalProperties": False}


async def checked(service: OpenAIService, seed: int, counts: Counter, max_tokens: int) -> str | None:
    """Force a call at temperature 1.5. Return what is wrong."""
    draw = random.Random(seed)
    schemas = {name: tool_schema(draw) for name in ("f", "get_weather")[: draw.randrange(1, 3)]}
    tools = [{"type": "function", "function": {"name": name, "parameters": each, "strict": draw.random() < 0.5}}
             for name, each in schemas.items()]
    choice = draw.choice(["required", {"type": "function", "function": {"name": "f"}}])
    body = {"messages": [{"role": "user", "content": "Emma smiled"}], "tools": tools, "tool_choice": choice,
            "temperature": 1.5, "max_tokens": max_tokens, "seed": seed, "parallel_tool_calls": draw.random() < 0.3}
    try:
        answer = await service.accept(json.dumps(body).encode(), True)
        (output,) = json.loads(await answer.whole())["choices"]
    except OpenAIError as error:
        counts["refused"] += 1
        return None if error.status == 400 and error.param == "tools" else f"seed {seed}: {error.message}"
    reason, calls = output["finish_reason"], output["message"].get("tool_calls", [])
    counts[reason] += 1
    if reason != "length" and not (reason == "tool_calls" and calls):
        return f"seed {seed}: {output}"
    for number, call in enumerate(calls):
        name, text = call["function"]["name"], call["function"]["arguments"]
        if reason == "length" and number == len(calls) - 1:
            counts["cut off"] += 1
            continue
        try:
            assert choice == "required" or name == "f", name
            jsonschema.validate(json.loads(text), schemas[name], format_checker=CHECKER)
            counts["valid calls"] += 1
        except Exception as error:
            return f"seed {seed}: {name}({text}): {str(error)[:200]}; {json.dumps(schemas)}"
    return None


def run(folder, seeds: range, seconds: float = float("inf"), max_tokens: int = 200) -> tuple[Counter, list[str]]:
    """Check the seeds, with the formats in turn, for at most so many seconds. Return the counts and what is wrong."""
    names, end = list(FORMATS), time.monotonic() + seconds
    counts, wrong = Counter(), []
    model = folder_of(folder)
    shutil.copy(MODEL / "model.safetensors", model)

    async def main() -> None:
        params = TrtGptModelOptionalParams(max_batch_size=AT_ONCE, max_queued_requests=4 * AT_ONCE)
        async with await AsyncEngine.start(model, optional_params=params, takes_all=True) as engine:
            services = [OpenAIService(engine, model, ["m"], tool_call_parser=name, reasoning_parser="none")
                        for name in names]
            for service in services[1:]:
                service._guided = services[0]._guided_decoding()      # the same tokenizer
            waiting = iter(seeds)

            async def work() -> None:
                for seed in waiting:
                    if time.monotonic() > end:
                        return
                    counts["schemas"] += 1
                    found = await checked(services[seed % len(services)], seed, counts, max_tokens)
                    wrong.extend([f"{names[seed % len(services)]}, {found}"] if found else [])
            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    asyncio.run(main())
    return counts, wrong
