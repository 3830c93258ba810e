"""Validates the output of a backend before it is used."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from ..errors import type_name
from ..handover import (
    END_ID,
    LENGTH,
    STOP_WORDS,
    Hypothesis,
    RowFailure,
    ScheduledBatch,
    StepOutput,
    TopLogProbs,
)
from ..names import ErrorCode

Value = TypeVar("Value")

INT32, UINT8 = np.dtype(np.int32), np.dtype(np.uint8)
NOTHING: dict[int, Any] = {}

NO_LOG_PROB = ("the log-probability of its token is NaN, so its logits were not finite; the request ends here, and "
               "other requests go on; check the model")


class WrongOutputError(Exception):
    """The output of a backend does not match its batch. The error's message contains no tokens."""


@dataclass(frozen=True, slots=True)
class RequestedValues:
    """Values that a sequence requests from its steps besides tokens.

    top_log_probs   number of likeliest tokens whose log-probs are requested
    prompt_length   tokens of the user's prompt; all later tokens were generated
    """

    log_probs: bool
    context_logits: bool
    generation_logits: bool
    top_log_probs: int
    beam_width: int
    prompt_length: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of an output.

    row_of      slot -> row, in ascending order of rows
    starts      [r + 1] index of the first token of each of the r rows, then the number of tokens of all rows
    requested   slot -> requested values, for sequences that request values and whose row did not fail
    """

    row_of: dict[int, int]
    starts: np.ndarray
    requested: dict[int, RequestedValues]

    def of(self, slot: int) -> slice:
        """Return the slice of the output's tokens that belongs to the sequence in a slot."""
        row = self.row_of[slot]
        return slice(int(self.starts[row]), int(self.starts[row + 1]))

    def with_beams(self) -> list[int]:
        """Return the slots of sequences with beams."""
        return [slot for slot in self.row_of if slot in self.requested and self.requested[slot].beam_width > 1]


