"""Turns fetched items into accepted requests or refusals."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ..config import TrtGptModelOptionalParams
from ..contained_log import RateLimitedLog, log
from ..errors import (
    BatchManagerError,
    DuplicateRequestIdError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    counted,
    type_name,
    where_raised,
)
from ..requests.admission import Admission, Admitted, usable_id
from ..seams import Clock
from .callbacks import GuardedCallbacks
from .fetched_items import RefusedItem
from .timings import Timings
from .unanswered import Refusal
from .waiting_requests import WaitingRequests

MAX_ARRIVAL_AHEAD_S = 1.0    # tolerance for an arrival time in the future


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Limits on accepted work. A request that exceeds a limit is refused at once."""

    max_queued_requests: int
    max_queued_tokens: int
    max_bytes_in_flight: int

    @staticmethod
    def of(params: TrtGptModelOptionalParams) -> "QueueBounds":
        return QueueBounds(params.max_queued_requests, params.max_queued_tokens, params.max_bytes_in_flight)


class Intake:
    """Accepts or refuses each fetched item once.

    Items come from `GuardedCallbacks.fetched`. `GuardedCallbacks.unanswered` lists them until their final response.

    num_accepted, num_refused, unaddressable   numbers of items accepted, refused, and without a usable id, since
                    construction
    max_admissions_per_iteration   number of items that one iteration reads at most
    arrived         (id, arrival time) of requests accepted since the last call of `take_arrived`
    timings         arrival times and metrics of the accepted requests, see `Timings`
    num_prompt_tokens   number of prompt tokens of the accepted requests, since construction
    came_late       whether a request was accepted after its deadline, which counts from its arrival_time; `expired`
                    resets this to False
    num_warnings    number of cuts of output lengths, so that sequences fit max_seq_len, and of draft tokens
    waiting         the accepted requests that are not active yet
    """

    def __init__(self, callbacks: GuardedCallbacks, admission: Admission, bounds: QueueBounds, clock: Clock,
                 max_admissions_per_iteration: int, terminate_req_id: int | None, waiting: WaitingRequests) -> None:
        self.waiting = waiting
        self._adapters = waiting.preparing.store
        self._callbacks = callbacks
        self._unanswered = callbacks.unanswered
        self.admission, self.admission_elsewhere = admission, admission.for_other_threads()
        self._unaddressable_log = RateLimitedLog(clock.monotonic)
        self._warning_log = RateLimitedLog(clock.monotonic)
        self._bounds = bounds
        self._clock = clock
        self.timings = Timings(clock)
        self.max_admissions_per_iteration = max_admissions_per_iteration
        self._terminate_req_id = terminate_req_id
        self._bytes_of: dict[int, int] = {}
        self._bytes_in_flight = 0
        self.came_late = False
        self._deadlines: dict[int, tuple[float, float]] = {}     # request id -> (time of the deadline, deadline_s)
        self.arrived: list[tuple[int, float]] = []
        self.is_terminating = False
        self.num_warnings = 0
        self.num_prompt_tokens = 0
        self._reported = 0, 0    # accepted and refused items in the statistics so far

    def __len__(self) -> int:
        """The number of accepted requests that wait to become active."""
        return self.waiting.num_requests

    @property
    def num_alive(self) -> int:
        """The number of live requests, waiting or active. Any thread may read it."""
        return len(self._unanswered.alive)

    @property
    def num_accepted(self) -> int:
        return self._unanswered.num_accepted

    @property
    def num_refused(self) -> int:
        return self._unanswered.num_refused

    @property
    def unaddressable(self) -> int:
        """Number of items without a usable id, for which no response can be sent."""
        return self._unanswered.num_unaddressable

    def figures(self) -> dict[str, int]:
        """Return the statistics of the intake; those of one iteration count from the previous call."""
        unanswered = self._unanswered
        accepted, refused = self._reported
        self._reported = unanswered.num_accepted, unanswered.num_refused
        return {
            "New Requests": unanswered.num_accepted - accepted,
            "Refused Requests": unanswered.num_refused - refused,
            "Accepted Prompt Tokens": self.num_prompt_tokens,
            "Queued Requests": self.waiting.num_requests,
            "Queued Tokens": self.waiting.num_tokens,
            "Clamped Requests": self.num_warnings,
            "Unaddressable Items": unanswered.num_unaddressable,
        }

    def ask(self, room: int | None) -> None:
        """Call the get callback for at most `room` - (number of queued requests) requests.

        An item with the id `terminate_req_id` ends the worker. Once such an item was read, the method does nothing.

        room   number of further requests that may become active; None: unbounded
        """
        if not self.is_terminating:
            self._callbacks.fetched.ask(-1 if room is None else max(room - self.waiting.num_requests, 0))

    def fetch(self, room: int | None, is_active: Callable[[int], bool],
              failure: BatchManagerError | None = None) -> list[Admitted]:
        """Accept or refuse up to max_admissions_per_iteration items. Returns the requests that become active.

        room         number of further requests that may become active; None: unbounded. Queued requests become
                     active before fetched ones
        is_active    whether an id belongs to an active request
        failure      refuse every item with this error; None: decide normally
        """
        unanswered, fetched, waiting = self._unanswered, self._callbacks.fetched, self.waiting
        preparing, stored = waiting.preparing, waiting.stored
        if not (waiting.queue or unanswered.undecided or fetched or preparing.waiting or stored):
            return []
        if preparing.waiting or stored:
            waiting.take_prepared()
        entering = waiting.take(room)
        if room is not None:
            room -= len(entering) + waiting.num_unready
        entering_ids = {admitted.request.request_id for admitted in entering}

        def is_alive(request_id: int) -> bool:
            return request_id in entering_ids or request_id in waiting.ids or is_active(request_id)

        for _ in range(self.max_admissions_per_iteration):
            if not (unanswered.undecided or fetched.read_next()):
                break
            item = unanswered.undecided[0]
            request_id = usable_id(item)
            if request_id is None:
                self._note_unaddressable(item)
                continue
            if request_id == self._terminate_req_id:
                self.is_terminating = True
                unanswered.drop()
                continue
            try:
                if failure is not None:
                    raise failure
                admitted = self._decide(item, request_id, is_alive, has_room=room is None or room > 0)
            except BatchManagerError as error:
                unanswered.refuse(Refusal(request_id, error))
                continue
            unanswered.accept(request_id)
            if (admitted.request.lora_task_id is not None and waiting.must_prepare(admitted)
                    or stored is not None and waiting.must_load(admitted)):
                if room is not None:
                    room -= 1
            elif room is None or room > 0:
                entering.append(admitted)
                entering_ids.add(request_id)
                if room is not None:
                    room -= 1
            else:
                waiting.add(admitted)
            self._note_accepted(admitted)
        return entering

    def _decide(self, item: object, request_id: int, is_alive: Callable[[int], bool], *, has_room: bool) -> Admitted:
        if type(item) is RefusedItem:
            raise item.error
        if is_alive(request_id):
            raise DuplicateRequestIdError(
                f"request {request_id}: a request with this id is alive",
                "this refusal is for the duplicate, and the live request goes on",
                "wait for the final response of an id before using it again")
        try:
            admitted = self.admission.admit(item)
        except RequestError:
            raise
        except Exception as error:
            log.error("admission raised %s\n%s", type_name(error), where_raised(error))
            raise InvalidRequestError(f"request {request_id}: it could not be read ({type_name(error)})",
                                      "its values must be torch CPU tensors, numpy arrays, numbers or lists",
                                      "report this error with the log") from error
        if admitted.request.request_id != request_id:
            raise InvalidRequestError(f"request {request_id}: its request_id changes between two reads",
                                      "the id must not change", "do not override request_id")
        if admitted.arrival_time is not None:
            self._check_arrival(request_id, admitted.arrival_time)
        if admitted.request.lora_task_id is not None:
            self.waiting.preparing.look_up(admitted)
        tokens, bounds, waiting = admitted.request.prompt_len, self._bounds, self.waiting
        if not has_room and waiting.num_requests >= bounds.max_queued_requests:
            raise QueueFullError(f"request {request_id}: the queue has {counted(waiting.num_requests, 'request')} "
                                 "already",
                                 f"max_queued_requests is {bounds.max_queued_requests}",
                                 "return no more than max_num_requests from get, or raise max_queued_requests")
        queued = waiting.num_tokens + tokens
        if not has_room and queued > bounds.max_queued_tokens:
            raise QueueFullError(f"request {request_id}: with its {counted(tokens, 'prompt token')}, "
                                 f"{queued:,} would be queued",
                                 f"max_queued_tokens is {bounds.max_queued_tokens:,}",
                                 "try again later, or raise max_queued_tokens")
        if self._bytes_in_flight + admitted.num_bytes > bounds.max_bytes_in_flight:
            raise QueueFullError(f"request {request_id}: it needs {counted(admitted.num_bytes, 'byte')} for its "
                                 f"tensors and the logits it asks for, and {self._bytes_in_flight:,} are in use",
                                 f"max_bytes_in_flight is {bounds.max_bytes_in_flight:,}",
                                 "ask for fewer logits, try again later, or raise max_bytes_in_flight")
        return admitted

    def _check_arrival(self, request_id: int, arrival_time: float) -> None:
        ahead = arrival_time - self._clock.monotonic()
        if ahead > MAX_ARRIVAL_AHEAD_S:
            raise InvalidRequestError(f"request {request_id}: arrival_time is {arrival_time:g}, {ahead:.6g} seconds in "
                                      "the future", "it must be in the past, in seconds of the engine's clock",
                                      "take it from time.monotonic(), not from time.time()")

    def _note_accepted(self, admitted: Admitted) -> None:
        request_id = admitted.request.request_id
        self.num_prompt_tokens += admitted.request.prompt_len
        self._bytes_of[request_id] = admitted.num_bytes
        self._bytes_in_flight += admitted.num_bytes
        arrived_at = now = self._clock.monotonic()
        if admitted.arrival_time is not None:
            arrived_at = min(admitted.arrival_time, arrived_at)
        self.arrived.append((request_id, arrived_at))
        self.timings.accept(admitted, arrived_at)
        if admitted.response.deadline_s is not None:
            deadline_s = admitted.response.deadline_s
            self._deadlines[request_id] = arrived_at + deadline_s, deadline_s
            self.came_late |= admitted.arrival_time is not None and arrived_at + deadline_s <= now
        for warning in admitted.warnings:
            self.num_warnings += 1
            self._warning_log.log(logging.WARNING, "%s (%d so far)", warning, self.num_warnings)

    def take_arrived(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return (ids, arrival times) of the requests accepted since the last call of this method."""
        arrived, self.arrived = self.arrived, []
        return tuple([request_id for request_id, _ in arrived]), tuple([time for _, time in arrived])

    def clear(self) -> None:
        """Forget every accepted request, waiting or not."""
        self.waiting.clear()
        self._bytes_of.clear()
        self._bytes_in_flight = 0
        self._deadlines.clear()
        self.timings.clear()

    def expired(self) -> dict[int, str]:
        """Return request id -> error text, for the requests whose deadlines have passed since the last call.

        The loop sends this error only to requests without generated tokens.
        """
        self.came_late = False
        if not self._deadlines:
            return {}
        now = self._clock.monotonic()
        late = {request_id: deadline_s for request_id, (deadline, deadline_s) in self._deadlines.items()
                if deadline <= now}
        for request_id in late:
            del self._deadlines[request_id]
        return {request_id: f"deadline_s is {deadline_s:g} and it passed before the first token; it counts from "
                            "the arrival and includes queueing, the prompt and one token; raise deadline_s, or lower "
                            "the load" for request_id, deadline_s in late.items()}

    def forget(self, request_id: int) -> None:
        """Drop the byte count, the deadline and the times of an ended request."""
        self._bytes_in_flight -= self._bytes_of.pop(request_id, 0)
        self._deadlines.pop(request_id, None)
        self.timings.forget(request_id)
        if request_id in self._adapters.users:
            self._adapters.leave(request_id)

    def _note_unaddressable(self, item: object) -> None:
        self._unanswered.note_unaddressable()
        self._unaddressable_log.log(
            logging.ERROR,
            "the get callback returned a value of type %s without a usable request id (%d so far), which cannot be "
            "answered; return InferenceRequests only",
            type_name(item), self._unanswered.num_unaddressable)
