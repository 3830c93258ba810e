"""Claims and releases take and return the right blocks, and schedulers get the right numbers of blocks."""

import numpy as np
import pytest

from batch_manager.errors import InternalError
from batch_manager.handover import NO_UPDATES
from batch_manager.kv.audit import audit
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager
from tests.conformance.estimates import Estimates


def entries(claim) -> list[tuple[int, int, int]]:
    updates = claim.table_updates
    assert {column.dtype for column in (updates.slots, updates.indices, updates.block_ids)} == {np.dtype(np.int32)}
    return list(zip(updates.slots.tolist(), updates.indices.tolist(), updates.block_ids.tolist(), strict=True))


def test_a_first_chunk_takes_the_blocks_of_its_whole_prompt(make_request):
    kv, request = KvCacheManager(10, 4, 100), make_request(3, 9)
    assert entries(kv.claim([request], [])) == [(3, 0, 0), (3, 1, 1), (3, 2, 2)]
    assert (kv.kv_length(request), kv.held_blocks(request), kv.block_ids(request)) == (9, 3, [0, 1, 2])
    assert (kv.num_blocks, kv.free_blocks, kv.used_blocks) == (10, 7, 3)


def test_a_generation_step_takes_a_block_when_it_crosses_a_boundary(make_request, start):
    kv = KvCacheManager(10, 4, 100)
    request = start(kv, make_request(0, 3))
    assert kv.claim([], [request]).table_updates is NO_UPDATES
    assert entries(kv.claim([], [request])) == [(0, 1, 1)]
    assert (kv.kv_length(request), kv.block_ids(request)) == (5, [0, 1])


def test_contexts_and_generation_are_claimed_together(make_request, start):
    kv = KvCacheManager(10, 4, 100)
    running, young, new = start(kv, make_request(0, 4)), start(kv, make_request(1, 5)), make_request(2, 2)
    claim = kv.claim([new], [running, young])
    assert entries(claim) == [(2, 0, 3), (0, 1, 4)]
    assert (claim.slots.tolist(), claim.kv_lengths.tolist(), claim.copies) == ([0, 1], [4, 5], ())
    assert claim.slots.dtype == claim.kv_lengths.dtype == np.int32
    assert [kv.kv_length(request) for request in (running, young, new)] == [5, 6, 2]


def test_a_claim_that_does_not_fit_changes_nothing(make_request, start):
    kv = KvCacheManager(4, 4, 100)
    running, new = start(kv, make_request(0, 8)), make_request(1, 5)
    with pytest.raises(OutOfBlocksError, match="3 free KV cache blocks are needed, and the pool has 2"):
        kv.claim([new], [running])
    assert (kv.free_blocks, kv.kv_length(running), kv.held_blocks(new)) == (2, 8, 0)
    audit(kv)


def test_a_sequence_cannot_be_added_twice(make_request):
    kv, request = KvCacheManager(10, 4, 100), make_request(0, 4)
    kv.claim([request], [])
    with pytest.raises(InternalError, match="slot 0, which is taken"):
        kv.claim([request], [])
    with pytest.raises(InternalError, match="slot 0, which is taken"):
        kv.claim([make_request(0, 4)], [])
    with pytest.raises(InternalError, match="slot 5"):
        kv.claim([make_request(5, 4), make_request(5, 4)], [])
    assert kv.used_blocks == 1
    audit(kv)


def test_a_request_without_a_slot_cannot_start(make_request):
    kv = KvCacheManager(10, 4, 100)
    with pytest.raises(InternalError, match="no slot"):
        kv.claim([make_request(-1, 4)], [])


@pytest.mark.parametrize("slot", [-1, 0, 1, 99])
def test_a_request_that_holds_nothing_cannot_generate(make_request, start, slot):
    kv = KvCacheManager(10, 4, 100)
    start(kv, make_request(0, 4))
    with pytest.raises(InternalError, match="holds no blocks"):
        kv.claim([], [make_request(slot, 4)])


def test_more_beams_than_one_are_refused(make_request):
    kv = KvCacheManager(10, 4, 100)
    with pytest.raises(InternalError, match="beam width 2"):
        kv.claim([make_request(0, 4, beam_width=2)], [])


def test_release_gives_back_once_and_only_ones_own(make_request):
    kv, request = KvCacheManager(10, 4, 100), make_request(0, 9)
    kv.release(request)
    kv.claim([request], [])
    kv.release(request)
    kv.release(request)
    successor = make_request(0, 5)
    kv.claim([successor], [])
    kv.release(request)                                        # the slot has another owner now
    assert (kv.used_blocks, kv.held_blocks(successor), kv.held_blocks(request)) == (2, 2, 0)
    audit(kv)


def test_a_request_without_blocks_is_answered_as_one_that_holds_nothing(make_request):
    kv, request = KvCacheManager(10, 4, 100), make_request(7, 9)
    assert (kv.owns(request), kv.held_blocks(request), kv.kv_length(request), kv.block_ids(request)) == (
        False, 0, 0, [])


