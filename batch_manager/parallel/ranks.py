"""Rank 0 and the other ranks: how they start together, notice a loss, and end.

Rank 0 has a Leader (leader.py) with a channel to each other rank, which has a Link (link.py). There is no membership,
no election and no retry. The first loss ends all: rank 0 tells the ranks that are left, and no rank waits for the lost
one.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import BatchManagerError, ConfigError, DeviceLostError, is_a, text_of, type_name
from .channel import Channel, Kind, LostError
from .wire import WireError

FAILED = "failed"                # the name of a phase of the start that no rank asks for
LONGEST_BEAT_S = 0.5
BEATS_IN_TIMEOUT = 8
SECONDS_TO_CLOSE = 2.0           # for the other ranks to read the end
SECONDS_FOR_THE_REASON = 1.0     # for the news of a loss, after an exchange inside a step has failed here
WAITS = 32                       # in each of these times
MOST_DIFFERENCES = 4             # that a message has
Wait = Callable[[float, Collection[int]], Collection[int]]


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
            raise start_failed(self.lost.fact)

    def _note_failure(self, rank: int, reason: str) -> None:
        self._failure = start_failed(f"rank {rank}: {reason}")
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
                    self._failure = start_failed(str(content))
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


def start_failed(reason: str) -> ConfigError:
    """Return the error of each rank if one cannot start. The reason names that rank."""
    return ConfigError(reason, "all ranks start together, or none does",
                       "correct that rank, then start all ranks again")


def _nothing(*_: Any) -> None:
    """The default of the hooks."""
