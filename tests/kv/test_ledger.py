"""What a plan may spend."""

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
