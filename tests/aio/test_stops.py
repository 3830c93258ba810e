"""Every way to leave a stream stops its request, with the engine in this process and in its own process."""

import asyncio
import gc
import threading
import time
from functools import partial

import pytest

from batch_manager import Parts, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine
from batch_manager.testing.scripted_backend import ScriptedBackend

BACKEND = partial(ScriptedBackend, max_seq_len=60_000, num_blocks=20_000, is_asynchronous=True, step_seconds=0.001)
LONG = {"input_ids": [1, 2], "request_output_len": 50_000}      # runs for a minute if it is not stopped
SECONDS_TO_STOP = 20.0


@pytest.fixture(scope="module", params=[False, True], ids=["in this process", "in a process of its own"])
def engine(request):
    made = asyncio.run(AsyncEngine.start(parts=Parts(backend=BACKEND), process=request.param, takes_all=True,
                                         optional_params=TrtGptModelOptionalParams(max_batch_size=2)))
    yield made
    assert asyncio.run(made.close(drain=False))


async def tokens_of(stream):
    return [token async for delta in stream for token in delta.tokens]


async def leave_by_break(engine):
    async for _ in engine.stream(LONG):
        break


async def drop_before_it_is_read(engine):
    engine.stream(LONG)


async def drop_while_it_runs(engine):
    stream = engine.stream(LONG)
    await anext(stream)
    await asyncio.sleep(0.05)


async def drop_while_it_waits_in_the_engine(engine):
    running = [engine.stream(LONG) for _ in range(2)]
    for stream in running:
        await anext(stream)
    engine.stream(LONG)
    await asyncio.sleep(0.05)
    gc.collect()
    deadline = time.monotonic() + SECONDS_TO_STOP
    while len(engine._switchboard) > 2:
        assert time.monotonic() < deadline, "the one that waits was not stopped"
        await asyncio.sleep(0.005)


async def cancel(engine):
    stream = engine.stream(LONG)
    await anext(stream)
    stream.cancel()
    assert await tokens_of(stream) == []


async def cancel_in_a_thread(engine):
    stream = engine.stream(LONG)
    await anext(stream)
    thread = threading.Thread(target=stream.cancel)
    thread.start()
    thread.join(60)
    assert await tokens_of(stream) == []


async def cancel_the_task_that_reads(engine):
    await cancelled(tokens_of(engine.stream(LONG)))


async def cancel_the_task_that_generates(engine):
    await cancelled(engine.generate(LONG))


async def cancelled(reading):
    task = asyncio.ensure_future(reading)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run_out_of_time(engine):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(LONG), 0.02)


async def close_the_event_loop(engine):
    def elsewhere():
        loop = asyncio.new_event_loop()
        for stream in kept:
            loop.run_until_complete(anext(stream))
        loop.close()

    kept = [engine.stream(LONG) for _ in range(2)]
    await asyncio.to_thread(elsewhere)
    await until_idle(engine)                   # `kept` lives until here


async def close_the_event_loop_before_a_read(engine):
    def elsewhere():
        async def begin():
            return [engine.stream(LONG) for _ in range(2)]

        loop = asyncio.new_event_loop()
        kept.extend(loop.run_until_complete(begin()))
        loop.close()

    kept = []
    await asyncio.to_thread(elsewhere)
    await until_idle(engine)                   # `kept` lives until here


async def until_idle(engine):
    deadline = time.monotonic() + SECONDS_TO_STOP
    while engine.health()["active_requests"] or len(engine._switchboard):
        assert time.monotonic() < deadline, "requests are still alive"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("leave", [
    leave_by_break, drop_before_it_is_read, drop_while_it_runs, drop_while_it_waits_in_the_engine, cancel,
    cancel_in_a_thread, cancel_the_task_that_reads, cancel_the_task_that_generates, run_out_of_time,
    close_the_event_loop, close_the_event_loop_before_a_read])
def test_a_request_that_nobody_reads_any_more_is_stopped(engine, leave):
    async def test():
        await leave(engine)
        gc.collect()
        await until_idle(engine)
        assert len(await tokens_of(engine.stream({**LONG, "request_output_len": 5}))) == 5

    asyncio.run(asyncio.wait_for(test(), 60))
