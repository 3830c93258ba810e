"""The callbacks of an AsyncEngine: between its mailboxes, on any event loop and thread, and the engine's worker."""

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from .. import forked_child
from ..config import Parts
from ..errors import BatchManagerError, ManagerClosedError
from ..names import FinishReason
from ..responses.named_tensor import NamedTensor
from .mailbox import Mailbox

MOST_AT_ONCE = 1024            # requests that one call of get returns
FINISH_REASONS = tuple(FinishReason)
CLOSED = ManagerClosedError("the engine was closed", "an engine runs once", "send the request to another instance")


class Switchboard:
    """The worker holds this and nothing that holds the engine, so that an engine without references ends.

    Threads meet in single operations of deques and dictionaries. Ids are never used twice, so that a stop which comes
    too late stops no request.

    takes_all      requests wait in the engine, by priority and deadline, and are refused with QUEUE_FULL beyond its
                   bounds; else they wait here, in order, without a bound, until there is room for them
    num_wake_ups   calls of an event loop so far
    closed         the worker has ended, for this reason; no request is taken any more. None: it runs
    """

    def __init__(self, takes_all: bool = False) -> None:
        self._takes_all = takes_all
        self._process_id = forked_child.current_process_id
        self._ids = count()
        self._mailboxes: dict[int, Mailbox] = {}
        self._handed_over: deque[tuple[Mailbox, Any]] = deque()
        self._stops: deque[int] = deque()
        self._to_wake: list[Mailbox] = []
        self.num_wake_ups = 0
        self.closed: BatchManagerError | None = None

    # ---------------------------------------------------------------- from any thread

    def next_id(self) -> int:
        return next(self._ids)

    def hand_over(self, mailbox: Mailbox, request: Any) -> None:
        """Give `get` a request: an InferenceRequest, or what an engine process takes for one."""
        self._mailboxes[mailbox.request_id] = mailbox
        self._handed_over.append((mailbox, request))
        if self.closed is not None:            # looked at after it was put there; `end` does the two in the other order
            self._end_all(self.closed)

    def stop(self, mailbox: Mailbox) -> None:
        """This mailbox has lost its reader. Never blocks, and may be called while garbage is collected."""
        mailbox.is_cancelled = True
        if not mailbox.has_ended:
            self._stops.append(mailbox.request_id)

    def check_process(self) -> None:
        """Raises ManagerClosedError in a forked child, where nothing ever arrives."""
        if self._process_id != forked_child.current_process_id:
            raise ManagerClosedError("this process was forked from the one that started the engine",
                                     "the engine serves the parent only", "start a new engine after forking")

    @property
    def has_stops(self) -> bool:
        """Whether `poll` has something to tell."""
        return bool(self._stops)

    def hooked_into(self, parts: Parts) -> Parts:
        """The user's parts with the hooks of this switchboard before theirs."""
        return replace(parts, after_responses=_both(self.after_responses, parts.after_responses),
                       at_end=_both(self.at_end, parts.at_end))

    def __len__(self) -> int:
        """Requests that have had no final response."""
        return len(self._mailboxes)

    # ---------------------------------------------------------------- callbacks, on the worker's thread

    def get(self, max_num_requests: int) -> list[Any]:
        is_bounded = max_num_requests >= 0 and not self._takes_all
        most = min(max_num_requests, MOST_AT_ONCE) if is_bounded else MOST_AT_ONCE
        requests: list[Any] = []
        while self._handed_over and len(requests) < most:
            mailbox, request = self._handed_over.popleft()
            if mailbox.is_cancelled:           # it never runs
                mailbox.has_ended = True
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
        """A response that came as a message. Its arguments are the fields of messages.Response."""
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
        """Wake each event loop once, for all its mailboxes that got something."""
        by_loop: dict[AbstractEventLoop, list[Mailbox]] = {}
        to_wake, self._to_wake = self._to_wake, []
        for mailbox in to_wake:
            mailbox.is_listed = False
            # None: a reader that begins to wait sets it, and then looks once more.
            if mailbox.loop is not None:
                by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, mailboxes in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, mailboxes)
                self.num_wake_ups += 1
            except RuntimeError:               # the loop was closed: it has no reader
                for mailbox in mailboxes:
                    self.stop(mailbox)

    def at_end(self, health: dict[str, Any]) -> None:
        self.end(CLOSED)

    def end(self, error: BatchManagerError) -> None:
        """There is no engine any more: each request that is left ends with this error."""
        self.closed = error
        self._end_all(error)

    def _end_all(self, error: BatchManagerError) -> None:
        """Requests that the worker never took have no answer of it."""
        self._handed_over.clear()
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
    """A hook that calls ours, then the user's, which may raise."""
    if theirs is None:
        return ours

    def call(*given: Any) -> None:
        ours(*given)
        theirs(*given)
    return call
