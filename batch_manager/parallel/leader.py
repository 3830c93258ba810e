"""Rank 0 among several: it sends the steps and what the callbacks of the others need, and collects their answers."""

from collections import deque
from collections.abc import Collection, Mapping
from copy import copy
from typing import Any

from ..errors import DeviceLostError
from ..handover import ScheduledBatch
from .channel import Channel, Kind, LostError
from .ranks import SECONDS_FOR_THE_REASON, SECONDS_TO_CLOSE, WAITS, Ranks, Wait


class RankError(RuntimeError):
    """A step raised on another rank. The text names the rank and the class of the exception, and no content."""


class RankOutOfMemoryError(RankError, MemoryError):
    """Another rank ran out of memory in a step."""


class Leader(Ranks):
    """Rank 0 and its channels.

    num_differences   requests refused so far because they were not the same on every rank; SameInputs counts them
    """

    def __init__(self, channels: Mapping[int, Channel], wait: Wait, rank_timeout_s: float) -> None:
        super().__init__(0, channels, wait, rank_timeout_s)
        self._num_steps = self.slowest_rank = self.num_differences = 0
        self._running: dict[int, set[int]] = {}        # number of a step -> ranks that have not done it
        self._errors: dict[int, list[tuple[int, Any]]] = {}
        self._answers: dict[int, deque[Any]] = {other: deque() for other in channels}

    @property
    def num_ranks(self) -> int:
        return len(self._channels) + 1

    def exchange(self, phase: str, value: Any = None) -> list[Any]:
        with self._reading:
            while True:
                self._check_start()
                if all(self._hellos.values()):
                    break
                self._receive(self._wait(self.beat_s, self._channels))
        theirs = {other: hellos.popleft() for other, hellos in self._hellos.items()}
        for other, (theirs_phase, _) in theirs.items():
            if theirs_phase != phase:
                self._note_failure(other, f"its start is at {theirs_phase!r}, and that of rank 0 at {phase!r}")
                self._check_start()
        values = (value, *[theirs[other][1] for other in sorted(theirs)])
        for other in self._channels:
            self._send(other, Kind.HELLO, (phase, values))
        return list(values)

    # ---------------------------------------------------------------- steps

    def send_step(self, batch: ScheduledBatch, drawn: tuple[Any, ...] = (), late: Collection[int] = ()) -> int:
        """Send a step to every other rank, and return its number.

        drawn   arrays for the other ranks' `put_drawn`, such as the tokens drawn since the last step
        late    ranks that get the step by `send_late_step`

        Raises DeviceLostError.
        """
        number = self._num_steps
        self._num_steps += 1
        self._running[number] = set(self._channels)
        self.send_late_step(number, batch, drawn, [other for other in self._channels if other not in late])
        return number

    def send_late_step(self, number: int, batch: ScheduledBatch, drawn: tuple[Any, ...], ranks: Collection[int]
                       ) -> None:
        """Send a step that has a number to some ranks. Raises DeviceLostError."""
        self.check()
        for other in ranks:
            self._send(other, Kind.STEP, (number, batch, drawn))
        self.check()

    def wait_done(self, number: int) -> None:
        """Wait until every other rank has done a step. Call it once for each step.

        Raises RankError if the step raised on a rank, and DeviceLostError if a rank is lost.
        """
        with self._reading:
            running = self._running[number]
            if running:
                self._receive(self._channels)
            if not running:
                self.slowest_rank = 0
            while running:
                self.check()
                self._receive(self._wait(self.beat_s, self._channels))
        del self._running[number]
        errors = self._errors.pop(number, [])
        for rank, (name, is_out_of_memory, is_lost) in sorted(errors):
            if is_lost:
                self._lose(rank, f"lost its device ({name})")
                self.check()
            raise (RankOutOfMemoryError if is_out_of_memory else RankError)(f"rank {rank} raised {name}")

    def ask(self, value: Any, rank: int | None = None) -> None:
        """Send an ASK frame to a rank; None: to every other rank. Raises DeviceLostError."""
        self.check()
        for other in self._channels if rank is None else (rank,):
            self._send(other, Kind.ASK, value)
        self.check()

    def answers(self) -> dict[int, Any]:
        """Wait for one ASK frame from every other rank. Returns rank -> value. Raises DeviceLostError."""
        with self._reading:
            while not all(self._answers.values()):
                self.check()
                self._receive(self._wait(self.beat_s, self._channels))
        return {other: answers.popleft() for other, answers in self._answers.items()}

    def check(self) -> None:
        """Raise DeviceLostError if a rank is lost."""
        if self.lost is not None:
            raise copy(self.lost)

    def find_lost(self) -> None:
        """After an exchange inside a step has failed here: raise DeviceLostError with the name of the lost rank.

        Returns if no rank is found lost within twice SECONDS_FOR_THE_REASON. The other ranks, whose exchanges fail as
        well, wait half as long before they end, so that the one that fails by itself is named.
        """
        self._read_until(lambda: self.lost is not None, 2 * SECONDS_FOR_THE_REASON)
        self.check()

    def _take(self, other: int, kind: Kind, value: Any) -> None:
        if kind is Kind.DONE:
            number, error = value
            if error is not None:
                name, is_out_of_memory, is_lost = error
                self._errors.setdefault(number, []).append((other, (str(name), bool(is_out_of_memory), bool(is_lost))))
            self._running[number].remove(other)
            if not self._running[number]:
                self.slowest_rank = other
        elif kind is Kind.ASK:
            self._answers[other].append(value)
        elif kind is Kind.END:
            drains, reason = value
            if reason:
                self._lose(other, f"ended: {reason}")
            else:
                self.end_asked = bool(drains) and self.end_asked is not False
                self.on_end(self.end_asked)
        else:
            super()._take(other, kind, value)

    def close(self, reason: str = "") -> None:
        if self.lost is None and not self._is_closed:
            self.before_end()
        if not self._begins_to_close():
            return
        if reason and self.lost is None and not self.is_starting:        # no callback waits for an answer any more
            self.lost = DeviceLostError(reason, "an engine of several ranks needs all of them")
        try:
            self._tell_the_rest(reason)
            # An end that still has bytes to read must not be closed: the other one would lose our last frame.
            with self._reading:
                left = set(self._channels) - {self._lost_rank}
                for _ in range(WAITS):
                    for other in list(self._wait(SECONDS_TO_CLOSE / WAITS, left)) if left else ():
                        try:
                            self._channels[other].receive()
                        except LostError:
                            left.discard(other)
        finally:                                       # an exception may be injected into the worker
            for channel in self._channels.values():
                channel.close()
