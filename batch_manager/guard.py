"""The guard of foreign code: callbacks, schedulers, backends, clocks, logits post-processors, traces.

Foreign code runs in a guarded block and nowhere else:

    in_send = guard.containing("send")        # made once
    with in_send:
        send_response(request_id, tensors, True, "")

The guard of a block

-   writes the heartbeat: what the worker is inside, and since when;
-   ends a process that was forked inside the block and leaves it (forked_child);
-   adds up the seconds spent inside;
-   takes every exception, SystemExit and KeyboardInterrupt included. A block made by `containing` counts it, logs it at
    most once a second and drops it; a block made by `raising` raises ForeignCodeError from it.

An exception that another thread raises in this one is taken too while a block runs, and passes at any other time.

The clock by which blocks are timed guards itself (clock.ReliableClock).

It is a block, and not a function that is given a callable, because some lines of ours must be one piece with the first
instruction of the foreign code: loop/unanswered.py says why.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from . import forked_child
from .contained_log import RateLimitedLog
from .errors import is_a, text_of, type_name

BETWEEN_BLOCKS = "loop"


class ForeignCodeError(Exception):
    """Foreign code raised an exception.

    error   what it raised, of any class. Its text may quote a prompt: it goes into no message and no log
    """

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"{name} raised {type_name(error)}")
        self.error = error


class Heartbeat:
    """What the worker does, and since when. Written by the worker and read by any thread; no lock is held.

    activity   "loop", "idle", or the name of a guarded block
    since      seconds of the engine's clock
    """

    __slots__ = ("activity", "since")

    def __init__(self, now: float = 0.0) -> None:
        self.activity, self.since = BETWEEN_BLOCKS, now

    def beat(self, activity: str, now: float) -> None:
        self.since = now
        self.activity = activity


class Guard:
    """Makes guarded blocks, and keeps what they have in common. One thread runs them.

    monotonic    seconds of the clock that blocks are timed by
    heartbeat    written where a block begins and ends
    logs_texts   what an exception says is logged too; it may quote a prompt
    process_id   of the process it was made in; in a forked copy of it no block is entered or left
    failures     name of a `containing` block -> how often it raised, or returned what cannot be used
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, heartbeat: Heartbeat | None = None,
                 logs_texts: bool = False) -> None:
        self.monotonic = monotonic
        self.heartbeat = Heartbeat() if heartbeat is None else heartbeat
        self.process_id = forked_child.current_process_id
        self.failures: dict[str, int] = {}
        self._logs_texts = logs_texts
        self._logs: dict[str, RateLimitedLog] = {}

    def containing(self, name: str, on_failure: Callable[[], None] | None = None) -> "ContainingBlock":
        """A block whose exceptions are counted under this name, logged and dropped.

        on_failure   called after each
        """
        return ContainingBlock(self, name, on_failure)

    def raising(self, name: str, passing: type[BaseException] | tuple[type[BaseException], ...] = ()) -> "RaisingBlock":
        """A block that raises ForeignCodeError from whatever is raised inside it.

        passing   exceptions of these classes pass as they are
        """
        return RaisingBlock(self, name, passing)

    def note_failure(self, name: str, error: BaseException) -> None:
        """Count it and log it, at most once a second for each name."""
        text = f": {text_of(error)}" if self._logs_texts else ""
        self._note(name, f"raised {type_name(error)}{text}", error)

    def note_misuse(self, name: str, value: object, expectation: str) -> None:
        """Count that a callback returned what cannot be used, and log it likewise."""
        self._note(name, f"returned a value of type {type_name(value)}; {expectation}", None)

    def _note(self, name: str, what: str, error: BaseException | None) -> None:
        self.failures[name] = count = self.failures.get(name, 0) + 1
        if name not in self._logs:
            self._logs[name] = RateLimitedLog(lambda: self.monotonic())
        self._logs[name].log(logging.ERROR, "the %s callback %s (%d so far); the loop goes on", name, what, count,
                             raised=error)


class GuardedBlock:
    """What the two kinds of blocks have in common. A block may be entered any number of times, but not inside itself.

    seconds   spent inside; a reader may set it to zero
    """

    __slots__ = ("seconds", "_guard", "_name", "_started")

    def __init__(self, guard: Guard, name: str) -> None:
        self.seconds = 0.0
        self._guard = guard
        self._name = name
        self._started = 0.0

    # The heartbeat is written and the process compared in place: each callback pays for every call in here.

    def __enter__(self) -> None:
        guard = self._guard
        self._started = now = guard.monotonic()
        if guard.process_id != forked_child.current_process_id:
            forked_child.end_this_process(None)
        heartbeat = guard.heartbeat
        heartbeat.since = now
        heartbeat.activity = self._name

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        guard = self._guard
        if guard.process_id != forked_child.current_process_id:
            forked_child.end_this_process(error)
        now = guard.monotonic()
        if now > self._started:    # else the clock was set back
            self.seconds += now - self._started
        heartbeat = guard.heartbeat
        heartbeat.since = now
        heartbeat.activity = BETWEEN_BLOCKS
        return error is not None and self._takes(error)

    def _takes(self, error: BaseException) -> bool:
        """Whether the exception ends here."""
        raise NotImplementedError


class ContainingBlock(GuardedBlock):
    """See Guard.containing."""

    __slots__ = ("_on_failure",)

    def __init__(self, guard: Guard, name: str, on_failure: Callable[[], None] | None) -> None:
        super().__init__(guard, name)
        self._on_failure = on_failure

    def _takes(self, error: BaseException) -> bool:
        if self._on_failure is not None:
            self._on_failure()
        self._guard.note_failure(self._name, error)
        return True


class RaisingBlock(GuardedBlock):
    """See Guard.raising."""

    __slots__ = ("_passing",)

    def __init__(self, guard: Guard, name: str, passing: type[BaseException] | tuple[type[BaseException], ...]) -> None:
        super().__init__(guard, name)
        self._passing = passing

    if TYPE_CHECKING:    # nothing ends here
        def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> Literal[False]: ...

    def _takes(self, error: BaseException) -> bool:
        if not is_a(error, self._passing):
            raise ForeignCodeError(self._name, error) from error
        return False
