"""The sentences of `batch-manager trace why` state only what a trace records: each change of an event changes them."""

from dataclasses import replace

import pytest

from batch_manager import IterationTrace, Trace
from batch_manager.scheduling import waiting
from batch_manager.tools.request_spans import lives
from batch_manager.tools.trace import IN_CLIENT, SENTENCES, why

EVENTS = ("arrived", "context", "generation", "paused", "finished")


@pytest.fixture(scope="module")
def iterations():
    """A run in which requests wait in the client and for blocks, are computed in chunks, and are paused."""
    from tests.harness.requests import request
    from tests.harness.world import build_world
    trace = Trace()
    world = build_world(parts={"trace": trace.append}, max_batch_size=3, max_num_tokens=16, max_num_sequences=3,
                        enable_chunked_context=True,
                        backend={"num_blocks": 8, "tokens_per_block": 8, "max_seq_len": 56})
    start = world.loop.backend.start
    world.loop.backend.start = lambda *given: (setattr(world.clock, "now", world.clock.now + 0.005), start(*given))[1]
    world.client.pending = [request(i, [i] * length, 14, arrival_time=world.clock.now)
                            for i, length in ((1, 20), (2, 12), (3, 30), (4, 5))]
    world.run()
    assert any(each.paused for each in trace.iterations)
    return trace.iterations


def told(iterations, request_id):
    return ["\n".join(why(life)) for life in lives(iterations) if life.request_id == request_id]


def changed(iterations, change):
    return [change(each) for each in iterations]


def without(iteration, event, request_id):
    """Return the iteration without one event of a request."""
    kept = [n for n, each in enumerate(getattr(iteration, event)) if request_id != (
        each[0] if event == "context" else each)]
    fields = [event, *([f"{event}_at_s"] if event in ("arrived", "finished") else [])]
    if event == "finished":        # the reason records the end too
        iteration = replace(iteration, end_reasons={
            reason: ids for reason, all_ids in iteration.end_reasons.items()
            if (ids := tuple(i for i in all_ids if i != request_id))})
    return replace(iteration, **{name: tuple(getattr(iteration, name)[n] for n in kept) for name in fields})


@pytest.mark.parametrize("request_id", [1, 2, 3, 4])
def test_without_any_one_of_its_events_the_sentences_change(request_id, iterations):
    before, dropped = told(iterations, request_id), 0
    for number, each in enumerate(iterations):
        for mutant in [without(each, event, request_id) for event in EVENTS] + [
                replace(each, waiting={**each.waiting, reason: tuple(i for i in ids if i != request_id)})
                for reason, ids in each.waiting.items()]:
            if mutant != each:
                dropped += 1
                assert told([*iterations[:number], mutant, *iterations[number + 1:]], request_id) != before, mutant
    assert dropped > 15


def test_only_a_recorded_pause_is_called_one(iterations):
    paused = {i for each in iterations for i in each.paused}
    for request_id in paused:
        (text,) = told(iterations, request_id)
        assert "paused: its blocks were freed" in text and "after it was paused 1 time, " in text
        (text,) = told([without(each, "paused", request_id) for each in iterations], request_id)
        assert "paused" not in text and " of them again" in text
    assert paused


def test_a_wait_between_two_chunks_is_no_pause():
    chunks = [IterationTrace(0, ((7, 0, 8),), (), (), (), (7,), 0.0),
              IterationTrace(1, (), (), (), (), (), 1.0, waiting={waiting.TOKENS: (7,)}),
              IterationTrace(2, ((7, 8, 4),), (), (), (7,), (), 2.0, {"start": 500_000})]
    assert told(chunks, 7) == [
        "request 7: 2.500 s from its arrival in iteration 0 to its end in iteration 2\n"
        "     1.500 s  computed its prompt: 12 tokens, in 2 iterations\n"
        "     1.000 s  waited: too few tokens of the steps were left (max_num_tokens); 1 iteration, 1 time"]


@pytest.mark.parametrize("reason", waiting.REASONS[1:])
def test_a_wait_has_its_recorded_reason(reason, iterations):
    mutants = changed(iterations, lambda each: replace(each, waiting={reason: sum(each.waiting.values(), ())}
                                                       if each.waiting else {}))
    sentences = {each for each in SENTENCES.values() if each.startswith("waited")}
    lines = told(changed(mutants, lambda each: replace(each, settings={})), 3)[0]
    assert {each for each in sentences if f"  {each};" in lines} == {SENTENCES[reason]}


@pytest.mark.parametrize("room, arrived, reason", [
    (0, True, "max_num_sequences (3) requests were active, and"), (5, True, IN_CLIENT["free room"]),
    (None, True, IN_CLIENT[""]), (0, False, "the first that names it")])
def test_a_wait_in_the_client_has_its_recorded_cause(room, arrived, reason, iterations):
    mutants = changed(iterations, lambda each: replace(each, room=room))
    if not arrived:
        mutants = changed(mutants, lambda each: without(each, "arrived", 4))
    text = told(mutants, 4)[0]
    assert reason in text and ("waited in the client" in text) == arrived


@pytest.mark.parametrize("change, before, after", [
    (lambda each: replace(each, settings={**each.settings, "max_num_sequences": 77} if each.settings else {}),
     "max_num_sequences (3)", "max_num_sequences (77)"),
    (lambda each: replace(each, context=tuple((i, first, tokens + 2 * (i == 4)) for i, first, tokens in each.context)),
     "computed its prompt: 5 tokens", "computed its prompt: 7 tokens"),
    (lambda each: replace(each, end_reasons={"CANCELLED": sum(each.end_reasons.values(), ())} if each.finished else {}),
     "to its end (LENGTH)", "to its end (CANCELLED)"),
    (lambda each: without(each, "finished", 4), "to its end (LENGTH)", "where it is still alive")])
def test_a_changed_event_changes_its_sentence(change, before, after, iterations):
    assert before in told(iterations, 4)[0]
    mutant = told(changed(iterations, change), 4)[0]
    assert after in mutant and before not in mutant


def test_other_prompts_are_named_only_if_they_are_recorded(iterations):
    assert "prompt tokens of" in told(iterations, 1)[0]
    mutants = changed(iterations, lambda each: replace(each, context=tuple(c for c in each.context if c[0] == 1)))
    assert "prompt tokens of" not in told(mutants, 1)[0]


def test_the_slowest_step_is_named_with_what_ran_beside_it(iterations):
    late, mutants = 0.0, []
    number, request_id = next((n, each.generation[0]) for n, each in enumerate(iterations)
                              if each.generation and each.context)
    for n, each in enumerate(iterations):
        later = replace(each, started_at_s=each.started_at_s + late,
                        finished_at_s=tuple(at + late for at in each.finished_at_s))
        late += 0.1 * (n == number)
        mutants.append(later)
    slow = iterations[number]
    tokens = sum(tokens for _, _, tokens in slow.context)
    others = len(slow.generation) + len(slow.context) - 1
    prompts = ", ".join(str(i) for i, _, _ in slow.context)
    assert (f"the slowest, 105.000 ms in iteration {slow.iteration}, had {others} other request{'s' * (others > 1)} "
            f"and {tokens} prompt tokens of {prompts}") in told(mutants, request_id)[0]
    assert "the slowest" not in told(iterations, request_id)[0]
