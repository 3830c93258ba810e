"""What a backend returned is looked at before anybody relies on it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..errors import type_name
from ..handover import (
    END_ID,
    LENGTH,
    STOP_WORDS,
    BeamOutput,
    Hypothesis,
    RowFailure,
    ScheduledBatch,
    StepOutput,
)
from ..names import ErrorCode

INT32, UINT8 = np.dtype(np.int32), np.dtype(np.uint8)

NO_LOG_PROB = ("the log-probability of its token is not a number, so its logits were not finite; the request ends "
               "here, the others go on; check the model")


class WrongOutputError(Exception):
    """What a backend returned is no output of its batch. The text says what of it, and holds no token."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a sequence wants of its steps besides a token.

    prompt_length   tokens of the user's prompt; what is behind them was generated
    """

    log_probs: bool
    context_logits: bool
    generation_logits: bool
    beam_width: int
    prompt_length: int


class StepOutputCheck:
    """Takes the output of a backend for what handover.StepOutput says it is, or raises.

    Kept here of each slot is what the sequence in it asked for, where that is more than tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._asked: dict[int, Asked] = {}

    def note(self, batch: ScheduledBatch) -> None:
        """Remember what the sequences that start in this batch ask for."""
        for work in batch.context:
            setup = work.setup
            if setup is None:
                continue
            width = setup.sampling.beam_width
            if setup.return_log_probs or setup.return_context_logits or setup.return_generation_logits or width > 1:
                self._asked[work.slot] = Asked(setup.return_log_probs, setup.return_context_logits,
                                               setup.return_generation_logits, width, setup.prompt_length)
            else:
                self._asked.pop(work.slot, None)

    def checked(self, batch: ScheduledBatch, output: StepOutput) -> StepOutput:
        """The output, with everything in it of the types that handover.StepOutput gives.

        Integers and floating-point numbers of other widths, and lists of them, are converted. A row whose
        log-probability is not a number fails: only logits that are not finite have such, and what the step wrote to the
        KV cache must then neither be found by others nor be left there.

        Raises WrongOutputError, or whatever reading the output raises: a row is missing, or there is one too many;
        something has another shape or type; a finish code is none that a device decides on; a sequence did not get what
        it asked for.
        """
        expected = _slots_of_rows(batch)
        return output if self._is_plain(batch, output, expected) else self._converted(batch, output, expected)

    def _is_plain(self, batch: ScheduledBatch, output: StepOutput, expected: np.ndarray) -> bool:
        """Whether the output has tokens and finish codes for the right rows and nothing else, and nobody asked for
        more. So it is in most steps; bytes are compared because that takes a tenth of the time for a few rows.
        """
        if type(output) is not StepOutput:
            return False
        slots, tokens, finish = output.slots, output.tokens, output.finish
        return (type(slots) is type(tokens) is type(finish) is np.ndarray
                and slots.dtype is tokens.dtype is expected.dtype is INT32 and finish.dtype is UINT8
                and slots.shape == tokens.shape == finish.shape
                and slots.tobytes() == expected.tobytes()
                and (finish.tobytes() == bytes(len(finish)) or finish.max() <= STOP_WORDS)
                and output.log_probs is None
                and output.failures == output.beams == output.generation_logits == output.context_logits == {}
                and (not self._asked or self._asked.keys().isdisjoint(batch.slots())))

    def _converted(self, batch: ScheduledBatch, output: StepOutput, expected: np.ndarray) -> StepOutput:
        if not isinstance(output, StepOutput):
            raise WrongOutputError(f"a {type_name(output)} is no StepOutput")
        slots = _integers("slots", output.slots, INT32, expected.shape)
        if not np.array_equal(slots, expected):
            raise WrongOutputError("the slots are not those of the batch in its order")
        tokens = _integers("tokens", output.tokens, INT32, slots.shape)
        finish = _integers("finish", output.finish, UINT8, slots.shape)
        log_probs = output.log_probs
        if log_probs is not None:
            log_probs = _numbers("log_probs", log_probs, slots.shape)

        failures = {_slot(slot): _failure(failure) for slot, failure in _mapping("failures", output.failures).items()}
        row_of = {slot: row for row, slot in enumerate(slots.tolist()) if slot not in failures}
        asked = {slot: self._asked[slot] for slot in batch.slots() if slot in self._asked and slot not in failures}
        drawing = {slot: wants for slot, wants in asked.items() if slot in row_of}

        context_logits = self._context_logits(batch, output, asked)
        generation_logits = self._generation_logits(batch, output, drawing)
        searching = {slot: wants for slot, wants in drawing.items() if wants.beam_width > 1}
        beams = _beams(batch, output, searching, failures)
        judged = [row for slot, row in row_of.items() if slot not in beams]
        if (finish[judged] > STOP_WORDS).any():
            raise WrongOutputError("a finish code is neither NOT_FINISHED nor END_ID nor STOP_WORDS")
        told = [slot for slot, wants in drawing.items() if wants.log_probs and slot not in beams]
        if told and log_probs is None:
            raise WrongOutputError("log_probs is None and was asked for")
        if told and np.isnan(log_probs).any():
            failures |= {slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, NO_LOG_PROB) for slot in told
                         if np.isnan(log_probs[row_of[slot]])}
        return StepOutput(batch.micro_batch_id, slots, tokens, finish, log_probs, context_logits, generation_logits,
                          failures, beams)

    def _context_logits(self, batch: ScheduledBatch, output: StepOutput,
                        asked: Mapping[int, Asked]) -> dict[int, np.ndarray]:
        given = _mapping("context_logits", output.context_logits)
        return {work.slot: _numbers("context_logits", _of(given, "context_logits", work.slot),
                                    (len(work.token_ids), self._vocab_size))
                for work in batch.context if work.slot in asked and asked[work.slot].context_logits}

    def _generation_logits(self, batch: ScheduledBatch, output: StepOutput,
                           drawing: Mapping[int, Asked]) -> dict[int, np.ndarray]:
        given = _mapping("generation_logits", output.generation_logits)
        first_tokens = {work.slot for work in batch.context}
        logits = {}
        for slot, wants in drawing.items():
            if wants.generation_logits:
                shape: tuple[int, ...] = (self._vocab_size,)
                if wants.beam_width > 1:
                    shape = (1 if slot in first_tokens else wants.beam_width, self._vocab_size)
                logits[slot] = _numbers("generation_logits", _of(given, "generation_logits", slot), shape)
        return logits


