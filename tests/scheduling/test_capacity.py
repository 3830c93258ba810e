"""Each policy gives blocks to the right requests, and pauses the right requests."""

import pytest

from batch_manager.names import LlmRequestState
from batch_manager.scheduling.capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler, StaticBatchScheduler

WITH_KV = [GuaranteedNoEvictScheduler, StaticBatchScheduler, MaxUtilizationScheduler]


@pytest.mark.parametrize("policy", WITH_KV)
def test_requests_that_cannot_run_are_passed_over(policy, make_line):
    line = make_line()
    line.waiting().state = LlmRequestState.GENERATION_COMPLETE
    line.waiting().state = LlmRequestState.ENCODER_INIT
    runs = line.waiting()
    assert policy(4, line.kv).schedule_request(line.requests) == ([runs], [])


@pytest.mark.parametrize("policy", WITH_KV)
def test_no_policy_takes_more_than_max_num_requests(policy, make_line):
    line = make_line()
    first, second, _ = (line.waiting() for _ in range(3))
    assert policy(2, line.kv).schedule_request(line.requests) == ([first, second], [])

    line = make_line()
    first, second, _ = (line.generating() for _ in range(3))
    assert policy(2, line.kv).schedule_request(line.requests)[0] == [first, second]


@pytest.mark.parametrize("policy", WITH_KV)
def test_planning_changes_nothing_and_can_be_repeated(policy, make_line):
    line = make_line(num_blocks=9)
    line.generating(8, 8, generated=1)
    line.between_chunks(12, 8)
    line.generating(8, 12, generated=1)
    line.waiting()
    scheduler = policy(4, line.kv)
    before = [(repr(request), line.kv.block_ids(request)) for request in line.requests]
    first = scheduler.schedule_request(line.requests)
    assert scheduler.schedule_request(line.requests) == first
    assert [(repr(request), line.kv.block_ids(request)) for request in line.requests] == before
    assert len(line.requests) == 4


def test_no_evict_reserves_for_generating_requests_wherever_they_stand(make_line):
    line = make_line(num_blocks=6)
    new = line.waiting(8, 4)                                   # needs 3 blocks up to its last token
    running = line.generating(8, 8)                            # holds 2 of its 4
    assert GuaranteedNoEvictScheduler(4, line.kv).schedule_request([new, running]) == ([running], [])


def test_no_evict_closes_the_door_behind_the_first_that_does_not_fit(make_line):
    line = make_line(num_blocks=6)
    large, small = line.waiting(24, 4), line.waiting(4, 4)
    assert GuaranteedNoEvictScheduler(4, line.kv).schedule_request([large, small]) == ([], [])


def test_no_evict_reserves_for_requests_between_chunks(make_line):
    line = make_line(num_blocks=6)
    started = line.between_chunks(8, 8)                        # holds 2 of its 4
    late = line.waiting(8, 4)                                  # needs 3; 4 are free, 2 of them reserved
    assert GuaranteedNoEvictScheduler(4, line.kv).schedule_request([started, late]) == ([started], [])


def test_a_static_batch_admits_nobody_once_it_generates(make_line):
    line = make_line()
    running, halfway, new = line.generating(), line.between_chunks(), line.waiting()
    scheduler = StaticBatchScheduler(4, line.kv)
    assert scheduler.schedule_request([running, halfway, new]) == ([running], [])
    assert scheduler.schedule_request([halfway, new]) == ([halfway, new], [])


def test_max_utilization_pauses_from_the_end_of_the_line(make_line):
    line = make_line(num_blocks=6)
    first, second, third = (line.generating(8, 8) for _ in range(3))   # each is about to need its third block
    scheduler = MaxUtilizationScheduler(4, line.kv)
    assert scheduler.schedule_request(line.requests) == ([first, second], [third])


def test_max_utilization_pauses_the_last_that_holds_something(make_line):
    line = make_line(num_blocks=6)
    first, second, third = (line.generating(8, 8) for _ in range(3))
    waiting = line.waiting()
    assert MaxUtilizationScheduler(4, line.kv).schedule_request(line.requests) == ([first, second], [third])
    assert waiting not in MaxUtilizationScheduler(4, line.kv).schedule_request(line.requests)[0]


def test_a_request_that_has_not_started_makes_nobody_ahead_pause(make_line):
    line = make_line(num_blocks=4)
    first, second, _ = line.generating(7, 8), line.generating(7, 8), line.waiting(4, 4)
    assert MaxUtilizationScheduler(4, line.kv).schedule_request(line.requests) == ([first, second], [])


def test_requests_beyond_max_num_requests_give_their_blocks_back(make_line):
    line = make_line()
    first, second = line.generating(), line.generating()
    assert MaxUtilizationScheduler(1, line.kv).schedule_request(line.requests) == ([first], [second])


def test_the_request_that_does_not_fit_may_be_the_victim(make_line):
    line = make_line(num_blocks=4)
    first, second = line.generating(8, 8), line.generating(8, 8)
    assert MaxUtilizationScheduler(4, line.kv).schedule_request([first, second]) == ([first], [second])
    assert MaxUtilizationScheduler(4, line.kv).schedule_request([second, first]) == ([second], [first])


def test_a_request_in_flight_is_no_victim(make_line):
    line = make_line(num_blocks=6)
    first, second, third = (line.generating(8, 8) for _ in range(3))
    line.kv.inflight_request_ids = {third.request_id}
    assert MaxUtilizationScheduler(4, line.kv).schedule_request(line.requests) == ([first], [second])


def test_a_look_ahead_of_two_steps_plans_for_both(make_line):
    line = make_line(num_blocks=4)
    first, second = line.generating(7, 8), line.generating(7, 8)       # the last block has room for one more token
    assert MaxUtilizationScheduler(4, line.kv).schedule_request(line.requests) == ([first, second], [])
    assert MaxUtilizationScheduler(4, line.kv, two_step_lookahead=True).schedule_request(line.requests) == (
        [first], [second])


def test_drafts_count_in_the_need_of_the_next_step(make_line):
    line = make_line(num_blocks=4)
    first, second = line.generating(6, 8, draft_tokens=range(2)), line.generating(6, 8)
    scheduler = MaxUtilizationScheduler(4, line.kv)
    assert scheduler.schedule_request([first, second]) == ([first], [second])
    first.draft_tokens = [0]
    assert scheduler.schedule_request([first, second]) == ([first, second], [])


def test_the_first_in_line_waits_for_those_in_flight_rather_than_give_way(make_line):
    line = make_line(num_blocks=4)
    first, second = line.generating(8), line.generating(8)
    line.kv.inflight_request_ids = {second.request_id}
    assert MaxUtilizationScheduler(9, line.kv).schedule_request(line.requests) == ([], [])
    line.kv.inflight_request_ids = frozenset()
    assert MaxUtilizationScheduler(9, line.kv).schedule_request(line.requests) == ([first], [second])


def test_a_promise_is_kept_against_those_who_stand_ahead(make_line):
    line = make_line(num_blocks=6)
    ahead, started = line.waiting(8, 4), line.between_chunks(8, 8)
    assert GuaranteedNoEvictScheduler(9, line.kv).schedule_request(line.requests) == ([started], [])
    line.kv.release(started)
    started.finish()
    assert GuaranteedNoEvictScheduler(9, line.kv).schedule_request(line.requests) == ([ahead], [])
