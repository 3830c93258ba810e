"""A plan that breaks a rule is refused, and the error names the scheduler and the rule."""

import pytest

from batch_manager.config import Limits
from batch_manager.errors import SchedulerContractError
from batch_manager.names import ContextChunkingPolicy, LlmRequestState, SchedulerPolicy
from batch_manager.scheduling.contract import check_plan
from batch_manager.scheduling.interfaces import SchedulerOutput
from batch_manager.scheduling.policies import make_scheduler

LIMITS = Limits(max_batch_size=3, max_num_tokens=12, max_seq_len=100, max_beam_width=1, max_num_requests=3,
                max_num_sequences=3, unbounded_sequences=False, vocab_size=10, num_blocks=12, tokens_per_block=4,
                enable_chunked_context=True,
                context_chunking_policy=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
                scheduler_policy=SchedulerPolicy.MAX_UTILIZATION)


class Bad:
    """A scheduler that breaks a rule. The error must contain its name."""


@pytest.fixture
def world(make_line):
    line = make_line(num_blocks=12)
    line.new, line.halfway, line.running = line.waiting(8), line.between_chunks(9), line.generating(8)
    return line


def broken(world, plan, inflight=frozenset()) -> str:
    with pytest.raises(SchedulerContractError) as caught:
        check_plan(Bad(), plan, world.requests, inflight, world.kv, LIMITS)
    assert str(caught.value).startswith("Bad broke the scheduler contract: ")
    return str(caught.value)


def test_our_own_plans_keep_the_rules(world):
    scheduler = make_scheduler(LIMITS, world.kv)
    plan = scheduler.schedule_request(world.requests, frozenset())
    check_plan(scheduler, plan, world.requests, frozenset(), world.kv, LIMITS)
    assert plan.context_requests and plan.generation_requests


@pytest.mark.parametrize("plan", [None, ([], []), 7])
def test_an_answer_that_is_no_plan(world, plan):
    assert "not a SchedulerOutput" in broken(world, plan)


@pytest.mark.parametrize("named", [[{}], None, [[]]])
def test_a_plan_that_names_no_requests(world, named):
    assert "not a request" in broken(world, SchedulerOutput(named, [], []))


def test_a_request_that_is_not_active(world, make_line):
    assert "is not active" in broken(world, SchedulerOutput([make_line().waiting()]))
    assert "is not active" in broken(world, SchedulerOutput(paused_requests=[make_line().generating()]))
    assert "is not active" in broken(world, SchedulerOutput(["a string"]))


def test_a_request_named_twice(world):
    assert "in the plan twice" in broken(world, SchedulerOutput([world.new, world.new]))
    assert "in the plan twice" in broken(world, SchedulerOutput([], [world.running, world.running]))
    assert "in the plan twice" in broken(world, SchedulerOutput([world.running], [world.running]))


def test_a_request_that_is_paused_and_runs(world):
    assert "both paused and scheduled" in broken(world, SchedulerOutput([], [world.running], [world.running]))


def test_a_request_in_flight(world):
    inflight = {world.running.request_id}
    assert "in flight" in broken(world, SchedulerOutput([], [world.running]), inflight)


def test_a_request_in_the_wrong_list(world):
    assert "not in its context phase" in broken(world, SchedulerOutput([world.running]))
    assert "is not generating" in broken(world, SchedulerOutput([], [world.new]))


def test_a_request_that_has_finished(world):
    world.running.state = LlmRequestState.GENERATION_COMPLETE
    assert "is not generating" in broken(world, SchedulerOutput([], [world.running]))
    assert "has finished" in broken(world, SchedulerOutput([], [], [world.running]))


@pytest.mark.parametrize("chunk", [0, -4, 9, 4.0, True, None, "4"])
def test_a_chunk_that_is_no_part_of_the_context(world, chunk):
    assert "gets a chunk" in broken(world, SchedulerOutput([world.new], [], [], [chunk]))


def test_a_chunk_that_ends_inside_a_block(world):
    assert "must be a multiple of tokens_per_block (4)" in broken(world, SchedulerOutput([world.new], [], [], [6]))


def test_as_many_chunk_sizes_as_contexts(world):
    assert "2 chunk sizes for 1" in broken(world, SchedulerOutput([world.new], [], [], [4, 4]))


def test_too_many_sequences(world):
    world.waiting()
    plan = SchedulerOutput([world.new, world.halfway, world.requests[-1]], [world.running], [], [4, 4, 4])
    assert "the step has 4 requests and max_batch_size is 3" in broken(world, plan)


def test_too_many_tokens(world):
    assert "the step has 14 tokens and max_num_tokens is 12" in broken(
        world, SchedulerOutput([world.new, world.halfway], [world.running]))


def test_more_blocks_than_are_free_after_the_pauses(make_line):
    line = make_line(num_blocks=4)
    first, second, new = line.generating(8), line.generating(8), line.waiting(8)
    line.new = new
    assert "needs 2 KV cache blocks and its pauses leave 0 free" in broken(line, SchedulerOutput([], [first, second]))
    assert "needs 3 KV cache blocks and its pauses leave 2 free" in broken(
        line, SchedulerOutput([new], [first], [second]))
    check_plan(Bad(), SchedulerOutput([], [first], [second]), line.requests, frozenset(), line.kv, LIMITS)


def test_a_later_chunk_needs_no_blocks(make_line):
    line = make_line(num_blocks=2)
    halfway = line.between_chunks(8)
    check_plan(Bad(), SchedulerOutput([halfway]), line.requests, frozenset(), line.kv, LIMITS)


def test_pausing_what_has_not_started_is_allowed(world):
    check_plan(Bad(), SchedulerOutput([], [world.running], [world.new]), world.requests, frozenset(), world.kv, LIMITS)
