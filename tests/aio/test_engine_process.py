"""AsyncEngine with process=True behaves like one with process=False. If the engine's process dies, all streams fail."""

import asyncio
import gc
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from batch_manager import (
    ErrorCode,
    FinishReason,
    KvCacheConfig,
    ManagerClosedError,
    ModelLoadError,
    Parts,
    TrtGptModelOptionalParams,
)
from batch_manager.aio import AsyncEngine, Delta, RequestFailed
from batch_manager.errors import BatchManagerError
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness.kv_replay import KEY, Replay

MODEL = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
LONG = {"max_seq_len": 60_000, "num_blocks": 20_000}


def request(prompt=(1, 2), new_tokens=5, **tensors):
    return {"input_ids": list(prompt), "request_output_len": new_tokens, **tensors}


async def start(stats=None, backend=None, kv=None, **hooks):
    backend = {**LONG, "is_asynchronous": True, "step_seconds": 0.001, **(backend or {})}
    return await AsyncEngine.start(
        parts=Parts(backend=partial(ScriptedBackend, **backend), **hooks), return_batch_manager_stats_cb=stats,
        optional_params=TrtGptModelOptionalParams(max_batch_size=8, kv_cache_config=kv or KvCacheConfig()),
        process=True)


def is_alive(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):           # the second one if it goes while it is read
        return False


def wait_for(is_so, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def engine():
    made = asyncio.run(start())
    yield made
    assert asyncio.run(made.close())


async def tokens_of(stream):
    return [token async for delta in stream for token in delta.tokens]


def test_streams_and_generate_give_what_the_model_generates(engine):
    expected = ScriptedBackend(**LONG).expected

    async def test():
        deltas = [delta async for delta in engine.stream(request())]
        assert [token for delta in deltas for token in delta.tokens] == expected([1, 2], 5)
        assert [delta.finish_reason for delta in deltas][-1] is FinishReason.LENGTH
        assert await engine.generate(request()) == Delta(expected([1, 2], 5), finish_reason=FinishReason.LENGTH)
        many = await asyncio.gather(*[tokens_of(engine.stream(request([number], 9))) for number in range(40)])
        assert many == [expected([number], 9) for number in range(40)]
        whole = await engine.generate(request(return_log_probs=True, return_generation_logits=True,
                                              return_top_log_probs=2))
        assert [list(likeliest)[0] for likeliest in whole.top_log_probs] == whole.tokens
        assert len(whole.log_probs) == 5 and whole.cum_log_prob == pytest.approx(sum(whole.log_probs), rel=1e-5)
        assert whole.responses[0][3].array.shape[2] == 5 and whole.responses[0][3].tensor.shape[2] == 5

    assert engine.info.vocab_size == ScriptedBackend(**LONG).info.vocab_size
    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_event_loop_is_woken_at_most_once_an_iteration(engine):
    async def test():
        woken, iterations = engine.num_wake_ups, engine.health()["iterations"]
        await asyncio.gather(*[tokens_of(engine.stream(request([number], 30))) for number in range(8)])
        woken = engine.num_wake_ups - woken            # a heartbeat brings the number of iterations
        await asyncio.to_thread(wait_for, lambda: woken <= engine.health()["iterations"] - iterations + 2)
        assert woken > 0

    asyncio.run(test())


def test_refusals_raise_with_their_code(engine):
    async def test():
        with pytest.raises(RequestFailed, match="input_ids") as raised:
            await engine.generate(request([-1]))
        assert raised.value.code is ErrorCode.INVALID_REQUEST
        with pytest.raises(RequestFailed, match="cannot be sent to the engine process: pickling it raised"):
            engine.stream(request(), logits_post_processor=lambda *_: None)
        with pytest.raises(RequestFailed, match="Invalid tensor name: 'nonsense'"):
            engine.stream(request(nonsense=1))

    asyncio.run(test())


def leave():
    raise SystemExit(3)


class Leaving:
    """A logits post-processor that can be pickled, but raises SystemExit when it is unpickled."""

    def __call__(self, *_):
        pass

    def __reduce__(self):
        return leave, ()


def test_a_request_that_cannot_be_unpickled_costs_itself(engine):
    async def test():
        streams = [engine.stream(request()), engine.stream(request(), logits_post_processor=Leaving()),
                   engine.stream(request())]
        assert len(await tokens_of(streams[0])) == len(await tokens_of(streams[2])) == 5
        with pytest.raises(RequestFailed, match="unpickling it raised SystemExit"):
            await tokens_of(streams[1])

    asyncio.run(asyncio.wait_for(test(), 60))


class Logging(ScriptedBackend):
    def __init__(self, **options):
        super().__init__(on_step=self.log, **options)

    def log(self, _):
        logger = logging.getLogger("a backend")
        logger.warning("%d arguments", "no")
        try:
            raise LookupError("nothing here")
        except LookupError:
            logger.exception("a step")


def test_log_records_come_with_their_traces_and_bad_ones_cost_nothing(caplog, monkeypatch):
    async def test():
        engine = await AsyncEngine.start(parts=Parts(backend=Logging), process=True)
        assert len((await engine.generate(request())).tokens) == 5
        await engine.close()

    monkeypatch.setattr(sys, "path", [*sys.path, Path("no string")])                 # is ignored, as by import
    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(test(), 60))
    formatted = [logging.Formatter().format(record) for record in caplog.records if record.name == "a backend"]
    assert len(formatted) == 5 and all("LookupError: nothing here" in text for text in formatted)


