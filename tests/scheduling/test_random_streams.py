"""Every policy runs random requests in tiny pools to their end, and keeps the rules in every step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager.kv.audit import audit
from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy

EQUAL = st.just(0.5)
PRIORITIES = st.sampled_from([0.5, 0.5, 0.5, 0.2, 0.9])


@st.composite
def streams(draw, priorities=EQUAL):
    """Generate (requests, options).

    The pool has at least the blocks of the largest request. The token budget of a step is at least the batch size plus
    the tokens of a block.
    """
    requests = draw(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 14), st.integers(0, 20), priorities),
                             min_size=1, max_size=10))
    tokens_per_block = draw(st.sampled_from([1, 2, 4, 5, 8]))
    max_batch_size = draw(st.integers(1, 6))
    chunking = draw(st.sampled_from([None, *ContextChunkingPolicy]))
    largest = max(-(-(prompt + new) // tokens_per_block) for prompt, new, *_ in requests)
    least = max_batch_size + tokens_per_block
    if chunking is None:
        least = max(least, *(prompt for prompt, *_ in requests))
    return requests, {
        "tokens_per_block": tokens_per_block,
        "max_batch_size": max_batch_size,
        "chunking": chunking,
        "num_blocks": largest + draw(st.integers(0, 12)),
        "max_num_tokens": least + draw(st.integers(0, 12)),
    }


def run_audited(game, each_step=lambda line, plan: None):
    """Run the requests of `game` to their end, and audit the accounting after every step.

    each_step   called with (active requests in order, plan of the step) after every step
    """
    step = game.step

    def audited_step():
        line = [*game.active.in_order, *(request for request, arrival in zip(game.all, game.arrivals, strict=True)
                                           if arrival == len(game.rows))]
        plan = step()
        audit(game.kv)
        each_step(line, plan)
        return plan

    game.step = audited_step
    game.run()
    for request, (_, new, *_) in zip(game.all, game.requests, strict=True):
        assert request.total_generated_tokens == new, game.picture()


@settings(max_examples=200, deadline=None)
@given(stream=streams())
def test_under_max_utilization_the_oldest_advances_in_every_iteration(play, stream):
    requests, options = stream
    game = play(requests, policy=SchedulerPolicy.MAX_UTILIZATION, **options)

    def oldest_advances(line, plan):
        assert not line or line[0] in plan.context_requests or line[0] in plan.generation_requests, game.picture()

    run_audited(game, oldest_advances)
    work = sum(-(-(prompt + new) // game.tokens_per_block) + new for prompt, new, *_ in requests)
    assert len(game.rows) <= max(game.arrivals) + work


@settings(max_examples=200, deadline=None)
@given(stream=streams(priorities=PRIORITIES))
def test_under_no_evict_nobody_is_paused_and_everybody_finishes(play, stream):
    requests, options = stream
    game = play(requests, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, **options)

    def nobody_is_paused(line, plan):
        assert plan.paused_requests == []

    run_audited(game, nobody_is_paused)
    assert all(request.num_pauses == 0 for request in game.all)


@settings(max_examples=100, deadline=None)
@given(stream=streams(priorities=PRIORITIES))
def test_under_max_utilization_nobody_is_paused_ahead_of_a_request_that_runs(play, stream):
    requests, options = stream
    game = play(requests, policy=SchedulerPolicy.MAX_UTILIZATION, **options)

    def pauses_come_from_the_end(line, plan):
        order = list(game.active.in_order)
        running = [*plan.context_requests, *plan.generation_requests]
        runs = [order.index(request) for request in running if request in order]
        pauses = [order.index(request) for request in plan.paused_requests]
        assert not pauses or not runs or min(pauses) > max(runs), game.picture()

    run_audited(game, pauses_come_from_the_end)
