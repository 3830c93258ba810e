"""A trace has the right contents, and is written to its file."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy, Trace, TraceFile, TrtGptModelType, read_trace
from batch_manager.loop.phase_times import PHASES
from batch_manager.scheduling import waiting
from batch_manager.tools.request_spans import CONTEXT, WAITING, lives

MODEL = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"


@pytest.fixture
def traced(make_world):
    """traced(**options of make_world) -> (world, the iterations of its trace)"""
    def make(**options):
        trace = Trace()
        return make_world(parts={"trace": trace.append}, **options), trace.iterations

    return make


def prompt(tokens):
    return list(range(1, 1 + tokens))


def test_a_full_batch(traced, new_request):
    world, iterations = traced(max_batch_size=2, max_num_sequences=8)
    world.client.pending = [new_request(i, prompt(3), 2) for i in (1, 2, 3, 4)]
    world.run()
    assert [each.waiting for each in iterations] == [{waiting.BATCH_SIZE: (3, 4)}] * 2 + [{}] * 2


def test_the_tokens_of_a_step(traced, new_request):
    world, iterations = traced(max_batch_size=8, max_num_tokens=32)
    world.client.pending = [new_request(1, prompt(20), 1), new_request(2, prompt(16), 1), new_request(3, prompt(4), 1)]
    world.run()
    assert iterations[0].waiting == {waiting.TOKENS: (2,), waiting.ORDER: (3,)}


@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_blocks(policy, traced, new_request):
    world, iterations = traced(policy=policy, backend={"num_blocks": 4, "tokens_per_block": 8, "max_seq_len": 32})
    world.client.pending = [new_request(1, prompt(20), 10), new_request(2, [7] * 20, 2)]
    world.run()
    assert iterations[0].waiting == {waiting.BLOCKS: (2,)}
    assert (iterations[0].live_blocks, iterations[0].free_blocks) == (3, 1)


def test_a_prefix_that_another_request_computes(traced, new_request):
    world, iterations = traced(backend={"num_blocks": 16, "tokens_per_block": 8},
                               kv_cache_config=KvCacheConfig(tokens_per_block=8, enable_block_reuse=True))
    world.client.pending = [new_request(1, prompt(20), 2), new_request(2, [*prompt(17), 40], 2)]
    world.run()
    assert iterations[0].waiting == {waiting.PREFIX: (2,)} and iterations[1].context == ((2, 16, 2),)


def test_a_static_batch(traced, new_request):
    world, iterations = traced(model_type=TrtGptModelType.V1)
    world.client.pending = [new_request(1, prompt(3), 3)]
    world.step()
    world.client.pending = [new_request(2, prompt(3), 1)]
    world.run()
    assert iterations[1].waiting == {waiting.BATCH_RUNS: (2,)}


def test_a_request_that_is_complete_before_its_static_batch(traced, new_request):
    world, iterations = traced(model_type=TrtGptModelType.V1, max_batch_size=3, max_num_sequences=3)
    world.client.pending = [new_request(1, prompt(3), 1), new_request(2, prompt(3), 4)]
    world.step()
    world.client.pending = [new_request(3, prompt(3), 1), new_request(4, prompt(3), 1)]
    world.run()
    assert [each.waiting for each in iterations[1:4]] == [{waiting.COMPLETE: (1,), waiting.BATCH_RUNS: (3,)}] * 3
    (life,) = (life for life in lives(iterations) if life.request_id == 1)
    assert [(span.kind, span.reason) for span in life.spans] == [(CONTEXT, ""), (WAITING, waiting.COMPLETE)]


def test_a_step_in_flight(traced, new_request):
    world, iterations = traced(enable_trt_overlap=True)
    world.client.pending = [new_request(i, prompt(3), 4) for i in (1, 2)]
    world.run()
    assert any(waiting.IN_FLIGHT in each.waiting for each in iterations)


def test_of_many_that_wait_the_first_are_examined(traced, new_request):
    world, iterations = traced(max_batch_size=2, max_num_sequences=64)
    world.client.pending = [new_request(i, prompt(3), 1) for i in range(1, 30)]
    world.run()
    assert {reason: len(ids) for reason, ids in iterations[0].waiting.items()} == {
        waiting.BATCH_SIZE: waiting.MOST_EXAMINED, waiting.ORDER: 29 - 2 - waiting.MOST_EXAMINED}


def test_times_of_the_phases(traced, new_request):
    world, iterations = traced()
    launch = world.loop.backend.start
    world.loop.backend.start = lambda *given: (setattr(world.clock, "now", world.clock.now + 0.25), launch(*given))[1]
    world.client.pending = [new_request(1, prompt(3), 2)]
    before = world.clock.now
    world.run()
    assert [each.phases_us for each in iterations] == [
        dict.fromkeys([*(["trace"] if each.iteration else []), "get", *PHASES.values(), "report", "stats"], 0)
        | {"start": 250_000} for each in iterations]
    assert [each.started_at_s - before for each in iterations] == [0.0, 0.25]


def test_phases_add_up_to_the_iteration_with_every_callback_and_hook_in_one(make_world, new_request):
    """The get callback takes 1 ms, each send 2 ms, poll 4 ms, the statistics 8 ms, the two hooks 16 and 32 ms."""
    iterations, sent = [], {}

    def after(milliseconds):
        world.clock.now += 1e-3 * milliseconds

    world = make_world(parts={"trace": lambda each: (iterations.append(each), after(32)),
                              "after_responses": lambda: after(16)}, max_batch_size=2)
    client = world.client
    client.on_get, client.on_poll, client.on_stats = (lambda ms=ms: after(ms) for ms in (1, 4, 8))
    client.on_send = lambda request_id, response: (sent.setdefault(request_id, world.clock.now), after(2))
    client.pending = [new_request(i, prompt(3), 2 + i) for i in (1, 2, 3)]
    world.run()
    finals = {request_id: number for number, each in enumerate(iterations) for request_id in each.finished}
    for number, (each, following) in enumerate(zip(iterations, [*iterations[1:], None])):
        finished = sum(1 for last in finals.values() if last == number)
        assert each.phases_us == dict.fromkeys(each.phases_us, 0) | {
            "get": 1000, "respond": 2000 * finished, "poll": 4000, "stats": 8000,
            "after_responses": 16_000 if finished else 0} | ({"trace": 32_000} if number else {})
        if following is not None:
            assert following.started_at_s - each.started_at_s == pytest.approx(1e-6 * sum(each.phases_us.values()))
        assert each.finished_at_s == tuple(pytest.approx(sent[request_id]) for request_id in each.finished)
    assert [*finals] == [1, 2, 3] and {2, 0, 1} == {*client.asked}
    assert [each.room for each in iterations] == client.asked[:len(iterations)]


@pytest.mark.parametrize("room, options", [(-1, {"max_num_sequences": -1}), (4, {})])
def test_the_first_iteration_of_an_engine_has_its_settings(room, options, traced, new_request):
    world, iterations = traced(max_batch_size=4, policy=SchedulerPolicy.GUARANTEED_NO_EVICT,
                               backend={"num_blocks": 30, "tokens_per_block": 8}, **options)
    world.client.pending = [new_request(1, prompt(3), 2)]
    world.run()
    first, *others = iterations
    assert {"max_batch_size": 4, "max_num_tokens": world.loop.limits.max_num_tokens, "num_blocks": 30,
            "tokens_per_block": 8, "scheduler_policy": "GUARANTEED_NO_EVICT", "enable_block_reuse": False,
            "max_num_sequences": options.get("max_num_sequences", 4)}.items() <= first.settings.items()
    assert first.room == room and not any(each.settings for each in others)


def test_each_step_of_a_native_engine_has_its_form_and_what_kept_it_out_of_earlier_ones(
        make_manager, new_client, new_request, monkeypatch):
    """Request 1 has a penalty, and `compiled` is changed so that it serves no stages. Request 2 has none."""
    torch = pytest.importorskip("torch")
    from batch_manager.decoding.slots import STAGES
    from batch_manager.runtime.forms import table

    class Form(table.CallsForm):
        def __init__(self, name, *given, **options):
            super().__init__(name, *given, **options)
            if name == "compiled":
                self.serves &= ~STAGES

    monkeypatch.setattr(table, "CallsForm", Form)
    client, trace = new_client(), Trace()
    client.pending = [new_request(1, prompt(5), 3, repetition_penalty=torch.tensor([1.5])),
                      new_request(2, prompt(5), 2)]
    manager = make_manager(client, model_path=MODEL, max_seq_len=64, max_batch_size=1, device="cpu",
                           kv_cache_config=KvCacheConfig(max_tokens=256), parts={"trace": trace.append})
    client.wait_for_finals(1, 2)
    assert manager.shutdown()
    found = [(each.form, dict(each.obstacles)) for each in trace.iterations if each.context or each.generation]
    if "compiled" in manager.info.absent:
        assert found == [("packed", {})] * 5, manager.info.absent        # there is no C compiler
    else:
        assert found == [("packed", {"compiled": "stages"})] * 3 + [("compiled", {})] * 2


def test_a_custom_backend_has_no_forms(traced, new_request):
    world, iterations = traced()
    world.client.pending = [new_request(1, prompt(3), 2)]
    world.run()
    assert [(each.form, each.obstacles) for each in iterations] == [("", {})] * 2


def test_without_a_trace_nothing_is_timed(make_world):
    loop = make_world().loop
    assert not {*vars(loop)} & {*PHASES} and loop._phase_times is None


def test_a_file_holds_what_was_flushed_before_a_crash(tmp_path):
    path = tmp_path / "trace.jsonl"
    script = f"""