class StepOutputCheck:
    """Validates a backend's output against `handover.StepOutput`.

    It remembers, for each slot, the values that its sequence requests besides tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._requested: dict[int, RequestedValues] = {}
        self._invalid_token = RowFailure(
            ErrorCode.INVALID_TOKEN, f"the model step chose a token outside 0..{vocab_size - 1}; the request ends "
            "here; please report it")

    def requested_by(self, batch: ScheduledBatch) -> dict[int, RequestedValues]:
        """Return slot -> requested values, for the sequences of a batch that is being launched. Slots without requested
        values are left out."""
        for work in batch.context:
            setup = work.setup
            if setup is None:
                continue
            width = setup.sampling.beam_width
            if (setup.return_log_probs or setup.return_context_logits or setup.return_generation_logits
                    or setup.top_log_probs or width > 1):
                self._requested[work.slot] = RequestedValues(setup.return_log_probs, setup.return_context_logits,
                                               setup.return_generation_logits, setup.top_log_probs, width,
                                               setup.prompt_length)
            else:
                self._requested.pop(work.slot, None)
        if not self._requested:
            return {}
        return {slot: self._requested[slot] for slot in batch.slots() if slot in self._requested}

    def checked(self, batch: ScheduledBatch, output: StepOutput,
                requested: Mapping[int, RequestedValues]) -> StepOutput:
        """Validate an output and return it with the types of handover.StepOutput.

        Converts numbers of other widths, and lists of numbers. Marks two kinds of rows as failed: those with a token
        outside the vocabulary, and those with a NaN log-probability. NaN means that the logits were not finite, so the
        KV cache blocks of such a sequence must be neither reused nor kept.

        requested   result of `requested_by` for the batch, or for a batch that contains this batch

        Raises WrongOutputError for missing or extra rows, wrong shapes or types, missing requested values, and finish
        codes other than NOT_FINISHED, END_ID and STOP_WORDS; hypotheses may also have LENGTH. Exceptions from reading
        the output propagate.
        """
        expected = batch.yielding if batch.context else batch.generation.slots    # the usual case without a call
        if not self._has_no_extras(batch, output, expected, requested):
            output = self._converted(batch, output, expected, requested)
        return self._without_invalid_tokens(output)

    def _has_no_extras(self, batch: ScheduledBatch, output: StepOutput, expected: np.ndarray,
                  requested: Mapping[int, RequestedValues]) -> bool:
        """Whether no sequence requests values besides tokens, and the output has the right types and slots and contains
        only tokens and finish codes.

        This is the common case. For a few rows, comparing bytes takes a tenth of the time of comparing arrays.
        """
        if type(output) is not StepOutput or requested:
            return False
        slots, tokens, finish = output.slots, output.tokens, output.finish
        return (type(slots) is type(tokens) is type(finish) is np.ndarray
                and slots.dtype is tokens.dtype is expected.dtype is INT32 and finish.dtype is UINT8
                and slots.shape == tokens.shape == finish.shape
                and slots.tobytes() == expected.tobytes()
                and (finish.tobytes() == bytes(len(finish)) or finish.max() <= STOP_WORDS)
                and output.log_probs is output.parents is output.row_starts is None
                and output.failures == NOTHING and output.hypotheses == NOTHING
                and output.generation_logits == NOTHING and output.context_logits == NOTHING
                and output.top_log_probs == NOTHING)

    def _without_invalid_tokens(self, output: StepOutput) -> StepOutput:
        slots = []
        if output.hypotheses:
            slots = [slot for slot, hypotheses in output.hypotheses.items()
                     if any(len(self._invalid(hypothesis.tokens)) for hypothesis in hypotheses)]
        invalid = self._invalid(output.tokens)
        if len(invalid):
            rows = invalid
            if output.row_starts is not None:
                rows = np.searchsorted(output.row_starts, invalid, side="right") - 1
            slots += output.slots[rows].tolist()
        if not slots:
            return output
        return replace(output, failures=dict.fromkeys(slots, self._invalid_token) | output.failures)

    def _invalid(self, tokens: np.ndarray) -> np.ndarray:
        """Return the indices of tokens outside the vocabulary."""
        unsigned = tokens.view(np.uint32)    # makes negative numbers large
        if not len(tokens) or unsigned.max() < self._vocab_size:
            return tokens[:0]
        return np.flatnonzero(unsigned >= self._vocab_size)

    def _converted(self, batch: ScheduledBatch, output: StepOutput, expected: np.ndarray,
                   requested: Mapping[int, RequestedValues]) -> StepOutput:
        if not isinstance(output, StepOutput):
            raise WrongOutputError(f"the output is of type {type_name(output)}, not a StepOutput")
        slots = _integers("slots", output.slots, INT32, expected.shape)
        if not np.array_equal(slots, expected):
            row = int(np.flatnonzero(slots != expected)[0])
            raise WrongOutputError(f"slots[{row}] is {slots[row]}, expected {expected[row]}, the slot of row {row} "
                                   "of the batch")
        failures = {_slot(slot): _failure(failure) for slot, failure in _mapping("failures", output.failures).items()}
        requested = {slot: wants for slot in batch.slots() if slot not in failures and (wants := requested.get(slot))}
        hypotheses = _hypotheses(batch, output, requested)
        starts = _row_starts(batch, output, slots, requested, hypotheses, failures)
        rows = _Rows({slot: row for row, slot in enumerate(slots.tolist())}, starts, requested)
        num_tokens = int(starts[-1])
        tokens = _integers("tokens", output.tokens, INT32, (num_tokens,))
        finish = _integers("finish", output.finish, UINT8, slots.shape)
        judged = [row for slot, row in rows.row_of.items() if slot not in failures and slot not in hypotheses]
        if (finish[judged] > STOP_WORDS).any():
            raise WrongOutputError(f"a finish code is {finish[judged].max()}, expected NOT_FINISHED, END_ID or "
                                   "STOP_WORDS")

        log_probs = output.log_probs
        if log_probs is not None:
            log_probs = _numbers("log_probs", log_probs, (num_tokens,))
        parents = _parents(batch, output, rows, num_tokens)
        with_log_probs = [slot for slot in rows.row_of if slot in requested and slot not in hypotheses
                          and (requested[slot].log_probs or requested[slot].beam_width > 1)]
        if with_log_probs:
            if log_probs is None:
                raise WrongOutputError("log_probs is None, but a sequence of the batch needs them")
            if np.isnan(log_probs).any():
                failures |= {slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, NO_LOG_PROB) for slot in with_log_probs
                             if np.isnan(log_probs[rows.of(slot)]).any()}
        return StepOutput(batch.micro_batch_id, slots, tokens, finish,
                          row_starts=None if num_tokens == len(slots) and output.row_starts is None else starts,
                          log_probs=log_probs, parents=parents, hypotheses=hypotheses,
                          context_logits=self._context_logits(batch, output, requested),
                          generation_logits=self._generation_logits(batch, output, rows),
                          top_log_probs=self._top_log_probs(output, rows, failures), failures=failures)

    def _context_logits(self, batch: ScheduledBatch, output: StepOutput,
                        requested: Mapping[int, RequestedValues]) -> dict[int, np.ndarray]:
        given = _mapping("context_logits", output.context_logits)
        return {work.slot: _numbers("context_logits", _of(given, "context_logits", work.slot),
                                    (work.end - work.start, self._vocab_size))
                for work in batch.context if work.slot in requested and requested[work.slot].context_logits}

    def _generation_logits(self, batch: ScheduledBatch, output: StepOutput, rows: _Rows) -> dict[int, np.ndarray]:
        given = _mapping("generation_logits", output.generation_logits)
        first_tokens = {work.slot for work in batch.context}
        logits = {}
        for slot in rows.row_of:
            wants = rows.requested.get(slot)
            if wants is not None and wants.generation_logits:
                tokens = rows.of(slot)
                count = tokens.stop - tokens.start
                if wants.beam_width > 1:
                    count = 1 if slot in first_tokens else wants.beam_width
                logits[slot] = _numbers("generation_logits", _of(given, "generation_logits", slot),
                                        (count, self._vocab_size))
        return logits

    def _top_log_probs(self, output: StepOutput, rows: _Rows,
                       failures: dict[int, RowFailure]) -> dict[int, TopLogProbs]:
        """Validate top_log_probs. Adds rows with NaN, or with ids outside the vocabulary, to `failures`."""
        given, checked = _mapping("top_log_probs", output.top_log_probs), {}
        for slot in rows.row_of:
            wants = rows.requested.get(slot)
            if wants is None or not wants.top_log_probs:
                continue
            top = _of(given, "top_log_probs", slot)
            if not isinstance(top, TopLogProbs):
                raise WrongOutputError(f"the top_log_probs of a slot are of type {type_name(top)}, not TopLogProbs")
            tokens = rows.of(slot)
            shape = (tokens.stop - tokens.start, wants.top_log_probs)
            top = checked[slot] = TopLogProbs(_integers("ids of top_log_probs", top.ids, INT32, shape),
                                              _numbers("log_probs of top_log_probs", top.log_probs, shape))
            if np.isnan(top.log_probs).any():
                failures.setdefault(slot, RowFailure(ErrorCode.NON_FINITE_LOGITS, NO_LOG_PROB))
            elif len(self._invalid(top.ids.reshape(-1))):
                failures.setdefault(slot, self._invalid_token)
        return checked


def _drafts(batch: ScheduledBatch) -> np.ndarray:
    """Return [r] int32, the number of draft tokens of each row."""
    drafts = batch.generation.num_drafts
    if drafts is None:
        drafts = np.zeros(len(batch.generation), np.int32)
    contexts = np.array([work.num_drafts for work in batch.context if work.is_last_chunk], np.int32)
    return np.concatenate([contexts, drafts])


def _row_starts(batch: ScheduledBatch, output: StepOutput, slots: np.ndarray, requested: Mapping[int, RequestedValues],
                hypotheses: Mapping[int, Any], failures: Mapping[int, Any]) -> np.ndarray:
    """Return [r + 1] int32, the index of the first token of each row. Raises WrongOutputError for a row with too few or
    too many tokens."""
    if output.row_starts is None:
        lengths = np.ones(len(slots), np.int32)
    else:
        starts = _integers("row_starts", output.row_starts, INT32, (len(slots) + 1,))
        lengths = np.diff(starts)
        if starts[0] != 0 or (lengths < 0).any():
            raise WrongOutputError("row_starts do not ascend from 0")
    longest = 1 + _drafts(batch)
    shortest = np.ones(len(slots), np.int32)
    for row, slot in enumerate(slots.tolist()):
        if slot in failures:
            shortest[row], longest[row] = 0, lengths[row]
        elif slot in hypotheses:
            shortest[row] = longest[row] = 0
        elif slot in requested and requested[slot].beam_width > 1:
            shortest[row] = longest[row] = requested[slot].beam_width
    is_wrong = (lengths < shortest) | (lengths > longest)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise WrongOutputError(f"the number of tokens of row {row} is {lengths[row]}, expected {shortest[row]} to "
                               f"{longest[row]}")
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])


def _parents(batch: ScheduledBatch, output: StepOutput, rows: _Rows, num_tokens: int) -> np.ndarray | None:
    searching = rows.with_beams()
    if output.parents is None:
        if any(rows.of(slot).stop > rows.of(slot).start for slot in searching):
            raise WrongOutputError("parents is None, but the batch has sequences with beams")
        return None
    parents = _integers("parents", output.parents, INT32, (num_tokens,))
    first_tokens = {work.slot for work in batch.context}
    for slot in searching:
        _check_beams("parents", 1 if slot in first_tokens else rows.requested[slot].beam_width,
                     parents[rows.of(slot)])
    return parents


def _hypotheses(batch: ScheduledBatch, output: StepOutput,
                requested: Mapping[int, RequestedValues]) -> dict[int, tuple[Hypothesis, ...]]:
    """Return slot -> validated results of a finished beam search, for rows that did not fail."""
    given = _mapping("hypotheses", output.hypotheses)
    if not given:
        return {}
    num_tokens = {work.slot: work.end for work in batch.context if work.is_last_chunk}
    num_tokens |= {slot: length + 1 for slot, length in zip(batch.generation.slots.tolist(),
                                                            batch.generation.kv_lengths.tolist())}
    checked = {}
    for slot, results in given.items():
        wants = requested.get(_slot(slot))
        if wants is None or wants.beam_width == 1 or slot not in num_tokens:
            if slot in output.failures:
                continue
            raise WrongOutputError(f"hypotheses contains slot {_slot(slot)}, expected only slots with a row in the "
                                   "batch and a beam_width above 1")
        width, longest = wants.beam_width, num_tokens[slot] + 1 - wants.prompt_length
        if type(results) not in (tuple, list) or not 1 <= len(results) <= width:
            found = (f"hold {len(results)} values" if type(results) in (tuple, list) else
                     f"are of type {type_name(results)}")
            raise WrongOutputError(f"the results of a beam search {found}, expected a list or tuple of 1..{width} "
                                   "hypotheses")
        checked[int(slot)] = tuple(_hypothesis(result, width, longest) for result in results)
    return checked


def _hypothesis(given: Hypothesis, width: int, longest: int) -> Hypothesis:
    """Validate one result of a beam search with `width` beams, and return it with the right types.

    longest   the largest number of tokens that an output can have after this step
    """
    if not isinstance(given, Hypothesis):
        raise WrongOutputError(f"a result of a search is of type {type_name(given)}, not a Hypothesis")
    shape = np.shape(given.tokens)
    if len(shape) != 1 or shape[0] > longest:
        raise WrongOutputError(f"tokens of a hypothesis have shape {shape}, expected at most ({longest},)")
    rows = _integers("rows of a hypothesis", given.rows, INT32, shape)
    _check_beams("rows of a hypothesis", width, rows)
    _check_beams("the first entry of rows of a hypothesis", 1, rows[:1])
    if not isinstance(given.finish, Integral) or given.finish not in (END_ID, STOP_WORDS, LENGTH):
        raise WrongOutputError("the finish code of a hypothesis is not END_ID, STOP_WORDS or LENGTH")
    if not isinstance(given.cum_log_prob, Real) or given.cum_log_prob != given.cum_log_prob:
        found = "NaN" if isinstance(given.cum_log_prob, Real) else f"of type {type_name(given.cum_log_prob)}"
        raise WrongOutputError(f"the cum_log_prob of a hypothesis is {found}, expected a number")
    return Hypothesis(_integers("tokens of a hypothesis", given.tokens, INT32, shape), float(given.cum_log_prob),
                      _numbers("log_probs of a hypothesis", given.log_probs, shape), rows, int(given.finish))


def _mapping(name: str, given: Mapping[int, Value]) -> Mapping[int, Value]:
    if not isinstance(given, Mapping):
        raise WrongOutputError(f"{name} is of type {type_name(given)}, expected a mapping")
    return given


def _of(given: Mapping[int, Any], name: str, slot: int) -> Any:
    if slot not in given:
        raise WrongOutputError(f"{name} are missing for a slot that requests them")
    return given[slot]


def _slot(slot: int) -> int:
    if not isinstance(slot, Integral):
        raise WrongOutputError(f"a slot is of type {type_name(slot)}, expected an integer")
    return int(slot)


def _failure(failure: RowFailure) -> RowFailure:
    if (not isinstance(failure, RowFailure) or not isinstance(failure.code, ErrorCode)
            or not isinstance(failure.message, str)):
        raise WrongOutputError(f"failures holds a value of type {type_name(failure)}, expected a RowFailure whose "
                               "code is an ErrorCode and whose message is a str")
    return failure


def _integers(name: str, values: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return `values` as an array of type `dtype`, after a check of the shape.

    A value outside the range of `dtype` is replaced with a marker for an invalid value. The marker is -1 for a
    signed type, and the largest value of the type for an unsigned type.
    """
    values = np.asarray(values)
    if values.shape != shape:
        raise WrongOutputError(f"{name} have shape {values.shape}, expected {shape}")
    if values.dtype is dtype:
        return values
    if values.dtype.kind not in "iu" and values.size:
        raise WrongOutputError(f"{name} are {values.dtype}, expected integers")
    converted, range_ = values.astype(dtype), np.iinfo(dtype)
    converted[(values < range_.min) | (values > range_.max)] = np.array(-1).astype(dtype)
    return converted


def _numbers(name: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(values)
    if values.shape != shape:
        raise WrongOutputError(f"{name} have shape {values.shape}, expected {shape}")
    if values.dtype.kind not in "fiu":
        raise WrongOutputError(f"{name} are {values.dtype}, expected numbers")
    return values.astype(np.float32, copy=False)


def _check_beams(name: str, bound: int, beams: np.ndarray) -> None:
    if (wrong := (beams < 0) | (beams >= bound)).any():
        raise WrongOutputError(f"a beam in {name} is {beams[wrong][0]}, expected 0..{bound - 1}")
