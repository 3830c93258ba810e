"""Schedulers written by users run: TensorRT-LLM's documented example, unchanged, and schedulers with other plan types."""

import pytest

from batch_manager.errors import SchedulerContractError
from batch_manager.names import ContextChunkingPolicy, LlmRequestState, SchedulerPolicy
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.interfaces import CapacityScheduler, RequestList
from batch_manager.scheduling.micro_batch import TokenBudgetScheduler
from batch_manager.scheduling.simple import SimpleScheduler

# fmt: off
# ruff: noqa


class GuaranteedNoEvictScheduler(CapacityScheduler):
    # only schedule requests has no_schedule_until_state <= state < no_schedule_after_state
    no_schedule_until_state = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state = LlmRequestState.GENERATION_COMPLETE

    def __init__(self, max_num_requests: int, kv_cache_manager):
        super(GuaranteedNoEvictScheduler, self).__init__()
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    def schedule_request(
        self, active_requests: RequestList
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        scheduled_requests = []
        pending_requests = []
        reserved_blocks = 0
        max_blocks = self.kv_cache_manager.get_max_resource_count()
        for request in active_requests:
            req_state = request.state
            # if request cannot be scheduled yet or request should no longer be scheduled, skip
            if req_state.value < self.no_schedule_until_state.value or req_state.value >= self.no_schedule_after_state.value:
                continue

            if len(scheduled_requests
                   ) >= self.max_num_requests or reserved_blocks >= max_blocks:
                break
            elif req_state == LlmRequestState.GENERATION_IN_PROGRESS or req_state == LlmRequestState.GENERATION_TO_COMPLETE:
                scheduled_requests.append(request)
                reserved_blocks += self.kv_cache_manager.get_needed_resource_to_completion(
                    request)
            else:
                pending_requests.append(request)

        avaiable_blocks = max_blocks - reserved_blocks
        for request in pending_requests:
            req_state = request.state
            if len(scheduled_requests) >= self.max_num_requests:
                break
            elif req_state == LlmRequestState.CONTEXT_INIT:
                needed_blocks = self.kv_cache_manager.get_needed_resource_to_completion(
                    request)
                if needed_blocks <= avaiable_blocks:
                    scheduled_requests.append(request)
                    avaiable_blocks -= needed_blocks
                elif needed_blocks > avaiable_blocks:
                    # If one requests fails to be scheduled, break
                    break

        assert len(scheduled_requests) > 0, (
            "no pending request can get enough resource to complete, "
            "please increase KV cache pool size.")
        return scheduled_requests, []


# fmt: on


def example_of_the_seed(limits, kv_cache_manager):
    return SimpleScheduler(GuaranteedNoEvictScheduler(limits.max_num_requests, kv_cache_manager),
                           TokenBudgetScheduler(limits.max_batch_size, limits.max_num_tokens))


@pytest.mark.parametrize("num_blocks", [5, 6, 9, 10, 40])
def test_the_documented_example_runs_as_it_stands_and_plans_as_our_own_policy(play, num_blocks):
    requests = [(4, 6), (8, 2), (2, 7), (9, 1, 3), (5, 5, 4)]
    options = {"num_blocks": num_blocks, "policy": SchedulerPolicy.GUARANTEED_NO_EVICT}
    theirs = play(requests, scheduler=example_of_the_seed, **options).run()
    assert theirs.picture() == play(requests, **options).run().picture()


class Fixed:
    """A scheduler that has no base class and always returns the same plan."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def schedule_request(self, active_requests):
        return self.answer

    def schedule(self, fitting_requests, inflight_request_ids):
        return self.answer


def test_a_capacity_scheduler_may_answer_with_three_lists(make_line):
    line = make_line()
    runs, pauses = line.generating(), line.generating()
    plan = SimpleScheduler(Fixed(([runs], [], [pauses])), TokenBudgetScheduler(4)).schedule_request([], frozenset())
    assert (plan.context_requests, plan.generation_requests, plan.paused_requests) == ([], [runs], [pauses])


def test_the_second_of_three_lists_must_be_empty(make_line):
    line = make_line()
    request = line.waiting()
    with pytest.raises(SchedulerContractError, match="Fixed broke the scheduler contract"):
        SimpleScheduler(Fixed(([], [request], [])), TokenBudgetScheduler(4)).schedule_request([], frozenset())


def test_a_micro_batch_scheduler_need_not_answer_with_chunk_sizes(make_line):
    line = make_line()
    context, running = line.waiting(), line.generating()
    capacity = Fixed(([context, running], []))
    plan = SimpleScheduler(capacity, Fixed(([context], [running]))).schedule_request([], frozenset())
    assert (plan.context_requests, plan.generation_requests, plan.chunk_sizes) == ([context], [running], None)
    plan = SimpleScheduler(capacity, Fixed(([context], [running], [4]))).schedule_request([], frozenset())
    assert plan.chunk_sizes == [4]


class ShortestFirst(CapacityScheduler):
    """A scheduler that runs short prompts before long ones, which the package's own policies do not."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def schedule_request(self, active_requests):
        return self.inner.schedule_request(sorted(active_requests, key=lambda request: request.prompt_len))


def test_a_policy_of_ones_own_can_wrap_ours(play):
    from batch_manager.scheduling.policies import make_scheduler

    def shortest_first(limits, kv):
        ours = make_scheduler(limits, kv)
        return SimpleScheduler(ShortestFirst(ours.capacity_scheduler), ours.micro_batch_scheduler)

    assert play([(8, 1), (2, 1), (4, 1)], scheduler=shortest_first, max_num_tokens=8,
                chunking=ContextChunkingPolicy.EQUAL_PROGRESS).run().picture() == """\
C2 C2 C4
C6 .  ."""


@pytest.mark.parametrize("returned, said", [
    (None, "a value of type NoneType"), ("ab", "a value of type str"), ({1: 2}, "a value of type dict"),
    (([],), "1 value"), (([], [], [], []), "4 values")])
def test_a_capacity_scheduler_that_returns_something_else_is_told_what_it_returned(make_line, returned, said):
    class Wrong(CapacityScheduler):
        def schedule_request(self, active_requests):
            return returned

    scheduler = SimpleScheduler(Wrong(), TokenBudgetScheduler(8))
    with pytest.raises(SchedulerContractError, match=f"Wrong broke the scheduler contract: schedule_request returned "
                                                     f"{said}, not .fitting requests, paused requests.;"):
        scheduler.schedule_request([], ())


@pytest.mark.parametrize("returned, said", [
    (None, "a value of type NoneType"), (iter([[], []]), "a value of type list_iterator"), ([[]], "1 value"),
    ([[]] * 5, "5 values")])
def test_a_micro_batch_scheduler_that_returns_something_else_is_told_what_it_returned(make_line, returned, said):
    class Wrong:
        def schedule(self, fitting_requests, inflight_request_ids):
            return returned

    class TakesAll(CapacityScheduler):
        def schedule_request(self, active_requests):
            return active_requests, []

    with pytest.raises(SchedulerContractError, match=f"Wrong broke the scheduler contract: schedule returned {said}, "
                                                     "not .context requests, generation requests"):
        SimpleScheduler(TakesAll(), Wrong()).schedule_request([], ())
