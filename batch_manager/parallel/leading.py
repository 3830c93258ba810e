"""The backend of rank 0: it sends each step to the other ranks, and runs its own part of it."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from ..errors import DeviceLostError, is_a
from ..handover import ScheduledBatch, StepOutput
from ..seams import BackendInfo, MemoryUsage, ModelBackend, PendingStep
from .channel import MOST_PAYLOAD
from .leader import Leader, RankError


class LeadingBackend:
    """The seams.ModelBackend of an engine of several ranks. It exists on rank 0 only.

    local   the backend of this rank's part. It may have these members beside those of ModelBackend:
                take_drawn(batch) -> tuple of arrays   what the other ranks need for a step, such as the tokens with
                                                       which its sequences continue. They are the arguments of the
                                                       other ranks' `put_drawn`
                figures() -> Mapping[str, int]
                leave()                                close the connections to the other ranks. Idempotent
                choice                                 form of a step that has not begun here
    leader  the channels to the other ranks

    most_bytes_of_a_step   that can travel to the other ranks

    A step succeeds if it succeeds on every rank. If it fails on one, every rank has done it, and it can be run again.
    """

    most_bytes_of_a_step = MOST_PAYLOAD

    def __init__(self, local: ModelBackend, leader: Leader, late_ranks: Collection[int] | None = None) -> None:
        """
        late_ranks   with several stages, the other ranks of rank 0's stage. A step begins on them and on rank 0 when it
                     is read, or a later one is: meanwhile the stages before are at the next micro-batch. As they begin
                     together, none of them waits inside an exchange while rank 0 is in a callback. `local.start` then
                     applies the updates of the block tables before anything that can fail, as it does on the other
                     ranks: `start` has returned already, so they are not repeated.
                     None: a step begins on all ranks when it is launched
        """
        self.info: BackendInfo = local.info
        self.local, self.leader = local, leader
        self._late_ranks: Collection[int] = late_ranks or ()
        self._late: deque[LedBatch] | None = None if late_ranks is None else deque()
        self._take_drawn: Callable[[ScheduledBatch], tuple[Any, ...]] = getattr(local, "take_drawn", _nothing)
        self._figures_of_local = getattr(local, "figures", dict)
        self._leave_local: Callable[[], None] = getattr(local, "leave", _leave_nothing)
        self._control_s = 0.0

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Send the step to the other ranks, then launch this rank's part; see seams.ModelBackend."""
        began = perf_counter()
        drawn = self._take_drawn(batch)
        number = self.leader.send_step(batch, drawn, self._late_ranks)
        self._control_s += perf_counter() - began
        step = LedBatch(self, number, batch, drawn)
        if self._late is not None:
            self._late.append(step)
            return step
        try:
            step.pending = self.begin(step)
        except BaseException as error:
            self._wait_after(error, number)
            raise
        return step

    def begin(self, step: "LedBatch") -> PendingStep:
        """Send a late step to the ranks of this stage, and launch this rank's part."""
        if self._late_ranks:
            began = perf_counter()
            self.leader.send_late_step(step.number, step.batch, step.drawn, self._late_ranks)
            self._control_s += perf_counter() - began
        return self.local.start(step.batch)

    def _wait_after(self, error: BaseException, number: int) -> None:
        """Wait for the other ranks after a step failed here. Raises DeviceLostError.

        Their errors do not matter then. If a rank is gone, the exchange with it may fail before its channel does.
        """
        if is_a(error, DeviceLostError):
            self.leader.find_lost()
            return
        with suppress(RankError):
            self.leader.wait_done(number)

    def finish(self, step: "LedBatch") -> StepOutput:
        """Finish this rank's part of a step, and wait for the other ranks."""
        while self._late and not step.has_begun:       # all ranks run the steps in the order of their launches
            self._late.popleft().begin_late()
        try:
            output = step.finish_here()
        except BaseException as error:
            self._wait_after(error, step.number)
            raise
        began = perf_counter()
        try:
            self.leader.wait_done(step.number)
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

    def leave(self, reason: str) -> None:
        """End the other ranks, because the engine has failed. No connection is left. Idempotent."""
        self.leader.close(reason)
        self._leave_local()

    def close(self) -> None:
        """End the other ranks, then close this rank's part. Idempotent."""
        try:
            if not self.leader.is_starting:            # else the start says why it failed
                self.leader.close()
        finally:
            self.local.close()


def _nothing(batch: ScheduledBatch) -> tuple[Any, ...]:
    return ()


def _leave_nothing() -> None:
    """The backend of this rank has no connections."""


class LedBatch:
    """A step that every rank runs.

    pending     this rank's part; None if it has not begun, or its launch failed
    has_begun   whether this rank's part was launched late
    """

    __slots__ = ("_backend", "_error", "batch", "drawn", "has_begun", "number", "pending")

    def __init__(self, backend: LeadingBackend, number: int, batch: ScheduledBatch, drawn: tuple[Any, ...]) -> None:
        self._backend, self.number, self.batch, self.drawn = backend, number, batch, drawn
        self.pending: PendingStep | None = None
        self._error: BaseException | None = None
        self.has_begun = False

    @property
    def choice(self) -> Any:
        """The form of this rank's part, see docs/steps.md; None if the backend has no forms."""
        return getattr(self._backend.local if self.pending is None else self.pending, "choice", None)

    def begin_late(self) -> None:
        """Launch this rank's part. If that fails, `finish_here` says so."""
        self.has_begun = True
        try:
            self.pending = self._backend.begin(self)
        except BaseException as error:                 # of this step; an earlier one may be the one that is read
            self._error = error

    def finish_here(self) -> StepOutput:
        """Finish this rank's part."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None                     # its traceback has this step
        assert self.pending is not None
        return self.pending.finish()

    def finish(self) -> StepOutput:
        """Wait for the step on every rank and return this rank's output; see seams.PendingStep."""
        return self._backend.finish(self)
