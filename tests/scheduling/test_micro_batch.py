"""The micro-batch scheduler puts the right requests into a step, with the right chunks."""

from batch_manager.names import LlmRequestState
from batch_manager.scheduling.chunking import ContextChunking, equal_progress, first_come_first_served, force_chunk
from batch_manager.scheduling.micro_batch import TokenBudgetScheduler

NOBODY = frozenset()


def test_generation_costs_its_beams_and_its_drafts(make_line):
    line = make_line()
    first, second = line.generating(draft_tokens=range(2)), line.generating(draft_tokens=range(2))
    assert TokenBudgetScheduler(4, 6).schedule(line.requests, NOBODY) == ([], [first, second])
    assert TokenBudgetScheduler(4, 5).schedule(line.requests, NOBODY) == ([], [first])


def test_the_first_that_does_not_fit_ends_the_step(make_line):
    line = make_line()
    small, _, _ = line.waiting(4), line.waiting(9), line.waiting(1)
    assert TokenBudgetScheduler(4, 10).schedule(line.requests, NOBODY) == ([small], [], [4])


def test_a_context_that_is_not_cut_costs_its_drafts_as_well(make_line):
    line = make_line()
    first, second = line.waiting(4, draft_tokens=range(2)), line.waiting(4, draft_tokens=range(2))
    assert TokenBudgetScheduler(4, 12).schedule(line.requests, NOBODY) == ([first, second], [], [4, 4])
    assert TokenBudgetScheduler(4, 11).schedule(line.requests, NOBODY) == ([first], [], [4])
    assert TokenBudgetScheduler(4, 9).schedule(line.requests, NOBODY) == ([first], [], [4])


def test_requests_in_flight_and_those_that_cannot_run_take_no_place(make_line):
    line = make_line()
    in_flight, done, first, second = line.generating(), line.generating(), line.generating(), line.waiting()
    done.state = LlmRequestState.GENERATION_COMPLETE
    scheduler = TokenBudgetScheduler(2, 100)
    assert scheduler.schedule(line.requests, {in_flight.request_id}) == ([second], [first], [8])


def test_a_step_has_one_beam_width_and_others_wait_without_a_place(make_line):
    line = make_line()
    first, _, third = line.generating(), line.generating(beam_width=2), line.generating()
    assert TokenBudgetScheduler(2, 100).schedule(line.requests, NOBODY) == ([], [first, third])


def test_without_a_token_limit_the_batch_size_is_the_only_bound(make_line):
    line = make_line()
    first, second, _ = line.waiting(500), line.waiting(500), line.waiting(500)
    assert TokenBudgetScheduler(2).schedule(line.requests, NOBODY) == ([first, second], [], [500, 500])


def test_contexts_share_what_generation_leaves(make_line):
    line = make_line()
    first, second, running = line.waiting(8), line.waiting(8), line.generating()
    chunking = ContextChunking(first_come_first_served, unit=4)
    contexts, generation, chunks, _ = TokenBudgetScheduler(4, 13, chunking).schedule(line.requests, NOBODY)
    assert (generation, dict(zip(contexts, chunks, strict=True))) == ([running], {first: 8, second: 4})


def test_prompts_that_are_not_finished_come_first(make_line):
    line = make_line()
    short, long = line.waiting(4), line.waiting(20)
    chunking = ContextChunking(first_come_first_served, unit=4)
    contexts, _, chunks, _ = TokenBudgetScheduler(4, 12, chunking).schedule(line.requests, NOBODY)
    assert (contexts, chunks) == ([long, short], [8, 4])


def test_contexts_without_a_chunk_wait(make_line):
    line = make_line()
    first, _ = line.waiting(8), line.waiting(8)
    chunking = ContextChunking(first_come_first_served, unit=4)
    contexts, _, chunks, _ = TokenBudgetScheduler(4, 10, chunking).schedule(line.requests, NOBODY)
    assert (contexts, chunks) == ([first], [8])


def test_what_fits_whole_is_not_cut(make_line):
    line = make_line()
    first, second = line.waiting(7), line.waiting(9)
    for divide in (first_come_first_served, equal_progress):
        scheduler = TokenBudgetScheduler(4, 16, ContextChunking(divide, unit=4))
        assert scheduler.schedule(line.requests, NOBODY) == ([first, second], [])


def test_force_chunk_cuts_what_would_fit_whole(make_line):
    line = make_line()
    first, second = line.waiting(7), line.waiting(3)
    scheduler = TokenBudgetScheduler(4, 100, ContextChunking(force_chunk, unit=4))
    assert scheduler.schedule(line.requests, NOBODY) == ([first, second], [], [4, 3], [0, 0])


def test_a_bound_on_one_chunk_cuts_although_the_budget_would_hold_all(make_line):
    line = make_line()
    first, second = line.waiting(4), line.waiting(20)
    scheduler = TokenBudgetScheduler(4, 100, ContextChunking(first_come_first_served, unit=4, max_context_length=8))
    assert scheduler.schedule(line.requests, NOBODY)[:3] == ([second, first], [], [8, 4])


def test_a_prompt_too_long_for_any_step_waits_unless_a_pause_made_it_so(make_line):
    line = make_line()
    request = line.waiting(11)
    scheduler = TokenBudgetScheduler(4, 10, tokens_per_block=4)
    assert scheduler.schedule(line.requests, NOBODY) == ([], [])
    request.num_pauses = 1
    assert scheduler.schedule(line.requests, NOBODY) == ([request], [], [8])
    request.advance_context(8)
    request.read_context(request.context_position)
    assert scheduler.schedule(line.requests, NOBODY) == ([request], [], [3])


def test_a_chunk_of_a_prompt_that_a_pause_made_too_long_costs_what_it_computes(make_line):
    """A paused request costs its uncached tokens if these fit the step. Otherwise, it costs all tokens of its chunk.

    The chunk begins after the cached part of the prompt, so that none of its tokens are cached.
    """
    line = make_line()
    paused, other = line.waiting(25), line.waiting(1)
    paused.num_pauses = 1
    for credit, budget, expected in ((8, 10, ([paused, other], [], [8, 1])), (8, 8, ([paused], [], [8])),
                                     (16, 10, ([paused, other], [], [25, 1])), (16, 9, ([paused], [], [25]))):
        scheduler = TokenBudgetScheduler(4, budget, tokens_per_block=4,
                                         credit_of=lambda request, credit=credit: credit if request is paused else 0)
        assert scheduler.schedule(line.requests, NOBODY) == expected
