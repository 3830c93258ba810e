"""The audit finds inconsistent accounting of the prefix cache, of windows and of beams."""

import pytest

from batch_manager.errors import InternalError
from batch_manager.kv.audit import audit
from batch_manager.kv.eviction import DEFAULT_PRIORITY
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.prefix_index import BlockKey, PrefixNode

UNIT = 4


@pytest.fixture
def kv(make_request, start):
    """Return a manager in which request 0 generates in its own block, and requests 1 and 2 share two full blocks.

    Request 2 has two beams. Some host blocks hold evicted content.
    """
    kv = KvCacheManager(16, UNIT, 100, max_beam_width=2, enable_block_reuse=True, host_blocks=20)
    evicted = make_request(5, 8, cache_salt="evicted")
    start(kv, evicted)
    kv.release(evicted, 6)
    hog = make_request(6, 16 * UNIT, cache_salt="hog")
    kv.claim([hog], [])
    kv.release(hog)
    for slot, length, options in ((0, 6, {"cache_salt": "alone"}), (1, 10, {}), (2, 10, {"beam_width": 2})):
        request = make_request(slot, length, **options)
        kv.claim([request], [])
        request.advance_context(length)
        request.read_context(request.context_position)
        kv.publish_context(request, length)
        for text in request.tokens:
            text.append(1)
    kv.claim([], [kv.sequences.owners[0]])
    audit(kv)
    assert kv.usage().used_host_blocks and kv.cache.index.num_nodes > 2
    return kv


def node_in_the_pool(kv):
    return next(iter(kv.cache.index.nodes.values()))


def node_in_the_host(kv):
    return next(node for node in kv.cache.index if node.host_id is not None)


def dropped_too_early(kv):
    kv.sequences.drop_up_to(1, 1, 0)


def an_entry_is_gone(kv):
    kv.sequences.dropped[1] = 1
    kv.sequences.block_ids[kv.sequences.max_beam_width, 1:3] = -1


def two_write_to_one_block(kv):
    kv.pool.share(kv.block_ids(kv.sequences.owners[0])[-1])


def what_is_written_to_can_be_found(kv):
    index = kv.cache.index
    index.nodes[kv.block_ids(kv.sequences.owners[0])[-1]] = node_in_the_pool(kv)


def cached_blocks_are_miscounted(kv):
    kv.pool.num_cached += 1


def owners_are_miscounted(kv):
    kv.pool.extra_owners += 1


def nodes_are_miscounted(kv):
    kv.cache.index.num_nodes += 1


def a_block_forgets_its_node(kv):
    del kv.cache.index.nodes[node_in_the_pool(kv).block_id]


def a_node_stands_under_another_digest(kv):
    node = node_in_the_pool(kv)
    node.parent.children[b"another"] = node.parent.children.pop(node.key.digest)


def a_node_has_other_tokens(kv):
    node = node_in_the_pool(kv)
    node.key = BlockKey(node.key.digest, (9, 9, 9, 9), node.key.extra_ids)


def a_node_is_in_both_pools(kv):
    node_in_the_pool(kv).host_id = 0


def a_host_block_is_lost(kv):
    kv.cache.host._empty.pop()


def a_host_block_stays_pinned(kv):
    kv.cache.host.pin(node_in_the_host(kv).host_id)


def a_host_block_has_somebody_elses_node(kv):
    kv.cache.host._nodes[node_in_the_host(kv).host_id] = PrefixNode(BlockKey(b"", (1,)), None)


def a_shared_block_is_not_full(kv):
    node = node_in_the_pool(kv)
    node.key = BlockKey(node.key.digest, (0,), None)


def a_node_is_larger_than_a_block(kv):
    node = node_in_the_host(kv)
    node.key = BlockKey(node.key.digest, (0,) * (UNIT + 1), None)


DAMAGES = {
    dropped_too_early: "dropped 1 block, some of them inside its attention window",
    an_entry_is_gone: "but its table has",
    two_write_to_one_block: "is being written and has 2 owners",
    what_is_written_to_can_be_found: "is being written and is published",
    cached_blocks_are_miscounted: "free blocks can be found, but num_cached is",
    owners_are_miscounted: "owners beyond the first, but extra_owners is",
    nodes_are_miscounted: "prefix nodes are reachable, but num_nodes is",
    a_block_forgets_its_node: "the prefix trees and the table of blocks differ",
    a_node_stands_under_another_digest: "is not at its digest in its parent",
    a_node_has_other_tokens: "does not match its content",
    a_node_is_in_both_pools: "and in host block 0",
    a_host_block_is_lost: "a host block is not exactly one of empty, full and reserved",
    a_host_block_stays_pinned: "a host block is still pinned, or ordered without content",
    a_host_block_has_somebody_elses_node: "is not registered for its node",
    a_shared_block_is_not_full: "is shared and not full",
    a_node_is_larger_than_a_block: "a node has 5 tokens",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_the_audit_names(damage, kv):
    damage(kv)
    with pytest.raises(InternalError, match=DAMAGES[damage]):
        audit(kv)


def test_a_host_block_that_belongs_to_a_node_elsewhere_is_named(kv):
    node_in_the_host(kv).host_id = 7
    assert any("belongs to a node with host_id 7" in fault for fault in kv.cache.host.faults())


def test_what_makes_way_while_it_is_pinned_is_not_put_back(kv):
    # A claim pins the sources of its copies; the block of a copy may evict just that content from the host's pool.
    host, node = kv.cache.host, node_in_the_host(kv)
    host_id, free = node.host_id, host.num_free
    host.pin(host_id)
    host.drop(host_id)
    host.unpin(host_id)
    assert host.num_free == free + 1
    assert host.put(node, DEFAULT_PRIORITY) == host_id, "a block that is empty is not in the order"
