"""With a scripted model, AsyncEngine's streams yield the right tokens, end as documented and stop their requests."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest

from batch_manager import ErrorCode, FinishReason, ManagerClosedError, Parts, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine, Delta, RequestFailed
from batch_manager.testing.scripted_backend import ScriptedBackend

LONG = {"max_seq_len": 60_000, "num_blocks": 20_000}


def request(prompt=(1, 2), new_tokens=5, **tensors):
    return {"input_ids": list(prompt), "request_output_len": new_tokens, **tensors}


async def start(backend=None, parts=None, **params):
    params.setdefault("max_batch_size", 8)
    scripted = backend if isinstance(backend, ScriptedBackend) else ScriptedBackend(**(backend or {}))
    return await AsyncEngine.start(parts=Parts(backend=scripted, **(parts or {})),
                                   optional_params=TrtGptModelOptionalParams(**params))


def run(test, **options):
    """Run test(engine) on a new event loop, with an engine that is closed afterwards."""
    async def inside():
        async with await start(**options) as engine:
            return await asyncio.wait_for(test(engine), 60)
    return asyncio.run(inside())


async def tokens_of(stream):
    return [token async for delta in stream for token in delta.tokens]


async def until_idle(engine, seconds=20.0):
    deadline = time.monotonic() + seconds
    while engine.health()["active_requests"] or len(engine._switchboard):
        assert time.monotonic() < deadline, "requests are still alive"
        await asyncio.sleep(0.002)


def test_streams_and_generate_give_what_the_model_generates():
    backend = ScriptedBackend()

    async def test(engine):
        deltas = [delta async for delta in engine.stream(request())]
        assert [token for delta in deltas for token in delta.tokens] == backend.expected([1, 2], 5)
        assert [delta.finish_reason for delta in deltas][-1] is FinishReason.LENGTH
        assert all(delta.finish_reason is FinishReason.NOT_FINISHED for delta in deltas[:-1])
        whole = await engine.generate(request())
        assert whole == Delta(backend.expected([1, 2], 5), finish_reason=FinishReason.LENGTH)
        many = await asyncio.gather(*[tokens_of(engine.stream(request([number], 9))) for number in range(40)])
        assert many == [backend.expected([number], 9) for number in range(40)]

    run(test, backend=backend)


def test_log_probs_come_with_their_tokens():
    async def test(engine):
        whole = await engine.generate(request(return_log_probs=True))
        assert len(whole.log_probs) == 5 and whole.cum_log_prob == pytest.approx(sum(whole.log_probs), rel=1e-5)
        deltas = [delta async for delta in engine.stream(request(return_log_probs=True))]
        assert [value for delta in deltas for value in delta.log_probs] == whole.log_probs
        assert deltas[-1].cum_log_prob == pytest.approx(whole.cum_log_prob)
        assert (await engine.generate(request(return_log_probs=False))).log_probs == []
        for more in ({}, {"return_perf_metrics": True}):
            asked = request(return_log_probs=True, return_top_log_probs=[3], **more)
            whole = await engine.generate(asked)
            assert [list(likeliest.items())[0] for likeliest in whole.top_log_probs] == list(
                zip(whole.tokens, whole.log_probs))
            assert all(len(likeliest) == 3 for likeliest in whole.top_log_probs)
            deltas = [delta async for delta in engine.stream(asked)]
            assert [each for delta in deltas for each in delta.top_log_probs] == whole.top_log_probs
            none = await engine.generate(request(return_top_log_probs=[0], **more))
            assert none.top_log_probs == none.log_probs == [] and (none.metrics is not None) == bool(more)

    run(test)


def test_a_reader_that_is_behind_gets_one_delta():
    async def test(engine):
        stream = engine.stream(request(new_tokens=30))
        first = await anext(stream)
        while engine.health()["final_responses"] < 1:
            await asyncio.sleep(0.005)
        rest = [delta async for delta in stream]
        assert len(first.tokens) + sum(len(delta.tokens) for delta in rest) == 30 and len(rest) <= 1

    run(test)


def test_a_request_that_waits_and_is_cancelled_never_runs():
    """A request that is cancelled while it waits never runs, whether the engine has read it or not."""
    seen = []

    async def test(engine):
        first = engine.stream(request(new_tokens=50_000))
        await anext(first)
        second = engine.stream(request([7, 8, 9]))
        second.cancel()
        first.cancel()
        await until_idle(engine)
        assert {history[0] for history in seen} == {1}

    run(test, backend={**LONG, "script": lambda history: seen.append(history) or 5}, max_batch_size=1)


@pytest.mark.parametrize("process", [False, True], ids=["in this process", "in a process of its own"])
@pytest.mark.parametrize("takes_all", [False, True])
def test_refusals_and_deadlines_do_not_wait_for_room(takes_all, process):
    async def test():
        parts = Parts(backend=partial(ScriptedBackend, **LONG, is_asynchronous=True, step_seconds=0.001))
        async with await AsyncEngine.start(parts=parts, optional_params=TrtGptModelOptionalParams(max_batch_size=1),
                                           takes_all=takes_all, process=process) as engine:
            running = engine.stream(request(new_tokens=50_000))
            await anext(running)
            waiting = asyncio.ensure_future(engine.generate(request()))
            for wrong in (request(temperature=-1.0), request([1] * 60_000), request([10**6]), request(new_tokens=0)):
                with pytest.raises(RequestFailed) as raised:
                    engine.stream(wrong)                         # at the call: no one reads the stream
                assert raised.value.code is ErrorCode.INVALID_REQUEST
                with pytest.raises(RequestFailed) as raised:
                    await engine.generate(wrong)
                assert raised.value.code is ErrorCode.INVALID_REQUEST
            for wrong in ({"deadline_s": -1}, {"priority": 2}):
                with pytest.raises(RequestFailed, match=next(iter(wrong))):
                    engine.stream(request(), **wrong)
            with pytest.raises(RequestFailed) as raised:
                await asyncio.wait_for(engine.generate(request(), deadline_s=0.05), 30)
            assert raised.value.code is ErrorCode.DEADLINE
            assert not waiting.done() and (await anext(running)).tokens          # there was no room meanwhile
            running.cancel()
            assert len((await waiting).tokens) == 5

    asyncio.run(test())


def test_several_requests_are_submitted_together_or_not_at_all():
    async def test(engine):
        streams = engine.streams([(request([number]), {"priority": 0.1}) for number in range(3)])
        assert await asyncio.gather(*map(tokens_of, streams)) == [backend.expected([n], 5) for n in range(3)]
        with pytest.raises(RequestFailed, match="priority"):
            engine.streams([(request(), {}), (request(), {"priority": 5})])
        assert len(engine._switchboard) == 0 and engine.streams([]) == []

    backend = ScriptedBackend()
    run(test, backend=backend)


def test_without_takes_all_no_number_of_waiting_requests_is_refused_unless_a_limit_is_set():
    async def test(engine):
        whole = await asyncio.gather(*[engine.generate(request(new_tokens=1)) for _ in range(1100)])
        assert all(len(delta.tokens) == 1 for delta in whole)

    run(test, max_batch_size=1)

    async def limited(engine):
        answers = await asyncio.gather(*[engine.generate(request(new_tokens=50)) for _ in range(9)],
                                       return_exceptions=True)
        assert ErrorCode.QUEUE_FULL in {getattr(answer, "code", None) for answer in answers}

    run(limited, max_batch_size=1, max_queued_requests=3, backend={"is_asynchronous": True, "step_seconds": 0.002})


def test_the_time_that_a_request_waits_here_counts():
    """The time that a request waits in AsyncEngine counts for its deadline and its queue time."""
    async def test(engine):
        first = engine.stream(request(new_tokens=50_000))
        await anext(first)
        began = time.monotonic()
        late = asyncio.create_task(engine.generate(request(), deadline_s=0.2))
        patient = asyncio.create_task(engine.generate(request(return_perf_metrics=True)))
        await asyncio.sleep(0)                           # both have been submitted
        submitted = time.monotonic()
        await asyncio.sleep(0.3)
        cancelled = time.monotonic()
        first.cancel()
        with pytest.raises(RequestFailed, match="passed before the first token"):
            await late
        assert cancelled - submitted <= (await patient).metrics.queue_s <= time.monotonic() - began

    run(test, backend={**LONG, "is_asynchronous": True, "step_seconds": 0.001}, max_batch_size=1)


def test_with_takes_all_requests_wait_in_the_engine_and_too_many_are_refused():
    """With takes_all, a request beyond max_queued_requests is refused, and the others run by priority."""
    async def test():
        optional_params = TrtGptModelOptionalParams(max_batch_size=2, max_queued_requests=3)
        parts = Parts(backend=ScriptedBackend(step_seconds=0.002, **LONG))
        async with await AsyncEngine.start(optional_params=optional_params, parts=parts, takes_all=True) as engine:
            running = [engine.stream(request([n], 50_000)) for n in range(2)]
            for stream in running:
                await anext(stream)
            ends = []

            async def generate(number, priority):
                try:
                    await engine.generate(request([number], 5), priority=priority)
                    ends.append(priority)
                except RequestFailed as error:
                    assert error.code is ErrorCode.QUEUE_FULL and error.is_retryable
                    ends.append("refused")

            waiting = [generate(10 + n, priority) for n, priority in enumerate((0.1, 0.9, 0.5, 0.7, 0.8))]
            tasks = [asyncio.ensure_future(each) for each in waiting]
            while len(ends) < 2:
                await asyncio.sleep(0.002)
            assert ends == ["refused"] * 2
            running[0].cancel()
            await asyncio.gather(*tasks)
            assert ends[2:] == [0.9, 0.5, 0.1]
            running[1].cancel()

    asyncio.run(test())


def test_refusals_and_names_that_are_none_raise_with_their_code():
    async def test(engine):
        with pytest.raises(RequestFailed, match="input_ids") as raised:
            await engine.generate(request([-1]))
        assert ErrorCode.of(str(raised.value))[0] is raised.value.code is ErrorCode.INVALID_REQUEST
        assert not raised.value.is_retryable
        with pytest.raises(RequestFailed, match="Invalid tensor name: 'nonsense'"):
            engine.stream(request(nonsense=1))
        for way in (engine.stream, engine.generate):
            with pytest.raises(RequestFailed, match="'streaming' was given; stream.. streams and generate.. does not"):
                answer = way(request(streaming=True))
                await answer
        with pytest.raises(RequestFailed, match="return_log_probs"):
            await engine.generate(request(return_log_probs=[[1, 0], [0, 1]]))

    run(test)


def test_the_end_of_the_engine_ends_every_stream_with_its_tokens_so_far():
    async def test(engine):
        streams = [engine.stream(request(new_tokens=50_000)) for _ in range(4)]
        read = [len((await anext(stream)).tokens) for stream in streams[:3]]
        closing = asyncio.create_task(engine.close(drain=False))
        for stream, count in zip(streams, [*read, 0]):
            with pytest.raises(RequestFailed) as raised:
                async for delta in stream:
                    count += len(delta.tokens)
            assert raised.value.code is ErrorCode.SHUTDOWN and raised.value.is_retryable
            assert len(raised.value.tokens) == count
        assert await closing
        with pytest.raises(RequestFailed, match="closed") as raised:
            engine.stream(request())
        assert raised.value.code is ErrorCode.SHUTDOWN

    run(test, backend=LONG, max_batch_size=3)


def test_an_engine_that_fails_ends_every_stream():
    async def test(engine):
        stream = engine.stream(request(new_tokens=50_000))
        await anext(stream)
        engine._manager._loop._claim = lambda *_: 1 / 0                   # no guard contains its exception
        with pytest.raises(RequestFailed, match="the engine raised ZeroDivisionError") as raised:
            await tokens_of(stream)
        assert raised.value.code is ErrorCode.ENGINE_FAILED and raised.value.is_retryable and raised.value.tokens

    run(test, backend=LONG)


def test_each_event_loop_is_woken_once_for_all_responses_of_an_iteration():
    iterations, gate = [], threading.Event()             # no token comes before all readers wait

    async def test(engine):
        reading = asyncio.gather(*[tokens_of(engine.stream(request([number], 20))) for number in range(8)])
        await asyncio.sleep(0)
        gate.set()
        await reading
        assert len(iterations) - 2 <= engine.num_wake_ups <= len(iterations) < 8 * 20

    run(test, backend={"on_step": lambda batch: gate.wait(20) and None},
        parts={"after_responses": lambda: iterations.append(1)})


def test_streams_on_several_event_loops_and_threads():
    backend, found = ScriptedBackend(), {}

    async def test(engine):
        def elsewhere(number):
            stream = engine.stream(request([number], 12))              # no event loop runs here yet
            found[number] = asyncio.run(tokens_of(stream))

        threads = [threading.Thread(target=elsewhere, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        here = await tokens_of(engine.stream(request([50], 12)))
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert here == backend.expected([50], 12)
        assert found == {number: backend.expected([number], 12) for number in range(6)}

    run(test, backend=backend)


def test_a_second_reader_of_a_stream_is_told_so_and_the_first_goes_on():
    gate = threading.Event()                             # no token comes before the second reader

    async def test(engine):
        stream = engine.stream(request(new_tokens=20))
        first = asyncio.create_task(tokens_of(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="awaits this stream; a stream has one reader at a time; "):
            await anext(stream)
        gate.set()
        assert len(await first) == 20
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(test, backend={"on_step": lambda batch: gate.wait(20) and None})


def test_options_that_the_engine_sets_itself_are_refused():
    async def test(engine):
        for name in ("request_id", "is_streaming"):
            with pytest.raises(TypeError, match=f"{name} was given; the engine sets it"):
                engine.stream(request(), **{name: 1})
        for name, told in (("nonsense", "unknown option 'nonsense'; the options are logits_post_processor, priority, "),
                           ("temperature", r"temperature is a tensor, and no option: put it into the tensors, \{"),
                           ("max_tokens", "unknown option 'max_tokens'; did you mean the tensor 'max_new_tokens'"),
                           ("priorty", "did you mean priority"), ("stop", "stop_words_list takes"),
                           ("runtime_topk", "did you mean the tensor 'runtime_top_k'")):
            with pytest.raises(TypeError, match=told):
                engine.stream(request(), **{name: 1})
            with pytest.raises(TypeError, match=told):
                await engine.generate(request(), **{name: 1})

    run(test)


def test_in_a_forked_child_a_stream_raises_instead_of_waiting():
    async def test(engine):
        stream = engine.stream(request(new_tokens=50_000))
        await anext(stream)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(20)                   # ends a child that hangs
            try:
                asyncio.run(tokens_of(stream))
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as told:
            assert (await asyncio.to_thread(told.read)).startswith("ManagerClosedError: this process was forked")
        os.waitpid(child, 0)
        assert (await anext(stream)).tokens
        stream.cancel()

    run(test, backend={**LONG, "is_asynchronous": True, "step_seconds": 0.002})


def test_an_engine_that_nobody_refers_to_ends_and_a_stream_keeps_it():
    """An engine without references ends its threads. A stream keeps its engine alive."""
    async def test():
        threads = set(threading.enumerate())
        for _ in range(5):
            engine = await start()
            stream = engine.stream(request(new_tokens=3))
            del engine
            gc.collect()
            assert len(await tokens_of(stream)) == 3
            del stream
        gc.collect()
        deadline = time.monotonic() + 20
        while sum(thread.name.startswith("batch_manager") for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        left = set(threading.enumerate()) - threads
        assert all(thread.name.startswith("asyncio") for thread in left)

    asyncio.run(test())


def test_the_hooks_of_the_user_are_called_too_and_what_they_raise_is_contained():
    calls = Counter()

    def after():
        calls["after"] += 1
        raise ValueError

    async def test(engine):
        assert len(await tokens_of(engine.stream(request()))) == 5

    run(test, parts={"after_responses": after, "at_end": lambda health: calls.update([health["state"]])})
    assert calls["after"] >= 4 and calls["STOPPED"] == 1


def test_what_is_no_argument_and_what_is_over_is_refused():
    """AsyncEngine.start() refuses arguments of a wrong type, and a closed engine cannot be entered."""
    async def test():
        with pytest.raises(ValueError, match="process is 'yes'; expected a bool"):
            await AsyncEngine.start(process="yes")
        with pytest.raises(ValueError, match="takes_all is 1; expected a bool"):
            await AsyncEngine.start(takes_all=1)
        engine = await start()
        assert engine.info.vocab_size > 1 and await engine.close()
        with pytest.raises(ManagerClosedError):
            async with engine:
                pass
        with pytest.raises(ValueError, match="parts is of type int"):
            await AsyncEngine.start(parts=3)

    asyncio.run(test())
