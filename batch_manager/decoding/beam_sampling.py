"""Sampling for beams: finds the best continuations on the device, and advances the beam searches on the host.

The best continuations of a sequence's beams are called candidates.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .beam_search import BeamSearch, BeamSearches
from .log_prob_report import log_distribution
from .output_rows import BeamStep
from .slots import SamplingRows, Send


@dataclass(frozen=True, slots=True)
class BeamGroup:
    """The beams of one sequence in a step.

    The step samples their tokens at `position`, from rows first..first + count - 1 of the logits of all beams.
    """

    slot: int
    position: int
    search: BeamSearch
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class BeamRows:
    """The rows of a step, split into b rows of beams and s other rows, with the arguments of `beam_topk`.

    singles                          the s rows of sequences without beams
    beams                            the b rows of beams; the rows of a sequence are contiguous
    device_singles, device_beams     [s] and [b] int64 on the device: indices of `singles` and `beams` among all rows
    groups                           a BeamGroup for each sequence with beams, in order
    sums                             [b] float32 on the device: cumulative log-probability of each beam
    rates                            [groups] float32 on the device: beam_search_diversity_rate of each group
    starts                           [groups + 1] int32 on the device: first row of each group, then b
    is_changed                       [b] bool, on the host and on the device: whether stages act on a row
    outputs                          list of (group, outputs of its beams [count, n] int32 on the device), for the
                                     groups with a stage that reads outputs
    """

    singles: SamplingRows
    beams: SamplingRows
    device_singles: torch.Tensor
    device_beams: torch.Tensor
    groups: list[BeamGroup]
    sums: torch.Tensor
    rates: torch.Tensor
    starts: torch.Tensor
    is_changed: np.ndarray
    device_is_changed: torch.Tensor
    outputs: list[tuple[BeamGroup, torch.Tensor]]

    @staticmethod
    def of(rows: SamplingRows, searches: BeamSearches, send: Send) -> "BeamRows":
        is_beam = np.fromiter((slot in searches for slot in rows.slots.tolist()), bool, len(rows))
        singles, beams = np.flatnonzero(~is_beam), np.flatnonzero(is_beam)
        groups = _groups_of(rows.slots[beams], rows.positions[beams], searches)
        counts = [group.count for group in groups]
        beam = np.concatenate([np.arange(count) for count in counts])
        is_changed = np.repeat([group.search.is_changed for group in groups], counts)
        device_singles, device_beams, device_beam, device_is_changed, sums, rates, starts = send([
            singles, beams, beam, is_changed, np.concatenate([group.search.cum_log_probs for group in groups]),
            np.array([group.search.sampling.beam_search_diversity_rate for group in groups], np.float32),
            np.array([*(group.first for group in groups), len(beams)], np.int32)])

        read = [group for group in groups if group.search.needs_history and group.search.outputs.shape[1]]
        outputs = send([group.search.outputs for group in read]) if read else ()

        def part(of: np.ndarray, device_of: torch.Tensor, *which_beams) -> SamplingRows:
            return SamplingRows(rows.slots[of], rows.positions[of], rows.device_slots[device_of],
                                rows.device_positions[device_of], *which_beams)

        return BeamRows(part(singles, device_singles), part(beams, device_beams, beam, device_beam), device_singles,
                        device_beams, groups, sums, rates, starts, is_changed, device_is_changed,
                        list(zip(read, outputs)))

    def single_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[self.device_singles]

    def beam_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the rows of `logits` that belong to beams. If all rows do, returns `logits` without a copy."""
        return logits[self.device_beams] if len(self.singles) else logits


