"""Another rank than rank 0: it gets frames from rank 0, and answers them."""

from collections import deque
from copy import copy
from typing import Any

from ..handover import ScheduledBatch
from .channel import Channel, Kind
from .ranks import SECONDS_FOR_THE_REASON, Ranks, Wait, start_failed
from .wire import unpack


class Link(Ranks):
    """Another rank than rank 0, and its channel to rank 0.

    end   what rank 0 said when it ended, or None: "" after a shutdown, else the reason
    """

    def __init__(self, rank: int, num_ranks: int, channel: Channel, wait: Wait, rank_timeout_s: float) -> None:
        super().__init__(rank, {0: channel}, wait, rank_timeout_s)
        self._num_ranks = num_ranks
        self._channel = channel
        self._frames: deque[tuple[str, Any]] = deque()
        self.end: str | None = None

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    def exchange(self, phase: str, value: Any = None) -> list[Any]:
        self._check_start()
        self._send(0, Kind.HELLO, (phase, value))
        with self._reading:
            while not self._hellos[0]:
                self._check_start()
                self._receive(self._wait(self.beat_s, self._channels))
        theirs_phase, values = self._hellos[0].popleft()
        if theirs_phase != phase or type(values) is not tuple or len(values) != self._num_ranks:
            raise start_failed(f"rank 0: its start is at {theirs_phase!r}, and that of this rank at {phase!r}")
        return list(values)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for bytes from rank 0."""
        self._wait(seconds, self._channels)

    def next_frame(self, seconds: float) -> tuple[str, Any] | None:
        """Return ("STEP" or "ASK", value) of the next frame, after waiting up to `seconds` for it; None: there is none.

        Returns None once rank 0 has ended, see `end`. Raises DeviceLostError if rank 0 is lost, after the frames that
        came before.
        """
        with self._reading:
            if not self._frames and self.lost is None and self.end is None:
                self._receive(self._wait(seconds, self._channels))
        if self._frames:
            return self._frames.popleft()
        if self.lost is not None and self.end is None:
            raise copy(self.lost)
        return None

    def done(self, number: int, error: tuple[str, bool, bool] | None) -> None:
        """Tell rank 0 that a step is done.

        error   None, or the class of the step's exception, whether memory is short, whether the device is lost
        """
        self._send(0, Kind.DONE, (number, error))

    def waits_for_end(self) -> bool:
        """Wait up to SECONDS_FOR_THE_REASON until rank 0 has ended or is lost, and return whether it is."""
        return self._read_until(lambda: self.end is not None or self.lost is not None, SECONDS_FOR_THE_REASON)

    def answer(self, value: Any) -> None:
        """Send an ASK frame to rank 0."""
        self._send(0, Kind.ASK, value)

    def ask_to_end(self, drain: bool) -> None:
        """Ask rank 0 to shut the engine down."""
        self._send(0, Kind.END, (drain, ""))

    def _take(self, other: int, kind: Kind, value: Any) -> None:
        if kind is Kind.STEP:
            number, batch, drawn = value
            if type(batch) is not ScheduledBatch or type(number) is not int or type(drawn) is not tuple:
                raise TypeError
            self._frames.append((kind.name, value))
        elif kind is Kind.ASK:
            what, *content = value
            if what == "responses":                    # each was packed when it was made
                value = what, tuple([unpack(response) for response in content[0]])
            self._frames.append((kind.name, value))
        elif kind is Kind.END:
            _, reason = value
            if self.is_starting and self._failure is None:
                self._failure = start_failed(f"rank 0: {reason}")
                self.on_failure(self._failure)
            if self.end is None:                       # rank 0 says why it was lost, then that its engine fails
                self.end = str(reason)
            self.on_change()
        else:
            super()._take(other, kind, value)

    def _lose(self, other: int, reason: str) -> None:
        if self.end is None:                           # else rank 0 has said so before it closed
            super()._lose(other, reason)

    def close(self, reason: str = "") -> None:
        if not self._begins_to_close():
            return
        try:
            if self.end is None and self.lost is None:
                self._tell_the_rest(reason or "it was closed")
        finally:
            self._channel.close()
