"""Reservations suffice, no matter which blocks are shared and which blocks leave the window."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.kv.audit import audit
from batch_manager.kv.block_needs import most_blocks
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.window import AttentionWindow
from batch_manager.requests.llm_request import LlmRequest

FAR = 10_000


lengths = {"prompt_len": st.integers(1, 40), "new": st.integers(1, 30), "unit": st.sampled_from([1, 2, 3, 4, 8]),
           "sinks": st.integers(0, 9), "unread": st.sampled_from([0, 0, 1, 3])}


@given(**lengths, window=st.integers(1, 30) | st.none(), beam_width=st.integers(1, 3), own_last=st.booleans())
def test_the_most_a_sequence_holds_is_what_growing_it_shows(prompt_len, new, unit, window, sinks, unread, beam_width,
                                                           own_last):
    held = [1] * ((prompt_len - 1 if own_last else prompt_len) // unit)
    if len(held) * unit < prompt_len:
        held.append(beam_width)
    most, first_behind = sum(held), -(-sinks // unit) if window else 0
    for length in range(prompt_len + 1, prompt_len + new + 1):
        if (length - 1) % unit == 0:
            held.append(beam_width)
        most = max(most, sum(held))
        for place in range(first_behind, (length - unread - window) // unit if window else 0):
            held[place] = 0
    limits = AttentionWindow(window or FAR, FAR, unit, sinks if window else 0, unread_steps=unread)
    assert most_blocks(prompt_len, new, limits, beam_width, own_last=own_last) == most


@given(**lengths, window=st.integers(1, 30), drafts=st.integers(1, 5))
def test_the_most_a_sequence_with_drafts_holds_is_enough(prompt_len, new, unit, window, sinks, unread, drafts):
    """A sequence's reservation suffices for any numbers of draft and accepted tokens, up to `drafts` in each step.

    The reservation exceeds the need by at most the blocks of 2 * `drafts` tokens.
    """
    sink_blocks, end, most = -(-sinks // unit), prompt_len + new, -(-prompt_len // unit)
    seen, waiting = set(), [(prompt_len, 0)]                    # length, blocks that left the window
    while waiting:
        length, dropped = waiting.pop()
        if length >= end or (length, dropped) in seen:
            continue
        seen.add((length, dropped))
        gone = max(dropped, (length + 1 - unread - window) // unit - sink_blocks)
        for count in range(min(drafts, end - length - 1) + 1):
            most = max(most, -(-(length + 1 + count) // unit) - dropped)
            waiting += [(length + 1 + accepted, gone) for accepted in range(count + 1)]
    limits = AttentionWindow(window, FAR, unit, sinks, unread_steps=unread, max_draft_len=drafts)
    reserved = most_blocks(prompt_len, new, limits)
    assert most <= reserved <= most + -(-2 * drafts // unit)


@pytest.mark.parametrize("seed", range(150))
def test_what_is_reserved_is_enough_whatever_is_drafted_accepted_and_taken_back(seed):
    """No claim fails while sequences draft, accept and rewind random numbers of tokens.

    The pool has as many blocks as the reservations of all sequences together.
    """
    draw = Random(seed)
    unit, window = draw.randint(1, 4), draw.choice([None, draw.randint(1, 12), draw.randint(1, 12)])
    unread, drafts = draw.randint(0, 2), draw.randint(0, 3)
    plans = [(draw.randint(1, 15), draw.randint(1, 20)) for _ in range(draw.randint(1, 3))]
    limits = AttentionWindow(window or FAR, FAR, unit, unread_steps=unread, max_draft_len=drafts)
    kv = KvCacheManager(sum(most_blocks(*plan, limits) for plan in plans), unit, FAR, window=window,
                        max_draft_len=drafts, unread_steps=unread)
    requests = []
    for slot, (prompt_len, new) in enumerate(plans):
        request = LlmRequest(slot, [0] * prompt_len, new, draft_tokens=range(drafts))
        request.seq_slot = slot
        requests.append(request)
    if draw.random() < 0.5:    # the last chunk comes later
        kv.claim(requests, [])
    counts = [draw.randint(0, kv.most_context_drafts(request)) for request in requests]
    drafting = [(request, count) for request, count in zip(requests, counts, strict=True) if count]
    first_chunks = [request for request in requests if not kv.owns(request)]
    ledger, free = kv.start_scheduling(), kv.free_blocks
    needed = kv.blocks_to_claim(first_chunks, [], (), None, drafting)
    not_reserved = free - ledger.blocks_to_completion_of_started() - sum(map(ledger.blocks_to_completion, first_chunks))
    assert needed <= sum(map(ledger.blocks_for_next_step, requests))
    assert needed <= sum(map(ledger.blocks_to_completion, requests)) <= free
    kv.claim(first_chunks, [], None, drafting)
    assert free - kv.free_blocks == needed
    for request, count in zip(requests, counts, strict=True):
        assert kv.kv_length(request) == request.prompt_len + count
        request.advance_context(request.prompt_len)
    kv.rewind(requests, [draw.randint(0, count) for count in counts])
    audit(kv)
    assert kv.free_blocks - kv.reservations.of_all_owners() >= not_reserved
    while True:
        left = [request.prompt_len + request.max_new_tokens - kv.kv_length(request) for request in requests]
        group = [pair for pair in zip(requests, left, strict=True) if pair[1] and draw.random() < 0.7]
        if not any(left):
            break
        growing = [request for request, _ in group]
        counts = [draw.randint(0, min(drafts, room - 1)) for _, room in group]
        ledger = kv.start_scheduling()
        free, needed = kv.free_blocks, kv.blocks_to_claim([], growing, (), counts)
        assert needed <= sum(map(ledger.blocks_for_next_step, growing))
        assert needed <= kv.reservations.of_owners(growing) <= ledger.blocks_to_completion_of_started() <= free
        kv.claim([], growing, counts)
        audit(kv)
        assert window or free - kv.free_blocks == needed
        if any(counts):
            kv.rewind(growing, [draw.randint(0, count) for count in counts])
        else:
            lengths = {request: kv.kv_length(request) for request in growing}
            for _ in range(unread):
                ahead = [request for request in growing
                         if kv.kv_length(request) < request.prompt_len + request.max_new_tokens]
                kv.claim([], ahead)
            kv.rewind(growing, [kv.kv_length(request) - length for request, length in lengths.items()])
        audit(kv)


def prompts_that_slide(num_blocks, make_request):
    """Return (manager, two requests that share the first two blocks of their prompts).

    The window moves past these blocks while the requests generate.
    """
    kv = KvCacheManager(num_blocks, 4, 100, window=9, enable_block_reuse=True)
    requests = [make_request(slot, 9, 16) for slot in range(2)]
    for request in requests:
        kv.claim([request], [])
        request.advance_context(9)
        request.read_context(request.context_position)
        kv.publish_context(request, 9)
        request.add_token(0)
    assert kv.pool.extra_owners == 2
    return kv, requests


def run_one_after_the_other(kv, requests):
    for request in requests:
        while not request.is_finished:
            kv.claim([], [request])
            request.add_token(0)


def test_a_block_two_hold_is_owed_to_whom_slides_past_it(make_request):
    kv, requests = prompts_that_slide(100, make_request)
    one_by_one = kv.reservations.of_owners(requests)
    ledger = kv.start_scheduling()
    assert (one_by_one, ledger.blocks_to_completion_of_started()) == (2, 4)
    run_one_after_the_other(*prompts_that_slide(kv.used_blocks + 4, make_request))
    with pytest.raises(OutOfBlocksError):
        run_one_after_the_other(*prompts_that_slide(kv.used_blocks + one_by_one, make_request))


def test_who_slides_past_a_shared_block_is_given_no_credit_for_it(make_request):
    kv, (first, _) = prompts_that_slide(100, make_request)
    sliding, short = make_request(7, 9, 16), make_request(8, 9, 1)
    assert kv.start_scheduling().blocks_to_completion(sliding) == kv.get_needed_resource_to_completion(sliding) == 4
    assert kv.start_scheduling().blocks_to_completion(short) == 3       # the others slide and release shared blocks
    kv.release(first)
    keeping = make_request(0, 9, 1)
    kv.claim([keeping], [])
    assert kv.start_scheduling().blocks_to_completion(short) == 1


def test_a_prompt_longer_than_its_window_is_stored_whole(make_request, start):
    kv = KvCacheManager(100, 4, 100, window=4)
    request = make_request(0, 40, 20)
    assert kv.get_needed_resource_to_completion(request) == 11
    start(kv, request)
    assert kv.reservations.of_owners([request]) == 1
    kv.claim([], [request])
    assert (kv.held_blocks(request), kv.reservations.of_owners([request])) == (2, 0)
