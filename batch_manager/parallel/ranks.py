"""Rank 0 and the other ranks: how they start together, run steps together, notice a loss, and end.

Rank 0 has a Leader with a channel to each other rank, which has a Link. There is no membership, no election and no
retry. The first loss ends all: rank 0 tells the ranks that are left, and no rank waits for the lost one.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

from ..errors import BatchManagerError, ConfigError, DeviceLostError, is_a, text_of, type_name
from ..handover import ScheduledBatch
from .channel import Channel, Kind, LostError
from .wire import WireError, unpack

FAILED = "failed"                # the name of a phase of the start that no rank asks for
LONGEST_BEAT_S = 0.5
BEATS_IN_TIMEOUT = 8
SECONDS_TO_CLOSE = 2.0           # for the other ranks to read the end
SECONDS_FOR_THE_REASON = 1.0     # for the news of a loss, after an exchange inside a step has failed here
WAITS = 32                       # in each of these times
MOST_DIFFERENCES = 4             # that a message has
Wait = Callable[[float, Collection[int]], Collection[int]]


class RankError(RuntimeError):
    """A step raised on another rank. The text names the rank and the class of the exception, and no content."""


class RankOutOfMemoryError(RankError, MemoryError):
    """Another rank ran out of memory in a step."""


class Ranks:
    """What Leader and Link have in common. One thread, the engine's, calls all methods but `tick` and `health`.

    rank, num_ranks   this process, and all
    beat_s            seconds between two calls of `tick`, which the control plane makes from a thread of its own
    is_starting       whether this rank has not started yet; set by `starting`
    lost              why the ranks cannot go on; None while they can. A copy of it is raised each time, because the
                      traceback of an exception grows with each raise
    on_change         called from any thread when the engine's thread must look: a loss, or a rank that asks for the end
    on_end            (drain) called from any thread when another rank asks rank 0 for the end
    end_asked         whether to drain, if another rank has asked for the end; else None
    on_failure        called from any thread when another rank fails while this one starts
    before_close      called before the channels are closed
    before_end        called by rank 0 before it tells the others that it ends
    """

    def __init__(self, rank: int, channels: Mapping[int, Channel], wait: Wait, rank_timeout_s: float) -> None:
        """
        channels   rank of the other end -> channel
        wait       (seconds, ranks) -> those of the ranks from which something may be there. Returns once there is
                   something, after `seconds`, and when the engine's thread is woken
        """
        self.rank = rank
        self.beat_s = min(LONGEST_BEAT_S, rank_timeout_s / BEATS_IN_TIMEOUT)
        self.lost: DeviceLostError | None = None
        self.on_change: Callable[[], None] = _nothing
        self.on_end: Callable[[bool], None] = _nothing
        self.end_asked: bool | None = None
        self.on_failure: Callable[[ConfigError], None] = _nothing
        self.before_close: Callable[[], None] = _nothing
        self.before_end: Callable[[], None] = _nothing
        self._channels = dict(channels)
        self._wait = wait
        self._rank_timeout_s = rank_timeout_s
        self._reading = threading.Lock()               # held while waiting: `tick` reads only when no thread waits
        self._losing = threading.Lock()
        self._hellos: dict[int, deque[tuple[str, Any]]] = {other: deque() for other in channels}
        self._failure: ConfigError | None = None
        self._lost_rank = -1
        self.is_starting, self._is_closed = True, False

    @property
    def num_ranks(self) -> int:
        raise NotImplementedError

    # ---------------------------------------------------------------- the start

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A block in which this rank starts. An exception in it makes every other rank raise ConfigError too."""
        try:
            yield
        except BaseException as error:
            if is_a(error, DeviceLostError):           # the rank that failed says why
                self._read_reason()
            if self._failure is None:
                self._note_failure(self.rank, error.fact if is_a(error, BatchManagerError) and not error.expectation
                                   else text_of(error) if is_a(error, Exception) else f"raised {type_name(error)}")
            self.close("the start failed")
            if is_a(error, DeviceLostError) and self._failure is not None:
                raise self._failure from error
            raise
        self.is_starting = False

    def _read_reason(self) -> None:
        """Read what the others send until one has failed, for up to SECONDS_TO_CLOSE."""
        self._read_until(lambda: self._failure is not None or self.lost is not None, SECONDS_TO_CLOSE)

    def _read_until(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Read what the others send until something is there, for up to some seconds. Returns whether it is."""
        for _ in range(WAITS):
            if is_there():
                break
            with self._reading:
                self._receive(self._wait(seconds / WAITS, self._channels))
        return is_there()

    def exchange(self, phase: str, value: Any = None) -> list[Any]:
        """Return the values of all ranks, by rank. Every rank calls this for the same phases in the same order.

        Raises ConfigError with the reason of the first rank that fails, and WireError for a value that cannot travel.
        """
        raise NotImplementedError

    def compare(self, what: str, value: Any, way_out: str) -> None:
        """Raise ConfigError on every rank unless the value is the same on all. `what` names it in the message."""
        self.compare_named(what, {what: value}, way_out)

    def compare_named(self, phase: str, values: Mapping[str, Any], way_out: str) -> None:
        """Raise ConfigError on every rank unless all have the same values. The message has the first that differ.

        values   name -> value. A name that another one is the beginning of, with a dot, is a part of that one
        """
        given = [dict(of_rank) for of_rank in self.exchange(phase, tuple(values.items()))]
        facts: dict[str, str] = {}
        for name in sorted(set().union(*given)):
            found = differing({rank: of_rank.get(name) for rank, of_rank in enumerate(given)})
            if found and name.rpartition(".")[0] not in facts:
                facts[name] = f"{name} is {found}"
        if facts:
            self._failure = ConfigError(               # every rank finds it by itself
                "; ".join(list(facts.values())[:MOST_DIFFERENCES]), "expected the same on every rank", way_out)
            raise self._failure

    def _check_start(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.lost is not None:
            raise _start_failed(self.lost.fact)

    def _note_failure(self, rank: int, reason: str) -> None:
        self._failure = _start_failed(f"rank {rank}: {reason}")
        for channel in self._channels.values():
            with suppress(LostError):                  # it has failed itself, or will find the end of the connection
                channel.send(Kind.HELLO, (FAILED, f"rank {rank}: {reason}" if self.rank == 0 else reason))

    # ---------------------------------------------------------------- receiving

    def tick(self) -> None:
        """Send a BEAT to each other end, and find the ranks that are silent. Called every `beat_s` seconds.

        Silence is counted in ticks of this process, so time in which this process was stopped does not count.
        """
        for channel in self._channels.values():
            channel.silence += 1
            with suppress(LostError):                  # reading says more about a loss
                channel.beat()
        if self._reading.acquire(blocking=False):
            try:
                self._receive(self._channels)
            finally:
                self._reading.release()
        for other, channel in self._channels.items():
            if channel.silence * self.beat_s > self._rank_timeout_s:
                self._lose(other, f"was silent for {self._rank_timeout_s:g} s")

    def _receive(self, others: Collection[int]) -> None:
        for other in list(others):
            try:
                for kind, value in self._channels[other].receive():
                    self._take(other, kind, value)
            except LostError as loss:
                self._lose(other, str(loss))
            except (TypeError, ValueError, KeyError, IndexError, WireError) as error:    # another form
                self._lose(other, f"sent a frame that does not belong here ({type_name(error)})")

    def _take(self, other: int, kind: Kind, value: Any) -> None:
        """Note a frame. May raise TypeError, ValueError, KeyError or IndexError if the frame has another form."""
        if kind is not Kind.HELLO or not self.is_starting:
            raise ValueError
        phase, content = value
        if phase == FAILED:
            if self._failure is None:
                if self.rank == 0:
                    self._note_failure(other, str(content))
                else:
                    self._failure = _start_failed(str(content))
                assert self._failure is not None
                self.on_failure(self._failure)
        else:
            self._hellos[other].append((phase, content))

    def _lose(self, other: int, reason: str) -> None:
        with self._losing:
            if self.lost is not None or self._is_closed:
                return
            self._lost_rank = other
            self.lost = DeviceLostError(f"rank {other} {reason}", "an engine of several ranks needs all of them",
                                        f"see the log of rank {other}, then start all ranks again")
        if self.is_starting and self._failure is None:
            self._note_failure(other, reason)
            assert self._failure is not None
            self.on_failure(self._failure)
        self._tell_the_rest(f"rank {other} {reason}")
        self.on_change()

    def _tell_the_rest(self, reason: str) -> None:
        for channel in self._channels.values():
            with suppress(LostError):
                channel.send(Kind.END, (False, reason))

    def _send(self, other: int, kind: Kind, value: Any) -> None:
        """Send a frame. If the other end is gone, note the loss, with the reason that it gave if it gave one."""
        try:
            self._channels[other].send(kind, value)
        except LostError as loss:
            with self._reading:
                self._receive([other])
            self._lose(other, str(loss))

    def health(self) -> dict[int, dict[str, Any]]:
        """Return rank -> its state and the seconds since it was heard. Any thread may call it."""
        return {other: {"state": "LOST" if other == self._lost_rank else
                        "STOPPED" if self._is_closed or self.lost is not None else "RUNNING",
                        "seconds_since_heard": channel.silence * self.beat_s}
                for other, channel in self._channels.items()}

    def _begins_to_close(self) -> bool:
        with self._losing:
            if self._is_closed:
                return False
            self._is_closed = True
        self.before_close()
        return True

    def close(self, reason: str = "") -> None:
        """Tell the other ranks that this one ends, and close the channels. Idempotent.

        reason   why it ends before its time; "": rank 0 was shut down
        """
        raise NotImplementedError


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
            raise _start_failed(f"rank 0: its start is at {theirs_phase!r}, and that of this rank at {phase!r}")
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
                self._failure = _start_failed(f"rank 0: {reason}")
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


def in_words(ranks: Collection[int]) -> str:
    """Return "rank 2", or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def differing(values: Mapping[int, Any]) -> str:
    """Return "0.5 on rank 0 and 0.7 on ranks 1, 2", or "" if the values of all ranks are the same."""
    by_value: dict[Any, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return ""
    return " and ".join(f"{value} on {in_words(ranks)}" for value, ranks in by_value.items())


def _start_failed(reason: str) -> ConfigError:
    return ConfigError(reason, "all ranks start together, or none does",
                       "correct that rank, then start all ranks again")


def _nothing(*_: Any) -> None:
    """The default of the hooks."""