def test_slots_may_be_far_apart_and_tables_grow_with_them(make_request, start):
    kv = KvCacheManager(100, 4, 1000)
    far, near = start(kv, make_request(5000, 9)), start(kv, make_request(2, 300))
    kv.claim([], [far, near])
    assert (kv.held_blocks(far), kv.held_blocks(near)) == (3, 76)
    audit(kv)


def test_resources_to_completion_are_of_the_whole_sequence(make_request, start):
    kv = KvCacheManager(20, 4, 100)
    request = start(kv, make_request(0, 9, 8))
    assert kv.get_max_resource_count() == 20
    assert kv.get_needed_resource_to_completion(request) == 5
    assert kv.get_remaining_blocks_to_completion(request) == 2


def test_a_first_chunk_that_was_claimed_and_not_computed_needs_nothing_more(make_request):
    kv, request = KvCacheManager(20, 4, 100), make_request(0, 9)
    assert kv.start_scheduling().blocks_for_next_step(request) == Estimates(kv).get_needed_blocks_one_step(request) == 3
    kv.claim([request], [])
    assert kv.start_scheduling().blocks_for_next_step(request) == Estimates(kv).get_needed_blocks_one_step(request) == 0


def test_a_paused_request_claims_its_longer_context_anew(make_request, start):
    kv = KvCacheManager(20, 4, 100)
    request = start(kv, make_request(0, 7, 8))
    for _ in range(3):
        kv.claim([], [request])
        request.add_token(0)
    kv.release(request)
    request.pause(100)
    # Seven prompt tokens and four generated ones.
    assert kv.start_scheduling().blocks_for_next_step(request) == Estimates(kv).get_needed_blocks_one_step(request) == 3
    kv.claim([request], [])
    assert (kv.kv_length(request), kv.held_blocks(request)) == (11, 3)
    audit(kv)


@pytest.mark.parametrize("beams", [1, 3])
def test_asking_for_many_gives_the_sum_of_asking_for_each(make_request, start, beams):
    kv = KvCacheManager(400, 4, 41, max_beam_width=beams, max_draft_len=2)
    requests = [start(kv, make_request(slot, 3 + slot, 20, draft_tokens=range(slot % 3))) for slot in range(12)]
    requests += [start(kv, make_request(12 + length, 36 + length, 5)) for length in range(5)]   # near their last tokens
    requests += [start(kv, make_request(20 + length, 5 + length, 9, beam_width=beams)) for length in range(5)]
    ledger = kv.start_scheduling()
    for lookahead in (False, True):
        for group in (requests, requests[::3], []):
            assert ledger.blocks_for_next_step_of_generating(group, lookahead) == sum(
                ledger.blocks_for_next_step(request, lookahead) for request in group)
    assert [ledger.blocks_for_next_step(request) for request in requests[:12]] == [
        Estimates(kv).get_needed_blocks_one_step(request) for request in requests[:12]]
    halfway = make_request(30, 9)
    kv.claim([halfway], [])
    owners = [*requests[:12], halfway]
    assert kv.reservations.of_owners(owners) == sum(
        kv.get_remaining_blocks_to_completion(request) for request in owners)
    assert kv.reservations.of_owners([]) == 0


def test_blocks_to_claim_is_what_a_claim_takes(make_request, start):
    kv = KvCacheManager(200, 4, 100)
    running = [start(kv, make_request(slot, 3 + slot)) for slot in range(6)]
    new = [make_request(slot, slot) for slot in range(10, 13)]
    expected, free = kv.blocks_to_claim(new, running), kv.free_blocks
    kv.claim(new, running)
    assert free - kv.free_blocks == expected


def test_without_reuse_the_blocks_used_last_are_used_next(make_request):
    kv, request = KvCacheManager(100, 4, 100), make_request(0, 9)
    for _ in range(5):
        kv.claim([request], [])
        assert kv.block_ids(request) == [0, 1, 2]
        kv.release(request)


def test_a_block_that_can_be_found_is_not_stored_under_another_key(make_request):
    kv = KvCacheManager(100, 4, 100, enable_block_reuse=True)
    first, second = make_request(0, 9), make_request(1, 9)
    kv.claim([first], [])
    kv.publish_context(first, 9)
    kv.claim([second], [])
    kv.release(second, computed_tokens=kv.reused_tokens(second))    # as if stopped before it computed anything
    kv.release(first)
    assert kv.usage().cached_blocks == 2
    audit(kv)


def test_a_request_that_holds_nothing_has_no_blocks_of_any_kind(make_request):
    kv, stranger, owner = KvCacheManager(20, 4, 100), make_request(0, 9), make_request(1, 9)
    kv.claim([owner], [])
    assert kv.own_blocks(stranger) == kv.blocks_of_span(stranger, 0, 9) == kv.block_ids(stranger) == []
    assert kv.blocks_of_span(owner, 5, 5) == [] and kv.own_blocks(owner) == kv.block_ids(owner)
    assert kv.blocks_of_span(owner, 5, 9) == [(kv.block_ids(owner)[1], 1), (kv.block_ids(owner)[2], 0)]
