"""The audit finds every inconsistency of the accounting."""

import pytest

from batch_manager.errors import InternalError
from batch_manager.kv.audit import audit
from batch_manager.kv.kv_cache_manager import KvCacheManager


def a_row_without_its_owner(kv):
    kv.sequences.owners[0] = None


def move_to_another_slot(kv):
    kv.sequences.owners[0].seq_slot = 9


def one_block_in_two_tables(kv):
    kv.sequences.block_ids[1, 0] = kv.sequences.block_ids[0, 0]


def a_block_that_does_not_exist(kv):
    kv.sequences.block_ids[1, 0] = 77


def a_length_without_its_block(kv):
    kv.sequences.kv_lengths[0] += 4


def a_promise_that_was_not_made(kv):
    kv.sequences.last_blocks[0] += 1


def a_block_free_and_owned(kv):
    kv.pool.free.append(kv.block_ids(kv.sequences.owners[0])[0])


def a_block_nowhere(kv):
    kv.pool.free.popitem()


def a_free_block_that_does_not_exist(kv):
    kv.pool.free.append(77)


DAMAGES = [a_row_without_its_owner, move_to_another_slot, one_block_in_two_tables, a_block_that_does_not_exist,
           a_length_without_its_block, a_promise_that_was_not_made, a_block_free_and_owned, a_block_nowhere,
           a_free_block_that_does_not_exist]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_audit_finds(damage, make_request):
    kv = KvCacheManager(10, 4, 100)
    kv.claim([make_request(0, 9), make_request(1, 4)], [])
    audit(kv)
    damage(kv)
    with pytest.raises(InternalError, match="the accounting of the KV cache is inconsistent"):
        audit(kv)


def test_the_cheap_check_finds_a_block_that_is_gone(make_request):
    kv = KvCacheManager(10, 4, 100)
    kv.claim([make_request(0, 9)], [])
    kv.check_totals()
    a_block_nowhere(kv)
    with pytest.raises(InternalError, match="6 blocks are free and 3 are held; expected 10 in total"):
        kv.check_totals()
