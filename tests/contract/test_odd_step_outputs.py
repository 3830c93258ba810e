"""C21: what a backend returns that is no output of its batch costs the request alone whose row it is."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from batch_manager.handover import Hypothesis, RowFailure
from batch_manager.names import ErrorCode
from batch_manager.runtime.scripted_backend import ScriptedBackend

PROMPTS = {i: [10 + i] * (2 + i) for i in range(6)}
ODD = 3
NEW_TOKENS = 6
ASKS = {"return_log_probs": True, "return_generation_logits": True, "return_context_logits": True}


class Spoiled(ScriptedBackend):
    """`spoil(output, slot of request ODD)` changes the outputs that have its row, `times` times."""

    def __init__(self, spoil, times=10**9, **options):
        super().__init__(**options)
        self.spoil, self.times, self.slot = spoil, times, None

    def start(self, batch):
        self.slot = next((work.slot for work in batch.context if work.token_ids[0] == 10 + ODD), self.slot)
        pending = super().start(batch)

        def finish():
            output = pending.finish()
            if self.slot not in output.slots or not self.times:
                return output
            self.times -= 1
            return self.spoil(output, self.slot)
        return SimpleNamespace(finish=finish)


def run(make_world, new_request, backend, odd=None, **others):
    """odd   what the request asks for whose row is spoiled"""
    width = max((odd or {}).get("beam_width", 1), 1)
    world = make_world(backend=backend, max_beam_width=width)
    world.client.pending = [new_request(i, prompt, NEW_TOKENS, **(odd or {} if i == ODD else others))
                            for i, prompt in PROMPTS.items()]
    world.run()
    return world


def others_are_right(world):
    return all(world.client.final(i).tokens() == prompt + world.expected(prompt, NEW_TOKENS)
               for i, prompt in PROMPTS.items() if i != ODD)


def same_tensors(world, right, request_id):
    given, expected = world.client.final(request_id).tensors, right.client.final(request_id).tensors
    return given.keys() == expected.keys() and all(np.array_equal(given[name], expected[name]) for name in expected)


def with_row(field, value, dtype=None):
    """An output in which one element of an array is another."""
    def spoil(output, slot):
        array = getattr(output, field).astype(dtype or getattr(output, field).dtype)
        array[output.slots == slot] = value
        return replace(output, **{field: array})
    return spoil


def with_all(**changes):
    return lambda output, slot: replace(output, **{name: change(getattr(output, name), slot)
                                                   for name, change in changes.items()})


def failure(code=ErrorCode.MODEL_ERROR, message="x", kind=RowFailure):
    return with_all(failures=lambda failures, slot: {slot: kind(code, message)})


WRONG = {
    "nothing": lambda output, slot: None,
    "another class": lambda output, slot: SimpleNamespace(slots=output.slots, tokens=output.tokens,
                                                          finish=output.finish),
    "tokens that are numbers": with_row("tokens", 1.0, np.float64),
    "a token that is no number": with_row("tokens", np.nan, np.float64),
    "tokens that are objects": with_row("tokens", None, object),
    "tokens that are text": with_row("tokens", "a", np.str_),
    "tokens that are true": with_all(tokens=lambda tokens, slot: np.ones(len(tokens), bool)),
    "tokens in a column": with_all(tokens=lambda tokens, slot: tokens[:, None]),
    "a token of its own": with_all(tokens=lambda tokens, slot: np.int32(1)),
    "a ragged list": with_all(tokens=lambda tokens, slot: [[1], *tokens.tolist()]),
    "a device that cancels": with_row("finish", 5),
    "a device that counts": with_row("finish", 3),
    "an unknown code": with_row("finish", 9),
    "a negative code": with_row("finish", -1, np.int64),
    "a code of another width": with_row("finish", 256, np.int64),
    "no codes": with_all(finish=lambda finish, slot: None),
    "codes that are numbers": with_row("finish", 0.5, np.float32),
    "slots in a column": with_all(slots=lambda slots, slot: slots[:, None]),
    "failures in a list": with_all(failures=lambda failures, slot: [slot]),
    "no failures": with_all(failures=lambda failures, slot: None),
    "a failure that is text": with_all(failures=lambda failures, slot: {slot: "boom"}),
    "a failure of nobody": with_all(failures=lambda failures, slot: {"a": RowFailure(ErrorCode.MODEL_ERROR, "x")}),
    "a failure with a text for a code": failure(code="MODEL_ERROR"),
    "a failure with a number for a text": failure(message=5),
    "a failure of another class": failure(kind=lambda code, message: SimpleNamespace(code=code, message=message)),
    "beams of one": with_all(beams=lambda beams, slot: {slot: 1}),
    "no beams": with_all(beams=lambda beams, slot: None),
    "logits in a list": with_all(generation_logits=lambda logits, slot: [1]),
    "no logits at all": with_all(context_logits=lambda logits, slot: None),
    "log-probabilities that are objects": with_all(log_probs=lambda log_probs, slot: [None] * 9),
}

WRONG_FOR_WHO_ASKED = {
    "no log-probabilities": with_all(log_probs=lambda log_probs, slot: None),
    "too few log-probabilities": with_all(log_probs=lambda log_probs, slot: log_probs[:-1]),
    "no logits": with_all(generation_logits=lambda logits, slot: {}),
    "logits that are None": with_all(generation_logits=lambda logits, slot: {**logits, slot: None}),
    "logits of another vocabulary": with_all(
        generation_logits=lambda logits, slot: {**logits, slot: np.zeros(5, np.float32)}),
    "logits that are text": with_all(
        generation_logits=lambda logits, slot: {**logits, slot: np.full(logits[slot].shape, "a")}),
}


@pytest.mark.parametrize(("spoil", "odd"), [*((spoil, {}) for spoil in WRONG.values()),
                                            *((spoil, ASKS) for spoil in WRONG_FOR_WHO_ASKED.values())],
                         ids=[*WRONG, *WRONG_FOR_WHO_ASKED])
def test_c21_only_the_request_whose_row_is_wrong_even_alone_is_lost(make_world, new_request, spoil, odd, caplog):
    with caplog.at_level(logging.ERROR, "batch_manager"):
        world = run(make_world, new_request, Spoiled(spoil), odd)
    assert world.client.final(ODD).code == "MODEL_ERROR" and not world.client.final(ODD).tensors
    assert others_are_right(world)
    assert all("WrongOutputError: " in r.getMessage() or "raised ValueError" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("spoil", [*WRONG.values(), *WRONG_FOR_WHO_ASKED.values()],
                         ids=[*WRONG, *WRONG_FOR_WHO_ASKED])
def test_c21_a_wrong_output_that_does_not_come_again_costs_nobody_anything(make_world, new_request, spoil):
    world = run(make_world, new_request, Spoiled(spoil, times=1), ASKS, **ASKS)
    assert others_are_right(world)
    right = run(make_world, new_request, ScriptedBackend(), ASKS, **ASKS)
    assert all(same_tensors(world, right, i) for i in PROMPTS)


def test_c21_context_logits_that_do_not_come_cost_who_asked_for_them(make_world, new_request):
    for spoil in with_all(context_logits=lambda logits, slot: {}), with_all(
            context_logits=lambda logits, slot: {slot: rows[:, 1:] for slot, rows in logits.items()}):
        world = run(make_world, new_request, Spoiled(spoil), ASKS)
        assert world.client.final(ODD).code == "MODEL_ERROR" and others_are_right(world)


CONVERTED = {
    "lists": with_all(slots=lambda slots, slot: slots.tolist(), tokens=lambda tokens, slot: tokens.tolist(),
                      finish=lambda finish, slot: finish.tolist(), log_probs=lambda log_probs, slot: log_probs.tolist(),
                      generation_logits=lambda logits, slot: {s: row.tolist() for s, row in logits.items()}),
    "wide": with_all(slots=lambda slots, slot: slots.astype(np.int64), tokens=lambda tokens, slot: tokens.astype(">i8"),
                     finish=lambda finish, slot: finish.astype(np.uint64),
                     log_probs=lambda log_probs, slot: log_probs.astype(np.float64)),
    "unsigned": with_all(tokens=lambda tokens, slot: tokens.astype(np.uint64)),
    "logits nobody asked for": with_all(generation_logits=lambda logits, slot: {**logits, 77: "x"},
                                        context_logits=lambda logits, slot: {**logits, 77: None}),
}


@pytest.mark.parametrize("spoil", CONVERTED.values(), ids=CONVERTED)
def test_integers_and_numbers_of_any_width_are_taken(make_world, new_request, spoil):
    world = run(make_world, new_request, Spoiled(spoil), ASKS, **ASKS)
    assert others_are_right(world)
    assert world.client.final(ODD).tokens() == PROMPTS[ODD] + world.expected(PROMPTS[ODD], NEW_TOKENS)


@pytest.mark.parametrize("token", [2**32 + 1, -2**40])
def test_a_wide_integer_that_is_no_token_is_none_either_way(make_world, new_request, token):
    world = run(make_world, new_request, Spoiled(with_row("tokens", token, np.int64)))
    assert world.client.final(ODD).code == "INVALID_TOKEN" and others_are_right(world)


def test_c21_a_log_probability_that_is_no_number_ends_its_request_and_clears_its_blocks(make_world, new_request):
    """Only logits that are not finite have such; what they came of must not be found by others."""
    cleared = []

    class Clears(Spoiled):
        def clear_blocks(self, block_ids):
            cleared.extend(block_ids)
            super().clear_blocks(block_ids)

    spoil = with_row("log_probs", np.nan)
    world = run(make_world, new_request, Clears(spoil), ASKS, **ASKS)
    assert world.client.final(ODD).code == "NON_FINITE_LOGITS" and others_are_right(world) and cleared


def test_what_is_meaningless_is_not_looked_at(make_world, new_request):
    """The row of a sequence that failed."""
    def spoil(output, slot):
        output = with_row("finish", 99)(with_row("tokens", -7)(output, slot), slot)
        return replace(output, failures={np.int64(slot): RowFailure(ErrorCode.OUT_OF_MEMORY, "too long")})

    world = run(make_world, new_request, Spoiled(spoil))
    assert world.client.final(ODD).error.startswith("[OUT_OF_MEMORY]") and others_are_right(world)


def test_what_a_slot_asked_for_is_not_asked_of_who_has_it_next(make_world, new_request):
    def nothing_but_tokens(output, slot):
        return replace(output, log_probs=None, generation_logits={}, context_logits={})

    backend = ScriptedBackend()
    world = make_world(backend=backend, max_batch_size=1)
    world.client.pending = [new_request(1, [1], 2, **ASKS)]
    world.run()
    start = backend.start
    backend.start = lambda batch: SimpleNamespace(finish=lambda: nothing_but_tokens(start(batch).finish(), 0))
    world.client.pending = [new_request(2, [1], 2)]
    world.run()
    assert world.client.final(2).error == ""


# ---------------------------------------------------------------------- beams

BEAMS = {"beam_width": 2, **ASKS, "return_context_logits": False}


def of_beams(**changes):
    """A step of beams in which something is another; a search that ends is left as it is."""
    def spoil(output, slot):
        beams = output.beams[slot]
        if beams.hypotheses is None:
            beams = replace(beams, **{name: change(getattr(beams, name)) for name, change in changes.items()})
        return replace(output, beams={slot: beams})
    return spoil


def of_texts(**changes):
    """The results of a search with something else in the last of them."""
    def spoil(output, slot):
        beams = output.beams[slot]
        if beams.hypotheses is not None:
            *others, last = beams.hypotheses
            last = replace(last, **{name: change(getattr(last, name)) for name, change in changes.items()})
            beams = replace(beams, hypotheses=(*others, last))
        return replace(output, beams={slot: beams})
    return spoil


def with_hypotheses(make):
    return lambda output, slot: replace(output, beams={slot: replace(output.beams[slot], hypotheses=make(slot))})


WRONG_BEAMS = {
    "no beams": with_all(beams=lambda beams, slot: {}),
    "None": with_all(beams=lambda beams, slot: None),
    "another class": with_all(beams=lambda beams, slot: {slot: 1}),
    "beams of another": with_all(beams=lambda beams, slot: {**beams, 77: beams[slot]}),
    "a parent too few": of_beams(parents=lambda parents: parents[:1]),
    "a parent that is not there": of_beams(parents=lambda parents: parents + 2),
    "a parent below the first": of_beams(parents=lambda parents: parents - 3),
    "tokens that are numbers": of_beams(tokens=lambda tokens: tokens * 1.0),
    "no sums": of_beams(cum_log_probs=lambda sums: None),
    "a log-probability too many": of_beams(log_probs=lambda log_probs: np.append(log_probs, 0)),
    "no texts": with_hypotheses(lambda slot: ()),
    "texts that are numbers": with_hypotheses(lambda slot: (1, 2)),
    "a number of texts": with_hypotheses(lambda slot: 2),
    "too many texts": with_hypotheses(lambda slot: (EMPTY,) * 3),
    "a text that is too long": with_hypotheses(lambda slot: (TOO_LONG,)),
    "a text that a device cancelled": of_texts(finish=lambda finish: 5),
    "a code that is text": of_texts(finish=lambda finish: "1"),
    "a sum that is none": of_texts(cum_log_prob=lambda total: np.nan),
    "rows of another length": of_texts(rows=lambda rows: rows[:-1]),
    "a row that is not there": of_texts(rows=lambda rows: rows + 2),
    "text in columns": of_texts(tokens=lambda tokens: tokens[:, None]),
    "no logits": with_all(generation_logits=lambda logits, slot: {}),
    "logits of one beam too many": with_all(
        generation_logits=lambda logits, slot: {slot: np.zeros((3, logits[slot].shape[1]), np.float32)}),
}
EMPTY = Hypothesis(np.empty(0, np.int32), 0.0, np.empty(0, np.float32), np.empty(0, np.int32), 1)
TOO_LONG = Hypothesis(np.ones(50, np.int32), 0.0, np.zeros(50, np.float32), np.zeros(50, np.int32), 3)


@pytest.mark.parametrize("spoil", WRONG_BEAMS.values(), ids=WRONG_BEAMS)
def test_c21_only_the_request_whose_beams_are_wrong_is_lost(make_world, new_request, spoil):
    world = run(make_world, new_request, Spoiled(spoil), BEAMS)
    assert world.client.final(ODD).code == "MODEL_ERROR" and others_are_right(world)


def test_c21_beams_that_were_wrong_once_are_right_in_the_end(make_world, new_request):
    right = run(make_world, new_request, ScriptedBackend(), BEAMS)
    for spoil in WRONG_BEAMS.values():
        world = run(make_world, new_request, Spoiled(spoil, times=1), BEAMS)
        assert same_tensors(world, right, ODD) and others_are_right(world)


def test_beams_in_lists_are_taken(make_world, new_request):
    def as_lists(names):
        return {name: lambda values: values.tolist() for name in names}

    for spoil in (of_beams(**as_lists(["tokens", "parents", "cum_log_probs", "log_probs"])),
                  of_texts(**as_lists(["tokens", "rows", "log_probs"]))):
        world = run(make_world, new_request, Spoiled(spoil), BEAMS)
        assert world.client.final(ODD).error == "" and others_are_right(world)