class SampledBeams:
    """The candidates for the beams of a step. `finish` advances the searches when the candidates are on the host.

    slots     [b] int32: slot of each row. The b rows are the rows of the sequences with beams, one for each beam
    tensors   name -> tensor on the device, to be copied to the host: beam_log_probs, beam_parents and beam_tokens
              [groups, candidates], with one group for each sequence with beams; beam_finite [b] bool
    """

    def __init__(self, rows: BeamRows, searches: BeamSearches, tensors: Sequence[torch.Tensor]) -> None:
        self.slots = rows.beams.slots
        self._groups, self._searches = rows.groups, searches
        self.tensors = dict(zip(("beam_log_probs", "beam_parents", "beam_tokens", "beam_finite"), tensors, strict=True))

    def exhausted_slots(self, arrays: dict[str, np.ndarray]) -> list[int]:
        """Return the slots whose beams have no continuation and no finished hypothesis.

        arrays   copies of `tensors` on the host
        """
        has_continuation = np.isfinite(arrays["beam_log_probs"][:, 0])
        return [group.slot for index, group in enumerate(self._groups)
                if not has_continuation[index] and not group.search.has_finished]

    def finish(self, arrays: dict[str, np.ndarray], failed: Collection[int]) -> dict[int, BeamStep]:
        """Advance the search of each sequence, and return slot -> BeamStep of the sequence.

        arrays   copies of `tensors` on the host
        failed   slots to skip, because their logits are unusable
        Mutates  the searches, after all operations that can fail
        """
        columns = arrays["beam_log_probs"], arrays["beam_parents"], arrays["beam_tokens"]
        advanced = [(group, *group.search.advance(*(column[index, :group.search.num_candidates] for column in columns)))
                    for index, group in enumerate(self._groups) if group.slot not in failed]
        for group, after, _ in advanced:
            self._searches.keep(group.slot, group.position, after)
        return {group.slot: step for group, _, step in advanced}


def to_log_probs(logits: torch.Tensor, temperature: torch.Tensor, rows: BeamRows, send: Send, *,
                 one_by_one: bool = False) -> torch.Tensor:
    """Turn the rows of logits on which stages act into log-probabilities, in place.

    Returns [b] bool: False for a row on which stages act and whose logits contain NaN or +inf, or only -inf; else True.

    send         function that uploads arrays in one copy. It does not wait for the copy
    one_by_one   compute the beams of each sequence separately
    Shapes       logits [b, vocab] float32; temperature [b]
    """
    parts = [np.flatnonzero(rows.is_changed)]
    if one_by_one:
        parts = [np.arange(group.first, group.first + group.count) for group in rows.groups if group.search.is_changed]
    finite = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for part in parts:
        # A view if the part has all rows, because a copy is large.
        of = slice(None) if len(part) == len(logits) else send([part])[0]
        log_probs = log_distribution(logits[of], temperature[of])
        logits[of], finite[of] = log_probs, log_probs.amax(1).isfinite()
    return finite


def find_candidates(kernel: Callable, logits: torch.Tensor, temperature: torch.Tensor, rows: BeamRows, *,
                    one_by_one: bool = False) -> Sequence[torch.Tensor]:
    """Return the candidates for the beams of a step: the results of the operation `beam_topk`.

    kernel       implementation of `beam_topk`
    logits       [b, vocab] float32; log-probabilities in the rows on which stages act
    temperature  [b]
    one_by_one   compute the beams of each sequence separately; for a CPU
    """
    count = max(group.search.num_candidates for group in rows.groups)
    if not one_by_one:
        return kernel(logits, temperature, rows.sums, rows.rates, rows.starts, count,
                      max(group.count for group in rows.groups), are_log_probs=rows.device_is_changed)
    found = []
    for index, group in enumerate(rows.groups):
        of = slice(group.first, group.first + group.count)
        starts = torch.tensor([0, group.count], dtype=torch.int32, device="cpu")
        found.append(kernel(logits[of].clone(), temperature[of], rows.sums[of], rows.rates[index : index + 1], starts,
                            count, group.count, are_log_probs=rows.device_is_changed[of]))
    return [torch.cat(column) for column in zip(*found)]


def _groups_of(slots: np.ndarray, positions: np.ndarray, searches: BeamSearches) -> list[BeamGroup]:
    firsts = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
    return [BeamGroup(int(slots[first]), int(positions[first]),
                      searches.at(int(slots[first]), int(positions[first])), first, stop - first)
            for first, stop in zip(firsts, [*firsts[1:], len(slots)])]
