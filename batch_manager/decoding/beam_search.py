"""Beam search: which continuations a sequence goes on with, which texts are finished, and when the search is over.

In each step the operation `beam_topk` gives the (1 + ends) * width best continuations of a sequence's beams, best
first. `ends` counts the end ids and the different last tokens of its stop words, and is 1 at least. At most `ends`
continuations of each beam end it, so `width` are left to go on with. The rest is done here, on the host, on a few
numbers:

    finished    a continuation by an end id or by the last token of a stop word, if it is among the first `width`; at
                `max_new_tokens` each of the first `width`. Worth cum_log_prob / length ** len_penalty, where the token
                that ends the text counts in both, though an end id is not part of it, and a stop word is. The `width`
                most worth are kept
    live        the first `width` that did not end
    over        at max_new_tokens, when nothing is live, or when `width` texts are finished and

        early_stopping 1      at once
        early_stopping 0      the best live text, at its present length, is worth no more than the least finished one
        another number        the same, but at the length at which it would be worth most: max_new_tokens if len_penalty
                              is above 0. So nothing that could get better is given up

    diversity   a continuation competes with its log-probability less diversity_rate for every better continuation of
                the same beam (Li, Monroe and Jurafsky, 2016); what is kept and reported of it is without that

With early_stopping 1, 0 and another number this is the beam search of transformers with True, False and "never", in
float32 as there. A stop word is what a stopping criterion is there: one of a single token is one more end id that stays
in the text. Logits processors of transformers act on log-probabilities when there are beams, and so do biases,
penalties and bans here (stages.py); `log_prob` is what they made of it. The results are the finished texts by worth, or
fewer than `width` where the model allows no more.

numpy only.
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
    num_beam_candidates,
)
from ..sampling_config import SamplingConfig
from .beam_stop_words import BeamStopWords
from .output_rows import BeamStep
from .position_ring import COLUMNS, PositionRing

NOWHERE = np.float32(-np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class _Trail:
    """The tokens a step added to the live texts, and which texts of the step before they continue. All [width]."""

    before: "_Trail | None"
    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray

    def walk_back(self, beam: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log-probs and rows of the text that is in `beam`, from its first token on."""
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
    """A finished text. worth is what it is compared by; its last token, which may be the end id, is held apart."""

    worth: np.float32
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
    """The search of one sequence between two steps. Never changed: a step makes a new one, so a step can be run again.

    num_candidates  continuations that `advance` takes
    cum_log_probs   [beams] float32 of the live texts: one, empty, before the first step, then `width`; -inf: none
    last_tokens     [width] int32: what the live sequences end with: input tokens of the next step
    texts           [beams, n] int32: what was generated of the live texts; None where nothing depends on it
    stop_words      those of the sequence; None: it has none, else it has texts
    is_changed      stages act on its log-probabilities
    needs_history   they look at the tokens, so the device must know these
    """

    sampling: SamplingConfig
    max_new_tokens: int
    end_ids: tuple[int, ...]
    num_candidates: int
    cum_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    last_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    texts: np.ndarray | None = None
    stop_words: BeamStopWords | None = None
    is_changed: bool = False
    needs_history: bool = False
    _num_generated: int = 0
    _trail: _Trail | None = None
    _finished: tuple[_Finished, ...] = ()

    @staticmethod
    def of(setup: SlotSetup, *, is_changed: bool = False, needs_history: bool = False) -> "BeamSearch":
        """The search of a sequence with beams that has generated nothing."""
        prompt, stop_words = setup.history, None
        if setup.stop_words:
            stop_words = BeamStopWords(setup.stop_words, np.empty(0, np.int32) if prompt is None else prompt)
        texts = np.empty((1, 0), np.int32) if needs_history or stop_words is not None else None
        return BeamSearch(
            setup.sampling, setup.max_new_tokens, setup.end_ids,
            num_beam_candidates(setup.sampling.beam_width, setup.end_ids, setup.stop_words),
            texts=texts, stop_words=stop_words, is_changed=is_changed, needs_history=needs_history)

    @property
    def has_finished(self) -> bool:
        """Whether there is a text to end with, should no beam go on."""
        return bool(self._finished)

    def advance(self, log_probs: np.ndarray, parents: np.ndarray,
                tokens: np.ndarray) -> tuple["BeamSearch", BeamStep]:
        """One step on.

        log_probs, parents, tokens   [num_candidates] the best continuations, best first, as `beam_topk` gives them
        """
        width, length = self.sampling.beam_width, self._num_generated + 1
        sums = self.cum_log_probs[parents] + log_probs
        exists, is_last = sums > NOWHERE, length == self.max_new_tokens
        finish = np.full(len(tokens), LENGTH if is_last else NOT_FINISHED)
        if self.stop_words is not None:
            finish[self.stop_words.ended(self.texts, parents, tokens)] = STOP_WORDS
        finish[np.isin(tokens, self.end_ids)] = END_ID

        finishing = exists & (finish != NOT_FINISHED)
        finished = self._finished
        if finishing[:width].any():
            divisor = _power(length, self.sampling.len_penalty)
            finished += tuple(
                _Finished(sums[i] / divisor, sums[i], self._trail, int(parents[i]), int(tokens[i]), log_probs[i],
                          int(finish[i])) for i in np.flatnonzero(finishing[:width]).tolist())
            finished = tuple(sorted(finished, key=lambda text: -text.worth)[:width])

        live = np.flatnonzero(exists & (finish != END_ID) & (finish != STOP_WORDS))[:width]
        step, cum_log_probs = self._go_on(sums[live], log_probs[live], parents[live], tokens[live])
        if is_last or not len(live) or self._is_over(finished, sums[live].max(), length):
            hypotheses = tuple(text.hypothesis() for text in finished)
            step = replace(step, hypotheses=hypotheses)
        trail = _Trail(self._trail, step.tokens, step.parents, step.log_probs)
        texts = self.texts
        if texts is not None:
            texts = np.concatenate([texts[step.parents], step.tokens[:, None]], axis=1, dtype=np.int32)
        return replace(self, cum_log_probs=cum_log_probs, last_tokens=step.tokens, texts=texts,
                       _num_generated=length, _trail=trail, _finished=finished), step

    def _go_on(self, sums: np.ndarray, log_probs: np.ndarray, parents: np.ndarray,
               tokens: np.ndarray) -> tuple[BeamStep, np.ndarray]:
        """The live texts and their cum_log_probs; beams for which there is none go on with anything, worth nothing."""
        width, count = self.sampling.beam_width, len(sums)
        if count == width:
            return BeamStep(tokens, parents, log_probs), sums
        anywhere = np.arange(count, width, dtype=np.int32)
        if len(self.cum_log_probs) == 1:
            anywhere[:] = 0
        nothing, none = np.full(width - count, NOWHERE), np.zeros(width - count, np.int32)
        tokens, parents, sums, log_probs = (np.concatenate(pair) for pair in (
            (tokens, none), (parents, anywhere), (sums, nothing), (log_probs, nothing)))
        return BeamStep(tokens, parents, log_probs), sums

    def _is_over(self, finished: tuple[_Finished, ...], best: np.float32, length: int) -> bool:
        sampling = self.sampling
        if len(finished) < sampling.beam_width:
            return False
        if sampling.early_stopping == 1:
            return True
        if sampling.early_stopping != 0 and sampling.len_penalty > 0:
            length = self.max_new_tokens
        return not best / _power(length, sampling.len_penalty) > finished[-1].worth


