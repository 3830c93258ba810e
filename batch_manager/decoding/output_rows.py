"""Builds the columns of a StepOutput from two sources: beam searches, and sampled tokens of all other sequences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..handover import Hypothesis


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The result of one step for the beams of one sequence.

    tokens       [width] int32: the last token of each beam
    parents      [width] int32: the beam of the previous step that the token extends; 0 after a context, which has one
                 row
    log_probs    [width] float32: log-probs of the tokens after all stages; -inf for an empty beam, which exists because
                 there are fewer continuations than beams
    hypotheses   results of a search that has ended, best first, with the other fields unused; None while the search
                 continues
    """

    tokens: np.ndarray
    parents: np.ndarray
    log_probs: np.ndarray
    hypotheses: tuple[Hypothesis, ...] | None = None


def columns_with_beams(slots: np.ndarray, single_slots: np.ndarray, tokens: np.ndarray, finish: np.ndarray,
                       log_probs: np.ndarray | None, beam_steps: Mapping[int, BeamStep],
                       num_accepted: np.ndarray | int = 1) -> dict[str, Any]:
    """Return name -> column of a StepOutput.

    slots          [r] slots of all sequences, in batch order
    single_slots   [s] slots of sequences without beams, in the same order
    tokens, finish, log_probs   [t], [s], [t] results of the sequences without beams; log_probs None: zeros
    num_accepted   [s] tokens of each of these sequences, t in all; one number: that many of each
    beam_steps     slot -> BeamStep of a sequence with beams. A sequence with beams that is missing here has failed and
                   gets a row without tokens
    """
    lengths = np.zeros(len(slots), np.int32)
    is_single = np.isin(slots, single_slots)
    lengths[is_single] = num_accepted
    hypotheses = {slot: step.hypotheses for slot, step in beam_steps.items() if step.hypotheses is not None}
    rows = {slot: row for row, slot in enumerate(slots.tolist())}
    for slot, step in beam_steps.items():
        lengths[rows[slot]] = 0 if slot in hypotheses else len(step.tokens)
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    num_tokens = int(starts[-1])

    columns = {"slots": slots, "row_starts": starts, "tokens": np.zeros(num_tokens, np.int32),
               "finish": np.zeros(len(slots), np.uint8), "log_probs": np.zeros(num_tokens, np.float32),
               "parents": np.zeros(num_tokens, np.int32), "hypotheses": hypotheses}
    of_single = np.repeat(is_single, lengths)
    columns["tokens"][of_single] = tokens
    columns["finish"][is_single] = finish
    if log_probs is not None:
        columns["log_probs"][of_single] = log_probs
    for slot, step in beam_steps.items():
        row = slice(starts[rows[slot]], starts[rows[slot] + 1])
        if slot in hypotheses:
            columns["finish"][rows[slot]] = hypotheses[slot][0].finish
            continue
        for name in ("tokens", "parents", "log_probs"):
            columns[name][row] = getattr(step, name)
    return columns
