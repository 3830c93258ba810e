"""The callbacks of an AsyncEngine: pass requests to the worker, and responses to mailboxes."""

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from .. import forked_child
from ..config import Parts
from ..errors import BatchManagerError, ManagerClosedError
from ..names import FinishReason
from ..responses.named_tensor import NamedTensor
from .mailbox import Mailbox

MOST_AT_ONCE = 1024            # most requests that one call of get returns
# For hosts whose callers wait for their outputs, and so limit the queue themselves.
WITHOUT_QUEUE_LIMITS = {"max_queued_requests": 2**31 - 1, "max_queued_tokens": 2**62}
FINISH_REASONS = tuple(FinishReason)
CLOSED = ManagerClosedError("the engine is closed", "a closed engine accepts no requests",
                            "send the request to another instance")


class Switchboard:
    """Connects the mailboxes of an engine with its worker.

    The worker references this object and not the AsyncEngine, so an unreferenced AsyncEngine is garbage-collected and
    ends. Threads communicate through atomic operations of deques and dictionaries. Ids are never reused, so a late stop
    cannot stop another request. Requests wait in the engine and not here, so that no refusal, deadline or
    priority waits for room.

    num_wake_ups   number of event loop wake-ups so far
    closed         the error with which the worker has ended; None while the worker runs. A closed switchboard accepts
                   no request
    """

    def __init__(self) -> None:
        self._process_id = forked_child.current_process_id
        self._ids = count()
        self._mailboxes: dict[int, Mailbox] = {}
        self._submitted: deque[tuple[Mailbox, Any]] = deque()
        self._stops: deque[int] = deque()
        self._to_wake: list[Mailbox] = []
        self.num_wake_ups = 0
        self.closed: BatchManagerError | None = None

    # ---------------------------------------------------------------- from any thread

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, requests: Sequence[tuple[Mailbox, Any]]) -> None:
        """Queue requests until `get` returns them. One call of `get` returns all of them, unless they are very many.

        requests   pairs of a mailbox and a PackedRequest if the engine runs in its own process, otherwise an
                   InferenceRequest
        """
        for mailbox, _ in requests:
            self._mailboxes[mailbox.request_id] = mailbox
        self._submitted.extend(requests)
        if self.closed is not None:            # checked after queueing; `end` sets it before it drains the queue
            self._end_all(self.closed)

    def stop(self, mailbox: Mailbox) -> None:
        """Stop the request of a mailbox without a reader. Never blocks; safe to call from a finalizer."""
        mailbox.is_cancelled = True
        if not mailbox.has_ended:
            self._stops.append(mailbox.request_id)

    def check_process(self) -> None:
        """Raise ManagerClosedError in a forked child, where no response would arrive."""
        if self._process_id != forked_child.current_process_id:
            raise ManagerClosedError("this process was forked from the one that started the engine",
                                     "an engine serves its parent process only", "start a new engine after forking")

    @property
    def has_stops(self) -> bool:
        """Whether there are stopped requests that `poll` has not reported yet."""
        return bool(self._stops)

    def hooked_into(self, parts: Parts) -> Parts:
        """Return the user's parts with hooks that call this switchboard's hooks, then the user's hooks."""
        return replace(parts, after_responses=_both(self.after_responses, parts.after_responses),
                       at_end=_both(self.at_end, parts.at_end))

    def __len__(self) -> int:
        """Number of requests without a final response."""
        return len(self._mailboxes)

    # ---------------------------------------------------------------- callbacks, on the worker's thread

    def get(self, max_num_requests: int) -> list[Any]:
        """Return the submitted requests, whether there is room for them or not."""
        requests: list[Any] = []
        while self._submitted and len(requests) < MOST_AT_ONCE:
            mailbox, request = self._submitted.popleft()
            if mailbox.is_cancelled:           # never runs
                mailbox.close()
                self._mailboxes.pop(mailbox.request_id, None)
            else:
                requests.append(request)
        return requests

    def send(self, request_id: int, tensors: list[NamedTensor], final: bool, error: str) -> None:
        mailbox = self._mailboxes.pop(request_id, None) if final else self._mailboxes.get(request_id)
        if mailbox is None:
            return
        mailbox.put(tensors, final, error)
        self._list(mailbox)

    def deliver(self, request_id: int, tokens: list[int], reason: int, tensors: list[NamedTensor] | None,
                error: str) -> None:
        """Put a response of an engine process into its mailbox. The arguments are the fields of messages.Response."""
        is_final = reason or error
        mailbox = self._mailboxes.pop(request_id, None) if is_final else self._mailboxes.get(request_id)
        if mailbox is None:
            return
        if error:
            mailbox.end(error)
        else:
            mailbox.add(tokens, FINISH_REASONS[reason], tensors)
        self._list(mailbox)

    def _list(self, mailbox: Mailbox) -> None:
        if not mailbox.is_listed and not mailbox.is_cancelled:
            mailbox.is_listed = True
            self._to_wake.append(mailbox)

    def poll(self) -> set[int]:
        stops, waiting = set(), self._stops
        while waiting:
            stops.add(waiting.popleft())
        return stops

    def after_responses(self) -> None:
        """Wake each event loop once, for all its mailboxes with new responses."""
        by_loop: dict[AbstractEventLoop, list[Mailbox]] = {}
        to_wake, self._to_wake = self._to_wake, []
        for mailbox in to_wake:
            mailbox.is_listed = False
            # None: the reader has not waited yet; it sets `loop` first and then takes once more.
            if mailbox.loop is not None:
                by_loop.setdefault(mailbox.loop, []).append(mailbox)
            elif mailbox.made_on is not None and mailbox.made_on.is_closed():
                self.stop(mailbox)
        for loop, mailboxes in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, mailboxes)
                self.num_wake_ups += 1
            except RuntimeError:               # the loop is closed: no reader is left
                for mailbox in mailboxes:
                    self.stop(mailbox)

    def at_end(self, health: dict[str, Any]) -> None:
        self.end(CLOSED)

    def end(self, error: BatchManagerError) -> None:
        """End all remaining requests with this error, because the engine has ended."""
        self.closed = error
        self._end_all(error)

    def _end_all(self, error: BatchManagerError) -> None:
        """End all requests, including requests that the worker never took."""
        self._submitted.clear()
        for request_id in list(self._mailboxes):
            mailbox = self._mailboxes.pop(request_id, None)
            if mailbox is not None:
                mailbox.end(error.response_text())
                self._to_wake.append(mailbox)
        self.after_responses()


def _wake(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


def _both(ours: Callable[..., None], theirs: Callable[..., None] | None) -> Callable[..., None]:
    """Return a hook that calls `ours`, then the user's hook `theirs`, which may raise.

    theirs   None: the user has no hook; return `ours`
    """
    if theirs is None:
        return ours

    def call(*given: Any) -> None:
        ours(*given)
        theirs(*given)
    return call
