"""The decoder: applies the stages to logits, samples tokens and collects the values that requests asked for."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..handover import END_ID, NOT_FINISHED, SlotSetup
from ..sampling_config import PARAMETERS
from ..triton_kernels import dispatch
from ..triton_kernels.cpu.native.library import Library
from ..triton_kernels.sample_scratch import BUCKETS
from .acceptance import RatioRows, decided_by_ratio, offsets_of
from .beam_sampling import BeamRows, SampledBeams, find_candidates, to_log_probs
from .beam_search import BeamSearches
from .end_ids import MoreEndIds
from .history import TokenHistory
from .log_prob_report import REPORTED, log_distribution, raw_log_probs, report
from .logits_post_processors import LogitsPostProcessors
from .logits_return import generation_logits
from .logits_rows import LogitsRows
from .logits_stage import LogitsStage
from .plain_sampling import sample_plain
from .sampled_step import SampledStep, SampledTokens
from .slots import (
    BEAMS,
    GENERATION_LOGITS,
    HISTORY,
    LOG_PROBS,
    MORE_END_IDS,
    POST_PROCESSED,
    RAW_LOG_PROBS,
    SAMPLES,
    STAGES,
    STOP_WORDS,
    SamplingRows,
    SlotState,
)
from .stages import Stages, default_stages
from .stop import StopWords

# Fields of SamplingConfig -> the matching arguments of `sample_token`.
SAMPLED_BY = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "random_seed": "seed"}
IN_FLOAT32 = GENERATION_LOGITS | POST_PROCESSED | BEAMS | STAGES     # features that need float32 logits
READS_LOGITS = IN_FLOAT32 | SAMPLES | LOG_PROBS | REPORTED   # features that need more than the largest logit
TORCH_DTYPES = {np.float32: torch.float32, np.int32: torch.int32, np.int64: torch.int64}
assert (NOT_FINISHED, END_ID) == (0, 1)                 # so that a bool is a finish reason


class GptDecoder:
    """Samples one token for each row of logits, or finds candidates for beams. Skips features that no row has.

    state           per-slot state. `keep` updates histories and stages, and then stores the sampled tokens in `state`
    searches        beam searches by slot; they advance when the host has read the candidates
    history         token histories of the sequences whose stages or stop words need them. In a step
                    with beams, the decoder writes the beams' outputs so far to the history before the stages read it
    stages          the changes made to logits before sampling
    own_stages      custom stages, which run between the stages of `stages.default_stages`, see stages.py
    deterministic   True: the bits of a row do not depend on the other rows. On a CPU, torch splits work by the number
                    of rows. The decoder therefore samples a row with a custom stage or a test by ratios on its own,
                    and processes the beams of each sequence separately; so it samples without `native`. The built-in
                    stages, the compiled library, Triton's kernels and a plain argmax process rows independently in any
                    case
    native          the library of compiled steps, which then computes the probabilities of sampled tokens; None: torch
    """

    def __init__(self, state: SlotState, own_stages: Sequence[LogitsStage] = (), deterministic: bool = False,
                 native: Library | None = None) -> None:
        self.state, device = state, state.device
        state.add_columns(SAMPLED_BY)
        self._post_processors = LogitsPostProcessors(state.send)
        self.searches = BeamSearches()
        self.history = TokenHistory(self.state)
        self.stages = Stages(default_stages(self.state, own_stages), self.state)
        self._more_end_ids = MoreEndIds(self.state)
        self._stop_words = StopWords(self.state)
        self._sample_token = dispatch.kernel("sample_token", device)
        if native is not None:
            self._sample_token = partial(self._sample_token, native=native)
        self._samples_any_dtype = dispatch.use_triton(device)
        self._one_by_one = deterministic and not dispatch.use_triton(device)
        # What `_one_by_one` is needed for.
        self._singly = self.stages.bits_of(own_stages) | (0 if native else SAMPLES | LOG_PROBS)
        self._all_greedy: dict[str, Any] = {}
        self._beam_kernel = dispatch.kernel("beam_topk", device)

    def set_up(self, setups: Iterable[tuple[int, SlotSetup]]) -> None:
        """Set up sequences in their slots. Idempotent."""
        for slot, setup in setups:
            self.state.set_up(slot, setup)
            features, needs_history = self.stages.set_up(slot, setup)
            self.searches.set_up(slot, setup, is_changed=features != 0, needs_history=needs_history)
            if self._more_end_ids.set_up(slot, setup):
                features |= MORE_END_IDS
            self._stop_words.set_up(slot, setup)
            if self._stop_words.is_active(setup):
                features |= STOP_WORDS
                needs_history = needs_history or self._stop_words.needs_history(setup)
            if needs_history:
                features |= HISTORY
                self.history.set_up(slot, setup)
            self._post_processors.set_up(slot, setup)
            self.state.features[slot] |= features
        self.state.upload()

    def sample(self, logits: torch.Tensor, rows: SamplingRows, ratio: RatioRows | None = None,
               drafts: tuple[np.ndarray, np.ndarray] | None = None) -> SampledStep:
        """Sample from `logits` [r, vocab], of any float dtype. Stores nothing; `keep` stores the sampled tokens.

        rows      slot and position of each row of logits; the beams of a sequence are contiguous
        ratio     rows whose drafts are tested by ratios, in a step without beams; None: there are none
        drafts    (counts, drafts) as for `assume`, for post-processors; None: the step has no drafts
        Mutates   logits, by post-processors and stages
        """
        logits_rows = LogitsRows(rows, self.state, self.history)
        if logits_rows.features & IN_FLOAT32 or not self._samples_any_dtype:      # else avoid the large copy
            logits = logits.float()
        slots, asked, returned, raw, post_processed, beams = rows.slots, [], None, None, None, None
        if logits_rows.features & GENERATION_LOGITS:    # copied before the logits are changed
            asked, returned = generation_logits(logits, logits_rows)
        if logits_rows.features & RAW_LOG_PROBS:        # computed before the logits are changed
            raw = raw_log_probs(logits, logits_rows, self._one_by_one)
        if logits_rows.features & POST_PROCESSED:
            post_processed = self._post_processors.apply(logits, slots, drafts)
        if logits_rows.features & BEAMS:
            beam_rows = BeamRows.of(rows, self.searches, self.state.send)
            slots = slots[np.flatnonzero(np.diff(slots, prepend=-1))]
            beams = SampledBeams(beam_rows, self.searches,
                                 self._find_candidates(beam_rows.beam_logits(logits), beam_rows))
            logits = beam_rows.single_logits(logits)
            logits_rows = LogitsRows(beam_rows.singles, self.state, self.history)
        alone = self._one_by_one and len(logits_rows) > 1 and (
            ratio is not None or logits_rows.features & self._singly != 0)
        sampled = (self._sample_one_by_one if alone else self._stage_and_sample)(logits, logits_rows, ratio)
        log_probs, top = sampled.log_probs, None
        if logits_rows.features & REPORTED:
            top = report(logits, logits_rows, sampled.tokens, log_probs, raw, self._beam_kernel, self._one_by_one)
        if log_probs is not None and not logits_rows.active(LOG_PROBS).all():
            log_probs = torch.where(logits_rows.column("return_log_probs") != 0, log_probs, 0)
        return SampledStep(slots, logits_rows, sampled.tokens, self._finish(sampled.tokens, logits_rows),
                           sampled.finite, log_probs, sampled.emptied, post_processed, asked, returned, top, beams)

    def sample_largest(self, tokens: torch.Tensor, largest: torch.Tensor, rows: SamplingRows) -> SampledStep:
        """Return the result of `sample`, computed from the largest logits alone.

        Requires rows without the features READS_LOGITS: they are greedy and read no logits other than the largest.

        tokens    [r] int64: token of the largest logit, the lowest id among equal logits
        largest   [r] float32: the largest logit; NaN if any logit of the row is NaN
        Mutates   tokens, which become 0 where `largest` is not finite
        """
        logits_rows = LogitsRows(rows, self.state, self.history)
        finite = largest.isfinite()
        if np.count_nonzero(finite.numpy()) != len(finite):
            tokens.masked_fill_(~finite, 0)
        return SampledStep(rows.slots, logits_rows, tokens, self._finish(tokens, logits_rows), finite, None, None, None,
                           [], None)

    def _finish(self, tokens: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Return [r] uint8: the finish reason of each token."""
        finish = (tokens == rows.column("end_id")).view(torch.uint8)          # an end id of -1 matches no token
        if rows.features & MORE_END_IDS:
            finish |= self._more_end_ids.end(tokens, rows).view(torch.uint8)
        return self._stop_words.mark(finish, tokens, rows) if rows.features & STOP_WORDS else finish

    def assume(self, rows: SamplingRows, counts: np.ndarray, drafts: np.ndarray) -> None:
        """Store draft tokens in the state that stages and stop words read, as if they had been sampled.

        Before `sample`, in a step with drafts. `keep` overwrites what is rejected, or later steps do.

        rows     as for `sample`
        counts   [n] number of drafts of each sequence, in the order of the rows
        drafts   [sum of counts] the draft tokens
        """
        features = int(np.bitwise_or.reduce(self.state.features[rows.slots]))
        if not features & (HISTORY | self.stages.decaying):
            return
        offsets, has_draft = offsets_of(counts)
        places = [np.flatnonzero(has_draft)]               # a history takes them at once, top-p decays token by token
        if features & self.stages.decaying:
            places = [np.flatnonzero(has_draft & (offsets == place)) for place in range(int(counts.max()))]
        before = np.cumsum(has_draft) - has_draft
        for chosen in places:
            device_chosen, tokens = self.state.send([chosen, drafts[before[chosen]]])
            part = LogitsRows(SamplingRows(rows.slots[chosen], rows.positions[chosen], rows.device_slots[device_chosen],
                                           rows.device_positions[device_chosen]), self.state, self.history)
            self._store(part, tokens)

    def keep(self, sampled: SampledStep) -> None:
        """Store the sampled tokens in all state that later steps read: newest tokens, token histories and stages."""
        rows = sampled.rows
        self._store(rows, sampled.tokens)
        self.state.last_tokens.put(rows.device_slots, rows.device_positions, sampled.tokens.long())

    def _store(self, rows: LogitsRows, tokens: torch.Tensor) -> None:
        if rows.features & HISTORY:
            self.history.append(rows, rows.active(HISTORY), tokens)
        if rows.features & STAGES:
            self.stages.keep(rows, tokens)

    def plain_counts(self, num_rows: int) -> torch.Tensor:
        """Return new memory for the argument `counts` of `sample_plain`, which the caller must set to zeros.

        If all rows are greedy, pass None to `sample_plain` instead.
        """
        return torch.empty((num_rows, BUCKETS), dtype=torch.int32, device=self.state.device)

    def sample_plain(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
                     counts: torch.Tensor | None, results: torch.Tensor) -> None:
        """Sample and store a token for each row of a step (see runtime/forms/fixed/inputs.py).

        plain_sampling.py describes the arguments.
        """
        sample_plain(self.state, self._sample_token, SAMPLED_BY, logits, slots, positions, counts, results)

    def _find_candidates(self, logits: torch.Tensor, rows: BeamRows) -> Sequence[torch.Tensor]:
        logits_rows, finite = LogitsRows(rows.beams, self.state, self.history), None
        temperature = logits_rows.column("temperature")
        if rows.is_changed.any():
            for group, outputs in rows.outputs:
                self.history.put_outputs(group.slot, group.position - outputs.shape[1], outputs)
            finite = to_log_probs(logits, temperature, rows, self.state.send, one_by_one=self._one_by_one)
            for part in [slice(group.first, group.first + group.count) for group in rows.groups
                         ] if self._one_by_one else [slice(None)]:
                self.stages.apply(logits[part], logits_rows.part(part))
        *found, has_finite = find_candidates(self._beam_kernel, logits, temperature, rows, one_by_one=self._one_by_one)
        # For rows that stages changed, take `finite` from before the stages: bans may leave a beam no continuation.
        return *found, has_finite if finite is None else finite.where(rows.device_is_changed, has_finite)

    def _stage_and_sample(self, logits: torch.Tensor, rows: LogitsRows, ratio: RatioRows | None) -> SampledTokens:
        """Apply the stages to the rows, and sample a token for each row. Log-probs of rows with a report are undefined.
        """
        given = None
        if rows.features & STAGES:
            # Checked before the stages, which are at fault for a row without a token only if the row is finite here.
            given = self._given_finite(logits, rows) if self.stages.changes(rows) else None
            self.stages.apply(logits, rows)
        if not rows.features & (SAMPLES | LOG_PROBS):
            tokens, _, finite = self._sample_token(logits, **self._greedy(len(logits)))
            log_probs = None
        else:
            tokens, log_probs, finite = self._sample_token(
                logits, position=rows.device_positions.int(),
                wants_log_prob=torch.from_numpy(rows.active(LOG_PROBS) & ~rows.active(REPORTED)),
                **{argument: rows.column(name) for name, argument in SAMPLED_BY.items()})
            if not rows.features & LOG_PROBS:
                log_probs = None
        if ratio is not None:
            self._decide_by_ratio(logits, rows, ratio, tokens, finite, log_probs)
        return SampledTokens(tokens, finite, log_probs, None if given is None else given & ~finite)

    def _decide_by_ratio(self, logits: torch.Tensor, rows: LogitsRows, ratio: RatioRows, tokens: torch.Tensor,
                         finite: torch.Tensor, log_probs: torch.Tensor | None) -> None:
        """Replace tokens and log-probs of the rows whose drafts are tested by ratios, where logits are finite."""
        (chosen,) = self.state.send([ratio.rows])
        own, before = logits[chosen].float(), tokens[chosen].long()
        columns = {argument: rows.column(name)[chosen] for name, argument in SAMPLED_BY.items()}
        is_finite = finite[chosen] != 0
        decided = decided_by_ratio(own.masked_fill(~is_finite[:, None], 0), ratio.logits, ratio.drafts, before,
                                   position=rows.device_positions[chosen], **columns)
        decided = decided.where(is_finite, before)
        tokens[chosen] = decided.to(tokens.dtype)
        if log_probs is not None:
            log_probs[chosen] = log_distribution(own, columns["temperature"]).gather(1, decided[:, None])[:, 0]

    def _given_finite(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Return [r] bool: whether the logits of each row are finite before the stages.

        On a CPU, rows that no stage changes are not checked, and their value is False.
        """
        changed = rows.active(STAGES)
        if logits.device.type != "cpu" or changed.all():
            return logits.amax(1).isfinite()
        finite = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        changed = torch.from_numpy(changed.nonzero()[0])
        finite[changed] = logits[changed].amax(1).isfinite()
        return finite

    def _greedy(self, num_rows: int) -> dict[str, Any]:
        """Return arguments of `sample_token` that make all rows greedy, without log-probs."""
        if not self._all_greedy or num_rows != len(self._all_greedy["temperature"]):
            device = self.state.device
            self._all_greedy = {
                argument: torch.zeros(num_rows, dtype=TORCH_DTYPES[PARAMETERS[name].dtype], device=device)
                for name, argument in SAMPLED_BY.items()}
            self._all_greedy["position"] = torch.zeros(num_rows, dtype=torch.int32, device=device)
            self._all_greedy["wants_log_prob"] = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
            self._all_greedy["only_greedy"] = True
        return self._all_greedy

    def _sample_one_by_one(self, logits: torch.Tensor, rows: LogitsRows, ratio: RatioRows | None) -> SampledTokens:
        """Apply the stages and sample so that the bits of a row do not depend on the other rows.

        Each row that torch computes is sampled separately. The rows between two of these are sampled together.
        """
        is_single = rows.active(self._singly)
        if ratio is not None:
            is_single[ratio.rows] = True
        # A part starts at each single row and after it.
        starts, parts = np.flatnonzero(is_single | np.append(True, is_single[:-1])).tolist(), []
        for first, end in pairwise([*starts, len(rows)]):
            part = logits[first:end].clone()
            parts.append(self._stage_and_sample(part, rows.part(slice(first, end)),
                                                None if ratio is None else ratio.part(first)))
            if rows.features & REPORTED:                    # a report reads the logits after the stages
                logits[first:end] = part
        return SampledTokens.joined(parts)
