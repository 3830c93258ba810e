"""Beams between device and host: rows of logits to candidates there, candidates to what becomes of them here."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..handover import BeamOutput
from .beam_search import BeamSearch, BeamSearches
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
    """

    singles: DrawRows
    beams: DrawRows
    device_singles: torch.Tensor
    device_beams: torch.Tensor
    groups: list[BeamGroup]
    sums: torch.Tensor
    rates: torch.Tensor
    starts: torch.Tensor

    @staticmethod
    def of(rows: DrawRows, searches: BeamSearches, upload: Upload) -> "BeamRows":
        is_beam = np.fromiter((slot in searches for slot in rows.slots.tolist()), bool, len(rows))
        singles, beams = np.flatnonzero(~is_beam), np.flatnonzero(is_beam)
        groups = _groups_of(rows.slots[beams], rows.positions[beams], searches)
        device_singles, device_beams, sums, rates, starts = upload([
            singles, beams, np.concatenate([group.search.cum_log_probs for group in groups]),
            np.array([group.search.setup.diversity_rate for group in groups], np.float32),
            np.array([*(group.first for group in groups), len(beams)], np.int32)])

        def part(of: np.ndarray, device_of: torch.Tensor) -> DrawRows:
            return DrawRows(rows.slots[of], rows.positions[of], rows.device_slots[device_of],
                            rows.device_positions[device_of])

        return BeamRows(part(singles, device_singles), part(beams, device_beams), device_singles, device_beams, groups,
                        sums, rates, starts)

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

    def finish(self, arrays: dict[str, np.ndarray], failed: Collection[int]) -> dict[int, BeamOutput]:
        """slot -> what its beams yielded.

        arrays   `tensors` on the host
        failed   slots that are passed over: their rows hold nothing to go by
        The searches go on from here, last of all: nothing of the step can fail any more.
        """
        columns = arrays["beam_log_probs"], arrays["beam_parents"], arrays["beam_tokens"]
        advanced = [(group, *group.search.advance(*(column[place, :group.search.num_candidates] for column in columns)))
                    for place, group in enumerate(self._groups) if group.slot not in failed]
        for group, after, _ in advanced:
            self._searches.keep(group.slot, group.position, group.search, after)
        return {group.slot: output for group, _, output in advanced}


def find_candidates(kernel: Callable, logits: torch.Tensor, temperature: torch.Tensor, rows: BeamRows, *,
                    one_by_one: bool = False) -> Sequence[torch.Tensor]:
    """`beam_topk` of a step. logits [b, vocab] float32 and temperature [b], of the rows of beams.

    one_by_one   each group as if it were the step
    """
    count = max(group.search.num_candidates for group in rows.groups)
    if not one_by_one:
        return kernel(logits, temperature, rows.sums, rows.rates, rows.starts, count,
                      max(group.count for group in rows.groups))
    found = []
    for place, group in enumerate(rows.groups):
        of = slice(group.first, group.first + group.count)
        starts = torch.tensor([0, group.count], dtype=torch.int32, device=logits.device)
        found.append(kernel(logits[of].clone(), temperature[of], rows.sums[of], rows.rates[place : place + 1], starts,
                            count, group.count))
    return [torch.cat(column) for column in zip(*found)]


def _groups_of(slots: np.ndarray, positions: np.ndarray, searches: BeamSearches) -> list[BeamGroup]:
    firsts = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
    return [BeamGroup(int(slots[first]), int(positions[first]),
                      searches.at(int(slots[first]), int(positions[first])), first, stop - first)
            for first, stop in zip(firsts, [*firsts[1:], len(slots)])]
