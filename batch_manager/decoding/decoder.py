"""Logits to tokens: stages, the draw, and what is reported about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..handover import SlotSetup
from ..triton_kernels import dispatch
from .beam_draw import BeamRows, DrawnBeams, find_candidates, to_log_probs
from .beam_search import BeamSearches
from .history import TokenHistory
from .logits_post_processors import LogitsPostProcessors, PostProcessed
from .logits_return import generation_logits
from .logprobs import chosen_log_probs
from .sampling import argmax, sample
from .slots import DrawRows, SlotState, changes_logits, wants_history
from .stages import LogitsStage, default_stages, wanted_stages
from .stop import StopWords, finish_codes
from .top_p_decay import TopPDecay


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, on the device.

    tokens            [r] int32 or int64; meaningless where not finite
    finish            [r] uint8
    finite            [r] bool: False where no token can be drawn from a row's logits
    log_probs         [r] float32, or None when nobody asked; 0 in the rows of those who did not
    post_processed    the rows that users' functions changed; None when there are none
    logits_slots      slots of the rows of `logits` [q, vocab] float32, as the model gave them; None when nobody asked
    beams             what was drawn for beams, of which the first four say nothing; None when there are none
    emptied           [r] bool: not finite, but finite before the stages; None: no row has a stage
    """

    tokens: torch.Tensor
    finish: torch.Tensor
    finite: torch.Tensor
    log_probs: torch.Tensor | None
    post_processed: PostProcessed | None
    logits_slots: list[int]
    logits: torch.Tensor | None
    beams: DrawnBeams | None = None
    emptied: torch.Tensor | None = None


