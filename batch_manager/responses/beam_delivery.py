"""Collects the log-probabilities and logits of a request's beams for its response."""

from collections.abc import Sequence

import numpy as np

from ..handover import Hypothesis, added_log_probs
from ..names import FinishReason
from ..requests.llm_request import LlmRequest
from .tensors import BeamOutput

NO_OUTPUT = -np.inf


class BeamDelivery:
    """The log-probabilities and logits of a request's beams: of the live beams during the search, then of its results.

    The beams are in the order of `LlmRequest.tokens`. The log-probability of each token, and the row of logits for
    each token, are kept only if the request asked for them. When a request starts over after a pause, its values start
    over too.
    """

    def __init__(self, beam_width: int, *, keeps_log_probs: bool, keeps_logits: bool) -> None:
        self._width = beam_width
        self._keeps_log_probs, self._keeps_logits = keeps_log_probs, keeps_logits
        self._finishes: list[FinishReason] | None = None
        self._start()

    def _start(self) -> None:
        self._cum_log_probs = [0.0] * self._width
        self._log_probs: list[Sequence[float] | np.ndarray] = [[] for _ in range(self._width)]
        self._rows: list[Sequence[int] | np.ndarray] = [[] for _ in range(self._width)]
        self._logits: list[np.ndarray] = []

    def follow(self, parents: Sequence[int], log_probs: np.ndarray, logits: np.ndarray | None, *,
               is_first: bool) -> None:
        """Let every beam continue its parent's output by one token.

        parents     [beams] the parent of each beam
        log_probs   [beams] float32, log-probability of each token; -inf for a beam without a continuation
        logits      [beams before the step, vocab], logits of the step; ignored unless the request asked for them
        is_first    whether the tokens are the first ones of the search; if so, the values of an earlier search, which a
                    pause ended, are dropped
        """
        if is_first:
            self._start()
        self._cum_log_probs = added_log_probs(np.array(self._cum_log_probs, np.float32)[parents], log_probs).tolist()
        if self._keeps_log_probs:
            self._log_probs = [[*self._log_probs[parent], log_prob]
                               for parent, log_prob in zip(parents, log_probs.tolist())]
        if self._keeps_logits:
            assert logits is not None    # steps/output_check.py ensures it
            self._rows = [[*self._rows[parent], parent] for parent in parents]
            self._logits.append(logits)

    def end(self, hypotheses: Sequence[Hypothesis], logits: np.ndarray | None, *, is_first: bool) -> None:
        """Replace the live beams by the results of the search. Beams without a result come last.

        logits      [beams before the step, vocab], logits of the step; ignored unless the request asked for them
        is_first    whether the search ended in its first step; if so, the values of an earlier search, which a pause
                    ended, are dropped
        """
        if is_first:
            self._start()
        missing = self._width - len(hypotheses)
        self._finishes = [FinishReason(output.finish) for output in hypotheses] + [FinishReason.NOT_FINISHED] * missing
        self._cum_log_probs = [output.cum_log_prob for output in hypotheses] + [NO_OUTPUT] * missing
        self._log_probs = [output.log_probs for output in hypotheses] + [[]] * missing
        self._rows = [output.rows for output in hypotheses] + [[]] * missing
        if self._keeps_logits:
            assert logits is not None
            self._logits.append(logits)

    def outputs(self, request: LlmRequest, reason: FinishReason) -> list[BeamOutput]:
        """The output of each beam, best first.

        reason   why the request ended; ignored for the results of a finished search, which have their own reasons
        """
        generated = [tokens[request.orig_prompt_len:] for tokens in request.tokens]
        if not generated[0] and self._finishes is None:    # paused, or not started
            self._start()
        best_first = sorted(range(self._width), key=lambda beam: -self._cum_log_probs[beam])
        return [self._output(beam, generated[beam], reason)
                for beam in (range(self._width) if self._finishes else best_first)]

    def _output(self, beam: int, generated: list[int], reason: FinishReason) -> BeamOutput:
        if self._finishes is not None:
            reason = self._finishes[beam]
        if self._cum_log_probs[beam] == NO_OUTPUT:
            return BeamOutput([], FinishReason.NOT_FINISHED, NO_OUTPUT)
        logits = None
        if self._keeps_logits and generated:
            logits = np.stack([step[row] for step, row in zip(self._logits, self._rows[beam])])
        return BeamOutput(generated, reason, self._cum_log_probs[beam],
                        self._log_probs[beam] if self._keeps_log_probs else None, logits)