class BeamSearches:
    """The searches of the slots, each kept by the position that it is to sample: a step that is run again finds the one
    it started from."""

    def __init__(self) -> None:
        self._rings: dict[int, PositionRing] = {}
        self._first: dict[int, BeamSearch] = {}

    def set_up(self, slot: int, setup: SlotSetup, *, is_changed: bool = False, needs_history: bool = False) -> None:
        """A sequence takes the slot, with beams or without, and starts afresh. Doing so again is harmless.

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
        """Beams of the sequence in the slot."""
        return self._first[slot].sampling.beam_width if slot in self._first else 1

    def at(self, slot: int, position: int) -> BeamSearch:
        """The search that is to sample the tokens of this position."""
        found = self._rings[slot].at(0, position)
        return found[1] if found is not None and found[0] == position else self._first[slot]

    def keep(self, slot: int, position: int, after: BeamSearch) -> None:
        """The search has sampled the tokens of this position and is now `after`."""
        self._rings[slot].put(0, position + 1, (position + 1, after))

    def input_tokens(self, generation: GenerationWork) -> np.ndarray:
        """[g * beam width] int32: the input tokens of a generation step."""
        return np.concatenate([self.at(slot, kv_length + 1).last_tokens for slot, kv_length in zip(
            generation.slots.tolist(), generation.kv_lengths.tolist())])


def _power(length: int, exponent: float) -> np.float32:
    """length ** exponent, infinite where that is too large."""
    with np.errstate(over="ignore"):
        return np.float32(np.float64(length) ** exponent)