class GptDecoder:
    """Draws one token per row, and the next tokens of beams. Work that no row of a step asks for is not done.

    state           the per-slot state; the token drawn is kept there by `keep`, last of all
    searches        the slots that have beams; their tokens are kept there, when the host has judged them
    history         tokens of the sequences for which anything but the model depends on them; those of beams are
                    written before each step, from the search that the step starts from
    stages          what is done to logits; None: `stages.default_stages`
    deterministic   a row's bits do not depend on the others: on a CPU, where torch shares work out by the number of
                    rows, each row is staged and drawn alone, and so are the beams of each sequence. Kernels take rows
                    alone anyhow, and so does plain argmax.
    """

    def __init__(self, num_slots: int, device: torch.device, stages: Sequence[LogitsStage] | None = None,
                 deterministic: bool = False) -> None:
        self.state = SlotState(num_slots, device)
        self._post_processors = LogitsPostProcessors()
        self.searches = BeamSearches()
        self.history = TokenHistory(num_slots, device)
        self._stages = default_stages(num_slots, device, self.history) if stages is None else tuple(stages)
        self._stop_words = StopWords(num_slots, device, self.history)
        self._top_p_decay = TopPDecay(num_slots, device)
        self._kernel = dispatch.kernel("sample_token", device) if dispatch.use_triton(device) else None
        self._one_by_one = deterministic and self._kernel is None
        self._beam_kernel = dispatch.kernel("beam_topk", device)
        self._zeros = torch.zeros(num_slots, dtype=torch.float32, device=device)

    def set_up(self, setups: Iterable[tuple[int, SlotSetup]]) -> None:
        """Sequences take their slots. Doing so again is harmless."""
        setups = list(setups)
        self.state.set_up(setups)
        for slot, setup in setups:
            self.searches.set_up(slot, setup, is_changed=changes_logits(setup),
                                 needs_history=changes_logits(setup) and wants_history(setup))
        parts = (self._post_processors, self.history, self._top_p_decay, self._stop_words, *self._stages)
        for part in parts:
            for slot, setup in setups:
                part.set_up(slot, setup)

    def draw(self, logits: torch.Tensor, rows: DrawRows, beam_rows: BeamRows | None = None) -> Drawn:
        """Draw from `logits` [r, vocab] float32, which post-processors and stages may change. Keeps nothing.

        beam_rows   which of the rows belong to beams, if any
        """
        returned = generation_logits(logits, rows, self.state)    # a copy, before anything is done to them
        post_processed = self._post_processors.apply(logits, rows.slots) if self._post_processors else None
        beams = None
        if beam_rows is not None:
            found = self._find_candidates(beam_rows.beam_logits(logits), beam_rows)
            beams = DrawnBeams(beam_rows, self.searches, found)
            logits, rows = beam_rows.single_logits(logits), beam_rows.singles
        if self._one_by_one and len(rows) > 1 and self._is_more_than_argmax(rows):
            tokens, finite, log_probs, emptied = self._draw_one_by_one(logits, rows)
        else:
            tokens, finite, log_probs, emptied = self._stage_and_draw(logits, rows)
        finish = self._stop_words.mark(finish_codes(tokens, self.state.column("end_id", rows)), tokens, rows)
        return Drawn(tokens, finish, finite, log_probs, post_processed, *returned, beams, emptied)

    def _find_candidates(self, logits: torch.Tensor, rows: BeamRows) -> Sequence[torch.Tensor]:
        temperature, finite = self.state.column("temperature", rows.beams), None
        if rows.is_changed.any():
            for group, texts in rows.texts:
                self.history.put_texts(group.slot, group.position - texts.shape[1], texts)
            finite = to_log_probs(logits, temperature, rows, one_by_one=self._one_by_one)
        for stage in wanted_stages(self._stages, rows.beams):
            stage.apply(logits, rows.beams)
        *found, drawable = find_candidates(self._beam_kernel, logits, temperature, rows, one_by_one=self._one_by_one)
        # A beam whose every continuation is banned yields nothing, and the others go on.
        return *found, drawable if finite is None else finite.where(rows.device_is_changed, drawable)

    def keep(self, drawn: Drawn, rows: DrawRows) -> None:
        """The next step is fed what was drawn, and its draws know of it."""
        self.history.append(rows, drawn.tokens)
        self._top_p_decay.keep(rows, drawn.tokens)
        self.state.keep_tokens(rows, drawn.tokens)

    def _stage_and_draw(self, logits: torch.Tensor, rows: DrawRows):
        # Whether the stages left nothing to draw from, or what they were given had nothing, shows before them only.
        stages = wanted_stages(self._stages, rows)
        given = logits.amax(1).isfinite() if stages else None
        for stage in stages:
            stage.apply(logits, rows)
        draw = self._draw_on_host if self._kernel is None else self._draw_in_kernel
        tokens, finite, log_probs = draw(logits, rows)
        return tokens, finite, log_probs, None if given is None else given & ~finite

    def _draw_one_by_one(self, logits: torch.Tensor, rows: DrawRows):
        """Each row as if it were the step; log-probabilities are 0 for those who did not ask."""
        drawn = [self._stage_and_draw(logits[row : row + 1].clone(), rows.one(row)) for row in range(len(rows))]
        tokens, finite, log_probs, emptied = zip(*drawn)
        if any(row is not None for row in log_probs):
            none = torch.zeros(1, dtype=torch.float32, device=logits.device)
            log_probs = torch.cat([none if row is None else row for row in log_probs])
        else:
            log_probs = None
        if any(row is not None for row in emptied):
            emptied = torch.cat([torch.zeros_like(of) if row is None else row for row, of in zip(emptied, finite)])
        else:
            emptied = None
        return torch.cat(tokens), torch.cat(finite), log_probs, emptied

    def _is_more_than_argmax(self, rows: DrawRows) -> bool:
        host = self.state.host
        return bool(host["samples"][rows.slots].any() or host["log_probs"][rows.slots].any()
                    or any(stage.is_wanted(rows) for stage in self._stages))

    def _draw_on_host(self, logits: torch.Tensor, rows: DrawRows):
        host, slots = self.state.host, rows.slots
        tokens, maxima = argmax(logits)
        finite = maxima.isfinite()
        samples = host["samples"][slots] & finite.numpy()
        if samples.any():
            # A view where everybody samples: rows of logits are large.
            chosen = slice(None) if samples.all() else samples.nonzero()[0]
            of = slots[chosen]
            tokens[chosen] = sample(logits[chosen], host["temperature"][of], host["top_k"][of],
                                    self._top_p(rows).numpy()[chosen], host["seed"][of], rows.positions[chosen],
                                    host["min_p"][of])
        return tokens, finite, self._log_probs(logits, tokens, rows)

    def _top_p(self, rows: DrawRows) -> torch.Tensor:
        top_p = self.state.column("top_p", rows)
        return self._top_p_decay.top_p(rows, top_p) if self._top_p_decay.is_wanted(rows) else top_p

    def _min_p(self, rows: DrawRows) -> torch.Tensor:
        if self.state.host["min_p"][rows.slots].any():
            return self.state.column("min_p", rows)
        if len(rows) > len(self._zeros):
            self._zeros = self._zeros.new_zeros(2 * len(rows))
        return self._zeros[: len(rows)]

    def _log_probs(self, logits: torch.Tensor, tokens: torch.Tensor, rows: DrawRows) -> torch.Tensor | None:
        asked = self.state.host["log_probs"][rows.slots]
        if not asked.any():
            return None
        temperature = self.state.column("temperature", rows)
        if asked.all():
            return chosen_log_probs(logits, tokens, temperature)
        asked = torch.from_numpy(asked.nonzero()[0])
        log_probs = torch.zeros(len(tokens), dtype=torch.float32, device="cpu")
        log_probs[asked] = chosen_log_probs(logits[asked], tokens[asked], temperature[asked])
        return log_probs

    def _draw_in_kernel(self, logits: torch.Tensor, rows: DrawRows):
        column = self.state.column
        tokens, log_probs, finite = self._kernel(
            logits, column("temperature", rows), column("top_k", rows), self._top_p(rows), column("seed", rows),
            rows.device_positions.int(), min_p=self._min_p(rows))
        asked = self.state.host["log_probs"][rows.slots]
        if not asked.any():
            return tokens, finite, None
        if not asked.all():
            log_probs = torch.where(torch.from_numpy(asked).to(log_probs.device), log_probs, 0)
        return tokens, finite, log_probs
