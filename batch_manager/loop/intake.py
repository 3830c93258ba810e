"""From what the get callback returned to accepted requests, refusals, and a bounded queue between them."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..config import TrtGptModelOptionalParams
from ..errors import (
    BatchManagerError,
    DuplicateRequestIdError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)
from ..requests.admission import Admission, Admitted, usable_id
from ..seams import Clock
from .callbacks import GuardedCallbacks

log = logging.getLogger("batch_manager")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item that was handed over and not accepted: one final response with this text."""

    request_id: int
    error: BatchManagerError


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How much accepted work may be alive. Beyond it a request is refused at once."""

    max_queued_requests: int
    max_queued_tokens: int
    max_bytes_in_flight: int

    @staticmethod
    def of(params: TrtGptModelOptionalParams) -> "QueueBounds":
        return QueueBounds(params.max_queued_requests, params.max_queued_tokens, params.max_bytes_in_flight)


class Intake:
    """Reads what was handed over and decides each item once.

    refusals        items that were refused and not answered yet, in order; the loop answers and removes them
    unaddressable   items without a usable id: counted and logged, since nobody can be answered
    num_accepted, num_refused   items decided since construction
    num_warnings    accepted requests that were changed on the way in (an output length cut to what fits)
    """

    def __init__(self, callbacks: GuardedCallbacks, admission: Admission, bounds: QueueBounds, clock: Clock,
                 max_admissions_per_iteration: int, terminate_req_id: int | None) -> None:
        self._callbacks = callbacks
        self._admission = admission
        self._bounds = bounds
        self._clock = clock
        self._at_most = max_admissions_per_iteration
        self._terminate_req_id = terminate_req_id
        self._queue: deque[Admitted] = deque()
        self._queued_ids: set[int] = set()
        self._queued_tokens = 0
        self._bytes_of: dict[int, int] = {}
        self._bytes_in_flight = 0
        self._deadlines: dict[int, float] = {}
        self._arrived: list[int] = []
        self._entering: list[Admitted] = []
        self.refusals: deque[Refusal] = deque()
        self.is_terminating = False
        self.unaddressable = 0
        self.num_accepted = 0
        self.num_refused = 0
        self.num_warnings = 0

    def __len__(self) -> int:
        """Accepted requests that wait for a place among the active ones."""
        return len(self._queue)

    def holds(self, request_id: int) -> bool:
        return request_id in self._queued_ids

    def ask(self, room: int | None) -> None:
        """Call the get callback for as many requests as there are places left once the queue has moved in.

        room   places among the active requests, None: unbounded
        """
        if not self.is_terminating:
            self._callbacks.get(-1 if room is None else max(room - len(self._queue), 0))

    def fetch(self, room: int | None, is_active: Callable[[int], bool],
              failure: BatchManagerError | None = None) -> list[Admitted]:
        """One look at what was handed over. Whoever is refused is added to `refusals`.

        room         places among the active requests, None: unbounded. The queue goes first.
        is_active    whether an id belongs to an active request
        failure      when given, nothing is accepted any more and this is everybody's answer
        Returns the requests that become active now.
        """
        entering = self._entering = self._from_queue(room)
        if room is not None:
            room -= len(entering)
        entering_ids = {admitted.request.request_id for admitted in entering}

        def is_alive(request_id: int) -> bool:
            return request_id in entering_ids or request_id in self._queued_ids or is_active(request_id)

        for item in self._callbacks.read(self._at_most):
            request_id = usable_id(item)
            if request_id is None:
                self._note_unaddressable(item)
                continue
            if request_id == self._terminate_req_id:
                self.is_terminating = True
                continue
            try:
                if failure is not None:
                    raise failure
                admitted = self._decide(item, request_id, is_alive, has_room=room is None or room > 0)
            except BatchManagerError as error:
                self.num_refused += 1
                self.refusals.append(Refusal(request_id, error))
                continue
            if room is None or room > 0:
                entering.append(admitted)
                entering_ids.add(request_id)
                if room is not None:
                    room -= 1
            else:
                self._enqueue(admitted)
            self._accept(admitted)
        self._entering = []
        return entering

    def _decide(self, item: object, request_id: int, is_alive: Callable[[int], bool], *, has_room: bool) -> Admitted:
        if is_alive(request_id):
            raise DuplicateRequestIdError(
                f"request {request_id}: a request with this id is alive",
                "it is untouched; this text answers the second one",
                "wait for the final response of an id before using it again")
        try:
            admitted = self._admission.admit(item)
        except RequestError:
            raise
        except Exception as error:
            log.exception("admission raised")
            raise InvalidRequestError(f"request {request_id}: it could not be read ({type(error).__name__})") from error
        tokens, bounds = admitted.request.prompt_len, self._bounds
        if not has_room and len(self._queue) >= bounds.max_queued_requests:
            raise QueueFullError(f"request {request_id}: {len(self._queue)} requests wait already",
                                 f"at most {bounds.max_queued_requests} may",
                                 "hand over no more than get was asked for, or raise max_queued_requests")
        if not has_room and self._queued_tokens + tokens > bounds.max_queued_tokens:
            raise QueueFullError(f"request {request_id}: its {tokens:,} prompt tokens would make "
                                 f"{self._queued_tokens + tokens:,} waiting ones",
                                 f"at most {bounds.max_queued_tokens:,} may wait",
                                 "try again later, or raise max_queued_tokens")
        if self._bytes_in_flight + admitted.num_bytes > bounds.max_bytes_in_flight:
            raise QueueFullError(f"request {request_id}: it needs {admitted.num_bytes:,} bytes for its tensors and the "
                                 f"logits it asks for, and {self._bytes_in_flight:,} are in use",
                                 f"at most {bounds.max_bytes_in_flight:,} may be",
                                 "ask for fewer logits, try again later, or raise max_bytes_in_flight")
        return admitted

    def _accept(self, admitted: Admitted) -> None:
        request_id = admitted.request.request_id
        self.num_accepted += 1
        self._arrived.append(request_id)
        self._bytes_of[request_id] = admitted.num_bytes
        self._bytes_in_flight += admitted.num_bytes
        if admitted.response.deadline_s is not None:
            self._deadlines[request_id] = self._clock.monotonic() + admitted.response.deadline_s
        for warning in admitted.warnings:
            self.num_warnings += 1
            log.warning("%s", warning)

    def _enqueue(self, admitted: Admitted) -> None:
        self._queue.append(admitted)
        self._queued_ids.add(admitted.request.request_id)
        self._queued_tokens += admitted.request.prompt_len

    def _from_queue(self, room: int | None) -> list[Admitted]:
        count = len(self._queue) if room is None else min(max(room, 0), len(self._queue))
        return [self._dequeue() for _ in range(count)]

    def _dequeue(self) -> Admitted:
        admitted = self._queue.popleft()
        self._queued_ids.discard(admitted.request.request_id)
        self._queued_tokens -= admitted.request.prompt_len
        return admitted

    def take_arrived(self) -> tuple[int, ...]:
        """Ids accepted since the last call."""
        arrived, self._arrived = tuple(self._arrived), []
        return arrived

    def withdraw(self, request_ids: set[int]) -> list[Admitted]:
        """Take these out of the queue; ids that do not wait are passed over."""
        wanted = request_ids & self._queued_ids
        if not wanted:
            return []
        taken = [admitted for admitted in self._queue if admitted.request.request_id in wanted]
        kept = [admitted for admitted in self._queue if admitted.request.request_id not in wanted]
        self._queue.clear()
        self._queued_ids.clear()
        self._queued_tokens = 0
        for admitted in kept:
            self._enqueue(admitted)
        return taken

    def withdraw_all(self) -> list[Admitted]:
        """Take everybody out of the queue, and who was about to become active when the engine failed."""
        entering, self._entering = self._entering, []
        return entering + [self._dequeue() for _ in range(len(self._queue))]

    def expired(self) -> set[int]:
        """Ids whose deadline has passed. Each is named once."""
        if not self._deadlines:
            return set()
        now = self._clock.monotonic()
        late = {request_id for request_id, deadline in self._deadlines.items() if deadline <= now}
        for request_id in late:
            del self._deadlines[request_id]
        return late

    def forget(self, request_id: int) -> None:
        """The request has ended; its bytes and its deadline no longer count."""
        self._bytes_in_flight -= self._bytes_of.pop(request_id, 0)
        self._deadlines.pop(request_id, None)

    def _note_unaddressable(self, item: object) -> None:
        self.unaddressable += 1
        log.error("the get callback returned a %s without a usable request id (%d so far); it cannot be answered",
                  type(item).__name__, self.unaddressable)
