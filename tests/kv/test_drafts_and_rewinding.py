"""One claim can include several drafts of a request, and one rewind can include several requests.

The manager refuses a rewind after which a request could not continue. A refused rewind changes nothing.
"""

import pytest

from batch_manager.errors import InternalError
from batch_manager.kv.audit import audit
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager


def test_who_holds_no_blocks_is_not_rewound(make_request):
    kv = KvCacheManager(4, 4, 100)
    with pytest.raises(InternalError, match="holds no blocks; only started requests are extended or rewound"):
        kv.rewind([make_request(0, 3)], 1)
    assert kv.free_blocks == 4


@pytest.mark.parametrize(("options", "prompt_len", "steps", "rewound", "expected"), [
    ({}, 3, 2, 5, "not empty"),
    ({"enable_block_reuse": True}, 6, 2, 3, "keeps a shared prompt"),
    ({"window": 4}, 10, 3, 4, "whose blocks are in the attention window"),
])
def test_too_much_is_not_taken_back(make_request, start, options, prompt_len, steps, rewound, expected):
    kv = KvCacheManager(8, 2, 100, **options)
    request = start(kv, make_request(0, prompt_len))
    for _ in range(steps):
        kv.claim([], [request])
    before = kv.block_ids(request), kv.kv_length(request), kv.pool.free_order()
    with pytest.raises(InternalError, match=f"cannot be rewound by {rewound} tokens; .*{expected}"):
        kv.rewind([request], rewound)
    assert (kv.block_ids(request), kv.kv_length(request), kv.pool.free_order()) == before
    audit(kv)
    kv.rewind([request], 1)
    audit(kv)


def test_a_last_block_that_beams_share_is_not_written_to_again(make_request, start):
    kv = KvCacheManager(8, 4, 100, max_beam_width=2)
    request = start(kv, make_request(0, 8, beam_width=2))
    kv.claim([], [request])
    with pytest.raises(InternalError, match="rewound by 2 tokens; .*a last block that is full, or that the beams do"):
        kv.rewind([request], 2)
    with pytest.raises(InternalError, match="rewound by -9 tokens; expected a number of tokens that is not negative"):
        kv.rewind([request], -9)
    kv.rewind([request], 1)
    assert kv.kv_length(request) == 8 and kv.used_blocks == 2
    audit(kv)


def test_drafts_are_claimed_together_and_may_fill_several_blocks(make_request, start):
    kv = KvCacheManager(20, 2, 100, max_beam_width=2, max_draft_len=5)
    beams = start(kv, make_request(0, 3, beam_width=2))
    drafting, plain = start(kv, make_request(1, 3)), start(kv, make_request(2, 4))
    assert kv.blocks_to_claim([], [drafting, plain, beams], (), [5, 0, 1]) == 3 + 1 + 2
    claim = kv.claim([], [drafting, plain, beams], [5, 0, 1])
    assert (claim.slots.tolist(), claim.kv_lengths.tolist()) == ([1, 2, 0], [3, 4, 3])
    assert [kv.kv_length(request) for request in (drafting, plain, beams)] == [9, 5, 5]
    updates = claim.table_updates
    rows = list(zip(updates.slots.tolist(), updates.indices.tolist(), strict=True))
    assert rows == [(2, 2), (2, 3), (2, 4), (4, 2), (0, 2), (1, 2)]
    for request, row in ((drafting, 2), (plain, 4), (beams, 0), (beams, 1)):
        told = [block for slot, block in zip(updates.slots.tolist(), updates.block_ids.tolist(), strict=True)
                if slot == row]
        assert kv.block_ids(request, row % 2)[2:] == told
    audit(kv)


@pytest.mark.parametrize(("num_drafts", "complaint"), [
    ([4], "4 drafts after 3 tokens; expected 0 to 3 drafts"), ([-1], "-1 drafts after 3 tokens"),
    ([3], "3 drafts after 3 tokens; expected 0 to 3 drafts, all in the 3 blocks that the request has at its final "
          "length"),
    ([1, 1], "for 1 request")])
def test_drafts_that_nobody_reckons_with_are_not_claimed(make_request, start, num_drafts, complaint):
    kv = KvCacheManager(20, 2, 100, max_draft_len=3)
    request = start(kv, make_request(0, 3, 3))
    with pytest.raises(InternalError, match=complaint):
        kv.claim([], [request], num_drafts)
    assert (kv.kv_length(request), kv.used_blocks) == (3, 2)
    kv.claim([], [request], [2])
    assert (kv.kv_length(request), kv.used_blocks) == (6, 3)
    audit(kv)