def test_signals_to_a_service_are_left_to_the_host(engine):
    process_id = engine.health()["engine_process_id"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process_id, number)
    assert asyncio.run(engine.generate(request())).tokens and is_alive(process_id)


def test_the_death_of_the_process_fails_every_stream_within_a_second():
    async def seconds_to_fail():
        ended = []
        engine = await start(at_end=ended.append)
        streams = [engine.stream(request(new_tokens=50_000)) for _ in range(3)]
        read = [len((await anext(stream)).tokens) for stream in streams]
        process_id = engine.health()["engine_process_id"]
        os.kill(process_id, signal.SIGKILL)
        died_at = time.monotonic()
        for stream, count in zip(streams, read):
            with pytest.raises(RequestFailed, match="the engine process was ended by signal 9") as raised:
                async for delta in stream:
                    count += len(delta.tokens)
            assert raised.value.code is ErrorCode.ENGINE_FAILED and raised.value.is_retryable
            assert len(raised.value.tokens) == count
        took = time.monotonic() - died_at
        with pytest.raises(RequestFailed, match="signal 9"):
            engine.stream(request())
        assert engine.health()["state"] == "FAILED" and await engine.close()
        assert [health["state"] for health in ended] == ["FAILED"] and not is_alive(process_id)
        return took

    # The least of up to four deaths counts, because other work may have the cores.
    assert any(asyncio.run(asyncio.wait_for(seconds_to_fail(), 60)) < 1.0 for _ in range(4))


def test_close_answers_what_is_left_and_gives_back_threads_and_descriptors():
    records, calls = [], []

    def after():
        calls.append(threading.current_thread().name)
        raise ValueError

    async def test():
        engine = await start(records.append, after_responses=after)
        process_id = engine.health()["engine_process_id"]
        short, long = engine.stream(request()), engine.stream(request(new_tokens=50_000))
        assert len(await tokens_of(short)) == 5 and await anext(long)
        assert await engine.close(drain=False)
        with pytest.raises(RequestFailed) as raised:
            await tokens_of(long)
        assert raised.value.code is ErrorCode.SHUTDOWN and raised.value.tokens
        assert not is_alive(process_id) and engine.health()["state"] == "STOPPED"
        assert engine.health()["callback_failures"]["after_responses"] == len(calls) >= 5

    asyncio.run(asyncio.wait_for(test(), 60))          # asyncio's own threads and descriptors end with run()
    assert records and '"Iteration Counter"' in records[0] and set(calls) == {"batch_manager engine process receiver"}
    assert not [thread for thread in threading.enumerate() if "engine process" in thread.name
                and thread.name.endswith("er") and not thread.is_alive()]


def test_an_engine_that_is_not_referred_to_any_more_ends_its_process():
    descriptors = len(os.listdir("/proc/self/fd"))
    engine = asyncio.run(start())
    process_id = engine.health()["engine_process_id"]
    del engine
    gc.collect()
    wait_for(lambda: not is_alive(process_id))
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


