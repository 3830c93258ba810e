"""The backend of rank 0: it sends each step to the other ranks, and runs its own part of it."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from ..handover import ScheduledBatch, StepOutput
from ..seams import BackendInfo, MemoryUsage, ModelBackend, PendingStep
from .ranks import Leader, RankError


class LeadingBackend:
    """The seams.ModelBackend of an engine of several ranks. It exists on rank 0 only.

    local   the backend of this rank's part. It may have these methods beside those of ModelBackend:
                take_drawn(batch) -> tuple of arrays   what the other ranks need for a step, such as the tokens with
                                                       which its sequences continue. They are the arguments of the
                                                       other ranks' `put_drawn`
                figures() -> Mapping[str, int]
    leader  the channels to the other ranks

    A step succeeds if it succeeds on every rank. If it fails on one, every rank has done it, and it can be run again.
    """

    def __init__(self, local: ModelBackend, leader: Leader) -> None:
        self.info: BackendInfo = local.info
        self.local, self.leader = local, leader
        self._take_drawn: Callable[[ScheduledBatch], tuple[Any, ...]] = getattr(local, "take_drawn", _nothing)
        self._figures_of_local = getattr(local, "figures", dict)
        self._control_s = 0.0

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Send the step to the other ranks, then launch this rank's part; see seams.ModelBackend."""
        began = perf_counter()
        number = self.leader.send_step(batch, self._take_drawn(batch))
        self._control_s += perf_counter() - began
        try:
            pending = self.local.start(batch)
        except BaseException:
            self._wait_done_after_failure(number)
            raise
        return LedBatch(self, number, pending)

    def _wait_done_after_failure(self, number: int) -> None:
        """Wait for the other ranks. Their errors do not matter, because the step failed here. Raises DeviceLostError.
        """
        try:
            self.leader.wait_done(number)
        except RankError:
            return

    def finish(self, number: int, pending: PendingStep) -> StepOutput:
        """Finish this rank's part of a step, and wait for the other ranks."""
        try:
            output = pending.finish()
        except BaseException:
            self._wait_done_after_failure(number)
            raise
        began = perf_counter()
        try:
            self.leader.wait_done(number)
        finally:
            self._control_s += perf_counter() - began
        return output

    def check(self) -> None:
        """Raise DeviceLostError if a rank was lost."""
        self.leader.check()

    def memory_usage(self) -> MemoryUsage:
        return self.local.memory_usage()

    def figures(self) -> Mapping[str, int]:
        """Return the statistics of this rank's part and of the control plane."""
        seconds, self._control_s = self._control_s, 0.0
        return {**self._figures_of_local(), "World Size": self.leader.num_ranks,
                "Control Time Microseconds": round(seconds * 1e6), "Slowest Rank": self.leader.slowest_rank,
                "Refused Rank Differences": self.leader.num_differences}

    def close(self) -> None:
        """End the other ranks, then close this rank's part. Idempotent."""
        if not self.leader.is_starting:                # else the start says why it failed
            self.leader.close()
        self.local.close()


def _nothing(batch: ScheduledBatch) -> tuple[Any, ...]:
    return ()


class LedBatch:
    """A step that every rank runs."""

    __slots__ = ("_backend", "_number", "_pending")

    def __init__(self, backend: LeadingBackend, number: int, pending: PendingStep) -> None:
        self._backend, self._number, self._pending = backend, number, pending

    @property
    def choice(self) -> Any:
        """The form of this rank's part, see docs/steps.md; None if the backend has no forms."""
        return getattr(self._pending, "choice", None)

    def finish(self) -> StepOutput:
        """Wait for the step on every rank and return this rank's output; see seams.PendingStep."""
        return self._backend.finish(self._number, self._pending)
