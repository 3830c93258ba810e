"""Properties of the division of a token budget among prompts, which hold for all lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.scheduling.chunking import (
    ContextChunking,
    drafts_kept,
    equal_progress,
    first_come_first_served,
    force_chunk,
)
from batch_manager.scheduling.micro_batch import TokenBudgetScheduler

DIVISIONS = [first_come_first_served, equal_progress, force_chunk]
remaining_lengths = st.lists(st.integers(1, 60), max_size=8)
units = st.integers(1, 9)
bounds = st.none() | st.integers(0, 100)
longest = st.none() | st.integers(9, 40)


@pytest.mark.parametrize("divide", DIVISIONS)
@given(remaining=remaining_lengths, unit=units, capacity=bounds, max_context_length=longest)
def test_chunks_keep_every_bound_and_end_on_a_block_or_with_the_prompt(divide, remaining, unit, capacity,
                                                                     max_context_length):
    chunks = divide(remaining, unit, capacity, max_context_length)
    assert capacity is None or sum(chunks) <= capacity
    assert max_context_length is None or max(chunks, default=0) <= max_context_length
    for chunk, wanted in zip(chunks, remaining, strict=True):
        assert 0 <= chunk <= wanted
        assert chunk == wanted or chunk % unit == 0


@pytest.mark.parametrize("divide", DIVISIONS)
@given(remaining=remaining_lengths.filter(bool), unit=units, spare=st.integers(0, 20))
def test_with_room_for_a_block_the_first_in_line_gets_one(divide, remaining, unit, spare):
    assert divide(remaining, unit, unit + spare, None)[0] > 0


@given(remaining=remaining_lengths, unit=units)
def test_without_bounds_everybody_gets_everything(remaining, unit):
    assert first_come_first_served(remaining, unit, None, None) == remaining
    assert equal_progress(remaining, unit, None, None) == remaining


@given(remaining=remaining_lengths, unit=units, capacity=bounds, max_context_length=longest, draft=st.integers(0, 12))
def test_kept_drafts_stay_in_the_last_block_and_in_the_budget(remaining, unit, capacity, max_context_length, draft):
    chunks = first_come_first_served(remaining, unit, capacity, max_context_length)
    drafts = [draft] * len(chunks)
    kept = drafts_kept(chunks, remaining, drafts, unit, capacity, max_context_length)
    used = 0
    for chunk, wanted, keep in zip(chunks, remaining, kept, strict=True):
        last = chunk == wanted
        assert keep <= draft
        assert not last or keep <= -chunk % unit
        assert not last or max_context_length is None or chunk + keep <= max_context_length
        used += chunk + (keep if last else 0)
    assert capacity is None or used <= capacity


def test_drafts_share_the_tokens_that_the_chunks_leave():
    assert drafts_kept([3, 3], [3, 3], [5, 5], 8, 10, None) == [4, 0]
    assert drafts_kept([3, 3], [3, 3], [1, 5], 8, 10, None) == [1, 3]
    assert drafts_kept([8, 3], [8, 3], [5, 5], 8, None, None) == [0, 5]


@pytest.mark.parametrize("divide", DIVISIONS)
@given(prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5)), min_size=1, max_size=6),
       unit=units, spare=st.integers(0, 40), max_context_length=st.none() | st.integers(1, 3))
def test_what_the_cache_has_costs_nothing_and_keeps_nobody_back(make_line, divide, prompts, unit, spare,
                                                               max_context_length):
    line = make_line(num_blocks=1000)
    requests = [line.waiting(length, draft_tokens=range(draft)) for length, _, draft in prompts]
    credits = {request: min(cached, length - 1) // unit * unit
               for request, (length, cached, _) in zip(requests, prompts, strict=True)}
    longest = None if max_context_length is None else max_context_length * unit
    scheduler = TokenBudgetScheduler(99, unit + spare, ContextChunking(divide, unit, longest), unit, credits.get)
    contexts, _, *sizes = scheduler.schedule(requests, frozenset())
    chunks, drafts = sizes or ([request.remaining_context for request in contexts],
                               [request.draft_len for request in contexts])
    computed = {request: min(chunk, request.prompt_len - credits[request])
                for request, chunk in zip(contexts, chunks, strict=True)}
    assert requests[0] in contexts
    last_ones = [draft for request, chunk, draft in zip(contexts, chunks, drafts, strict=True)
                 if chunk == request.prompt_len]
    assert sum(computed.values()) + sum(last_ones) <= unit + spare
    for request, chunk, draft in zip(contexts, chunks, drafts, strict=True):
        assert chunk == request.prompt_len or (chunk % unit == 0 and chunk + credits[request] < request.prompt_len)
        assert 0 <= draft <= request.draft_len
        assert longest is None or computed[request] <= longest