HOST = """
import asyncio, os, sys
from functools import partial
from batch_manager import Parts
from batch_manager.aio import AsyncEngine
from batch_manager.testing.scripted_backend import ScriptedBackend

async def main():
    backend = partial(ScriptedBackend, max_seq_len=60_000, num_blocks=20_000)
    engine = await AsyncEngine.start(parts=Parts(backend=backend), process=True)
    stream = engine.stream({"input_ids": [1], "request_output_len": 50_000})
    await anext(stream)
    print(engine.health()["engine_process_id"], flush=True)
    if sys.argv[1] == "exit":
        return
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_end_of_the_host_ends_the_process(end):
    with subprocess.Popen([sys.executable, "-c", HOST, end], stdout=subprocess.PIPE, text=True) as host:
        process_id = int(host.stdout.readline())
        if end == "kill":
            host.kill()
        assert host.wait(30) == (0 if end == "exit" else -signal.SIGKILL)
        wait_for(lambda: not is_alive(process_id))


def test_what_is_no_timeout_is_refused_and_changes_nothing(engine):
    async def test():
        with pytest.raises(TypeError, match="timeout is of type str; expected seconds, or None"):
            await engine.close(timeout="soon")
        with pytest.raises(ValueError, match="timeout is NaN; expected seconds, or None"):
            await engine.close(timeout=float("nan"))
        assert len((await engine.generate(request())).tokens) == 5

    asyncio.run(asyncio.wait_for(test(), 60))


def test_health_counts_what_hooks_and_statistics_callbacks_raise_here():
    def fail(*_):
        raise ValueError

    async def test():
        engine = await start(fail, after_responses=fail, at_end=fail)
        await engine.generate(request())

        def are_counted():    # both are called after the answer has been delivered
            return {"after_responses", "stats"} <= set(engine.health()["callback_failures"])

        await asyncio.to_thread(wait_for, are_counted)
        await engine.close()
        assert engine.health()["callback_failures"]["at_end"] == 1

    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_engine_that_died_may_be_entered_and_one_that_was_closed_may_not():
    async def test():
        engine = await start()
        os.kill(engine.health()["engine_process_id"], signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: engine.health()["state"] == "FAILED")
        async with engine:
            with pytest.raises(RequestFailed, match="signal 9"):
                await engine.generate(request())
        with pytest.raises(ManagerClosedError):
            async with engine:
                pass

    asyncio.run(asyncio.wait_for(test(), 60))


def test_what_the_constructor_raises_is_raised_here(tmp_path):
    async def test():
        with pytest.raises(ModelLoadError, match="nothing_here"):
            await AsyncEngine.start(tmp_path / "nothing_here", process=True)
        for wrong in (5, start):
            with pytest.raises(ValueError, match="return_batch_manager_stats_cb is (of type int|an async)"):
                await start(wrong)
        with pytest.raises(ValueError, match="parts cannot be sent to the engine process"):
            await AsyncEngine.start(parts=Parts(backend=lambda: ScriptedBackend()), process=True)

    asyncio.run(test())


def test_the_engine_process_has_the_classes_of_register_model(tmp_path, monkeypatch):
    registry = pytest.importorskip("batch_manager.models.registry")
    folder = shutil.copytree(MODEL, tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MyForCausalLM"]}))
    monkeypatch.setattr(registry, "_models", dict(registry._models))

    llama = registry.find_model("LlamaForCausalLM")
    registry.register_model("MyForCausalLM", llama)

    async def test():
        async with await AsyncEngine.start(folder, process=True) as engine:
            assert len((await engine.generate(request())).tokens) == 5

    asyncio.run(test())
    registry.register_model("MyForCausalLM", type("Mine", (llama,), {"__module__": "__main__"}))
    registry.register_names(registry.registered_names())              # as in an engine process
    with pytest.raises(ModelLoadError, match="__main__.Mine, registered for MyForCausalLM, cannot be imported here"):
        registry.find_model("MyForCausalLM")


def all_errors(error_class=BatchManagerError):
    yield error_class
    for subclass in error_class.__subclasses__():
        yield from all_errors(subclass)


PUBLIC_ERRORS = {error for error in all_errors() if error.__module__ == "batch_manager.errors"} | {RequestFailed}


@pytest.mark.parametrize("error_class", sorted(PUBLIC_ERRORS, key=lambda each: each.__name__))
def test_errors_survive_pickling(error_class):
    arguments = {"SchedulerContractError": (object(), "a rule"), "RequestFailed": (ErrorCode.DEADLINE, "late", [1, 2])}
    error = error_class(*arguments.get(error_class.__name__, ("fact", "expectation", "way out")))
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is error_class and str(copied) == str(error) and vars(copied) == vars(error)
    assert copied.code is error.code


def test_events_of_the_prefix_cache_come_to_the_host():
    replay, snapshot = Replay(), Replay()

    async def test():
        engine = await start(kv_events=replay, kv=KvCacheConfig(enable_block_reuse=True, event_hash_key=KEY))
        async with engine:
            await engine.generate(request(range(1, 40)))
            for event in await engine.kv_snapshot():
                snapshot.take(event)

    asyncio.run(test())
    assert replay.blocks == snapshot.blocks
    assert replay.next_id >= 2 and len(replay.blocks) > 2 and not replay.complaints