import os
from batch_manager import IterationTrace, TraceFile
trace = TraceFile({str(path)!r}, seconds_between_flushes=0.0)
for number in range(3):
    trace(IterationTrace(number, ((1, 0, 5),), (2, 2**64 - 1), (), (), waiting={{"order": (4,)}}))
trace._seconds, trace._flush_at = 60.0, float("inf")
trace(IterationTrace(3, (), (), (), ()))
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, cwd=Path(__file__).parents[2])
    with path.open("rb") as file:
        read = list(read_trace(file))
    assert [each.iteration for each in read] == [0, 1, 2] and read[0].waiting == {"order": (4,)}
    assert read[0].generation == (2, 2**64 - 1)


def test_a_trace_file_of_a_running_engine(tmp_path, make_manager, new_client, new_request):
    client, path = new_client(), tmp_path / "trace.jsonl"
    client.pending = [new_request(i, prompt(5), 4) for i in range(1, 6)]
    with TraceFile(path) as trace:
        manager = make_manager(client, parts={"trace": trace})
        client.wait_for_finals(1, 2, 3, 4, 5)
        assert manager.shutdown()
    with path.open("rb") as file:
        read = list(read_trace(file))
    assert sorted(i for each in read for i in each.finished) == [1, 2, 3, 4, 5]
    assert sum(each.iteration for each in read) == sum(range(len(read)))


