"""The result of sampling a step: tensors to read back, and their conversion to a StepOutput."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..handover import RowFailure, TopLogProbs
from ..names import ErrorCode
from .beam_sampling import SampledBeams
from .log_prob_report import TopRows
from .logits_post_processors import NO_TOKEN, PostProcessed
from .logits_return import logits_by_slot
from .logits_rows import LogitsRows
from .output_rows import columns_with_beams

NOT_FINITE = ("the model computed NaN or infinite values for this request; logits must be finite; use a dtype with a "
              "larger range")
UNUSABLE = RowFailure(ErrorCode.NON_FINITE_LOGITS, NOT_FINITE)


@dataclass(slots=True, eq=False)
class SampledTokens:
    """The sampled tokens of rows without beams. SampledStep documents the fields."""

    tokens: torch.Tensor
    finite: torch.Tensor
    log_probs: torch.Tensor | None
    emptied: torch.Tensor | None

    @staticmethod
    def joined(parts: "Sequence[SampledTokens]") -> "SampledTokens":
        """Return the rows of all elements of `parts`, concatenated."""

        def column(name: str) -> torch.Tensor | None:
            values = [getattr(part, name) for part in parts]
            known = next((value for value in values if value is not None), None)
            if known is None:
                return None
            return torch.cat([known.new_zeros(len(part.tokens)) if value is None else value
                              for part, value in zip(parts, values)])

        return SampledTokens(column("tokens"), column("finite"), column("log_probs"), column("emptied"))


@dataclass(slots=True, eq=False)
class SampledStep:
    """The result of sampling a step, on the device until `tensors` are read back.

    slots             [n] int32 on the host: slots of the sequences of the step, in batch order
    rows              the r rows of sequences without beams; the next five fields belong to these rows
    tokens            [r] int32 or int64; undefined where `finite` is False
    finish            [r] uint8: FinishReason of each row
    finite            [r] bool: whether a token could be sampled from the row's logits
    log_probs         [r] float32: of `tokens`, 0 in rows that did not ask for them; None: no row asked
    emptied           [r] bool: whether the stages left a NaN, a +inf or no token in a row that was finite before the
                      stages; None: no active stage changes logits
    post_processed    the rows that post-processors changed; None: no row has a post-processor
    logits_slots      slots of the rows of `logits`
    logits            [q, vocab] float32: logits to return, as the model computed them; None: no row asked
    top               likeliest tokens of the rows that asked for them; None: no row asked
    beams             best continuations of the beams of each sequence with beams; None: no sequence has beams
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
    beams: SampledBeams | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to read back, by name."""
        tensors = {"tokens": self.tokens, "finish": self.finish, "finite": self.finite}
        for name in ("log_probs", "emptied", "logits"):
            if (tensor := getattr(self, name)) is not None:
                tensors[name] = tensor
        if self.post_processed is not None:
            tensors["model_finite"] = self.post_processed.model_finite
        if self.top is not None:
            tensors |= self.top.tensors
        return tensors if self.beams is None else tensors | self.beams.tensors

    def with_usable_rows(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the arrays of a step with drafts, whose `finite` is False also where the model's logits were not."""
        if self.post_processed is None:
            return arrays
        finite = arrays["finite"] != 0
        finite[self.post_processed.rows] &= arrays["model_finite"]
        return {**arrays, "finite": finite}

    def output(self, arrays: Mapping[str, np.ndarray], failures: Mapping[int, RowFailure], vocab_size: int,
               is_new: np.ndarray | None = None, num_new: np.ndarray | None = None) -> dict[str, Any]:
        """Return name -> value for the fields of a StepOutput that sampling determines.

        is_new     [r] bool: rows with the new tokens of sequences with drafts; None: all rows
        num_new    [n] new tokens of each sequence, if `is_new` is not None

        arrays     the result of the method `tensors`, copied to the host
        failures   slot -> failure found before sampling. The result has these failures and those found in `arrays`
        Mutates    the beam searches, which advance by a step
        """
        slots = self.slots
        if is_new is not None and num_new is not None:
            slots, arrays = self.rows.slots[is_new], {**arrays, "finite": arrays["finite"] | ~is_new}
            if "emptied" in arrays:
                arrays["emptied"] = arrays["emptied"] & is_new
            if self.post_processed is not None:
                arrays["model_finite"] = arrays["model_finite"] | ~is_new[self.post_processed.rows]
        if not arrays["finite"].all() or self.post_processed is not None or self.beams is not None:
            failures = self._failures(arrays, vocab_size) | failures
        tokens, finish, log_probs = arrays["tokens"].astype(np.int32), arrays["finish"], arrays.get("log_probs")
        columns = {"slots": slots, "tokens": tokens, "finish": finish, "log_probs": log_probs}
        if is_new is not None and num_new is not None:
            ends = np.cumsum(num_new, dtype=np.int32)
            columns = {name: None if column is None else column[is_new] for name, column in columns.items()
                       if name != "slots"}
            columns |= {"slots": slots[ends - 1], "finish": columns["finish"][ends - 1],
                        "row_starts": np.concatenate([np.zeros(1, np.int32), ends])}
        if self.beams is not None:
            columns = columns_with_beams(self.slots, self.rows.slots, tokens, finish, log_probs,
                                         self.beams.finish(arrays, failures))
        if self.logits_slots:
            columns["generation_logits"] = logits_by_slot(self.logits_slots, arrays["logits"])
        if self.top is not None:
            columns["top_log_probs"] = self.top.by_slot(arrays)
        if num_new is not None:
            new_of = dict(zip(columns["slots"].tolist(), num_new.tolist()))
            columns["generation_logits"] = {slot: logits[:new_of[slot]] for slot, logits
                                            in columns.get("generation_logits", {}).items()}
            columns["top_log_probs"] = {slot: TopLogProbs(top.ids[:new_of[slot]], top.log_probs[:new_of[slot]])
                                        for slot, top in columns.get("top_log_probs", {}).items()}
        columns["failures"] = failures
        return columns

    def _failures(self, arrays: Mapping[str, np.ndarray], vocab_size: int) -> dict[int, RowFailure]:
        not_finite, emptied = self._slots_without_a_token(arrays)
        failures = {}
        if self.post_processed is not None:
            failures |= self.post_processed.failures
            # If the model's logits were finite, the function left nothing to sample. If they were not, the row fails
            # whatever the function did, because the KV cache is unusable.
            slots, model_finite = self.post_processed.slots, arrays["model_finite"]
            for slot in not_finite.intersection(slots[model_finite].tolist()):
                not_finite.discard(slot)
                failures.setdefault(slot, RowFailure(ErrorCode.NON_FINITE_LOGITS, NO_TOKEN))
            not_finite.update(slots[~model_finite].tolist())
        for slot in emptied:
            failures.setdefault(slot, RowFailure(
                ErrorCode.NON_FINITE_LOGITS, "embedding_bias, penalties, bans and Parts.stages of this request ban all "
                f"{vocab_size:,} tokens of the vocabulary, or leave a NaN or +inf; at least one logit must stay "
                "finite, and the others finite or -inf; ban fewer tokens, or correct the stage"))
        return failures | dict.fromkeys(not_finite, UNUSABLE)

    def _slots_without_a_token(self, arrays: Mapping[str, np.ndarray]) -> tuple[set[int], set[int]]:
        """Return (slots whose logits were not finite before the stages, slots in which the stages left no token)."""
        not_finite, emptied, slots = set(), set(), self.rows.slots
        if not arrays["finite"].all():
            without = ~arrays["finite"]
            if "emptied" in arrays:
                emptied.update(slots[arrays["emptied"]].tolist())
                without &= ~arrays["emptied"]
            not_finite.update(slots[without].tolist())
        if self.beams is not None:
            not_finite.update(self.beams.slots[~arrays["beam_finite"]].tolist())
            emptied.update(self.beams.exhausted_slots(arrays))
        return not_finite, emptied - not_finite
