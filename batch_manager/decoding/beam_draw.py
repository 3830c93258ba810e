"""Beams between device and host: rows of logits to candidates there, candidates to what becomes of them here."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .beam_search import BeamSearch, BeamSearches
from .log_prob_report import log_distribution
from .output_rows import BeamStep
from .slots import DrawRows

Upload = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class BeamGroup:
    """The beams of one sequence in a step: their tokens are to stand at `position`, their rows of logits are `count`
    from `first` on among those of all beams."""

    slot: int
    position: int
    search: BeamSearch
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class BeamRows:
    """The rows of a step that belong to beams, and the others; what the device must know to look for candidates.

    singles, beams                   the others, and those of beams: a sequence's beams one after the other
    device_singles, device_beams     [s], [b] int64: where they are among all rows
    groups                           of the beams, in order
    sums, rates, starts              [b], [groups] float32 and [groups + 1] int32, on the device, for `beam_topk`
    is_changed                       [b] bool, on the host and on the device: whether stages act on a row
    texts                            what beams hold, for the stages that look at it: a group and [its count, n] int32
                                     on the device
    """

    singles: DrawRows
    beams: DrawRows
    device_singles: torch.Tensor
    device_beams: torch.Tensor
    groups: list[BeamGroup]
    sums: torch.Tensor
    rates: torch.Tensor
    starts: torch.Tensor
    is_changed: np.ndarray
    device_is_changed: torch.Tensor
    texts: list[tuple[BeamGroup, torch.Tensor]]

    @staticmethod
    def of(rows: DrawRows, searches: BeamSearches, upload: Upload) -> "BeamRows":
        is_beam = np.fromiter((slot in searches for slot in rows.slots.tolist()), bool, len(rows))
        singles, beams = np.flatnonzero(~is_beam), np.flatnonzero(is_beam)
        groups = _groups_of(rows.slots[beams], rows.positions[beams], searches)
        counts = [group.count for group in groups]
        beam = np.concatenate([np.arange(count) for count in counts])
        is_changed = np.repeat([group.search.is_changed for group in groups], counts)
        device_singles, device_beams, device_beam, device_is_changed, sums, rates, starts = upload([
            singles, beams, beam, is_changed, np.concatenate([group.search.cum_log_probs for group in groups]),
            np.array([group.search.sampling.beam_search_diversity_rate for group in groups], np.float32),
            np.array([*(group.first for group in groups), len(beams)], np.int32)])

        told = [group for group in groups if group.search.needs_history and group.search.texts.shape[1]]
        texts = upload([group.search.texts for group in told]) if told else ()

        def part(of: np.ndarray, device_of: torch.Tensor, *which_beams) -> DrawRows:
            return DrawRows(rows.slots[of], rows.positions[of], rows.device_slots[device_of],
                            rows.device_positions[device_of], *which_beams)

        return BeamRows(part(singles, device_singles), part(beams, device_beams, beam, device_beam), device_singles,
                        device_beams, groups, sums, rates, starts, is_changed, device_is_changed,
                        list(zip(told, texts)))

    def single_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[self.device_singles]

    def beam_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Their rows of `logits`; that itself where there are no others, as it is large."""
        return logits[self.device_beams] if len(self.singles) else logits


class DrawnBeams:
    """What a step drew for its beams: on its way to the host in `tensors`, judged by `finish`.

    slots     [b] int32, of the rows
    tensors   to be read back: beam_log_probs, beam_parents, beam_tokens [groups, candidates], beam_finite [b] bool
    """

    def __init__(self, rows: BeamRows, searches: BeamSearches, tensors: Sequence[torch.Tensor]) -> None:
        self.slots = rows.beams.slots
        self._groups, self._searches = rows.groups, searches
        self.tensors = dict(zip(("beam_log_probs", "beam_parents", "beam_tokens", "beam_finite"), tensors, strict=True))

    def slots_without_a_text(self, arrays: dict[str, np.ndarray]) -> list[int]:
        """The slots of which no beam goes on, and none has come to its end. arrays as `finish` takes them"""
        can_go_on = np.isfinite(arrays["beam_log_probs"][:, 0])
        return [group.slot for place, group in enumerate(self._groups)
                if not can_go_on[place] and not group.search.has_finished]

    def finish(self, arrays: dict[str, np.ndarray], failed: Collection[int]) -> dict[int, BeamStep]:
        """slot -> what its beams yielded.

        arrays   `tensors` on the host
        failed   slots that are passed over: their rows hold nothing to go by
        The searches go on from here, last of all: nothing of the step can fail any more.
        """
        columns = arrays["beam_log_probs"], arrays["beam_parents"], arrays["beam_tokens"]
        advanced = [(group, *group.search.advance(*(column[place, :group.search.num_candidates] for column in columns)))
                    for place, group in enumerate(self._groups) if group.slot not in failed]
        for group, after, _ in advanced:
            self._searches.keep(group.slot, group.position, after)
        return {group.slot: step for group, _, step in advanced}


def to_log_probs(logits: torch.Tensor, temperature: torch.Tensor, rows: BeamRows, *,
                 one_by_one: bool = False) -> torch.Tensor:
    """Make log-probabilities of the rows that stages act on. logits [b, vocab] float32 and temperature [b]

    one_by_one   those of each group as if it were the step
    Returns      [b] bool: which rows were finite
    """
    parts = [np.flatnonzero(rows.is_changed)]
    if one_by_one:
        parts = [np.arange(group.first, group.first + group.count) for group in rows.groups if group.search.is_changed]
    finite = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for part in parts:
        # A view where it is every row: rows of logits are large.
        of = slice(None) if len(part) == len(logits) else torch.from_numpy(part).to(logits.device)
        log_probs = log_distribution(logits[of], temperature[of])
        logits[of], finite[of] = log_probs, log_probs.amax(1).isfinite()
    return finite


def find_candidates(kernel: Callable, logits: torch.Tensor, temperature: torch.Tensor, rows: BeamRows, *,
                    one_by_one: bool = False) -> Sequence[torch.Tensor]:
    """`beam_topk` of a step. logits [b, vocab] float32 and temperature [b], of the rows of beams; log-probabilities in
    the rows that stages act on.

    one_by_one   each group as if it were the step
    """
    count = max(group.search.num_candidates for group in rows.groups)
    if not one_by_one:
        return kernel(logits, temperature, rows.sums, rows.rates, rows.starts, count,
                      max(group.count for group in rows.groups), are_log_probs=rows.device_is_changed)
    found = []
    for place, group in enumerate(rows.groups):
        of = slice(group.first, group.first + group.count)
        starts = torch.tensor([0, group.count], dtype=torch.int32, device=logits.device)
        found.append(kernel(logits[of].clone(), temperature[of], rows.sums[of], rows.rates[place : place + 1], starts,
                            count, group.count, are_log_probs=rows.device_is_changed[of]))
    return [torch.cat(column) for column in zip(*found)]


def _groups_of(slots: np.ndarray, positions: np.ndarray, searches: BeamSearches) -> list[BeamGroup]:
    firsts = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
    return [BeamGroup(int(slots[first]), int(positions[first]),
                      searches.at(int(slots[first]), int(positions[first])), first, stop - first)
            for first, stop in zip(firsts, [*firsts[1:], len(slots)])]