def test_drafts_that_do_not_fit_change_nothing(make_request, start):
    kv = KvCacheManager(4, 2, 100, max_draft_len=3)
    first, second = start(kv, make_request(0, 2)), start(kv, make_request(1, 2))
    before = kv.pool.free_order()
    with pytest.raises(OutOfBlocksError, match="3 free KV cache blocks are needed, and the pool has 2"):
        kv.claim([], [first, second], [3, 0])
    assert (kv.pool.free_order(), kv.kv_length(first), kv.kv_length(second)) == (before, 2, 2)
    audit(kv)


def test_many_are_rewound_at_once_and_their_blocks_are_taken_next(make_request, start):
    kv = KvCacheManager(20, 2, 100, max_draft_len=6)
    requests = [start(kv, make_request(slot, 3)) for slot in range(3)]
    kv.claim([], requests, [6, 2, 0])
    newest, (third, _) = kv.block_ids(requests[1])[2], kv.block_ids(requests[0])[3:]
    kv.rewind(requests, [4, 2, 1])
    assert [kv.kv_length(request) for request in requests] == [6, 4, 3]
    assert [kv.held_blocks(request) for request in requests] == [3, 2, 2]
    audit(kv)
    kv.rewind(requests[:2], 1)
    assert [kv.kv_length(request) for request in requests] == [5, 3, 3]
    kv.rewind([], 1)
    kv.claim([], [requests[0]], [3])
    assert kv.block_ids(requests[0])[3:] == [newest, third]
    audit(kv)


def test_when_one_of_many_cannot_be_rewound_none_is(make_request, start):
    kv = KvCacheManager(20, 2, 100)
    requests = [start(kv, make_request(slot, 3)) for slot in range(3)]
    kv.claim([], requests)
    for wrong, complaint in (([1, 4, 1], "1, GENERATION_IN_PROGRESS.* cannot be rewound by 4 tokens"),
                             ([1, 1, -1], "cannot be rewound by -1 tokens; .*not negative")):
        with pytest.raises(InternalError, match=complaint):
            kv.rewind(requests, wrong)
    with pytest.raises(InternalError, match="a rewind has the same request twice"):
        kv.rewind([requests[0], requests[0]], 1)
    assert [kv.kv_length(request) for request in requests] == [4, 4, 4]
    audit(kv)


def test_what_unread_steps_may_look_at_again_stays(make_request, start):
    kv, strict = (KvCacheManager(20, 2, 100, window=4, unread_steps=unread) for unread in (2, 0))
    for manager, held in ((kv, 4), (strict, 3)):
        request = start(manager, make_request(0, 5))
        for _ in range(6):
            manager.claim([], [request])
            audit(manager)
        assert (manager.kv_length(request), manager.held_blocks(request)) == (11, held)
    request = kv.sequences.owners[0]
    kv.rewind([request], 2)
    audit(kv)
    with pytest.raises(InternalError, match="cannot be rewound by 2 tokens"):
        strict.rewind([strict.sequences.owners[0]], 2)


@pytest.mark.parametrize("options", [{}, {"enable_block_reuse": True}])
def test_tokens_claimed_at_once_are_those_of_as_many_claims(make_request, start, options):
    def held(at_once):
        kv = KvCacheManager(12, 4, 100, **options)
        requests = [start(kv, make_request(number, length, max_new_tokens=20)) for number, length in ((0, 3), (1, 8))]
        if at_once:
            kv.claim_tokens(requests, 11)
        else:
            for _ in range(11):
                kv.claim([], requests)
        audit(kv)
        return [(kv.kv_length(request), kv.held_blocks(request)) for request in requests], kv.free_blocks

    assert held(True) == held(False)


def test_more_tokens_than_there_is_room_for_are_not_claimed_at_once(make_request, start):
    kv = KvCacheManager(4, 4, 100)
    requests = [start(kv, make_request(number, 4, max_new_tokens=20)) for number in range(2)]
    with pytest.raises(OutOfBlocksError):
        kv.claim_tokens(requests, 8)
    with pytest.raises(InternalError, match="a step claims 25 tokens at once, beyond the end of a request"):
        kv.claim_tokens(requests[:1], 25)
    assert [kv.kv_length(request) for request in requests] == [4, 4] and kv.free_blocks == 2
    audit(kv)
    kv = KvCacheManager(8, 2, 100, window=4)
    with pytest.raises(InternalError, match="a step claims 2 tokens at once, with an attention window of 4 tokens"):
        kv.claim_tokens([start(kv, make_request(0, 4, max_new_tokens=20))], 2)
