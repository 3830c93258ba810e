"""With run-ahead, a step is launched before the last one is read, and the responses equal those of lockstep."""

import functools
import json
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from batch_manager import (
    CapacityScheduler,
    ConfigError,
    ContextChunkingPolicy,
    InferenceRequest,
    KvCacheConfig,
    SchedulerPolicy,
    SimpleScheduler,
    TrtGptModelType,
)
from batch_manager.errors import DeviceLostError
from batch_manager.handover import RowFailure
from batch_manager.names import ErrorCode, FinishReason
from batch_manager.scheduling.policies import make_scheduler
from batch_manager.stats.trace import Trace
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness.requests import request
from tests.harness.world import build_world

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
REUSE = KvCacheConfig(enable_block_reuse=True)
VOCAB, SIZE = 50, 4
ALL_LOGITS = {"return_log_probs": True, "return_context_logits": True, "return_generation_logits": True}


class Late(ScriptedBackend):
    """Asynchronous backend that records its steps.

    deepest      the largest number of steps in flight
    in_two       slots with a row in two steps in flight
    iterations   iterations in which steps were launched
    """

    def __init__(self, **options):
        super().__init__(**{"vocab_size": VOCAB, "tokens_per_block": SIZE, "num_blocks": 200, "is_asynchronous": True,
                            **options})
        self.deepest, self.in_two, self.iterations = 0, set(), set()

    def start(self, batch):
        self.iterations.add(batch.iteration)
        for step in self._queue:
            self.in_two |= set(batch.slots()) & set(step.batch.slots())
        step = super().start(batch)
        self.deepest = max(self.deepest, len(self._queue))
        return step


def lockstep_world(make_world, *, backend=None, **options):
    return make_world(backend=Late(**backend or {}, is_asynchronous=False), run_ahead=False, **options)


def world_ahead(make_world, *, backend=None, **options):
    return make_world(backend=Late(**backend or {}), run_ahead=True, **options)


def received(world, request_id):
    """Return all responses to a request as comparable values, with the bytes of every tensor."""
    return [(response.final, response.error, response.names,
             [(tensor.dtype, tensor.shape, tensor.tobytes()) for tensor in response.tensors.values()])
            for response in world.client.responses[request_id]]


def sends(world):
    return [event for event in world.client.events if event.startswith("send")]


def last_record(world):
    return json.loads(world.client.stats[-1])


def run_both(make_world, make_requests, **options):
    """Run the same requests in lockstep and with run-ahead. Assert equal responses. Return both worlds."""
    worlds = []
    for build in (lockstep_world, world_ahead):
        world = build(make_world, **options)
        world.client.pending = make_requests(world)
        world.run()
        worlds.append(world)
    lockstep, ahead = worlds
    assert lockstep.backend.deepest == 0 and ahead.backend.deepest == 2, "the one waits for each step, the other not"
    assert lockstep.client.responses.keys() == ahead.client.responses.keys()
    for request_id in lockstep.client.responses:
        assert received(lockstep, request_id) == received(ahead, request_id)
    return lockstep, ahead


def plain(new_request, world, count=8, new_tokens=9):
    """Return requests without log-probabilities and logits. Every other request streams."""
    return [new_request(i, [i + 1] * (i + 2), new_tokens, streaming=i % 2 == 1) for i in range(count)]


def mixed(new_request, seed, world, count=12):
    """Return requests of all kinds. Some prompts share a prefix, and some requests end with an end id."""
    draw, requests = random.Random(seed), []
    trunk = [draw.randrange(VOCAB) for _ in range(20)]
    for i in range(count):
        prompt = trunk[:draw.choice([0, 8, 13])] + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
        new_tokens = draw.choice([1, 2, 3, draw.randint(4, 15)])
        asked = {name: True for name in ALL_LOGITS if draw.random() < 0.3}
        if draw.random() < 0.4:
            asked |= {"runtime_top_k": 5, "temperature": 0.7, "random_seed": i}
        if draw.random() < 0.4:
            asked["end_id"] = draw.choice(world.expected(prompt, new_tokens, random_seed=asked.get("random_seed")))
        requests.append(new_request(i, prompt, new_tokens, streaming=draw.random() < 0.5, **asked))
    return requests


