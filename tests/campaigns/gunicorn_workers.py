"""The OpenAI server under gunicorn with two workers, while a worker is killed, and while gunicorn gets HUP and TERM.

    python tests/campaigns/gunicorn_workers.py [--streams 16] [--tokens 1200]

Streams run all the time. Kill -9 of a worker must break the streams of that worker only. HUP and TERM must break no
stream. The program needs gunicorn, uvicorn, starlette and httpx. It prints a line per step. The exit status is 1 if a
rule is broken.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]


def children(process_id: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


def streams_of(process_id: int, port: int) -> int:
    """Return the number of connections to `port` that the process `process_id` serves."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    here = {row[9] for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "01"}
    links = [os.readlink(each) for each in Path(f"/proc/{process_id}/fd").iterdir() if each.is_symlink()]
    return len(here & {link.removeprefix("socket:[").rstrip("]") for link in links})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def stream(url: str, number: int, tokens: int) -> str:
    """Read one stream to its end. Returns "whole" if it had all `tokens`, otherwise how the stream ended."""
    try:
        async with httpx.AsyncClient(timeout=120) as client, client.stream("POST", f"{url}/v1/completions", json={
                "prompt": f"Chapter {number}", "seed": number, "max_tokens": tokens, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    except httpx.HTTPError as error:
        return type(error).__name__
    used = json.loads(lines[-2].removeprefix("data: ")).get("usage") if lines[-1:] == ["data: [DONE]"] else None
    return "whole" if used and used["completion_tokens"] == tokens else lines[-1][:80] if lines else "nothing"


async def while_streaming(url: str, count: int, tokens: int, act) -> list[str]:
    tasks = [asyncio.ensure_future(stream(url, number, tokens)) for number in range(count)]
    await asyncio.sleep(0.7)
    act()
    return await asyncio.gather(*tasks)


def until_well(url: str, process: subprocess.Popen, workers: int, seconds: float = 60) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if len(children(process.pid)) >= workers and httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return time.monotonic() - began
        except (httpx.HTTPError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not get well")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1200)
    given = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    application = (f'batch_manager.extras.openai.application:make_app("{REPOSITORY}/examples/models/austen-4m", '
                   "num_threads=1)")
    process = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "-k", "uvicorn.workers.UvicornWorker", "-w", "2", "-b", f"127.0.0.1:{port}",
         "--graceful-timeout", "60", application],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    is_right = True
    try:
        print(f"ready after {until_well(url, process, 2):.1f} s")
        lost: list[int] = []

        def kill() -> None:
            victim = max(children(process.pid), key=lambda child: streams_of(child, port))
            lost.append(streams_of(victim, port))
            os.kill(victim, signal.SIGKILL)

        whole = asyncio.run(while_streaming(url, given.streams, given.tokens, kill)).count("whole")
        print(f"kill -9 of a worker with {lost[0]} of {given.streams} streams: {whole} whole, "
              f"two workers again after {until_well(url, process, 2):.1f} s")
        is_right &= lost[0] > 0 and whole == given.streams - lost[0]
        time.sleep(8)     # both workers load in this time; only one is known to have answered
        for name in ("HUP", "TERM"):
            ends = asyncio.run(while_streaming(url, given.streams, given.tokens,
                                               lambda name=name: process.send_signal(getattr(signal, f"SIG{name}"))))
            print(f"{name}: {ends.count('whole')} of {given.streams} streams whole", set(ends) - {"whole"} or "")
            is_right &= ends.count("whole") == given.streams
            if name == "HUP":
                until_well(url, process, 2)
                time.sleep(8)
        print(f"exit status {process.wait(30)}")
    finally:
        if process.poll() is None:
            process.kill()
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
