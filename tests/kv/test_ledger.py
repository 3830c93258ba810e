"""The ledger gives a plan the right budget of blocks."""

from batch_manager.kv.kv_cache_manager import KvCacheManager


def test_a_ledger_is_a_budget_and_touches_no_block(make_request, start):
    kv = KvCacheManager(10, 4, 100)
    running = start(kv, make_request(0, 9))
    ledger = kv.start_scheduling()
    assert (ledger.available_blocks, ledger.fits(7), ledger.fits(8)) == (7, True, False)
    ledger.spend(5)
    assert (ledger.fits(2), ledger.fits(3)) == (True, False)
    ledger.refund(running)
    assert ledger.available_blocks == 5
    assert (kv.free_blocks, kv.held_blocks(running), kv.start_scheduling().available_blocks) == (7, 3, 7)


def test_a_request_in_flight_is_not_refundable(make_request, start):
    kv = KvCacheManager(10, 4, 100)
    running = start(kv, make_request(0, 9))
    kv.inflight_request_ids = {running.request_id}
    assert not kv.start_scheduling().is_refundable(running)
    kv.inflight_request_ids = frozenset()
    assert kv.start_scheduling().is_refundable(running)


def test_a_ledger_knows_what_the_manager_knows(make_request, start):
    kv = KvCacheManager(10, 4, 100)
    running, new = start(kv, make_request(0, 8, 9)), make_request(1, 5, 9)
    ledger = kv.start_scheduling()
    assert (ledger.blocks_for_next_step(running), ledger.blocks_for_next_step(new)) == (1, 2)
    assert ledger.blocks_for_next_step_of_generating([running], True) == 1
    assert (ledger.blocks_to_completion(running), ledger.blocks_to_completion(new)) == (3, 4)
    assert ledger.blocks_to_completion_of_started() == 3


def cached(kv, make_request, start, slot: int, length: int):
    """Start a request with a prompt of `length` tokens, publish the blocks of its prompt, and return the request."""
    request = start(kv, make_request(slot, length))
    kv.publish_context(request, length)
    return request


def test_what_a_first_chunk_shares_with_a_victim_does_not_come_free(make_request, start):
    kv = KvCacheManager(20, 4, 100, enable_block_reuse=True)
    victim, new = cached(kv, make_request, start, 0, 9), make_request(1, 12)
    ledger = kv.start_scheduling()
    assert ledger.blocks_for_next_step(new) == 1
    ledger.spend(1, new)
    before = ledger.available_blocks
    ledger.refund(victim)
    assert ledger.available_blocks - before == 1
    assert (kv.blocks_to_claim([new], [], [victim]), kv.blocks_freed_by([victim])) == (3, 3)


def test_a_victims_blocks_cost_what_free_ones_cost(make_request, start):
    kv = KvCacheManager(20, 4, 100, enable_block_reuse=True)
    victim, new = cached(kv, make_request, start, 0, 9), make_request(1, 12)
    ledger = kv.start_scheduling()
    ledger.refund(victim)
    assert ledger.blocks_for_next_step(new) == 3


def test_free_cached_blocks_are_spent_once_for_all_first_chunks(make_request, start):
    kv = KvCacheManager(20, 4, 100, enable_block_reuse=True)
    kv.release(cached(kv, make_request, start, 0, 9))
    assert (kv.free_blocks, kv.usage().cached_blocks) == (20, 2)
    first, second = make_request(1, 12), make_request(2, 12)
    ledger = kv.start_scheduling()
    for request, cost in ((first, 3), (second, 1)):
        assert ledger.blocks_for_next_step(request) == cost
        ledger.spend(cost, request)
    assert kv.blocks_to_claim([first, second], []) == 4
    kv.claim([first, second], [])
    assert kv.free_blocks == ledger.available_blocks == 16
