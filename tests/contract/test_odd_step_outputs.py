"""C21: an output of a backend that does not match its batch ends only the request whose row is wrong."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from batch_manager.handover import Hypothesis, RowFailure, TopLogProbs
from batch_manager.names import ErrorCode
from batch_manager.testing.scripted_backend import ScriptedBackend

PROMPTS = {i: [10 + i] * (2 + i) for i in range(6)}
ODD = 3
NEW_TOKENS = 6
ASKS = {"return_log_probs": True, "return_generation_logits": True, "return_context_logits": True,
        "return_top_log_probs": 3}


class Spoiled(ScriptedBackend):
    """A backend that spoils the output of the first `times` steps that have a row of request ODD.

    It returns spoil(output, slot of ODD) as the output of such a step.
    """

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
    """Run six requests to their end and return the world.

    odd      options of request ODD, whose row is spoiled
    others   options of the other requests
    """
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
    """Return a `spoil` that sets the row of the slot to `value` in the array `field` of the output."""
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


def with_starts(change):
    """Return a `spoil` that sets `row_starts` to change(the right `row_starts`, row of the slot)."""
    def spoil(output, slot):
        starts = np.arange(len(output.slots) + 1, dtype=np.int32)
        return replace(output, row_starts=change(starts, output.slots.tolist().index(slot)))
    return spoil


def with_tokens_of_row(change):
    """Return a `spoil` that changes the tokens of the slot's row and sets `row_starts` to match."""
    def spoil(output, slot):
        rows = np.split(output.tokens, np.arange(1, len(output.slots)))
        row = output.slots.tolist().index(slot)
        rows[row] = change(rows[row])
        lengths = [len(tokens) for tokens in rows]
        return replace(output, tokens=np.concatenate(rows), row_starts=np.cumsum([0, *lengths]).astype(np.int32))
    return spoil


EMPTY = Hypothesis(np.empty(0, np.int32), 0.0, np.empty(0, np.float32), np.empty(0, np.int32), 1)
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
    "results of a search there is none": with_all(hypotheses=lambda hypotheses, slot: {slot: (EMPTY,)}),
    "a number for the results of a search": with_all(hypotheses=lambda hypotheses, slot: {slot: 1}),
    "no hypotheses": with_all(hypotheses=lambda hypotheses, slot: None),
    "hypotheses in a list": with_all(hypotheses=lambda hypotheses, slot: [slot]),
    "rows that begin elsewhere": with_starts(lambda starts, row: starts + 1),
    "rows that fall": with_starts(lambda starts, row: starts[::-1]),
    "a row too few": with_starts(lambda starts, row: starts[:-1]),
    "rows that are numbers": with_starts(lambda starts, row: starts * 1.0),
    "rows in a column": with_starts(lambda starts, row: starts[:, None]),
    "a row without a token": with_tokens_of_row(lambda tokens: tokens[:0]),
    "a row with a token too many": with_tokens_of_row(lambda tokens: np.append(tokens, tokens)),
    "a token of no row": with_all(tokens=lambda tokens, slot: np.append(tokens, 1)),
    "parents that are numbers": lambda output, slot: replace(output, parents=output.tokens * 1.0),
    "too few parents": lambda output, slot: replace(output, parents=output.tokens[1:]),
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
    "no likeliest tokens": with_all(top_log_probs=lambda top, slot: {}),
    "likeliest tokens in a list": with_all(top_log_probs=lambda top, slot: list(top.values())),
    "likeliest tokens that are a pair": with_all(
        top_log_probs=lambda top, slot: {**top, slot: (top[slot].ids, top[slot].log_probs)}),
    "a likely token too few": with_all(top_log_probs=lambda top, slot: {
        **top, slot: TopLogProbs(top[slot].ids[:, 1:], top[slot].log_probs[:, 1:])}),
    "likeliest tokens that are numbers": with_all(top_log_probs=lambda top, slot: {
        **top, slot: TopLogProbs(top[slot].ids * 1.0, top[slot].log_probs)}),
    "log-probabilities of likely tokens that are text": with_all(top_log_probs=lambda top, slot: {
        **top, slot: TopLogProbs(top[slot].ids, np.full(top[slot].log_probs.shape, "a"))}),
}


@pytest.mark.parametrize(("spoil", "odd"), [*((spoil, {}) for spoil in WRONG.values()),
                                            *((spoil, ASKS) for spoil in WRONG_FOR_WHO_ASKED.values())],
                         ids=[*WRONG, *WRONG_FOR_WHO_ASKED])
