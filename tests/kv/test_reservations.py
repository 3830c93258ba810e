"""What is reserved is enough, whoever shares what with whom, and whatever leaves the window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.kv.block_needs import most_blocks
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.window import AttentionWindow

FAR = 10_000


@given(prompt_len=st.integers(1, 40), new=st.integers(1, 30), unit=st.sampled_from([1, 2, 3, 4, 8]),
       window=st.integers(1, 30) | st.none(), sinks=st.integers(0, 9), beam_width=st.integers(1, 3),
       own_last=st.booleans())
def test_the_most_a_sequence_holds_is_what_growing_it_shows(prompt_len, new, unit, window, sinks, beam_width, own_last):
    held = [1] * ((prompt_len - 1 if own_last else prompt_len) // unit)
    if len(held) * unit < prompt_len:
        held.append(beam_width)
    most, first_behind = sum(held), -(-sinks // unit) if window else 0
    for length in range(prompt_len + 1, prompt_len + new + 1):
        if (length - 1) % unit == 0:
            held.append(beam_width)
        most = max(most, sum(held))
        for place in range(first_behind, (length - window) // unit if window else 0):
            held[place] = 0
    limits = AttentionWindow(window or FAR, FAR, unit, sinks if window else 0)
    assert most_blocks(prompt_len, new, limits, beam_width, own_last=own_last) == most


def prompts_that_slide(num_blocks, make_request):
    """Two requests that share the first two blocks of their prompts and slide past them."""
    kv = KvCacheManager(num_blocks, 4, 100, window=9, enable_block_reuse=True)
    requests = [make_request(slot, 9, 16) for slot in range(2)]
    for request in requests:
        kv.claim([request], [])
        request.advance_context(9)
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
    one_by_one = kv.get_remaining_blocks_to_completion_of_owners(requests)
    ledger = kv.start_scheduling()
    assert (one_by_one, ledger.blocks_to_completion_of_started()) == (2, 4)
    run_one_after_the_other(*prompts_that_slide(kv.used_blocks + 4, make_request))
    with pytest.raises(OutOfBlocksError):
        run_one_after_the_other(*prompts_that_slide(kv.used_blocks + one_by_one, make_request))


def test_who_slides_past_a_shared_block_is_given_no_credit_for_it(make_request):
    kv, (first, _) = prompts_that_slide(100, make_request)
    sliding, short = make_request(7, 9, 16), make_request(8, 9, 1)
    assert kv.start_scheduling().blocks_to_completion(sliding) == kv.get_needed_resource_to_completion(sliding) == 4
    assert kv.start_scheduling().blocks_to_completion(short) == 3       # the others will slide: nobody keeps it for him
    kv.release(first)
    keeping = make_request(0, 9, 1)
    kv.claim([keeping], [])
    assert kv.start_scheduling().blocks_to_completion(short) == 1


def test_a_prompt_longer_than_its_window_is_stored_whole(make_request, start):
    kv = KvCacheManager(100, 4, 100, window=4)
    request = make_request(0, 40, 20)
    assert kv.get_needed_resource_to_completion(request) == 11
    start(kv, request)
    assert kv.get_remaining_blocks_to_completion_of_owners([request]) == 1
    kv.claim([], [request])
    assert (kv.held_blocks(request), kv.get_remaining_blocks_to_completion_of_owners([request])) == (2, 0)
