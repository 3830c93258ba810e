"""The guard around foreign code: callbacks, hooks, schedulers, backends, logits post-processors.

Foreign code runs in a guarded block and nowhere else:

    in_send = guard.containing("send")        # made once
    with in_send:
        send_response(request_id, tensors, True, "")

A guarded block

-   writes the heartbeat: the name of the block and the time of entry;
-   ends a process that was forked inside the block, at the exit of the block (forked_child);
-   adds up the seconds spent inside;
-   catches every exception, SystemExit and KeyboardInterrupt included. A block of `containing` counts the exception,
    logs it at most once a second and drops it. A block of `raising` raises ForeignCodeError from it.

A block also catches an exception that another thread raises in the thread of the block. Outside of a block such an
exception propagates.

The clock that times the blocks guards itself (clock.ReliableClock).

A guarded block is a context manager, because the first instruction of the foreign code must directly follow our last
instruction (see loop/unanswered.py). A function that takes a callable would run other instructions in between.
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

    error   the exception, of any class. Its text may quote a prompt and therefore appears in no message and no log
    """

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"{name} raised {type_name(error)}")
        self.error = error


class Heartbeat:
    """The worker's current activity and its start. The worker writes it, and any thread reads it without a lock.

    activity   "loop", "idle", or the name of a guarded block
    since      start of the activity, in seconds of the engine's clock
    """

    __slots__ = ("activity", "since")

    def __init__(self, now: float = 0.0) -> None:
        self.activity, self.since = BETWEEN_BLOCKS, now

    def beat(self, activity: str, now: float) -> None:
        self.since = now
        self.activity = activity


class Guard:
    """Makes guarded blocks and holds their shared state. One thread runs the blocks.

    monotonic    the clock that times the blocks, in seconds
    heartbeat    written at the start and the end of a block
    logs_texts   also log the text of an exception, which may quote a prompt
    process_id   the process that made this guard; a forked child ends when it enters or leaves a block
    failures     name of a `containing` block -> number of calls that raised or returned an unusable value
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, heartbeat: Heartbeat | None = None,
                 logs_texts: bool = False) -> None:
        self.monotonic = monotonic
        self.heartbeat = Heartbeat() if heartbeat is None else heartbeat
        self.process_id = forked_child.current_process_id
        self.failures: dict[str, int] = {}
        self._logs_texts = logs_texts
        self._logs: dict[str, RateLimitedLog] = {}

    def containing(self, name: str, on_failure: Callable[[], None] | None = None, *,
                   kind: str = "callback") -> "ContainingBlock":
        """Return a block whose exceptions are counted under this name, logged and dropped.

        on_failure   called for each exception
        kind         what the log calls the code in the block: "the <name> <kind> raised ..."
        """
        return ContainingBlock(self, name, on_failure, kind)

    def raising(self, name: str, passing: type[BaseException] | tuple[type[BaseException], ...] = ()) -> "RaisingBlock":
        """Return a block that raises ForeignCodeError from any exception inside it.

        passing   exception classes that propagate unchanged
        """
        return RaisingBlock(self, name, passing)

    def note_failure(self, name: str, error: BaseException, kind: str = "callback") -> None:
        """Count an exception under a name, and log at most one exception per second for each name."""
        text = f": {text_of(error)}" if self._logs_texts else ""
        self._note(name, kind, f"raised {type_name(error)}{text}", error)

    def note_misuse(self, name: str, value: object, expectation: str) -> None:
        """Count an unusable return value of a callback, and log at most one per second for each name."""
        self._note(name, "callback", f"returned a value of type {type_name(value)}; {expectation}", None)

    def _note(self, name: str, kind: str, what: str, error: BaseException | None) -> None:
        self.failures[name] = count = self.failures.get(name, 0) + 1
        if name not in self._logs:
            self._logs[name] = RateLimitedLog(lambda: self.monotonic())
        self._logs[name].log(logging.ERROR, "the %s %s %s (%d so far); the worker goes on", name, kind, what,
                             count, raised=error)


class GuardedBlock:
    """Base class of ContainingBlock and RaisingBlock, the context managers in which foreign code runs.

    Foreign code is code that the engine calls and does not own, such as callbacks. A block can be used again, but
    not while code runs inside it.

    seconds   time spent inside; a reader may reset it to zero
    """

    __slots__ = ("seconds", "_guard", "_name", "_started")

    def __init__(self, guard: Guard, name: str) -> None:
        self.seconds = 0.0
        self._guard = guard
        self._name = name
        self._started = 0.0

    # Written inline: every function call here would slow down each callback.

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
        return error is not None and self._suppresses(error)

    def _suppresses(self, error: BaseException) -> bool:
        """Handle the exception. Returns True to suppress it."""
        raise NotImplementedError


class ContainingBlock(GuardedBlock):
    """The guarded block that `Guard.containing` returns. It counts, logs and drops exceptions."""

    __slots__ = ("_kind", "_on_failure")

    def __init__(self, guard: Guard, name: str, on_failure: Callable[[], None] | None, kind: str) -> None:
        super().__init__(guard, name)
        self._on_failure = on_failure
        self._kind = kind

    def _suppresses(self, error: BaseException) -> bool:
        if self._on_failure is not None:
            self._on_failure()
        self._guard.note_failure(self._name, error, self._kind)
        return True


class RaisingBlock(GuardedBlock):
    """The guarded block that `Guard.raising` returns. It raises ForeignCodeError from an exception."""

    __slots__ = ("_passing",)

    def __init__(self, guard: Guard, name: str, passing: type[BaseException] | tuple[type[BaseException], ...]) -> None:
        super().__init__(guard, name)
        self._passing = passing

    if TYPE_CHECKING:    # suppresses nothing
        def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> Literal[False]: ...

    def _suppresses(self, error: BaseException) -> bool:
        if not is_a(error, self._passing):
            raise ForeignCodeError(self._name, error) from error
        return False
