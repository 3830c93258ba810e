"""enable_trt_overlap: two micro-batches of disjoint requests are in flight, and no token changes."""

import json
import random

import pytest

from batch_manager import SchedulerPolicy
from batch_manager.handover import BlockClear, RowFailure
from batch_manager.names import ErrorCode
from batch_manager.stats.trace import Trace
from batch_manager.testing.scripted_backend import ScriptedBackend

POLICIES = list(SchedulerPolicy)


class Deferred(ScriptedBackend):
    """A backend that computes a step only when it is read, and records the batches launched, read and in flight."""

    def __init__(self, **options):
        super().__init__(**options)
        self.in_flight = []
        self.launched, self.read = [], []
        self.deepest = 0

    def start(self, batch):
        assert not set(batch.slots()) & {slot for other in self.in_flight for slot in other.slots()}
        self.in_flight.append(batch)
        self.launched.append(batch)
        self.deepest = max(self.deepest, len(self.in_flight))
        start = super().start

        class Pending:
            def finish(pending):
                self.in_flight.remove(batch)
                self.read.append(batch)
                return start(batch).finish()

        return Pending()


def submit(world, new_request, count=14, seed=0):
    draw = random.Random(seed)
    prompts = {i: [draw.randrange(1000) for _ in range(draw.randrange(1, 17))] for i in range(count)}
    lengths = {i: draw.randrange(1, 14) for i in prompts}
    world.client.pending = [new_request(i, prompt, lengths[i], streaming=i % 3 == 0) for i, prompt in prompts.items()]
    return prompts, lengths


def assert_right(world, prompts, lengths):
    for i, prompt in prompts.items():
        got = world.client.streamed(i) if i % 3 == 0 else world.client.final(i).tokens()[len(prompt):]
        assert got == world.expected(prompt, lengths[i])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunked", [False, True])
def test_overlapped_micro_batches_are_disjoint_and_give_the_same_tokens(make_world, new_request, policy, chunked, seed):
    backend = Deferred(num_blocks=11, tokens_per_block=4)
    world = make_world(policy=policy, backend=backend, enable_trt_overlap=True, enable_chunked_context=chunked,
                       max_num_tokens=40)
    prompts, lengths = submit(world, new_request, seed=seed)
    world.run()
    assert_right(world, prompts, lengths)
    assert backend.deepest == 2 and not backend.in_flight
    assert all(launched is read for launched, read in zip(backend.launched, backend.read, strict=True))


def test_requests_that_start_together_are_shared_evenly_and_the_statistics_name_the_micro_batch(
        make_world, new_request):
    trace = Trace()
    world = make_world(backend=Deferred(), enable_trt_overlap=True, parts={"trace": trace.append})
    world.client.pending = [new_request(i, [i, i], 6) for i in range(8)]
    world.run()
    steps = [{chunk[0] for chunk in i.context} | set(i.generation) for i in trace.iterations]
    assert [len(step) for step in steps[:6]] == [4] * 6
    assert steps[0] == steps[2] == steps[4] and steps[1] == steps[3] == steps[5] and not steps[0] & steps[1]
    records = [json.loads(record) for record in world.client.stats]
    assert [record["MicroBatch ID"] for record in records] == [i % 2 for i in range(len(records))]


def test_a_request_stopped_while_its_step_is_in_flight_ends_at_once_and_its_late_token_goes_nowhere(
        make_world, new_request):
    world = make_world(backend=Deferred(num_blocks=6, tokens_per_block=4), enable_trt_overlap=True)
    world.client.pending = [new_request(1, [1, 2], 12, streaming=True), new_request(2, [3], 12)]
    world.step(6)
    sent = world.client.streamed(1)
    world.client.stops = {1}
    world.step()
    world.client.stops = set()
    assert world.client.final(1).finish_reason == 5
    # Its slot and its blocks go to the next request at once.
    world.client.pending = [new_request(1, [9] * 5, 9, streaming=True)]
    already = len(world.client.responses[1])
    world.run()
    late = [t for r in world.client.responses[1][already:] for t in r.tokens()]
    assert sent == world.expected([1, 2], 12)[:len(sent)]
    assert late == world.expected([9] * 5, 9)
    assert world.client.final(2).tokens() == [3, *world.expected([3], 12)]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_alone_runs_too_and_a_failing_one_costs_nobody_else_anything(make_world, new_request, policy):
    world = make_world(policy=policy, backend=Deferred(), enable_trt_overlap=True)
    world.client.pending = [new_request(1, [1, 2, 3], 7)]
    world.run()
    assert world.client.final(1).tokens() == [1, 2, 3, *world.expected([1, 2, 3], 7)]

    backend = Deferred()

    def fails_for_five(batch):
        if 5 in [backend.history(work.slot, 1)[0] for work in batch.context]:
            raise RuntimeError

    backend.on_step = fails_for_five
    world = make_world(policy=policy, backend=backend, enable_trt_overlap=True)
    world.client.pending = [new_request(i, [i] * 3, 5) for i in range(8)]
    world.run()
    assert [world.client.final(i).code for i in range(8)] == ["MODEL_ERROR" if i == 5 else "" for i in range(8)]


@pytest.mark.parametrize("fault", ["raises", "not finite"])
def test_a_request_stopped_in_flight_is_cleared_up_after_before_its_blocks_are_anybody_elses(
        make_world, new_request, fault):
    """A fault in a stopped request's row ends no other request. The request's block is cleared before its next use."""
    slots, alive_when_read, operations = [], [], []

    class Listens(ScriptedBackend):
        def start(self, batch):
            operations.append(batch.operations)
            return super().start(batch)

    def once(batch):
        if not slots or slots[0] not in batch.slots():
            return None
        slot = slots.pop()
        alive_when_read.append(stopped in world.loop.active)
        if fault == "raises":                                    # the step is bisected
            raise RuntimeError
        return {slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")}

    backend = Listens(num_blocks=4, tokens_per_block=8, on_finish=once)
    world = make_world(backend=backend, enable_trt_overlap=True, max_num_sequences=4)
    world.client.pending = [new_request(i, [i], 7) for i in range(4)]
    world.step(2)
    next_one = next(request for request in world.loop.active if not world.loop.window.holds(request))
    (block_id,) = world.loop.kv.block_ids(next_one)
    # The next step has a row of this request, which is stopped before that step is read.
    slots.append(next_one.seq_slot)
    stopped = next_one.request_id
    world.client.stops = {stopped}
    world.step()
    world.client.stops = set()
    assert world.client.final(stopped).finish_reason == 5
    assert world.loop.kv.used_blocks == 3 and not any(operations), "its block is free at once"
    prompts = {i: [i] * 4 for i in range(10, 13)}                # one of these requests gets the free block
    world.client.pending = [new_request(i, prompt, 4) for i, prompt in prompts.items()]
    world.run()
    for i, prompt in {**prompts, **{i: [i] for i in range(4) if i != stopped}}.items():
        final = world.client.final(i)
        assert final.error == "" and final.tokens() == prompt + world.expected(prompt, 4 if i >= 10 else 7)
    assert alive_when_read == [False], "its step is read, or run again, without it"
    if fault == "raises":
        assert json.loads(world.client.stats[-1])["Failed Steps"] == 1
    # The clear starts after the last token that was read. It runs before the next request writes to the block.
    assert next(filter(None, operations)) == (BlockClear(block_id, 1),)
