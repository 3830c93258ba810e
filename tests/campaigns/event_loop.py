"""Sends the largest allowed body of every kind to the OpenAI server, and measures its event loop and its memory.

A body has as many bytes or as many values as the server allows. Three bodies have more, and the server refuses them.

    python tests/campaigns/event_loop.py [--only KIND ...] [--rounds 3]

It is suite T19 of `python -m tests.campaigns`.

The server is `batch-manager serve` in a process of its own, with a context of 16,384 tokens; the bodies go over HTTP.
For each kind, the program prints three figures. `late`: the longest time by which a timer of the event loop was late.
`held`: the same, but at most the CPU time that the process used meanwhile, so that other programs on the machine count
less. `kept`: the resident memory afterwards, above that before the first body. A kind is wrong if `held` is more than
50 ms, or if it adds more than 10 MB to `kept`. A body with a larger `held` is sent up to three times, and the least
`held` counts: a body that holds the loop does so each time, other programs do not. The first requests after the start
are sent once. All bodies together may keep 25 MB: Python's allocator keeps an arena of a megabyte while one object in
it lives. Sent again and again, they may not keep more: the last round at most 2 MB more than the one in the middle.
Then each of the two caches that have a fixed most is filled: the KV cache's pool, and the names of the tokens.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.campaigns.registry import Options, Summary  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"
TEMPLATE = ("{% for t in tools or [] %}<tool_call>{{ t.function.name }}</tool_call>{% endfor %}"
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
CONTEXT = 16_384
POOL = 2 * CONTEXT     # tokens
ABOVE = ("too large", "too many values", "too many values by far")    # the bodies beyond the limits of the server
MOST_HELD_MS, MOST_TRIES = 50, 3
MOST_KEPT_MB, MOST_KEPT_OF_ALL_MB, MOST_GROWTH_MB = 10, 25, 2
SECONDS_TO_TRIM = 2.5

# ---------------------------------------------------------------------- the server's process


def serve(arguments: list[str]) -> int:
    """Run the server with one more route, which tells the figures since the last call and starts anew."""
    import asyncio

    from starlette.routing import Route

    from batch_manager.extras.openai import application
    from batch_manager.extras.openai.responses import json_response
    from batch_manager.tools.serve import main

    worst, watching = {"late": 0.0, "held": 0.0}, []

    async def watch() -> None:
        while True:
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            late = time.perf_counter() - began - 0.001
            worst["late"] = max(worst["late"], late)
            worst["held"] = max(worst["held"], min(late, time.process_time() - cpu))

    async def told(_: Any) -> Any:
        if not watching:
            watching.append(asyncio.create_task(watch()))
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        answer = json_response(json.dumps({**worst, "resident": resident}).encode())
        worst.update(late=0.0, held=0.0)
        return answer

    make_app = application.make_app

    def with_figures(*arguments: Any, **options: Any) -> Any:
        app = make_app(*arguments, **options)
        app.router.routes.append(Route("/figures", told))
        return app

    application.make_app = with_figures
    application.KvCacheConfig = partial(application.KvCacheConfig, max_tokens=POOL)
    return main(arguments)


# ---------------------------------------------------------------------- the bodies


def filled(start: str, item: Callable[[int], str], end: str, most: int, count: int = 10**9) -> bytes:
    """Return start + item(0) + "," + item(1) ... + end, with as many items as a body may have, but at most `count`.

    item   text of the item with a number. All items have as many values as the first
    most   largest number of bytes
    """
    from batch_manager.extras.openai.json_object import MOST_VALUES

    count = min(count, (MOST_VALUES - values_of(start + end)) // values_of(item(0) + ","))
    size, items = len(start) + len(end), []
    for number in range(count):
        items.append(item(number))
        size += len(items[-1].encode()) + 1
        if size > most:
            items.pop()
            break
    return (start + ",".join(items) + end).encode()


def values_of(text: str) -> int:
    """Return the number of values in a piece of a body, as the server counts them."""
    from batch_manager.extras.openai.json_object import VALUES_OF_A_LIST, VALUES_OF_A_NAME

    weights = {"[": VALUES_OF_A_LIST, "{": VALUES_OF_A_LIST, ":": VALUES_OF_A_NAME, ",": 1}
    return sum(weights.get(mark, 0) for mark in re.sub(r'"(?:[^"\\]|\\.)*"', "", text))


def bodies(largest: int) -> dict[str, tuple[str, bytes]]:
    """Return name -> (path, body)."""
    from batch_manager.extras.openai.fields import LONGEST_STOP_STRING, MOST_STOP_STRINGS, MOST_TEXTS
    from batch_manager.extras.openai.json_object import MOST_VALUES, VALUES_OF_A_LIST

    draw = random.Random(1)

    def of(**fields: Any) -> bytes:
        return json.dumps(fields).encode()

    def text(size: int) -> str:
        words = draw.choices(["Emma", "walked", "to", "the", "village,", "and", "then", "home"], k=size // 4)
        return " ".join(words)[:size]

    def with_schema(start: str, item: Callable[[int], str], end: str, count: int = 10**9) -> bytes:
        return filled('{"messages":[{"role":"user","content":"Who?"}],"max_tokens":8,"response_format":{"type":'
                      '"json_schema","json_schema":{"name":"x","schema":' + start, item, end + "}}}", largest, count)

    stops = ["".join(draw.choices("abcdefghij ", k=LONGEST_STOP_STRING)) for _ in range(MOST_STOP_STRINGS)]
    alike = ["e" * (LONGEST_STOP_STRING - number) + "b" * number for number in range(MOST_STOP_STRINGS)]
    user, ask = '{"role":"user","content":"a"}', '"messages":[{"role":"user","content":"Who?"}]'
    call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{\\"a\\":[[],[]]}"}}'
    completions = {
        "small": of(prompt="Emma", max_tokens=4),
        "stop": of(prompt="Emma", max_tokens=64, stop=stops),
        "stop alike": of(prompt="Emma", max_tokens=1000, n=8, stop=alike, logit_bias={"272": 100}),
        "prompt: one text": of(prompt=text(largest - 100)),
        "prompt: a text without spaces": of(prompt="a" * (largest - 100)),
        "prompt: the whole context": of(prompt=text(CONTEXT * 2), max_tokens=1),
        "prompt: texts": of(prompt=[text(largest // MOST_TEXTS - 10)] * MOST_TEXTS, max_tokens=1),
        "prompt: short texts, echo": of(prompt=["Emma"] * MOST_TEXTS, max_tokens=2, echo=True),
        "prompt: shortest texts": of(prompt=["a"] * MOST_TEXTS, max_tokens=1),
                "prompt: ids": filled('{"prompt":[', lambda n: "1234", "]}", largest),
        "prompt: lists of ids": filled('{"max_tokens":1,"prompt":[', lambda n: f"[{n % 4000}" + ",7" * 470 + "]", "]}",
                                       largest, MOST_TEXTS),
        "prompt: objects": filled('{"prompt":[', lambda n: "{}", "]}", largest),
        "n, logprobs": of(prompt="Emma", n=MOST_TEXTS, logprobs=20, max_tokens=50, ignore_eos=True),
        "n, logprobs, streamed": of(prompt="Emma", n=MOST_TEXTS, logprobs=20, max_tokens=50, stream=True,
                                    ignore_eos=True),
        "n, stop": of(prompt="Emma", n=MOST_TEXTS, stop=stops, max_tokens=16),
        "n, a long prompt": of(prompt=text(CONTEXT // 2), n=MOST_TEXTS, max_tokens=1),
        "n, logprobs, long": of(prompt="Emma", n=8, logprobs=20, max_tokens=2000, ignore_eos=True),
        "echo with logprobs": of(prompt=text(16_000), echo=True, logprobs=20, max_tokens=1),
        "logit_bias": filled('{"prompt":"Emma","max_tokens":4,"logit_bias":{', lambda n: f'"{n}":1', "}}", largest,
                             4096),
        "logit_bias with wrong keys": filled('{"prompt":"Emma","logit_bias":{', lambda n: f'"{n}":1', "}}", largest),
        "stop_token_ids": filled('{"prompt":"Emma","stop_token_ids":[', lambda n: "7", "]}", largest),
        "metadata": filled('{"prompt":"Emma","max_tokens":4,"metadata":{', lambda n: f'"{n}":[]', "}}", largest),
        "an unknown field": filled('{"prompt":"Emma","other":[', lambda n: "[]", "]}", largest),
        "many unknown fields": filled('{"prompt":"Emma",', lambda n: f'"{n}":1', "}", largest),
        "a repeated name": filled('{"prompt":"Emma","metadata":{', lambda n: f'"{n}":1', ',"0":1}}', largest),
        "no JSON": (b"[" * (MOST_VALUES // VALUES_OF_A_LIST)).ljust(largest),
        "too large": of(prompt=text(largest - 100)).ljust(largest + 1),
        "too many values": b'{"prompt":[' + b"[]," * (MOST_VALUES // (VALUES_OF_A_LIST + 1)) + b"[]]}",
        "too many values by far": b'{"prompt":[' + b"7," * (largest // 2 - 10) + b"7]}",
    }
    chats = {
        "messages": filled('{"max_tokens":1,"messages":[', lambda n: user, "]}", largest),
        "messages in the context": filled('{"max_tokens":1,"messages":[', lambda n: user, "]}", largest, CONTEXT // 16),
        "message: one text": of(messages=[{"role": "user", "content": text(largest - 100)}]),
        "message: parts": filled('{"max_tokens":1,"messages":[{"role":"user","content":[',
                                 lambda n: '{"type":"text","text":"a"}', "]}]}", largest),
        "message: other keys": filled('{"max_tokens":1,"messages":[{"role":"user","content":"a","more":[',
                                      lambda n: "[]", "]}]}", largest),
        "message: deep": (b'{"max_tokens":1,"messages":[{"role":"user","content":"a","more":' + b"[" * 900 + b"]" * 900
                          + b"}]}"),
        "chat_template_kwargs": filled('{"max_tokens":1,' + ask + ',"chat_template_kwargs":{', lambda n: f'"{n}":{{}}',
                                       "}}", largest),
        "tools": filled('{"max_tokens":8,' + ask + ',"tools":[',
                        lambda n: f'{{"type":"function","function":{{"name":"f{n}"}}}}', "]}", largest, 400),
        "tools: a large schema": filled(
            '{"max_tokens":8,"tool_choice":"required",' + ask + ',"tools":[{"type":"function","function":{"name":"f",'
            '"parameters":{"type":"object","properties":{', lambda n: f'"a{n}":{{"type":"string"}}', "}}}}]}", largest),
        "tools: streamed calls": of(messages=[{"role": "user", "content": "Who?"}], max_tokens=3000, stream=True, n=8,
                                    tool_choice="required", tools=[{"type": "function", "function": {
                                        "name": "n" * 200, "parameters": {"type": "object"}}}]),
        "tool_calls": filled('{"max_tokens":1,"messages":[{"role":"assistant","content":"","tool_calls":[',
                             lambda n: call, ']},{"role":"user","content":"Who?"}]}', largest),
        "response_format: object": of(messages=[{"role": "user", "content": "Who?"}], max_tokens=8,
                                      response_format={"type": "json_object"}),
        "response_format: enum": with_schema('{"enum":[', lambda n: f'"name {n}"', "]}"),
        "response_format: a small enum": with_schema('{"enum":[', lambda n: f'"name {n}"', "]}", 20_000),
        "response_format: properties": with_schema('{"type":"object","properties":{',
                                                   lambda n: f'"a{n}":{{"type":"string"}}', "}}"),
        "response_format: required": with_schema('{"type":"object","additionalProperties":false,"properties":{',
                                                 lambda n: f'"a{n}":{{"type":"array","items":{{"type":"null"}}}}',
                                                 "}}"),
        "response_format: anyOf": with_schema(
            '{"anyOf":[', lambda n: f'{{"type":"object","properties":{{"b{n}":{{"type":"integer"}}}}}}', "]}"),
        "response_format: pattern": with_schema(json.dumps({"type": "string", "pattern": "(a|b){1,900}c" * 300}),
                                                lambda n: "", "", 0),
        "response_format: deep": with_schema('{"type":"array","items":' * 250 + '{"type":"string"}' + "}" * 250,
                                             lambda n: "", "", 0),
    }
    large_tool = filled('{"max_output_tokens":300,"stream":true,"input":"Who?","tools":[{"type":"function","name":"f",'
                        '"parameters":{"type":"object","properties":{"a":{"type":"string"}},"examples":[',
                        lambda n: '{"a":"b"}', "]}}]}", largest)
    results = filled('{"max_tokens":1,"messages":[{"role":"user","content":[', lambda n: (
        f'{{"type":"tool_result","tool_use_id":"t{n}","content":[{{"type":"text","text":"a"}}]}}'), "]}]}", largest,
        1500)
    return {**{name: ("/v1/completions", body) for name, body in completions.items()},
            **{name: ("/v1/chat/completions", body) for name, body in chats.items()},
            "responses: a large tool": ("/v1/responses", large_tool),
            "messages: results of tools": ("/v1/messages", results)}


# ---------------------------------------------------------------------- the run


def run(options: Options, only: list[str] | None = None, log: Callable[[str], None] = lambda _: None,
        rounds: int = 1) -> Summary:
    import httpx

    from batch_manager.extras.openai.responses import LARGEST_BODY

    summary = Summary("")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "austen"
        shutil.copytree(MODEL, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
        with (Path(folder) / "log").open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(model), "--port", "0", "--num-threads", "1",
                 "--max-batch-size", "64"],
                stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        try:
            while not (found := re.search(r"running on (http://\S+)", (Path(folder) / "log").read_text())):
                assert process.poll() is None, (Path(folder) / "log").read_text()
                time.sleep(0.1)
            with httpx.Client(base_url=found[1], timeout=600) as client:
                _send_all(client, bodies(LARGEST_BODY), only, rounds, summary, log)
        finally:
            process.terminate()
            process.wait(60)
        tail = (Path(folder) / "log").read_text()
        if "Traceback" in tail:
            summary.failures.append(f"the log has a stack: {tail[-2000:]}")
    return summary


def _send_all(client: Any, all_bodies: dict[str, tuple[str, bytes]], only: list[str] | None, rounds: int,
              summary: Summary, log: Callable[[str], None]) -> None:
    def figures() -> dict[str, float]:
        return client.get("/figures").json()

    def send(name: str, path: str, body: bytes, tries: int = 1) -> float:
        """Send a body, log its figures, and return the memory that it left."""
        least = float("inf")
        for number in range(1, tries + 1):
            figures()
            began = time.monotonic()
            with client.stream("POST", path, content=body) as answer:
                told = b"".join(answer.iter_bytes())
            seconds = time.monotonic() - began
            time.sleep(SECONDS_TO_TRIM)
            now = figures()
            least = min(least, 1e3 * now["held"])
            kept = (now["resident"] - start) / 1e6
            line = (f"{name}, try {number}: {len(body):,} bytes, {answer.status_code} after {seconds:.2f} s, "
                    f"{len(told):,} bytes; late {1e3 * now['late']:.0f} ms, held {1e3 * now['held']:.0f} ms, "
                    f"kept {kept:.1f} MB")
            log(line if answer.status_code == 200 else f"{line}\n    {told[:200].decode()}")
            if least <= MOST_HELD_MS:
                break
        worst_held.append(least)
        is_refused = answer.status_code == 413
        added = kept - (worst_kept[-1] if worst_kept else 0)
        worst_kept.append(kept)
        if least > MOST_HELD_MS or added > MOST_KEPT_MB or answer.status_code >= 500 or is_refused != (name in ABOVE):
            summary.failures.append(f"python tests/campaigns/event_loop.py --only {name!r}: {line}")
        return kept

    worst_held: list[float] = []
    worst_kept: list[float] = []
    figures()
    start = figures()["resident"]
    for name in ("small", "response_format: object"):
        send(f"{name}, for the first time", *all_bodies[name])
    client.post("/v1/completions", json={"max_tokens": 1, "prompt": [[number] * 1000
                                                                     for number in range(POOL // 1000 + 8)]})
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    client.post("/v1/completions", json={"max_tokens": 0, "echo": True, "logprobs": 0,
                                         "prompt": list(range(vocabulary))}).raise_for_status()
    time.sleep(SECONDS_TO_TRIM)
    start, kept, worst_kept = figures()["resident"], [], []
    for _ in range(rounds):
        for name, (path, body) in all_bodies.items():
            if not only or name in only:
                last = send(name, path, body, MOST_TRIES)
        kept.append(last)
    if max(kept) > MOST_KEPT_OF_ALL_MB or len(kept) > 2 and kept[-1] > kept[len(kept) // 2] + MOST_GROWTH_MB:
        summary.failures.append(f"memory grows: {kept} MB kept after the rounds")
    summary.ran = (f"{len(only or all_bodies)} bodies: held at most {max(worst_held):.0f} ms; kept after each round: "
                   f"{', '.join(f'{each:.1f}' for each in kept)} MB")


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="KIND")
    parser.add_argument("--rounds", type=int, default=1, help="how often all bodies are sent (1)")
    given = parser.parse_args()
    summary = run(Options("F"), given.only, lambda line: print(line, flush=True), given.rounds)
    print(*summary.failures, summary.ran, sep="\n")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