@pytest.mark.parametrize("seed", range(12))
def test_the_trace_and_the_statistics_agree_iteration_by_iteration(seed, make_world, new_request):
    chooser = random.Random(seed)
    trace = Trace()
    is_static = seed % 4 == 3
    world = make_world(
        parts={"trace": trace.append}, policy=chooser.choice([*SchedulerPolicy]),
        model_type=TrtGptModelType.V1 if is_static else TrtGptModelType.InflightFusedBatching,
        backend={"num_blocks": 8, "tokens_per_block": 8, "max_seq_len": 40, "is_asynchronous": seed % 2 == 1},
        kv_cache_config=KvCacheConfig(tokens_per_block=8, enable_block_reuse=not is_static and seed % 3 == 0),
        max_batch_size=3, max_num_sequences=5, enable_trt_overlap=not is_static and seed % 5 == 2)
    launch = world.loop.backend.start
    world.loop.backend.start = lambda *given: (setattr(world.clock, "now", world.clock.now + 0.25), launch(*given))[1]
    for request_id in range(1, 40):
        world.client.pending.append(new_request(request_id, [1] * chooser.randint(1, 20), chooser.randint(1, 12)))
        if chooser.random() < 0.5:
            world.client.stops = {chooser.randint(1, request_id)}
        world.step(chooser.randint(1, 3))
    world.run()

    records = {record["Iteration Counter"]: record for record in map(json.loads, world.client.stats)}
    assert {each.iteration for each in trace.iterations} <= records.keys() and len(trace.iterations) > 50
    for each in trace.iterations:
        record = records[each.iteration]
        told = {"Generation Requests": len(each.generation), "Context Requests": len(each.context),
                "Total Context Tokens": sum(tokens for _, _, tokens in each.context),
                "Paused Requests": len(each.paused)}
        if is_static:    # statistics describe the whole batch
            told = {}
        told |= {"New Requests": len(each.arrived), "Queued Requests": each.queued_requests,
                 "Used KV cache blocks": each.live_blocks, "Cached KV cache blocks": each.cached_blocks,
                 "Free KV cache blocks": each.cached_blocks + each.free_blocks}
        assert {name: record[name] for name in told} == told
        in_iteration = {*each.generation, *each.paused, *(request_id for request_id, _, _ in each.context),
                        *(request_id for ids in each.waiting.values() for request_id in ids)}
        assert not in_iteration or is_static or len(in_iteration) == record["Active Request Count"]
        assert sum(each.phases_us.values()) == record["Iteration Latency Microseconds"]
    assert any(each.paused or each.waiting for each in trace.iterations)
