"""The timings of a request are right: `return_perf_metrics` and `arrival_time`."""

import asyncio
import time

import pytest

from batch_manager import FinishReason, InferenceRequest, KvCacheConfig, Parts, PerfMetrics, SchedulerPolicy
from batch_manager.aio import AsyncEngine
from batch_manager.loop.timings import Timings
from batch_manager.names import TrtGptModelType
from batch_manager.responses.perf_metrics import PERF_TENSORS
from batch_manager.testing import ScriptedBackend

ASKS = {"return_perf_metrics": True}


def metrics_of(world, request_id):
    return metrics_of_final(world.client.final(request_id))


def metrics_of_final(final):
    assert final.names[-len(PERF_TENSORS):] == list(PERF_TENSORS) and len(final.names) == 7 + len(PERF_TENSORS)
    assert all(final.tensors[name].shape == (1,) and final.tensors[name].dtype == "int64" for name in PERF_TENSORS)
    return PerfMetrics(**{name: int(final.tensors[name][0]) for name in PERF_TENSORS})


@pytest.mark.parametrize("streaming", [False, True])
def test_each_moment_is_told_in_nanoseconds_of_the_clock(streaming, make_world, new_request):
    world = make_world(max_batch_size=1)
    world.clock.now = 100.0
    world.client.pending = [new_request(1, [1, 2], 3, streaming=streaming, **ASKS)]
    for _ in range(3):
        world.step()
        world.clock.now += 1.0
    metrics = metrics_of(world, 1)
    assert metrics == PerfMetrics(arrival_time_ns=100 * 10**9, first_scheduled_time_ns=100 * 10**9,
                                  first_token_time_ns=100 * 10**9, last_token_time_ns=102 * 10**9,
                                  kv_cache_alloc_new_blocks=metrics.kv_cache_alloc_new_blocks)
    assert metrics.kv_cache_alloc_new_blocks >= 1
    assert (metrics.queue_s, metrics.time_to_first_token_s, metrics.end_to_end_s) == (0.0, 0.0, 2.0)
    assert metrics.time_per_output_token_s(3) == 1.0 and metrics.time_per_output_token_s(1) is None
    assert all(len(response.names) == 7 for response in world.client.responses[1][:-1]), "finals only"


def test_queue_time_counts_from_the_arrival_in_the_server(make_world, new_request):
    world = make_world(max_batch_size=1)
    world.client.pending = [new_request(1, [1], 2, arrival_time=world.clock.now - 7.5, **ASKS)]
    world.run()
    assert metrics_of(world, 1).queue_s == 7.5


def test_a_request_whose_deadline_has_passed_when_it_is_fetched_never_runs(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 1, deadline_s=2.0, arrival_time=world.clock.now - 2.0),
                            new_request(1, [1], 1), new_request(2, [1], 1)]
    world.run()
    late, duplicate = sorted(final.error for final in world.client.finals(1))
    assert late.startswith("[DEADLINE]") and duplicate.startswith("[DUPLICATE_REQUEST_ID]")
    assert world.client.final(2).error == ""


def test_the_metrics_of_a_request_are_its_own_when_a_step_of_an_earlier_one_with_its_id_is_in_flight(
        make_world, new_request):
    world = make_world(enable_trt_overlap=True, max_batch_size=1)
    world.client.pending = [new_request(1, [1, 2], 12, **ASKS)]
    world.step(4)
    world.client.stops = {1}
    world.step()                                    # it ends while its step runs
    world.client.stops = set()
    world.client.pending = [new_request(1, [9] * 3, 4, **ASKS)]
    for _ in range(20):
        world.clock.now += 1.0
        world.step()
    first, metrics = world.client.finals(1)[0], metrics_of_final(world.client.finals(1)[1])
    assert first.finish_reason == FinishReason.CANCELLED
    moments = [metrics.arrival_time_ns, metrics.first_scheduled_time_ns, metrics.first_token_time_ns,
               metrics.last_token_time_ns]
    assert moments == sorted(moments) and metrics.first_token_time_ns > metrics.first_scheduled_time_ns


