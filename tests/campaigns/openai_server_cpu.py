"""Measures the CPU time per token of the OpenAI server with a scripted model, and of tasks that only count deltas.

    python tests/campaigns/openai_server_cpu.py [--streams 256] [--tokens 200] [--step-ms 5] [--runs 3]

Each run is a new process. The client is another process with plain sockets. The program prints the microseconds of CPU
time per token of the server and of the tasks, and their difference. Each time is the smallest of the runs. The
difference is the cost of text, JSON, server-sent events, uvicorn and sockets.
"""

import argparse
import asyncio
import json
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"


def start(streams: int, step_s: float):
    from batch_manager import Parts, TrtGptModelOptionalParams
    from batch_manager.aio import AsyncEngine
    from batch_manager.testing.scripted_backend import ScriptedBackend

    backend = ScriptedBackend(vocab_size=4096, max_seq_len=4000, num_blocks=streams * 40, tokens_per_block=64,
                              num_slots=streams, verify=False, step_seconds=step_s)
    params = TrtGptModelOptionalParams(max_batch_size=streams, num_threads=1)
    return AsyncEngine.start(parts=Parts(backend=backend), optional_params=params, takes_all=True)


async def count(engine, streams: int, tokens: int) -> int:
    async def read(number: int) -> int:
        return sum([len(delta.tokens) async for delta in engine.stream({"input_ids": [number],
                                                                        "request_output_len": tokens})])
    return sum(await asyncio.gather(*[read(number) for number in range(streams)]))


async def engine_alone(streams: int, tokens: int, step_s: float) -> dict[str, float]:
    async with await start(streams, step_s) as engine:
        await count(engine, 8, tokens)
        began, cpu = time.monotonic(), time.process_time()
        total = await count(engine, streams, tokens)
        return {"us": 1e6 * (time.process_time() - cpu) / total, "tokens_s": total / (time.monotonic() - began)}


async def server(streams: int, tokens: int, step_s: float) -> dict[str, float]:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    from batch_manager.extras.openai import OpenAIService
    from batch_manager.extras.openai.application import completions

    async with await start(streams, step_s) as engine:
        app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
        app.state.service = OpenAIService(engine, MODEL)
        running = uvicorn.Server(uvicorn.Config(app, port=0, access_log=False, log_level="warning"))
        task = asyncio.ensure_future(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        port = running.servers[0].sockets[0].getsockname()[1]
        for number in (8, streams):
            began, cpu = time.monotonic(), time.process_time()
            client = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--client", str(port), "--streams", str(number), "--tokens", str(tokens))
            assert await client.wait() == 0
        total = streams * tokens
        told = {"us": 1e6 * (time.process_time() - cpu) / total, "tokens_s": total / (time.monotonic() - began)}
        running.should_exit = True
        await task
        return told


def client(port: int, streams: int, tokens: int) -> None:
    """Start `streams` streams of `tokens` tokens each, and read them until each has sent [DONE]."""
    selector, ends = selectors.DefaultSelector(), {}
    for number in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        body = json.dumps({"prompt": [number], "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        selector.register(connection, selectors.EVENT_READ)
        ends[connection] = b""
    while ends:
        for key, _ in selector.select():
            read = key.fileobj.recv(65536)
            seen = ends[key.fileobj] + read
            if not read:
                sys.exit("a stream was cut")
            if b"[DONE]" in seen:
                selector.unregister(key.fileobj)
                del ends[key.fileobj]
            else:
                ends[key.fileobj] = seen[-8:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("engine", "server"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client is not None:
        client(given.client, given.streams, given.tokens)
        return
    if given.only is not None:
        job = (engine_alone if given.only == "engine" else server)(given.streams, given.tokens, given.step_ms / 1000)
        try:
            import uvloop
            print(json.dumps(uvloop.run(job)))
        except ImportError:
            print(json.dumps(asyncio.run(job)))
        return
    least = {}
    for _ in range(given.runs):
        for name in ("engine", "server"):
            command = [sys.executable, __file__, "--only", name, "--streams", str(given.streams), "--tokens",
                       str(given.tokens), "--step-ms", str(given.step_ms)]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{name}: {told['us']:.1f} us of CPU a token, {told['tokens_s']:,.0f} tokens/s", flush=True)
            least[name] = min(least.get(name, told["us"]), told["us"])
    print(f"least: engine {least['engine']:.1f}, server {least['server']:.1f}, "
          f"difference {least['server'] - least['engine']:.1f}")


if __name__ == "__main__":
    main()
