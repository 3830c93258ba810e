"""LockstepScheduler, which makes static batches, puts the right requests into a batch."""

import pytest

from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.lockstep import LockstepScheduler


@pytest.fixture
def batch_of():
    """Return the function `batch_of([(prompt, output, key), ...])`, which returns the indices of a batch's requests."""
    def schedule(line, max_num_requests=8, max_seq_len=100, num_blocks=100, generating=()):
        requests = [LlmRequest(i, [0] * prompt, output, batch_key=key) for i, (prompt, output, key) in enumerate(line)]
        for slot, request in enumerate(requests):
            request.seq_slot = slot
        kv = KvCacheManager(num_blocks, 4, max_seq_len)
        running = [requests[i] for i in generating]
        kv.claim(running, [])
        for request in running:
            request.advance_context(request.prompt_len)
            request.read_context(request.context_position)
        fitting, paused = LockstepScheduler(max_num_requests, kv, max_seq_len).schedule_request(requests)
        assert paused == []
        return [request.request_id for request in fitting]

    return schedule


def test_the_first_in_line_chooses_the_kind(batch_of):
    assert batch_of([(1, 2, "b"), (1, 2, "a"), (1, 2, "b"), (1, 2, "a")]) == [0, 2]


def test_once_somebody_generates_only_those_who_generate_run(batch_of):
    assert batch_of([(1, 2, "a"), (1, 2, "b"), (1, 2, "b")], generating=[1]) == [1]


def test_the_longest_prompt_and_the_longest_output_fit_max_seq_len_together(batch_of):
    assert batch_of([(4, 5, "a"), (5, 5, "a"), (6, 1, "a"), (1, 7, "a"), (1, 5, "a")], max_seq_len=10) == [0, 1, 4]
    assert batch_of([(6, 4, "a"), (1, 9, "a")], max_seq_len=10) == [0], "the first in line always runs"


def test_a_batch_is_bounded_by_its_requests_and_by_the_pool(batch_of):
    assert batch_of([(1, 2, "a")] * 5, max_num_requests=3) == [0, 1, 2]
    assert batch_of([(4, 4, "a"), (8, 4, "a"), (1, 2, "a")], num_blocks=4) == [0], "and nobody overtakes in it"


def test_nobody_waiting_is_no_batch(batch_of):
    assert batch_of([]) == []
