"""Beam search: selects the beams of the next step, collects finished hypotheses, and decides when the search ends.

In each step the operation `beam_topk` returns the (1 + ends) * width best continuations of a sequence's beams, best
first. `ends` is the number of end ids and distinct last tokens of stop words, at least 1. At most `ends` continuations
of each beam end it, which leaves at least `width` continuations that can go on. This module does the rest on the host:

    finished    A continuation by an end id or by the last token of a stop word is finished if it is among the first
                `width`. At `max_new_tokens`, each of the first `width` is finished. The score of a finished hypothesis
                is cum_log_prob / length ** len_penalty, and the ending token counts in both. A stop word is part of
                the output, an end id is not. The hypotheses with the `width` best scores are kept
    live        The live beams are the first `width` continuations that did not end
    end         The search ends at max_new_tokens, when no beam is live, or when there are `width` finished hypotheses
                and the condition for the value of early_stopping is true:

        early_stopping 1      always true
        early_stopping 0      the best live beam, at its present length, scores no higher than the worst finished
                              hypothesis
        any other value       the same, but with the length that gives the best score: max_new_tokens if len_penalty is
                              above 0, else the present length. The search continues while a live beam could still
                              score higher

    diversity   For the competition between continuations, the log-probability of a continuation is reduced by
                beam_search_diversity_rate for each better continuation of the same beam (Li, Monroe and Jurafsky,
                2016). Stored and reported values are not reduced

This is the beam search of transformers. Both compute scores in float32. For early_stopping, 1 corresponds to True in
transformers, 0 to False, and any other value to "never". A stop word acts like a stopping criterion of transformers. A
stop word of a single token acts like an end id that stays in the output. Biases, penalties and bans act on
log-probabilities (see stages.py), as the logits processors of transformers do with beams, and `log_prob` is the value
after them. The results are the finished hypotheses in the order of their scores. There are fewer than `width` results
if fewer sequences are possible.

The module uses numpy only.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from ..handover import (
    END_ID,
    LENGTH,
    NOT_FINISHED,
    STOP_WORDS,
    GenerationWork,
    Hypothesis,
    SlotSetup,
    added_log_probs,
    num_beam_candidates,
)
from ..sampling_config import SamplingConfig
from .beam_stop_words import BeamStopWords
from .output_rows import BeamStep
from .position_ring import COLUMNS, PositionRing

EMPTY = np.float32(-np.inf)             # cum_log_prob of an empty beam


@dataclass(frozen=True, slots=True, eq=False)
class _Trail:
    """The tokens that one step added to the live beams, linked to the trail of the step before. All arrays are [width].

    before    trail of the step before; None: this is the first step
    parents   index of the beam that each token extends, among the beams of the step before
    """

    before: "_Trail | None"
    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray

    def walk_back(self, beam: int) -> tuple[list[int], list[float], list[int]]:
        """Return (tokens, log-probs, parents) of the output of `beam`, in order of the tokens.

        An entry of parents is the index of the beam that the token extends, among the beams of the step before.
        """
        tokens, log_probs, rows = [], [], []
        trail: _Trail | None = self
        while trail is not None:
            tokens.append(int(trail.tokens[beam]))
            log_probs.append(float(trail.log_probs[beam]))
            beam = int(trail.parents[beam])
            rows.append(beam)
            trail = trail.before
        return tokens[::-1], log_probs[::-1], rows[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Finished:
    """A finished hypothesis: the output of beam `row`, then `token`, which may be an end id.

    before   trail from which the output of beam `row` is read; None: this output is empty
    """

    score: np.float32
    cum_log_prob: np.float32
    before: _Trail | None
    row: int
    token: int
    log_prob: np.float32
    finish: int

    def hypothesis(self) -> Hypothesis:
        tokens, log_probs, rows = ([], [], []) if self.before is None else self.before.walk_back(self.row)
        if self.finish != END_ID:
            tokens.append(self.token)
            log_probs.append(float(self.log_prob))
            rows.append(self.row)
        return Hypothesis(np.array(tokens, np.int32), float(self.cum_log_prob), np.array(log_probs, np.float32),
                          np.array(rows, np.int32), self.finish)


@dataclass(frozen=True, slots=True, eq=False)
class BeamSearch:
    """The beam search of one sequence between two steps.

    The object is immutable, so that a step can run again: `advance` returns a new search.

    num_candidates  number of continuations to pass to `advance`
    cum_log_probs   [beams] float32 of the live beams, -inf for an empty beam. Before the first step there is one beam
                    without tokens, then there are `width` beams
    last_tokens     [width] int32: last tokens of the live beams, the input tokens of the next step
    outputs         [beams, n] int32: tokens generated by the live beams; None if no stage or stop word reads them
    stop_words      stop words of the sequence; None if it has no stop words. With stop words, `outputs` is not None
    is_changed      whether stages act on the sequence's log-probabilities
    needs_history   whether these stages read the tokens, which requires the outputs on the device
    """

    sampling: SamplingConfig
    max_new_tokens: int
    end_ids: tuple[int, ...]
    num_candidates: int
    cum_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    last_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    outputs: np.ndarray | None = None
    stop_words: BeamStopWords | None = None
    is_changed: bool = False
    needs_history: bool = False
    _num_generated: int = 0
    _trail: _Trail | None = None
    _finished: tuple[_Finished, ...] = ()

    @staticmethod
    def of(setup: SlotSetup, *, is_changed: bool = False, needs_history: bool = False) -> "BeamSearch":
        """Return the beam search of a sequence, in its state before the first token is sampled."""
        prompt, stop_words = setup.history, None
        if setup.stop_words:
            stop_words = BeamStopWords(setup.stop_words, np.empty(0, np.int32) if prompt is None else prompt)
        outputs = np.empty((1, 0), np.int32) if needs_history or stop_words is not None else None
        return BeamSearch(
            setup.sampling, setup.max_new_tokens, setup.end_ids,
            num_beam_candidates(setup.sampling.beam_width, setup.end_ids, setup.stop_words),
            outputs=outputs, stop_words=stop_words, is_changed=is_changed, needs_history=needs_history)

    @property
    def has_finished(self) -> bool:
        """Whether there is a finished hypothesis to return if no beam can continue."""
        return bool(self._finished)

    def advance(self, log_probs: np.ndarray, parents: np.ndarray,
                tokens: np.ndarray) -> tuple["BeamSearch", BeamStep]:
        """Return the search after one more step, and the BeamStep of this step.

        log_probs, parents, tokens   [num_candidates] the best continuations, best first, from `beam_topk`
        """
        width, length = self.sampling.beam_width, self._num_generated + 1
        sums = added_log_probs(self.cum_log_probs[parents], log_probs)
        exists, is_last = sums > EMPTY, length == self.max_new_tokens
        finish = np.full(len(tokens), LENGTH if is_last else NOT_FINISHED)
        if self.stop_words is not None:
            finish[self.stop_words.ended(self.outputs, parents, tokens)] = STOP_WORDS
        finish[np.isin(tokens, self.end_ids)] = END_ID

        finishing = exists & (finish != NOT_FINISHED)
        finished = self._finished
        if finishing[:width].any():
            divisor = _power(length, self.sampling.len_penalty)
            finished += tuple(
                _Finished(sums[i] / divisor, sums[i], self._trail, int(parents[i]), int(tokens[i]), log_probs[i],
                          int(finish[i])) for i in np.flatnonzero(finishing[:width]).tolist())
            finished = tuple(sorted(finished, key=lambda hypothesis: -hypothesis.score)[:width])

        live = np.flatnonzero(exists & (finish != END_ID) & (finish != STOP_WORDS))[:width]
        step, cum_log_probs = self._next_beams(sums[live], log_probs[live], parents[live], tokens[live])
        if is_last or not len(live) or self._has_ended(finished, sums[live].max(), length):
            step = replace(step, hypotheses=tuple(one.hypothesis() for one in finished))
        trail = _Trail(self._trail, step.tokens, step.parents, step.log_probs)
        outputs = self.outputs
        if outputs is not None:
            outputs = np.concatenate([outputs[step.parents], step.tokens[:, None]], axis=1, dtype=np.int32)
        return replace(self, cum_log_probs=cum_log_probs, last_tokens=step.tokens, outputs=outputs,
                       _num_generated=length, _trail=trail, _finished=finished), step

    def _next_beams(self, sums: np.ndarray, log_probs: np.ndarray, parents: np.ndarray,
                    tokens: np.ndarray) -> tuple[BeamStep, np.ndarray]:
        """Return (BeamStep, cum_log_probs) of the given live beams, both filled up to `width` with empty beams."""
        width, count = self.sampling.beam_width, len(sums)
        if count == width:
            return BeamStep(tokens, parents, log_probs), sums
        # The parent of an empty beam is the beam of its own index, or the only beam after a context.
        empty_parents = np.arange(count, width, dtype=np.int32)
        if len(self.cum_log_probs) == 1:
            empty_parents[:] = 0
        empty_sums, empty_tokens = np.full(width - count, EMPTY), np.zeros(width - count, np.int32)
        tokens, parents, sums, log_probs = (np.concatenate(pair) for pair in (
            (tokens, empty_tokens), (parents, empty_parents), (sums, empty_sums), (log_probs, empty_sums)))
        return BeamStep(tokens, parents, log_probs), sums

    def _has_ended(self, finished: tuple[_Finished, ...], best: np.float32, length: int) -> bool:
        sampling = self.sampling
        if len(finished) < sampling.beam_width:
            return False
        if sampling.early_stopping == 1:
            return True
        if sampling.early_stopping != 0 and sampling.len_penalty > 0:
            length = self.max_new_tokens
        return not best / _power(length, sampling.len_penalty) > finished[-1].score


class BeamSearches:
    """The beam searches of the sequences in all slots.

    A search is stored by slot and by the position that it samples next. A step that is run again therefore starts from
    the same search.
    """

    def __init__(self) -> None:
        self._rings: dict[int, PositionRing] = {}
        self._first: dict[int, BeamSearch] = {}

    def set_up(self, slot: int, setup: SlotSetup, *, is_changed: bool = False, needs_history: bool = False) -> None:
        """Set up a sequence in a slot, with a new search if it has beams. Idempotent.

        is_changed, needs_history   see BeamSearch
        """
        if setup.has_beams:
            self._first[slot] = BeamSearch.of(setup, is_changed=is_changed, needs_history=needs_history)
            self._rings[slot] = PositionRing(np.full((1, COLUMNS), None, object))
        elif self._first:
            self._first.pop(slot, None)
            self._rings.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._first

    def __len__(self) -> int:
        return len(self._first)

    def width(self, slot: int) -> int:
        """Return the number of beams of the sequence in a slot; 1 without a search."""
        return self._first[slot].sampling.beam_width if slot in self._first else 1

    def at(self, slot: int, position: int) -> BeamSearch:
        """Return the search as it is before the tokens at `position` are sampled."""
        found = self._rings[slot].at(0, position)
        return found[1] if found is not None and found[0] == position else self._first[slot]

    def keep(self, slot: int, position: int, after: BeamSearch) -> None:
        """Store `after`, the state of the search after the tokens at `position` are sampled."""
        self._rings[slot].put(0, position + 1, (position + 1, after))

    def input_tokens(self, generation: GenerationWork) -> np.ndarray:
        """Return the input tokens [g * beam width] int32 of g generation requests: the newest token of each beam."""
        return np.concatenate([self.at(slot, kv_length + 1).last_tokens for slot, kv_length in zip(
            generation.slots.tolist(), generation.kv_lengths.tolist())])


def _power(length: int, exponent: float) -> np.float32:
    """Return length ** exponent, or infinity on overflow."""
    with np.errstate(over="ignore"):
        return np.float32(np.float64(length) ** exponent)