def test_c21_only_the_request_whose_row_is_wrong_even_alone_is_lost(make_world, new_request, spoil, odd, caplog):
    """If the output is still wrong when request ODD runs alone, only this request ends, with MODEL_ERROR."""
    with caplog.at_level(logging.ERROR, "batch_manager"):
        world = run(make_world, new_request, Spoiled(spoil), odd)
    assert world.client.final(ODD).code == "MODEL_ERROR" and not world.client.final(ODD).tensors
    assert others_are_right(world)
    assert all("WrongOutputError: " in r.getMessage() or "raised ValueError" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("spoil", [*WRONG.values(), *WRONG_FOR_WHO_ASKED.values()],
                         ids=[*WRONG, *WRONG_FOR_WHO_ASKED])
def test_c21_a_wrong_output_that_does_not_come_again_costs_nobody_anything(make_world, new_request, spoil):
    """An output that is wrong only once changes the response of no request."""
    world = run(make_world, new_request, Spoiled(spoil, times=1), ASKS, **ASKS)
    assert others_are_right(world)
    right = run(make_world, new_request, ScriptedBackend(), ASKS, **ASKS)
    assert all(same_tensors(world, right, i) for i in PROMPTS)


def test_c21_context_logits_that_do_not_come_cost_who_asked_for_them(make_world, new_request):
    """Context logits that are missing or have too few columns end only the request with return_context_logits."""
    for spoil in with_all(context_logits=lambda logits, slot: {}), with_all(
            context_logits=lambda logits, slot: {slot: rows[:, 1:] for slot, rows in logits.items()}):
        world = run(make_world, new_request, Spoiled(spoil), ASKS)
        assert world.client.final(ODD).code == "MODEL_ERROR" and others_are_right(world)


CONVERTED = {
    "rows of one token each": with_starts(lambda starts, row: starts),
    "rows in a list": with_starts(lambda starts, row: starts.tolist()),
    "wide rows": with_starts(lambda starts, row: starts.astype(np.uint64)),
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
    """A 64-bit integer outside the vocabulary is an invalid token, even if its lower 32 bits are a valid one."""
    world = run(make_world, new_request, Spoiled(with_row("tokens", token, np.int64)))
    assert world.client.final(ODD).code == "INVALID_TOKEN" and others_are_right(world)


def test_c21_a_log_probability_that_is_no_number_ends_its_request_and_clears_its_blocks(make_world, new_request):
    """A log-probability that is NaN ends only its request, and the request's blocks are cleared before their reuse.

    NaN comes from logits that are not finite.
    """
    cleared = []

    class Clears(Spoiled):
        def clear_block(self, block_id, first_token):
            cleared.append((block_id, first_token))
            super().clear_block(block_id, first_token)

    spoil = with_row("log_probs", np.nan)
    world = run(make_world, new_request, Clears(spoil), ASKS, **ASKS)
    assert world.client.final(ODD).code == "NON_FINITE_LOGITS" and others_are_right(world)
    assert cleared and {first_token for _, first_token in cleared} == {0}, "all of them, from their first token on"


def test_what_is_meaningless_is_not_looked_at(make_world, new_request):
    """Tokens and finish codes in the row of a failed sequence are ignored: its request ends with the reported error."""
    def spoil(output, slot):
        output = with_row("finish", 99)(with_row("tokens", -7)(output, slot), slot)
        return replace(output, failures={np.int64(slot): RowFailure(ErrorCode.OUT_OF_MEMORY, "too long")})

    world = run(make_world, new_request, Spoiled(spoil))
    assert world.client.final(ODD).error.startswith("[OUT_OF_MEMORY]") and others_are_right(world)


def test_what_a_slot_asked_for_is_not_asked_of_who_has_it_next(make_world, new_request):
    """A step output without log-probabilities and logits is valid for a request without the options that need them.

    The request that had the slot before had these options.
    """
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

BEAMS = {"beam_width": 2, **ASKS, "return_context_logits": False, "return_top_log_probs": 0}


def row_of(output, slot):
    """Return the slice of the output's arrays that has the row of the slot."""
    row = output.slots.tolist().index(slot)
    return slice(int(output.row_starts[row]), int(output.row_starts[row + 1]))


def of_beams(**changes):
    """Return a `spoil` that changes the slot's row in the arrays `changes`, except in the step that ends the search."""
    def spoil(output, slot):
        if slot in output.hypotheses:
            return output
        changed = {}
        for name, change in changes.items():
            changed[name] = getattr(output, name).copy()
            changed[name][row_of(output, slot)] = change(changed[name][row_of(output, slot)])
        return replace(output, **changed)
    return spoil


def unless_it_ends(**changes):
    """Return a `spoil` that changes the fields `changes` of the output, except in the step that ends the search."""
    return lambda output, slot: output if slot in output.hypotheses else with_all(**changes)(output, slot)


def with_length(change):
    """Return a `spoil` that cuts or pads the row of the slot from n to change(n) tokens."""
    def spoil(output, slot):
        lengths = np.diff(output.row_starts)
        row = output.slots.tolist().index(slot)
        before, after = lengths[row], change(lengths[row])
        if after == before:
            return output
        lengths[row] = after
        stop = row_of(output, slot).stop
        columns = {}
        for name in ("tokens", "parents", "log_probs"):
            column = getattr(output, name)
            columns[name] = (np.insert(column, stop, [0] * (after - before)) if after > before
                             else np.delete(column, range(stop - (before - after), stop)))
        return replace(output, row_starts=np.cumsum([0, *lengths]).astype(np.int32), **columns)
    return spoil


def of_texts(**changes):
    """Return a `spoil` that changes the fields `changes` of the last hypothesis, in the step that ends the search."""
    def spoil(output, slot):
        if slot not in output.hypotheses:
            return output
        *others, last = output.hypotheses[slot]
        last = replace(last, **{name: change(getattr(last, name)) for name, change in changes.items()})
        return replace(output, hypotheses={**output.hypotheses, slot: (*others, last)})
    return spoil


def with_hypotheses(make):
    """Return a `spoil` that ends the search, with make(slot) as its hypotheses."""
    def spoil(output, slot):
        return replace(with_length(lambda length: 0)(output, slot), hypotheses={slot: make(slot)})
    return spoil


WRONG_BEAMS = {
    "None": with_all(hypotheses=lambda hypotheses, slot: None),
    "another class": with_hypotheses(lambda slot: 1),
    "results of another": with_all(hypotheses=lambda hypotheses, slot: {**hypotheses, 77: (EMPTY,)}),
    "results of a search that goes on": lambda output, slot: output if slot in output.hypotheses else replace(
        output, hypotheses={slot: (EMPTY,)}),
    "no tokens, and no results": with_length(lambda length: 0),
    "tokens of a search that is over": lambda output, slot: with_length(lambda length: 2)(
        output, slot) if slot in output.hypotheses else output,
    "a token too few": with_length(lambda length: length and length - 1),
    "a token too many": with_length(lambda length: length and length + 1),
    "rows of one token each": unless_it_ends(row_starts=lambda starts, slot: None),
    "no parents": unless_it_ends(parents=lambda parents, slot: None),
    "a parent too few": with_all(parents=lambda parents, slot: parents[:-1]),
    "a parent that is not there": of_beams(parents=lambda parents: parents + 2),
    "a parent below the first": of_beams(parents=lambda parents: parents - 3),
    "tokens that are numbers": with_all(tokens=lambda tokens, slot: tokens * 1.0),
    "no log-probabilities": unless_it_ends(log_probs=lambda log_probs, slot: None),
    "a log-probability too many": with_all(log_probs=lambda log_probs, slot: np.append(log_probs, 0)),
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
        return {name: lambda values, slot=None: values.tolist() for name in names}

    for spoil in (with_all(**as_lists(["row_starts", "tokens", "parents", "log_probs"])),
                  of_texts(**as_lists(["tokens", "rows", "log_probs"]))):
        world = run(make_world, new_request, Spoiled(spoil), BEAMS)
        assert world.client.final(ODD).error == "" and others_are_right(world)


@pytest.mark.parametrize(("change", "code"), [
    (lambda top: TopLogProbs(top.ids, np.full_like(top.log_probs, np.nan)), "NON_FINITE_LOGITS"),
    (lambda top: TopLogProbs(top.ids + 10**6, top.log_probs), "INVALID_TOKEN"),
    (lambda top: TopLogProbs(top.ids - 10**6, top.log_probs), "INVALID_TOKEN"),
], ids=["not numbers", "beyond the vocabulary", "below the first token"])
def test_likeliest_tokens_that_are_none_cost_their_request_alone(make_world, new_request, change, code):
    """Likeliest tokens that are invalid, or whose log-probabilities are not numbers, end only their own request."""
    spoil = with_all(top_log_probs=lambda top, slot: {**top, slot: change(top[slot])})
    world = run(make_world, new_request, Spoiled(spoil), ASKS, **ASKS)
    assert world.client.final(ODD).code == code and others_are_right(world)


def test_likeliest_tokens_in_lists_are_taken(make_world, new_request):
    spoil = with_all(top_log_probs=lambda top, slot: {
        slot: TopLogProbs(found.ids.tolist(), found.log_probs.tolist()) for slot, found in top.items()})
    world, right = (run(make_world, new_request, backend, ASKS) for backend in (Spoiled(spoil), ScriptedBackend()))
    assert others_are_right(world) and same_tensors(world, right, ODD)
