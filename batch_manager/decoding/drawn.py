"""What a step sampled: tensors on their way to the host, and what the host makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..handover import RowFailure
from ..names import ErrorCode
from .beam_draw import DrawnBeams
from .log_prob_report import TopRows
from .logits_post_processors import NO_TOKEN, PostProcessed
from .logits_return import logits_by_slot
from .logits_rows import LogitsRows
from .output_rows import columns_with_beams

NOT_FINITE = ("the model computed values that are not finite for this request; the others go on; compute in a dtype "
              "with a larger range")
UNUSABLE = RowFailure(ErrorCode.NON_FINITE_LOGITS, NOT_FINITE)


@dataclass(slots=True, eq=False)
class Sampled:
    """What was sampled for rows without beams; see Drawn, which has the same fields."""

    tokens: torch.Tensor
    finite: torch.Tensor
    log_probs: torch.Tensor | None
    emptied: torch.Tensor | None
    top: TopRows | None

    @staticmethod
    def joined(parts: "Sequence[Sampled]") -> "Sampled":
        """The rows of all parts, one after the other."""

        def column(name: str) -> torch.Tensor | None:
            values = [getattr(part, name) for part in parts]
            known = next((value for value in values if value is not None), None)
            if known is None:
                return None
            return torch.cat([known.new_zeros(len(part.tokens)) if value is None else value
                              for part, value in zip(parts, values)])

        return Sampled(column("tokens"), column("finite"), column("log_probs"), column("emptied"),
                       TopRows.joined([part.top for part in parts]))


@dataclass(slots=True, eq=False)
class Drawn:
    """What a step sampled, on the device.

    slots             [n] int32 on the host: the sequences of the step, in batch order
    rows              the rows of those without beams, which the next five are of
    tokens            [r] int32 or int64; meaningless where not finite
    finish            [r] uint8
    finite            [r] bool: False where no token can be sampled from a row's logits
    log_probs         [r] float32, or None when no request asked; 0 in the rows of requests that did not
    emptied           [r] bool: not finite, but finite before the stages: they left nothing, or a NaN or +inf; None: no
                      row has a stage
    post_processed    the rows that users' functions changed; None when there are none
    logits_slots      slots of the rows of `logits` [q, vocab] float32, as the model gave them; None when no request
    asked top               the likeliest tokens of rows; None when no request asked
    beams             what was sampled for beams; None when there are none
    """

    slots: np.ndarray
    rows: LogitsRows
    tokens: torch.Tensor
    finish: torch.Tensor
    finite: torch.Tensor
    log_probs: torch.Tensor | None
    emptied: torch.Tensor | None
    post_processed: PostProcessed | None
    logits_slots: list[int]
    logits: torch.Tensor | None
    top: TopRows | None = None
    beams: DrawnBeams | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the host has to read, by name."""
        tensors = {"tokens": self.tokens, "finish": self.finish, "finite": self.finite}
        for name in ("log_probs", "emptied", "logits"):
            if (tensor := getattr(self, name)) is not None:
                tensors[name] = tensor
        if self.post_processed is not None:
            tensors["model_finite"] = self.post_processed.model_finite
        if self.top is not None:
            tensors |= self.top.tensors
        return tensors if self.beams is None else tensors | self.beams.tensors

    def output(self, arrays: Mapping[str, np.ndarray], failures: Mapping[int, RowFailure],
               vocab_size: int) -> dict[str, Any]:
        """The columns of the step's StepOutput, by name, with its generation_logits and failures.

        arrays     `tensors`, on the host
        failures   slots whose rows are unusable already; others are added
        The searches of beams go on from here.
        """
        if not arrays["finite"].all() or self.post_processed is not None or self.beams is not None:
            failures = self._failures(arrays, vocab_size) | failures
        tokens, finish, log_probs = arrays["tokens"].astype(np.int32), arrays["finish"], arrays.get("log_probs")
        columns = {"slots": self.slots, "tokens": tokens, "finish": finish, "log_probs": log_probs}
        if self.beams is not None:
            columns = columns_with_beams(self.slots, self.rows.slots, tokens, finish, log_probs,
                                         self.beams.finish(arrays, failures))
        if self.logits_slots:
            columns["generation_logits"] = logits_by_slot(self.logits_slots, arrays["logits"])
        if self.top is not None:
            columns["top_log_probs"] = self.top.by_slot(arrays)
        columns["failures"] = failures
        return columns

    def _failures(self, arrays: Mapping[str, np.ndarray], vocab_size: int) -> dict[int, RowFailure]:
        not_finite, emptied = self._slots_without_a_token(arrays)
        failures = {}
        if self.post_processed is not None:
            failures |= self.post_processed.failures
            # Where the model's own logits were finite, it is the user's function that left nothing to sample. Where
            # they were not, nothing it does makes the row good: what is in the cache is not.
            slots, model_finite = self.post_processed.slots, arrays["model_finite"]
            for slot in not_finite.intersection(slots[model_finite].tolist()):
                not_finite.discard(slot)
                failures.setdefault(slot, RowFailure(ErrorCode.NON_FINITE_LOGITS, NO_TOKEN))
            not_finite.update(slots[~model_finite].tolist())
        for slot in emptied:
            failures.setdefault(slot, RowFailure(
                ErrorCode.NON_FINITE_LOGITS, "embedding_bias, Parts.stages, penalties and bans of this request leave "
                f"none of the {vocab_size:,} tokens of the vocabulary, or they leave a NaN or +inf; one logit must "
                "stay finite, and the others finite or -inf; ban less, or correct the stage"))
        return failures | dict.fromkeys(not_finite, UNUSABLE)

    def _slots_without_a_token(self, arrays: Mapping[str, np.ndarray]) -> tuple[set[int], set[int]]:
        """The slots whose logits were not finite before the stages, and those for which the stages left no token."""
        not_finite, emptied, slots = set(), set(), self.rows.slots
        if not arrays["finite"].all():
            without = ~arrays["finite"]
            if "emptied" in arrays:
                emptied.update(slots[arrays["emptied"]].tolist())
                without &= ~arrays["emptied"]
            not_finite.update(slots[without].tolist())
        if self.beams is not None:
            not_finite.update(self.beams.slots[~arrays["beam_finite"]].tolist())
            emptied.update(self.beams.slots_without_a_text(arrays))
        return not_finite, emptied - not_finite