WAYS = {
    "plain": {},
    "no evict": {"policy": GUARANTEED},
    "split": {"model_type": TrtGptModelType.InflightBatching},
    "a tight pool": {"backend": {"num_blocks": 12}, "max_batch_size": 4},
    "a tight pool, no evict": {"backend": {"num_blocks": 12}, "policy": GUARANTEED},
    "chunks": {"enable_chunked_context": True, "max_num_tokens": 12},
    "chunks alike, a tight pool": {"enable_chunked_context": True, "max_num_tokens": 12, "backend": {"num_blocks": 12},
                                   "context_chunking_policy": ContextChunkingPolicy.EQUAL_PROGRESS},
    "reuse": {"kv_cache_config": REUSE},
    "reuse, chunks, a tight pool": {"kv_cache_config": REUSE, "enable_chunked_context": True, "max_num_tokens": 12,
                                    "backend": {"num_blocks": 12}},
    "a host cache": {"kv_cache_config": KvCacheConfig(enable_block_reuse=True, host_cache_size=1),
                     "backend": {"num_blocks": 12, "host_blocks": 9}},
    "a window": {"backend": {"window": 9}, "kv_cache_config": KvCacheConfig(max_attention_window=9)},
    "sinks, a tight pool": {"backend": {"window": 9, "sink": 3, "num_blocks": 12},
                            "kv_cache_config": KvCacheConfig(max_attention_window=9, sink_token_length=3)},
    "a window, reuse": {"backend": {"window": 9, "num_blocks": 20},
                        "kv_cache_config": KvCacheConfig(max_attention_window=9, enable_block_reuse=True)},
    "one at a time": {"max_num_sequences": 1},
    "many at a time": {"max_num_sequences": -1, "max_batch_size": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_response_is_that_of_lockstep(make_world, new_request, way):
    lockstep, ahead = run_both(make_world, partial(mixed, new_request, 0), **WAYS[way])
    assert all(final.error == "" for i in range(12) for final in ahead.client.finals(i))
    assert sum(json.loads(record)["Generated Tokens"] for record in ahead.client.stats) == sum(
        json.loads(record)["Generated Tokens"] for record in lockstep.client.stats)


def test_the_worlds_above_pause_reuse_and_leave_windows(make_world, new_request):
    """The worlds of WAYS, which the test above runs, recompute tokens, reuse blocks and evict blocks."""
    recomputed = reused = evicted = 0
    for way in WAYS:
        _, ahead = run_both(make_world, partial(mixed, new_request, 0), **WAYS[way])
        recomputed += last_record(ahead)["Recomputed Tokens"]
        reused += last_record(ahead)["Reused KV cache blocks"]
        evicted += ahead.loop.kv.usage().evicted_blocks
    assert recomputed and reused and evicted


@pytest.mark.parametrize("policy", [MAX, GUARANTEED])
def test_responses_come_in_the_order_of_lockstep(make_world, new_request, policy):
    lockstep, ahead = run_both(make_world, partial(plain, new_request), policy=policy)
    assert sends(lockstep) == sends(ahead)


@pytest.mark.parametrize("policy", [MAX, GUARANTEED])
def test_lengths_alone_cost_no_token_twice(make_world, new_request, policy):
    """If all requests end at their lengths, no token is discarded."""
    _, ahead = run_both(make_world, partial(plain, new_request), policy=policy)
    assert last_record(ahead)["Discarded Tokens"] == ahead.loop.window.num_discarded_tokens == 0


def test_the_next_step_is_launched_before_the_last_one_is_read(make_world, new_request):
    """An iteration launches step n + 1 before it reads step n.

    The order is: get, schedule, launch n + 1, read n, send, poll, finals of stopped requests, statistics.
    """
    world = world_ahead(make_world)
    events, start = world.client.events, world.backend.start

    def noted(batch):
        pending = start(batch)
        events.append(f"launch {batch.iteration}")
        return SimpleNamespace(finish=lambda: events.append(f"read {batch.iteration}") or pending.finish())

    world.backend.start = noted
    world.client.pending = [new_request(1, [1], 3, streaming=True)]
    world.run()
    assert events[:22] == [
        "get", "launch 0", "poll", "stats",
        "get", "launch 1", "read 0", "send 1", "poll", "stats",
        "get", "launch 2", "read 1", "send 1", "poll", "stats",
        "get", "read 2", "send 1", "poll", "stats", "get"]


# Beams and logits post-processors

def with_beams(new_request, world):
    return [*plain(new_request, world, 4),
            *(new_request(10 + i, [i, 2, 3], 7, beam_width=2 + i % 2, return_log_probs=True,
                          return_generation_logits=i == 0, return_context_logits=i == 1) for i in range(3))]


@pytest.mark.parametrize("num_blocks", [200, 22])
def test_beams_take_their_turn_in_lockstep_beside_requests_that_run_ahead(make_world, new_request, num_blocks):
    lockstep, ahead = run_both(make_world, partial(with_beams, new_request), max_beam_width=3,
                               backend={"num_blocks": num_blocks})
    assert ahead.backend.in_two
    alone = world_ahead(make_world, max_beam_width=3)
    alone.client.pending = with_beams(new_request, alone)[4:]
    alone.run()
    assert not alone.backend.in_two, "the parents of the next step are in the last one"
    assert all(received(alone, i) == received(lockstep, i) for i in (10, 11, 12))


class Recorder:
    """A logits post-processor that makes token (tokens so far) % VOCAB the likeliest one and records its calls."""

    def __init__(self):
        self.seen = {}

    def __call__(self, request_id, logits, token_ids):
        (tokens,) = token_ids
        self.seen.setdefault(request_id, []).append(tokens)
        logits[0, 0, :] = -1.0
        logits[0, 0, len(tokens) % VOCAB] = 1.0
        return logits


def test_a_function_of_the_user_sees_every_token_before_the_one_it_helps_to_choose(make_world, new_request):
    recorders = []

    def requests(world):
        recorders.append(Recorder())
        asking = [InferenceRequest(i, {"input_ids": [i] * 3, "request_output_len": 6}, is_streaming=i % 2 == 1,
                                   logits_post_processor=recorders[-1]) for i in (20, 21)]
        return [*plain(new_request, world, 4), *asking]

    run_both(make_world, requests)
    lockstep, ahead = (recorder.seen for recorder in recorders)
    assert lockstep == ahead
    for i in (20, 21):
        text = [i] * 3 + [n % VOCAB for n in range(3, 9)]
        assert ahead[i] == [text[:n] for n in range(3, 9)], "once for each token"


# Steps in flight delay no response

def steps_until(world, holds, limit=50):
    for number in range(1, limit):
        world.step()
        if holds():
            return number
    raise AssertionError("it never holds")


@pytest.mark.parametrize("options", [{"request_output_len": 1}, {"request_output_len": 4, "beam_width": 2}], ids=str)
def test_what_no_step_can_follow_is_read_in_the_iteration_that_launched_it(make_world, options):
    """A step that no other step can follow is read in the iteration that launched it."""
    world = world_ahead(make_world, max_beam_width=2)
    world.client.pending = [InferenceRequest(1, {"input_ids": [1, 2], **options})]
    assert steps_until(world, lambda: world.client.finals(1)) == options["request_output_len"]


def test_a_first_token_waits_for_no_more_than_a_launch(make_world, new_request):
    """The first token is sent in the iteration after its launch. Then each iteration sends one token."""
    world = world_ahead(make_world)
    world.client.pending = [new_request(1, [1, 2], 6, streaming=True)]
    assert steps_until(world, lambda: world.client.streamed(1)) == 2
    for number in range(2, 7):
        assert world.client.streamed(1) == world.expected([1, 2], number - 1)
        assert world.step()
    assert world.client.final(1).final


@pytest.mark.parametrize("policy", [MAX, GUARANTEED])
def test_who_waits_for_blocks_of_a_running_request_starts_when_its_last_step_is_read(make_world, new_request, policy):
    """A request that waits for the blocks of a running request starts when the last step of that request is read."""
    world = world_ahead(make_world, policy=policy, backend={"num_blocks": 3})
    world.client.pending = [new_request(1, [1] * 8, 4), new_request(2, [2] * 8, 4)]
    assert steps_until(world, lambda: world.client.finals(1)) == 5
    assert steps_until(world, lambda: world.client.finals(2)) == 5
    for i in (1, 2):
        assert world.client.final(i).tokens() == [i] * 8 + world.expected([i] * 8, 4)


# Requests that end while a step is in flight

def freed_at_their_finals(world):
    """Return a set that collects the ids of requests whose blocks were free when their final response was sent."""
    freed, by_id = set(), {}
    admit = world.loop._resources.admit

    def noted(admitted):
        by_id[admitted.request.request_id] = admitted.request
        admit(admitted)

    def on_send(request_id, response):
        if response.final and request_id in by_id and not world.loop.kv.owns(by_id[request_id]):
            freed.add(request_id)

    world.loop._resources.admit, world.client.on_send = noted, on_send
    return freed


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("way", ["plain", "chunks", "reuse", "a tight pool", "a window"])
def test_a_stop_at_any_point_costs_a_row_and_leaves_no_trace(make_world, new_request, way, at, streaming):
    """A stop discards at most one token, and other requests get the id, slot and blocks at once."""
    prompts = {i: [i] * (9 + 8 * (i == 1)) for i in range(4)}
    world = world_ahead(make_world, **WAYS[way])
    freed = freed_at_their_finals(world)
    world.client.pending = [new_request(i, prompt, 8, streaming=streaming and i == 1) for i, prompt in prompts.items()]
    world.step(at)
    told = len(world.client.responses[1])
    world.client.stops = {1}
    world.step()
    world.client.stops = set()
    final = world.client.final(1)
    tokens = world.client.streamed(1) if streaming else final.tokens()[17:]
    assert tokens == world.expected(prompts[1], len(tokens)) and 1 in freed
    assert final.finish_reason == (FinishReason.LENGTH if len(tokens) == 8 else FinishReason.CANCELLED)
    assert not streaming or len(world.client.responses[1]) - told <= 2, "what was read, and the end"

    # Other requests get the id, the slot and the blocks of the stopped request at once.
    before = len(world.client.responses[1])
    world.client.pending += [new_request(1, [7] * 9, 6, streaming=True)]
    world.client.pending += [new_request(i, [i] * 15, 6) for i in range(10, 16)]
    world.run()
    again = world.client.responses[1][before:]
    assert [token for response in again for token in response.tokens()] == world.expected([7] * 9, 6)
    for i in (0, 2, 3, *range(10, 16)):
        prompt, count = ([i] * 15, 6) if i >= 10 else (prompts[i], 8)
        assert world.client.final(i).tokens() == prompt + world.expected(prompt, count)
    assert last_record(world)["Discarded Tokens"] <= 1


def test_a_stop_discards_the_token_in_flight_and_statistics_say_so(make_world, new_request):
    world = world_ahead(make_world)
    world.client.pending = [new_request(i, [i], 12) for i in range(2)]
    world.step(4)
    assert last_record(world)["Iterations In Flight"] == 1 and last_record(world)["Discarded Tokens"] == 0
    world.client.stops = {1}
    world.step(2)
    assert last_record(world)["Discarded Tokens"] == 1
    world.run()
    records = [json.loads(record) for record in world.client.stats]
    assert [record["Iterations In Flight"] for record in records] == [1] * (len(records) - 1) + [0]
    assert records[-1]["Discarded Tokens"] == 1
    assert sum(record["Generated Tokens"] for record in records) == 12 + 4


def test_in_lockstep_nothing_is_in_flight_and_nothing_discarded(make_world, new_request):
    world = lockstep_world(make_world)
    world.client.pending = plain(new_request, world)
    world.run()
    records = [json.loads(record) for record in world.client.stats]
    assert {record["Iterations In Flight"] for record in records} == {0}
    assert {record["Discarded Tokens"] for record in records} == {0}


def test_an_end_id_discards_the_row_that_was_launched_after_it(make_world, new_request):
    def requests(world):
        return [new_request(0, [5], 12, streaming=True), *(
            new_request(i, [i], 12, end_id=world.expected([i], 4)[3], streaming=i % 2 == 1) for i in range(1, 5))]

    lockstep, ahead = run_both(make_world, requests)
    assert last_record(ahead)["Discarded Tokens"] == 4 and last_record(lockstep)["Discarded Tokens"] == 0
    assert {ahead.client.final(i).finish_reason for i in range(1, 5)} == {FinishReason.END_ID}


def test_the_last_of_all_ends_with_an_end_id_and_what_is_in_flight_is_waited_for(make_world, new_request):
    world = world_ahead(make_world)
    world.client.pending = [new_request(1, [5], 12, end_id=world.expected([5], 4)[3])]
    world.run()
    world.step()
    assert len(world.loop.window) == 0 and world.loop.window.num_discarded_tokens == 1
    assert world.client.final(1).tokens() == [5, *world.expected([5], 3)]
    world.client.pending = [new_request(1, [6], 4)]
    world.run()
    assert world.client.finals(1)[1].tokens() == [6, *world.expected([6], 4)]


@pytest.mark.parametrize("at", range(1, 9))
def test_a_deadline_that_passes_while_a_step_is_in_flight(make_world, new_request, at):
    world = world_ahead(make_world, enable_chunked_context=True, max_num_tokens=12)
    freed = freed_at_their_finals(world)
    world.client.pending = [new_request(1, [1] * 20, 20, streaming=True, deadline_s=5.0), new_request(2, [2] * 3, 12)]
    world.step(at)
    world.clock.now += 6
    world.step()
    final, told = world.client.final(1), world.client.streamed(1)
    assert told == world.expected([1] * 20, 20)[:len(told)] and 1 in freed
    assert final.code == "DEADLINE" if not told else final.finish_reason == FinishReason.TIMED_OUT
    world.client.pending = [new_request(i, [i] * 9, 5) for i in range(3, 9)]
    world.run()
    assert world.client.final(2).tokens() == [2] * 3 + world.expected([2] * 3, 12)
    assert all(world.client.final(i).tokens() == [i] * 9 + world.expected([i] * 9, 5) for i in range(3, 9))


@pytest.mark.parametrize("drain", [True, False])
def test_a_manager_that_runs_ahead_shuts_down_as_any_other(make_manager, new_client, new_request, drain):
    client = new_client()
    backend = Late()
    client.pending = [new_request(i, [i], 300, streaming=True) for i in range(4)]
    manager = make_manager(client, backend=backend)
    while not client.responses[3]:
        client.wait_for_finals()
    assert manager.shutdown(drain=drain, timeout=20)
    assert backend.deepest == 2 and backend.closed
    for i in range(4):
        told = client.streamed(i)
        assert told == backend.expected([i], 300)[:len(told)] and client.final(i).code == ("" if drain else "SHUTDOWN")
        assert not drain or len(told) == 300


# Steps that fail while the next one is in flight

def failing(where, at, raised):
    """Return {where: hook}, an option of a backend. In the step of iteration `at`, the hook raises once.

    Before it raises, the hook appends `at` to `raised`.
    """
    def hook(batch):
        if batch.iteration == at and not raised:
            raised.append(at)
            raise RuntimeError("planted")

    return {where: hook}


def as_many_as_planted(num_failed_steps, planted, where):
    """Whether the number of failed steps fits the number of planted faults.

    A step that raises in finish has written what the next step needs, so only the planted steps fail. A step that
    raises before it runs has written nothing, so the step that was launched after it may fail too.
    """
    return num_failed_steps == planted if where == "on_finish" else num_failed_steps >= planted


@functools.cache
def mixed_in_lockstep(way, seed):
    """Return a world of WAYS that has run the requests `mixed` of a seed in lockstep."""
    lockstep = lockstep_world(build_world, **WAYS[way])
    lockstep.client.pending = mixed(request, seed, lockstep)
    lockstep.run()
    return lockstep


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
@pytest.mark.parametrize("at", range(14))
@pytest.mark.parametrize("way", ["plain", "chunks", "reuse, chunks, a tight pool", "a tight pool", "a window",
                                 "sinks, a tight pool", "a host cache"])
def test_a_step_that_raises_once_costs_nobody_anything_at_any_point(make_world, new_request, way, at, where):
    lockstep = mixed_in_lockstep(way, at)
    raised = []
    options = {**WAYS[way], "backend": {**WAYS[way].get("backend", {}), **failing(where, at, raised)}}
    ahead = world_ahead(make_world, **options)
    ahead.client.pending = mixed(new_request, at, ahead)
    ahead.run()
    failed = {i for i in range(12) if ahead.client.final(i).error}
    assert len(failed) <= 1 and raised == [at] * (at in ahead.backend.iterations)
    assert as_many_as_planted(ahead.loop._runner.num_failed_steps, len(raised), where)
    for i in set(range(12)) - failed:
        assert received(ahead, i) == received(lockstep, i)
    if failed:      # the request was alone in its step, and the tokens that it had been sent are right
        (i,) = failed
        told = ahead.client.streamed(i)
        assert ahead.client.final(i).code == "MODEL_ERROR"
        assert told == lockstep.client.streamed(i)[:len(told)] or not told


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_steps_that_fail_one_after_the_other_cost_nobody_anything(make_world, new_request, at, length, where):
    raised = []

    def hook(batch):
        if at <= batch.iteration < at + length and batch.iteration not in raised:
            raised.append(batch.iteration)
            raise RuntimeError("planted")

    ahead = world_ahead(make_world, backend={where: hook})
    ahead.client.pending = plain(new_request, ahead)
    ahead.run()
    assert 1 <= len(raised) <= length and as_many_as_planted(last_record(ahead)["Failed Steps"], len(raised), where)
    for i in range(8):
        prompt = [i + 1] * (i + 2)
        got = ahead.client.streamed(i) if i % 2 else ahead.client.final(i).tokens()[len(prompt):]
        assert got == ahead.expected(prompt, 9)


def test_rows_that_ran_on_a_step_that_failed_are_discarded_and_run_again(make_world, new_request):
    ahead = world_ahead(make_world, backend=failing("on_finish", 4, []))
    ahead.client.pending = plain(new_request, ahead, 6)
    ahead.run()
    assert last_record(ahead)["Discarded Tokens"] == 6, "the step that was launched after it was of six requests"
    assert sum(json.loads(record)["Generated Tokens"] for record in ahead.client.stats) == 6 * 9


@pytest.mark.parametrize("at", range(7))
def test_a_launch_that_raises_while_a_step_is_in_flight_costs_nobody_anything(make_world, new_request, at):
    class CannotLaunch(Late):
        left = 1

        def start(self, batch):
            if batch.iteration == at and self.left:
                self.left -= 1
                raise MemoryError
            return super().start(batch)

    world = make_world(backend=CannotLaunch(), run_ahead=True)
    world.client.pending = plain(new_request, world)
    world.run()
    assert last_record(world)["Failed Steps"] == 1 and world.backend.deepest == 2
    for i in range(8):
        prompt = [i + 1] * (i + 2)
        got = world.client.streamed(i) if i % 2 else world.client.final(i).tokens()[len(prompt):]
        assert got == world.expected(prompt, 9)


def starts_with(backend, batch, token):
    """Return the slots of the batch whose sequences start with this token."""
    lengths = [(work.slot, work.start + len(work.token_ids)) for work in batch.context]
    lengths += zip(batch.generation.slots.tolist(), (batch.generation.kv_lengths + 1).tolist())
    return [slot for slot, length in lengths if backend.history(slot, length)[0] == token]


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
@pytest.mark.parametrize("since", [0, 3])
@pytest.mark.parametrize("fault", ["raises", "not finite"])
def test_c21_one_who_fails_alone_is_lost_and_the_others_get_what_they_get_in_lockstep(
        make_world, new_request, fault, since, where):
    def hook(batch):
        slots = starts_with(world.backend, batch, 3) if batch.iteration >= since else []
        if slots and fault == "raises":
            raise RuntimeError("planted")
        return dict.fromkeys(slots, RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted"))

    for build in (lockstep_world, world_ahead):
        world = build(make_world, backend={where: hook, "num_blocks": 40})
        world.client.pending = plain(new_request, world, 5)
        world.run()
        assert world.client.final(2).code == ("MODEL_ERROR" if fault == "raises" else "NON_FINITE_LOGITS")
        world.client.pending = [new_request(i, [9, i] * 10, 6) for i in range(20, 30)]    # these use all blocks again
        world.run()
        for i in (0, 1, 3, 4):
            prompt = [i + 1] * (i + 2)
            got = world.client.streamed(i) if i % 2 else world.client.final(i).tokens()[len(prompt):]
            assert got == world.expected(prompt, 9)
        assert all(world.client.final(i).tokens() == [9, i] * 10 + world.expected([9, i] * 10, 6)
                   for i in range(20, 30))
    assert world.backend.deepest == 2 and (fault == "raises" or last_record(world)["Discarded Tokens"] > 0)


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
@pytest.mark.parametrize("fault", ["raises", "not finite", "always raises"])
@pytest.mark.parametrize("end", ["end id", "stop"])
def test_a_fault_in_a_row_that_is_discarded_is_nobodys(make_world, new_request, end, fault, where):
    """A fault in the row of a request that has its final response already fails no other request.

    Other requests get the blocks of this request, which the fault may have spoilt.
    """
    struck = []

    def hook(batch):
        slots = starts_with(world.backend, batch, 7) if world.client.finals(1) else []
        if not slots or (struck and fault != "always raises"):
            return None
        struck.append(batch.iteration)
        if fault != "not finite":
            raise RuntimeError("planted")
        return dict.fromkeys(slots, RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted"))

    world = world_ahead(make_world, backend={where: hook, "num_blocks": 6})
    fourth = world.expected([7, 7], 4)[3]
    world.client.pending = [new_request(1, [7, 7], 12, **({"end_id": fourth} if end == "end id" else {})),
                            new_request(2, [8], 12, streaming=True)]
    world.step(5)
    if end == "stop":
        world.client.stops = {1}
        world.step()
        world.client.stops = set()
    world.client.pending = [new_request(i, [i] * 6, 9) for i in range(10, 14)]
    world.run()
    assert struck and len(world.client.finals(1)) == 1 and not world.client.final(1).error
    assert world.client.streamed(2) == world.expected([8], 12)
    assert all(world.client.final(i).tokens() == [i] * 6 + world.expected([i] * 6, 9) for i in range(10, 14))
    record = last_record(world)
    assert "Errors MODEL_ERROR" not in record and "Errors NON_FINITE_LOGITS" not in record
    assert as_many_as_planted(record["Failed Steps"], fault != "not finite", where)


def test_a_lost_device_is_noticed_when_its_step_is_read(make_manager, new_client, new_request):
    def lost(batch):
        if batch.iteration == 4:
            raise DeviceLostError("the device's context is lost")

    client, backend = new_client(), Late(on_step=lost)
    client.pending = [new_request(i, [i], 20, streaming=True) for i in range(4)]
    manager = make_manager(client, backend=backend)
    client.wait_for_finals(*range(4))
    assert {client.final(i).code for i in range(4)} == {"ENGINE_FAILED"} and manager.health()["state"] == "FAILED"
    assert all(client.streamed(i) == backend.expected([i], 4) for i in range(4)), "four steps were read"


def test_a_broken_plan_drops_what_is_in_flight(make_world, new_request):
    class BreaksTheRules:
        plans_by_lengths = True
        at = 3

        def __init__(self, limits, kv_cache_manager):
            self.scheduler = make_scheduler(limits, kv_cache_manager)

        def schedule_request(self, active_requests, inflight_request_ids):
            plan = self.scheduler.schedule_request(active_requests, inflight_request_ids)
            type(self).at -= 1
            if type(self).at == -1:
                plan.generation_requests.append(plan.generation_requests[0])
            return plan

    world = world_ahead(make_world, parts={"scheduler": BreaksTheRules})
    world.client.pending = [new_request(i, [i], 9) for i in range(3)]
    world.step(4)
    assert all("BreaksTheRules" in world.client.final(i).error for i in range(3))
    assert len(world.loop.window) == 0 and world.loop.window.num_discarded_tokens == 3
    world.client.pending = [new_request(i, [i], 9) for i in range(3, 6)]
    world.run()
    assert all(world.client.final(i).tokens() == [i, *world.expected([i], 9)] for i in range(3, 6))


# Options that enable run-ahead or rule it out

class OfOnesOwn(SimpleScheduler):
    def __init__(self, limits, kv_cache_manager):
        whole = make_scheduler(limits, kv_cache_manager)
        super().__init__(whole.capacity_scheduler, whole.micro_batch_scheduler)


class ByLengths(OfOnesOwn):
    plans_by_lengths = True


def test_run_ahead_beside_what_rules_it_out_is_refused_by_name(make_world):
    with pytest.raises(ConfigError, match="run_ahead and enable_trt_overlap are both set"):
        make_world(backend=Late(), run_ahead=True, enable_trt_overlap=True)
    with pytest.raises(ConfigError, match="run_ahead is True.*V1.*InflightFusedBatching"):
        make_world(backend=Late(), run_ahead=True, model_type=TrtGptModelType.V1)
    for scheduler in (OfOnesOwn, lambda limits, kv: ByLengths(limits, kv)):
        with pytest.raises(ConfigError, match="run_ahead is True.*scheduler.*plans_by_lengths = True"):
            make_world(backend=Late(), run_ahead=True, parts={"scheduler": scheduler})


@pytest.mark.parametrize("value", [1, "True", None, [True]])
def test_a_scheduler_says_that_it_plans_by_lengths_with_true_alone(make_world, value):
    scheduler = type("Unsure", (OfOnesOwn,), {"plans_by_lengths": value})
    with pytest.raises(ConfigError, match="plans_by_lengths"):
        make_world(backend=Late(), run_ahead=True, parts={"scheduler": scheduler})


@pytest.mark.parametrize("seed", range(2))
def test_a_scheduler_that_plans_by_lengths_runs_ahead(make_world, new_request, seed):
    run_both(make_world, partial(mixed, new_request, seed), parts={"scheduler": ByLengths})


@pytest.mark.parametrize(("options", "is_ahead"), [
    ({}, True), ({"run_ahead": False}, False), ({"run_ahead": True}, True), ({"enable_trt_overlap": True}, False),
    ({"model_type": TrtGptModelType.V1}, False), ({"parts": {"scheduler": OfOnesOwn}}, False),
    ({"parts": {"scheduler": ByLengths}}, True), ({"model_type": TrtGptModelType.InflightBatching}, True)], ids=str)
def test_an_asynchronous_backend_runs_ahead_where_nothing_rules_it_out(make_world, new_request, options, is_ahead):
    world = make_world(backend=Late(), **options)
    world.client.pending = plain(new_request, world)
    world.run()
    assert bool(world.backend.in_two) == is_ahead == world.loop.window.runs_ahead
    for i in range(8):
        prompt = [i + 1] * (i + 2)
        got = world.client.streamed(i) if i % 2 else world.client.final(i).tokens()[len(prompt):]
        assert got == world.expected(prompt, 9)


def test_a_backend_that_waits_for_its_steps_runs_in_lockstep_unless_asked(make_world, new_request):
    for options, is_ahead in (({}, False), ({"run_ahead": True}, True)):
        world = make_world(backend=Late(is_asynchronous=False), **options)
        assert world.loop.window.runs_ahead == is_ahead and world.loop.window.depth == 1 + is_ahead
        world.client.pending = plain(new_request, world)
        world.run()
        assert all(world.client.final(i).error == "" for i in range(8))


@pytest.mark.parametrize("seed", range(3))
def test_overlapped_micro_batches_of_an_asynchronous_backend_give_the_same(make_world, new_request, seed):
    worlds = [lockstep_world(make_world), make_world(backend=Late(), enable_trt_overlap=True)]
    for world in worlds:
        world.client.pending = mixed(new_request, seed, world)
        world.run()
    assert worlds[1].backend.deepest == 2 and not worlds[1].backend.in_two
    assert all(received(worlds[0], i) == received(worlds[1], i) for i in range(12))


def test_what_the_trace_says_of_chunks_and_generation_is_what_was_launched(make_world, new_request):
    trace = Trace()
    world = world_ahead(make_world, parts={"trace": trace.append}, enable_chunked_context=True, max_num_tokens=8)
    world.client.pending = [new_request(1, [1] * 10, 4)]
    world.run()
    assert [(one.context, one.generation) for one in trace.iterations[:6]] == [
        (((1, 0, 8),), ()), (((1, 8, 2),), ()), ((), (1,)), ((), (1,)), ((), (1,)), ((), ())]
    assert [one.finished for one in trace.iterations] == [()] * 5 + [(1,)]


def test_logits_and_log_probs_are_those_of_their_tokens(make_world, new_request):
    """Logits and log-probabilities come from the step that is read, although a later step was launched."""
    world = world_ahead(make_world, enable_chunked_context=True, max_num_tokens=8)
    world.client.pending = [new_request(1, list(range(10, 23)), 7, **ALL_LOGITS)]
    world.run()
    final, prompt = world.client.final(1), list(range(10, 23))
    text = prompt + world.expected(prompt, 7)
    assert final.tokens() == text
    assert np.argmax(final.tensors["generation_logits"][0, 0], axis=1).tolist() == text[13:]
    assert np.argmax(final.tensors["context_logits"][0], axis=1).tolist() == [
        world.expected(prompt[:n], 1)[0] for n in range(1, 14)]
    assert final.tensors["cum_log_probs"][0, 0] == pytest.approx(final.tensors["output_log_probs"].sum(), rel=1e-6)


class PausesTheYoungest(CapacityScheduler):
    """A scheduler that pauses the last request in every fourth plan, whether or not the request is in flight.

    It sets `plans_by_lengths`, so that the engine runs ahead.
    """

    plans_by_lengths = True

    def __init__(self):
        self.num_plans = 0

    def schedule_request(self, active_requests):
        self.num_plans += 1
        if self.num_plans % 4 == 0 and len(active_requests) > 1:
            return active_requests[:-1], active_requests[-1:]
        return list(active_requests), []


@pytest.mark.parametrize("new_tokens", [3, 4, 5, 6, 7, 20])
def test_a_plan_that_pauses_who_is_in_flight_is_asked_for_again(make_world, new_request, new_tokens):
    """A plan that pauses a request in flight is made again after the step is read.

    A capacity scheduler cannot see which requests are in flight.
    """
    paused = 0
    for build in (lockstep_world, world_ahead):
        world = build(make_world, parts={"scheduler": PausesTheYoungest()})
        world.client.pending = [new_request(1, [1, 2, 3], 9), new_request(2, [1, 2, 3], new_tokens)]
        world.run()
        assert world.client.final(1).tokens() == [1, 2, 3] + world.expected([1, 2, 3], 9)
        assert world.client.final(2).tokens() == [1, 2, 3] + world.expected([1, 2, 3], new_tokens)
        paused += sum(json.loads(record)["Paused Requests"] for record in world.client.stats)
    assert paused or new_tokens == 3    # a request of 3 tokens ends before the fourth plan


@pytest.mark.parametrize(("num_blocks", "ahead"), [(2, False), (3, True)])
def test_a_request_that_a_pool_holds_in_lockstep_is_not_refused_for_running_ahead(
        make_world, new_request, caplog, num_blocks, ahead):
    """An engine does not run ahead if its pool can hold a request in lockstep only, and the request runs.

    A window of 16 tokens needs 2 blocks of 16 tokens in lockstep, and 3 if the token before it may be needed again.
    """
    world = world_ahead(make_world, backend={"tokens_per_block": 16, "num_blocks": num_blocks, "window": 16,
                                             "max_seq_len": 128},
                        policy=GUARANTEED, kv_cache_config=KvCacheConfig(tokens_per_block=16, max_attention_window=16))
    assert world.loop.limits.runs_ahead is ahead
    assert ("needs up to 3 KV cache blocks with run_ahead and 2 without it" in caplog.text) is not ahead
    world.client.pending = [new_request(1, [1] * 24, 48)]
    world.run()
    assert world.client.final(1).error == ""


def test_the_last_record_of_an_engine_that_falls_idle_counts_what_was_in_flight(make_world, new_request):
    world = world_ahead(make_world, flush_stats_when_idle=True)
    prompt = [1, 2, 3]
    end = world.expected(prompt, 4)[3]
    world.client.pending = [new_request(1, prompt, 20, end_id=end)]
    world.run()
    before, last = map(json.loads, world.client.stats[-2:])
    assert before["Iterations In Flight"] == 1 and before["Active Request Count"] == 1
    assert last["Iterations In Flight"] == last["Active Request Count"] == 0
    assert last["Discarded Tokens"] == 1


class SaysNothing:
    @property
    def plans_by_lengths(self):
        raise ValueError("planted")

    def schedule_request(self, active_requests, inflight_request_ids):
        raise AssertionError


class SaysOne(SaysNothing):
    plans_by_lengths = 1


@pytest.mark.parametrize(("scheduler", "text"), [
    (SaysNothing(), "plans_by_lengths of the scheduler of type SaysNothing raised ValueError; expected True or False; "
                    "make plans_by_lengths a plain attribute"),
    (SaysOne(), "plans_by_lengths of the scheduler of type SaysOne is of type int; expected True or False; "
                "set plans_by_lengths to True if")])
def test_a_scheduler_that_does_not_say_what_it_plans_by_is_refused(make_world, scheduler, text):
    with pytest.raises(ConfigError, match=text):
        world_ahead(make_world, parts={"scheduler": scheduler})