def test_held_finals_of_a_static_batch_are_sent_when_its_last_member_expires_while_requests_are_fetched(
        make_world, new_request):
    world = make_world(model_type=TrtGptModelType.V1, max_batch_size=2, max_num_sequences=4)
    world.client.pending = [new_request(1, [1], 1), new_request(2, [1], 9, deadline_s=5.0)]
    world.step(2)
    world.clock.now += 6.0
    world.client.pending = [new_request(3, [1], 2, deadline_s=1.0, arrival_time=world.clock.now - 2.0),
                            new_request(4, [1], 2)]
    world.step()
    assert world.client.final(1).finish_reason == FinishReason.LENGTH
    assert world.client.final(2).finish_reason == FinishReason.TIMED_OUT
    assert world.client.final(3).error.startswith("[DEADLINE]")
    world.run()
    assert world.client.final(4).error == "" and world.client.final(4).finish_reason == FinishReason.LENGTH


def test_a_deadline_counts_from_the_arrival(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 9, deadline_s=8.0, arrival_time=world.clock.now - 7.5, **ASKS)]
    world.step()
    assert not world.client.finals(1)
    world.clock.now += 1.0
    world.step()
    assert world.client.final(1).finish_reason == FinishReason.TIMED_OUT
    assert metrics_of(world, 1).end_to_end_s == 8.5


def test_the_wall_clock_as_arrival_is_refused_with_the_right_clock(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 2, arrival_time=1_790_000_000.0)]
    world.run()
    assert world.client.final(1).error.endswith("take it from time.monotonic(), not from time.time()")


@pytest.mark.parametrize("arrival", ["ahead", float("nan"), float("inf"), True, "1"])
def test_an_arrival_that_cannot_be_is_refused_and_costs_no_other(arrival, make_world, new_request):
    world = make_world()
    given = world.clock.now + 60 if arrival == "ahead" else arrival
    world.client.pending = [new_request(1, [1], 2, arrival_time=given), new_request(2, [1], 2)]
    world.run()
    error = world.client.final(1).error
    num_parts = 3 if arrival == "ahead" else 2    # there is nothing to advise for values of other types, nan and inf
    assert error.startswith("[INVALID_REQUEST]") and "arrival_time" in error and error.count(";") == num_parts - 1
    if arrival == "ahead":
        assert "60 seconds in the future" in error and "time.monotonic()" in error
    assert world.client.final(2).error == ""


def test_an_arrival_within_the_tolerance_is_now(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [1], 2, arrival_time=world.clock.now + 0.5, **ASKS)]
    world.run()
    assert metrics_of(world, 1).queue_s == 0.0


def test_pauses_and_what_they_cost(make_world, new_request):
    world = make_world(backend={"num_blocks": 6, "tokens_per_block": 4}, policy=SchedulerPolicy.MAX_UTILIZATION)
    world.client.pending = [new_request(i, [i + 1] * 5, 8, **ASKS) for i in range(4)]
    seen = {}
    world.client.on_send = lambda request_id, response: seen.update({request_id: response})
    world.run()
    found = [metrics_of(world, i) for i in range(4)]
    recomputed = world.loop.timings.recomputed_tokens
    assert recomputed and sum(metrics.recomputed_tokens for metrics in found) == recomputed
    assert found[0].num_pauses == 0 and sum(metrics.num_pauses for metrics in found) > 0
    assert found[0].kv_cache_alloc_new_blocks == 3, "12 tokens are computed, in blocks of 4"
    assert all(m.kv_cache_alloc_new_blocks > 4 for m in found if m.num_pauses), "blocks after a pause count, too"
    assert not world.loop.timings.asking and not world.loop.timings.waiting


