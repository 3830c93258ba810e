"""Measure the host cost of AsyncEngine, compared with a callback that only counts responses.

    python -m tests.benchmarks.async_streams --streams 256 --tokens 100 --step-ms 5 --runs 3 [--process]

The model is scripted, and one event loop reads many streams. Each run first measures a counting callback, then an
AsyncEngine, and prints one line of JSON:

    us_per_token       CPU microseconds per token with AsyncEngine, minus `counting_us`; with --process, CPU
                       microseconds per token of this process, which does not run the engine
    counting_us        CPU microseconds per token with the counting callback, mostly the work of the engine; 0 with
                       --process
    late_ms_p99        99th percentile of the delay of a 1 ms timer in the event loop
    delivery_ms_p99    99th percentile of the time from the hook `after_responses` until a reader has its tokens
    wake_ups           number of wake-ups of the event loop
    iterations         number of iterations with responses
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from batch_manager.aio import AsyncEngine
from batch_manager.config import Parts, TrtGptModelOptionalParams
from batch_manager.gpt_manager import GptManager
from batch_manager.names import SchedulerPolicy, TrtGptModelType
from batch_manager.requests.inference_request import InferenceRequest
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least, within

PROMPT, TOKENS_PER_BLOCK, LOOK_S = 16, 64, 0.001


def backend_of(streams: int, tokens: int, step_ms: float) -> Callable[[], ScriptedBackend]:
    """Return a factory of scripted backends for `streams` requests with `tokens` output tokens each.

    A step takes `step_ms` milliseconds. The factory can be pickled, so that an engine process can call it.
    """
    blocks = -(-(PROMPT + tokens) // TOKENS_PER_BLOCK)
    return partial(ScriptedBackend, max_seq_len=blocks * TOKENS_PER_BLOCK, num_blocks=streams * blocks + 1,
                   verify=False, tokens_per_block=TOKENS_PER_BLOCK, num_slots=streams, is_asynchronous=step_ms > 0,
                   step_seconds=step_ms / 1000)


def params_of(streams: int) -> TrtGptModelOptionalParams:
    return TrtGptModelOptionalParams(max_batch_size=streams, max_num_tokens=streams * PROMPT)


def request_of(tokens: int) -> dict[str, object]:
    return {"input_ids": list(range(1, PROMPT + 1)), "request_output_len": tokens}


def counting_cpu_s(streams: int, tokens: int, step_ms: float) -> float:
    """Serve the streams with a callback that only counts responses, and return the CPU seconds of the process."""
    waiting = [InferenceRequest(number, request_of(tokens), is_streaming=True) for number in range(streams)]
    count = 0

    def get(most: int) -> list[InferenceRequest]:
        taken, waiting[:most] = waiting[:most], []
        return taken

    def send(*_: object) -> None:
        nonlocal count
        count += 1

    began = time.process_time()
    with GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, get, send,
                    None, None, params_of(streams), parts=Parts(backend=backend_of(streams, tokens, step_ms))):
        while count < streams * tokens:
            time.sleep(0.01)
    return time.process_time() - began


async def async_run(streams: int, tokens: int, step_ms: float, process: bool = False) -> dict[str, object]:
    late: list[float] = []
    delivered: list[float] = []
    iterations: list[float] = []

    async def look() -> None:
        while True:
            due = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            late.append(time.perf_counter() - due)

    async def read(engine: AsyncEngine) -> int:
        num_tokens = num_seen = 0              # num_seen: iterations whose tokens the reader has
        async for delta in engine.stream(request_of(tokens)):
            num_tokens += len(delta.tokens)
            if num_seen < len(iterations):
                delivered.append(time.perf_counter() - iterations[-1])
                num_seen = len(iterations)
            elif num_seen:                     # a reader that was awake had the tokens before the hook
                delivered.append(0.0)
                num_seen += 1
        return num_tokens

    began = time.process_time()
    parts = Parts(backend=backend_of(streams, tokens, step_ms),
                  after_responses=lambda: iterations.append(time.perf_counter()))
    async with await AsyncEngine.start(optional_params=params_of(streams), parts=parts, process=process) as engine:
        if process:
            began = time.process_time()        # excludes the start of a process, which is not a cost per token
        looking = asyncio.create_task(look())
        counts = await asyncio.gather(*[read(engine) for _ in range(streams)])
        looking.cancel()
        wake_ups = engine.num_wake_ups
    assert counts == [tokens] * streams
    return {"cpu_s": time.process_time() - began, "late_ms_p99": _p99_ms(late), "delivery_ms_p99": _p99_ms(delivered),
            "wake_ups": wake_ups, "iterations": len(iterations)}


def _p99_ms(seconds: Sequence[float]) -> float:
    return round(1000 * float(np.percentile(seconds, 99)), 2)


def measure(streams: int, tokens: int, step_ms: float, process: bool = False) -> dict[str, object]:
    counting = 0.0 if process else counting_cpu_s(streams, tokens, step_ms)
    found = asyncio.run(async_run(streams, tokens, step_ms, process))
    per_token = 1e6 / (streams * tokens)
    return {"us_per_token": round((found.pop("cpu_s") - counting) * per_token, 2),
            "counting_us": round(counting * per_token, 2), **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.async_streams", description=__doc__)
    parser.add_argument("--streams", type=at_least(1), default=256)
    parser.add_argument("--tokens", type=at_least(1), default=100, help="tokens per stream")
    parser.add_argument("--step-ms", type=within(0, 60_000), default=5.0,
                        help="milliseconds per step of the scripted model")
    parser.add_argument("--runs", type=at_least(1), default=1)
    parser.add_argument("--process", action="store_true", help="run the engine in a separate process")
    options = parser.parse_args(arguments)
    for _ in range(options.runs):
        found = measure(options.streams, options.tokens, options.step_ms, options.process)
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