def _slots_of_rows(batch: ScheduledBatch) -> np.ndarray:
    """[r]: one for each context that ends in this step, then one for each generating sequence, in batch order."""
    last_chunks = [work.slot for work in batch.context if work.is_last_chunk]
    if not last_chunks:
        return batch.generation.slots
    return np.concatenate([np.array(last_chunks, np.int32), batch.generation.slots])


def _beams(batch: ScheduledBatch, output: StepOutput, searching: Mapping[int, Asked],
           failures: Mapping[int, RowFailure]) -> dict[int, BeamOutput]:
    """What the beams of these sequences yielded.

    searching   the sequences with beams that have a row which did not fail
    """
    given = _mapping("beams", output.beams)
    if any(slot not in searching and slot not in failures for slot in given):
        raise WrongOutputError("beams of a sequence that has none, or no row")
    if not searching:
        return {}
    tokens_so_far = {work.slot: (0, work.start + len(work.token_ids)) for work in batch.context}
    tokens_so_far |= {slot: (1, length + 1) for slot, length in zip(batch.generation.slots.tolist(),
                                                                    batch.generation.kv_lengths.tolist())}
    beams = {}
    for slot, wants in searching.items():
        has_parted, num_tokens = tokens_so_far[slot]
        beams[slot] = _one_search(_of(given, "beams", slot), wants.beam_width, wants.beam_width if has_parted else 1,
                                  num_tokens + 1 - wants.prompt_length)
    return beams