def test_what_was_found_in_the_cache(make_world, new_request):
    world = make_world(backend={"num_blocks": 20, "tokens_per_block": 4},
                       kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    world.client.pending = [new_request(1, list(range(1, 11)), 2, **ASKS)]
    world.run()
    world.client.pending = [new_request(2, list(range(1, 11)), 2, **ASKS)]
    world.run()
    first, second = metrics_of(world, 1), metrics_of(world, 2)
    assert (first.cached_tokens, first.kv_cache_reused_blocks, first.kv_cache_alloc_new_blocks) == (0, 0, 3)
    assert second.cached_tokens == 9 and second.kv_cache_reused_blocks == 3 and second.kv_cache_alloc_new_blocks == 0


def test_beams_count_the_blocks_of_all_beams(make_world, new_request):
    world = make_world(backend={"num_blocks": 40, "tokens_per_block": 4}, max_beam_width=3)
    world.client.pending = [new_request(1, [1] * 6, 4, beam_width=3, **ASKS)]
    world.run()
    metrics = metrics_of(world, 1)
    assert metrics.kv_cache_alloc_new_blocks == 1 + 3 + 3, "one shared, a last one each, and one more each"
    assert metrics.first_token_time_ns


def test_static_batches_tell_it_too(make_world, new_request):
    world = make_world(model_type=TrtGptModelType.V1, policy=SchedulerPolicy.GUARANTEED_NO_EVICT)
    world.client.pending = [new_request(1, [1], 2, **ASKS), new_request(2, [1], 5)]
    while not world.client.finals(1):
        world.step()
        world.clock.now += 1.0
    metrics = metrics_of(world, 1)
    assert metrics.time_per_output_token_s(2) == 1.0, "until its own last token, not that of the batch"
    assert len(world.client.final(2).names) == 7


def test_a_request_that_is_stopped_running_or_waiting(make_world, new_request):
    world = make_world(max_batch_size=1)
    items = [new_request(1, [1], 50, **ASKS), new_request(2, [1], 50, **ASKS)]
    world.loop.callbacks.fetched._get = lambda n: [items.pop(0) for _ in list(items)]
    world.step(2)
    world.client.stops = {1, 2}
    world.step()
    assert metrics_of(world, 1).first_token_time_ns == 1000 * 10**9
    waiting = metrics_of(world, 2)
    assert waiting == PerfMetrics(arrival_time_ns=1000 * 10**9) and waiting.queue_s is None
    assert waiting.end_to_end_s is None and waiting.time_to_first_token_s is None


def test_nothing_is_computed_where_nobody_asks(make_world, new_request, monkeypatch):
    for name in ("note_tokens", "note_pauses"):
        monkeypatch.setattr(Timings, name, lambda *_: pytest.fail("nobody asked"))
    monkeypatch.setattr("batch_manager.loop.timings.PerfMetrics", lambda **_: pytest.fail("nobody asked"))
    world = make_world(backend={"num_blocks": 6, "tokens_per_block": 4}, policy=SchedulerPolicy.MAX_UTILIZATION)
    world.client.pending = [new_request(i, [i + 1] * 5, 8, streaming=i % 2 == 0) for i in range(4)]
    world.run()
    assert all(len(world.client.final(i).names) == 7 for i in range(4))


def test_an_error_has_none(make_world, new_request):
    world = make_world()
    world.client.pending = [new_request(1, [10**9], 2, **ASKS), new_request(2, [1], 9, deadline_s=1.0, **ASKS)]
    world.loop.backend.start, start = (lambda batch: (_ for _ in ()).throw(ValueError())), world.loop.backend.start
    world.run()
    assert world.client.final(1).tensors == {} and world.client.final(2).tensors == {}
    world.loop.backend.start = start
    assert not world.loop.timings.asking and not world.loop.timings.waiting


def test_the_engine_for_asyncio_tells_it_in_the_last_delta():
    async def main():
        engine = await AsyncEngine.start(parts=Parts(backend=ScriptedBackend()))
        async with engine:
            begun = time.monotonic()
            tensors = {"input_ids": [1, 2], "request_output_len": 5}
            deltas = [d async for d in engine.stream({**tensors, **ASKS}, arrival_time=begun)]
            return begun, deltas, await engine.generate({**tensors, **ASKS}), await engine.generate(tensors)

    begun, deltas, whole, plain = asyncio.run(main())
    metrics = deltas[-1].metrics
    assert all(delta.metrics is None for delta in deltas[:-1]) and plain.metrics is None
    assert metrics.arrival_time_ns == round(begun * 1e9) and 0 < metrics.time_to_first_token_s <= metrics.end_to_end_s
    assert whole.metrics.arrival_time_ns >= metrics.last_token_time_ns


def test_it_is_an_attribute_like_the_others():
    assert InferenceRequest(1, arrival_time=3.0).arrival_time == 3.0 and InferenceRequest(1).arrival_time is None
