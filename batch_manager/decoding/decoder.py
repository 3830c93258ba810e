"""Logits to tokens: stages, sampling, and what is reported about it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..handover import END_ID, NOT_FINISHED, SlotSetup
from ..sampling_config import PARAMETERS
from ..triton_kernels import dispatch
from ..triton_kernels.sample_scratch import BUCKETS
from .beam_draw import BeamRows, DrawnBeams, find_candidates, to_log_probs
from .beam_search import BeamSearches
from .drawn import Drawn, Sampled
from .end_ids import MoreEndIds
from .history import TokenHistory
from .log_prob_report import REPORTED, raw_log_probs, report
from .logits_post_processors import LogitsPostProcessors
from .logits_return import generation_logits
from .logits_rows import LogitsRows
from .logits_stage import LogitsStage
from .plain_draw import draw_plainly
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
    DrawRows,
    Send,
    SlotState,
)
from .stages import Stages, default_stages
from .stop import StopWords

# What a token is sampled by: fields of SamplingConfig, under the names that `sample_token` has for them.
SAMPLED_BY = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "random_seed": "seed"}
IN_FLOAT32 = GENERATION_LOGITS | POST_PROCESSED | BEAMS | STAGES     # features whose logits are float32
READS_LOGITS = IN_FLOAT32 | SAMPLES | LOG_PROBS | REPORTED   # features for which the largest logit is not enough
TORCH_DTYPES = {np.float32: torch.float32, np.int32: torch.int32, np.int64: torch.int64}
assert (NOT_FINISHED, END_ID) == (0, 1)                 # so that a bool is one of the two


class GptDecoder:
    """Samples one token per row, and the next tokens of beams. Work that no row of a step asks for is not done.

    state           the per-slot state; the token sampled is kept there by `keep`, last of all
    searches        the slots that have beams; their tokens are kept there, when the host has judged them
    history         tokens of the sequences for which anything but the model depends on them; those of beams are
                    written before each step, from the search that the step starts from
    stages          what is done to logits before a token is drawn
    own_stages      changes of logits beside those of `stages.default_stages`, in the place that stages.py says
    deterministic   a row's bits do not depend on the others: on a CPU, where torch shares work out by the number of
                    rows, each row is staged and sampled alone, and so are the beams of each sequence. Kernels take rows
                    alone anyhow, and so does plain argmax
    send            brings arrays to the device in one copy; None: one copy each
    """

    def __init__(self, num_slots: int, device: torch.device, own_stages: Sequence[LogitsStage] = (),
                 deterministic: bool = False, send: Send | None = None) -> None:
        self.state = SlotState(num_slots, device, send)
        self.state.add_columns(SAMPLED_BY)
        self._post_processors = LogitsPostProcessors()
        self.searches = BeamSearches()
        self.history = TokenHistory(device)
        self.stages = Stages(default_stages(self.state, own_stages), self.state)
        self._more_end_ids = MoreEndIds(self.state)
        self._stop_words = StopWords(self.state)
        self._sample_token = dispatch.kernel("sample_token", device)
        self._samples_any_dtype = dispatch.use_triton(device)
        self._one_by_one = deterministic and not dispatch.use_triton(device)
        self._all_greedy: dict[str, Any] = {}
        self._beam_kernel = dispatch.kernel("beam_topk", device)

    def set_up(self, setups: Iterable[tuple[int, SlotSetup]]) -> None:
        """Sequences take their slots. Doing so again is harmless."""
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

    def draw(self, logits: torch.Tensor, rows: DrawRows) -> Drawn:
        """Sample from `logits` [r, vocab], of any float dtype; post-processors and stages may change it. Keeps nothing.

        rows   whose they are; several that follow one another may be the beams of one sequence
        """
        of = LogitsRows(rows, self.state, self.history)
        if of.features & IN_FLOAT32 or not self._samples_any_dtype:     # a copy of rows that are large, unless they are
            logits = logits.float()
        slots, asked, returned, raw, post_processed, beams = rows.slots, [], None, None, None, None
        if of.features & GENERATION_LOGITS:             # a copy, before anything is done to them
            asked, returned = generation_logits(logits, of)
        if of.features & RAW_LOG_PROBS:                 # likewise
            raw = self._raw_log_probs(logits, of)
        if of.features & POST_PROCESSED:
            post_processed = self._post_processors.apply(logits, slots)
        if of.features & BEAMS:
            beam_rows = BeamRows.of(rows, self.searches, self.state.send)
            slots = slots[np.flatnonzero(np.diff(slots, prepend=-1))]
            beams = DrawnBeams(beam_rows, self.searches,
                               self._find_candidates(beam_rows.beam_logits(logits), beam_rows))
            logits, of = beam_rows.single_logits(logits), LogitsRows(beam_rows.singles, self.state, self.history)
        if self._one_by_one and len(of) > 1 and of.features & (STAGES | SAMPLES | LOG_PROBS | REPORTED):
            sampled = self._sample_one_by_one(logits, of, raw)
        else:
            sampled = self._stage_and_sample(logits, of, raw)
        return Drawn(slots, of, sampled.tokens, self._finish(sampled.tokens, of), sampled.finite, sampled.log_probs,
                     sampled.emptied, post_processed, asked, returned, sampled.top, beams)

    def takes_largest(self, rows: DrawRows) -> bool:
        """Whether each row yields the token of its largest logit, and nothing else is asked of the logits."""
        return not np.bitwise_or.reduce(self.state.features[rows.slots]) & READS_LOGITS

    def draw_largest(self, tokens: torch.Tensor, largest: torch.Tensor, rows: DrawRows) -> Drawn:
        """What `draw` makes of logits whose largest are these.

        tokens    [r] int64: which token has the largest logit, the lowest of equals. Set to 0 where that is not finite
        largest   [r] float32: that logit, NaN where one is
        """
        of = LogitsRows(rows, self.state, self.history)
        finite = largest.isfinite()
        if np.count_nonzero(finite.numpy()) != len(finite):
            tokens.masked_fill_(~finite, 0)
        return Drawn(rows.slots, of, tokens, self._finish(tokens, of), finite, None, None, None, [], None)

    def _finish(self, tokens: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """[r] uint8: how each token ends its sequence."""
        finish = (tokens == rows.column("end_id")).view(torch.uint8)          # an end id of -1 is no token's
        if rows.features & MORE_END_IDS:
            finish |= self._more_end_ids.end(tokens, rows).view(torch.uint8)
        return self._stop_words.mark(finish, tokens, rows) if rows.features & STOP_WORDS else finish

    def keep(self, drawn: Drawn) -> None:
        """The next step's input is what was sampled, and what is sampled next depends on it."""
        of = drawn.rows
        if of.features & HISTORY:
            self.history.append(of, of.active(HISTORY), drawn.tokens)
        if of.features & STAGES:
            self.stages.keep(of, drawn.tokens)
        self.state.last_tokens.put(of.device_slots, of.device_positions, drawn.tokens.long())

    def plain_counts(self, num_rows: int) -> torch.Tensor:
        """Memory for `draw_plainly` of rows that may be sampled. The caller sets it to zeros before."""
        return torch.empty((num_rows, BUCKETS), dtype=torch.int32, device=self.state.device)

    def draw_plainly(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
                     counts: torch.Tensor | None, results: torch.Tensor) -> None:
        """Draw and keep, for rows that nothing but the numbers of `sample_token` matters for; see plain_draw.py."""
        draw_plainly(self.state, self._sample_token, SAMPLED_BY, logits, slots, positions, counts, results)

    def _find_candidates(self, logits: torch.Tensor, rows: BeamRows) -> Sequence[torch.Tensor]:
        of, finite = LogitsRows(rows.beams, self.state, self.history), None
        temperature = of.column("temperature")
        if rows.is_changed.any():
            for group, texts in rows.texts:
                self.history.put_texts(group.slot, group.position - texts.shape[1], texts)
            finite = to_log_probs(logits, temperature, rows, one_by_one=self._one_by_one)
            for part in [slice(group.first, group.first + group.count) for group in rows.groups
                         ] if self._one_by_one else [slice(None)]:
                self.stages.apply(logits[part], of.part(part))
        *found, drawable = find_candidates(self._beam_kernel, logits, temperature, rows, one_by_one=self._one_by_one)
        # A beam whose every continuation is banned yields nothing, and the others go on.
        return *found, drawable if finite is None else finite.where(rows.device_is_changed, drawable)

    def _raw_log_probs(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        if not self._one_by_one:
            return raw_log_probs(logits, rows)
        return torch.cat([raw_log_probs(logits[row : row + 1].clone(), rows.part(slice(row, row + 1)))
                          for row in np.flatnonzero(rows.active(RAW_LOG_PROBS)).tolist()])

    def _stage_and_sample(self, logits: torch.Tensor, rows: LogitsRows, raw: torch.Tensor | None) -> Sampled:
        """raw: what `raw_log_probs` gave for these rows; None: none of them asked"""
        given = None
        if rows.features & STAGES:
            # Whether the stages left nothing to sample, or what they were given had nothing, shows before them only.
            given = self._given_finite(logits, rows) if self.stages.changes(rows) else None
            self.stages.apply(logits, rows)
        if not rows.features & (SAMPLES | LOG_PROBS):
            tokens, _, finite = self._sample_token(logits, **self._greedy(len(logits)))
            log_probs = None
        else:
            wants_log_prob = rows.active(LOG_PROBS)
            tokens, log_probs, finite = self._sample_token(
                logits, position=rows.device_positions.int(),
                wants_log_prob=torch.from_numpy(wants_log_prob & ~rows.active(REPORTED)),
                **{argument: rows.column(name) for name, argument in SAMPLED_BY.items()})
            if not rows.features & LOG_PROBS:
                log_probs = None
        top = None
        if rows.features & REPORTED:
            top = report(logits, rows, tokens, log_probs, raw, self._beam_kernel, self.state.send)
        if log_probs is not None and not wants_log_prob.all():
            log_probs = torch.where(rows.column("return_log_probs") != 0, log_probs, 0)
        return Sampled(tokens, finite, log_probs, None if given is None else given & ~finite, top)

    def _given_finite(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """[r] bool: which rows that stages will change are finite before that."""
        changed = rows.active(STAGES)
        if logits.device.type != "cpu" or changed.all():
            return logits.amax(1).isfinite()
        finite = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        changed = torch.from_numpy(changed.nonzero()[0])
        finite[changed] = logits[changed].amax(1).isfinite()
        return finite

    def _greedy(self, num_rows: int) -> dict[str, Any]:
        """What `sample_token` is given where each row is greedy, whatever its numbers are, and wants no log-prob."""
        if not self._all_greedy or num_rows != len(self._all_greedy["temperature"]):
            device = self.state.device
            self._all_greedy = {
                argument: torch.zeros(num_rows, dtype=TORCH_DTYPES[PARAMETERS[name].dtype], device=device)
                for name, argument in SAMPLED_BY.items()}
            self._all_greedy["position"] = torch.zeros(num_rows, dtype=torch.int32, device=device)
            self._all_greedy["wants_log_prob"] = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
            self._all_greedy["only_greedy"] = True
        return self._all_greedy

    def _sample_one_by_one(self, logits: torch.Tensor, rows: LogitsRows, raw: torch.Tensor | None) -> Sampled:
        """Each row as if it were the step; log-probabilities are 0 for those who did not ask."""
        if raw is None:
            raw_of = [None] * len(rows)
        else:
            own = iter(raw.split(1))
            raw_of = [next(own).clone() if asks else None for asks in rows.active(RAW_LOG_PROBS).tolist()]
        return Sampled.joined([
            self._stage_and_sample(logits[row : row + 1].clone(), rows.part(slice(row, row + 1)), raw_of[row])
            for row in range(len(rows))])