def _one_search(beams: BeamOutput, width: int, num_parents: int, longest: int) -> BeamOutput:
    """longest   tokens a text can have by now"""
    if not isinstance(beams, BeamOutput):
        raise WrongOutputError(f"a {type_name(beams)} is no BeamOutput")
    if beams.hypotheses is not None:
        if type(beams.hypotheses) not in (tuple, list) or not 1 <= len(beams.hypotheses) <= width:
            raise WrongOutputError(f"the results of a search for {width} texts are a {type_name(beams.hypotheses)}, or "
                                   "too few or too many")
        return replace(beams, hypotheses=tuple(_text(text, width, longest) for text in beams.hypotheses))
    return BeamOutput(
        tokens=_integers("tokens of beams", beams.tokens, INT32, (width,)),
        parents=_below(num_parents, _integers("parents", beams.parents, INT32, (width,))),
        cum_log_probs=_numbers("cum_log_probs", beams.cum_log_probs, (width,)),
        log_probs=_numbers("log_probs of beams", beams.log_probs, (width,)))


def _text(text: Hypothesis, width: int, longest: int) -> Hypothesis:
    if not isinstance(text, Hypothesis):
        raise WrongOutputError(f"a {type_name(text)} is no Hypothesis")
    shape = np.shape(text.tokens)
    if len(shape) != 1 or shape[0] > longest:
        raise WrongOutputError(f"tokens of a text have shape {shape}, and there are at most {longest} by now")
    rows = _below(width, _integers("rows of a text", text.rows, INT32, shape))
    _below(1, rows[:1])
    if not isinstance(text.finish, Integral) or text.finish not in (END_ID, STOP_WORDS, LENGTH):
        raise WrongOutputError("the finish code of a text is neither END_ID nor STOP_WORDS nor LENGTH")
    if not isinstance(text.cum_log_prob, Real) or text.cum_log_prob != text.cum_log_prob:
        raise WrongOutputError("the cum_log_prob of a text is not a number")
    return Hypothesis(_integers("tokens of a text", text.tokens, INT32, shape), float(text.cum_log_prob),
                      _numbers("log_probs of a text", text.log_probs, shape), rows, int(text.finish))


def _mapping(name: str, given: Mapping) -> Mapping:
    if not isinstance(given, Mapping):
        raise WrongOutputError(f"{name} is a {type_name(given)}")
    return given


def _of(given: Mapping[int, Any], name: str, slot: int) -> Any:
    if slot not in given:
        raise WrongOutputError(f"{name} were asked for and are missing")
    return given[slot]


def _slot(slot: int) -> int:
    if not isinstance(slot, Integral):
        raise WrongOutputError(f"a slot of failures is a {type_name(slot)}")
    return int(slot)


def _failure(failure: RowFailure) -> RowFailure:
    if (not isinstance(failure, RowFailure) or not isinstance(failure.code, ErrorCode)
            or not isinstance(failure.message, str)):
        raise WrongOutputError(f"a {type_name(failure)} is no RowFailure, or has no ErrorCode, or no text")
    return failure


def _integers(name: str, values: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The values in this type. What it cannot hold becomes what nothing is: -1, or the largest where there is none."""
    values = np.asarray(values)
    if values.shape != shape:
        raise WrongOutputError(f"{name} have shape {values.shape}, {shape} is expected")
    if values.dtype is dtype:
        return values
    if values.dtype.kind not in "iu" and values.size:
        raise WrongOutputError(f"{name} are {values.dtype}, integers are expected")
    converted, range_ = values.astype(dtype), np.iinfo(dtype)
    converted[(values < range_.min) | (values > range_.max)] = np.array(-1).astype(dtype)
    return converted


def _numbers(name: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(values)
    if values.shape != shape:
        raise WrongOutputError(f"{name} have shape {values.shape}, {shape} is expected")
    if values.dtype.kind not in "fiu":
        raise WrongOutputError(f"{name} are {values.dtype}, numbers are expected")
    return values.astype(np.float32, copy=False)


def _below(bound: int, rows: np.ndarray) -> np.ndarray:
    if ((rows < 0) | (rows >= bound)).any():
        raise WrongOutputError(f"a beam continues one that is not among 0..{bound - 1}")
    return rows
