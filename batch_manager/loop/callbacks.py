"""The four callbacks and the two hooks, each in its guarded block: what a callback raises stays there.

get     items it gave before raising stand; the rest counts as nothing, and it is called again after a back-off
send    counts as delivered, never repeated
poll    counts as an empty set
stats, after_responses, at_end   ignored, not repeated
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from operator import index
from typing import Any

from .. import forked_child
from ..errors import InternalError
from ..guard import Guard
from ..names import ErrorCode
from ..requests.inference_request import InferenceRequest
from ..responses.named_tensor import NamedTensor
from .fetched_items import FetchedItems
from .unanswered import UnansweredItems

NO_IDS: tuple[type, ...] = (int, bool, float, str, bytes)
ATTEMPTS_AT_END = 3
MOST_STOPS_OF_AN_ITERATOR = 1 << 20    # it may be endless; a set or a list is not

GetInferenceRequestsCallback = Callable[[int], Iterable[InferenceRequest]]
SendResponseCallback = Callable[[int, list[NamedTensor], bool, str], None]
PollStopSignalCallback = Callable[[], Iterable[int]]
ReturnBatchManagerStatsCallback = Callable[[str], None]
AfterResponsesHook = Callable[[], None]
AtEndHook = Callable[[dict[str, Any]], None]


class GuardedCallbacks:
    """The user's callbacks. No method raises what a callback raises.

    An exception that another thread raises in this one is contained too while a callback runs, and passes at any other
    time; either way no item is lost and no final response is repeated (unanswered.py says how).

    guard        of the engine
    unanswered   items that still need a final response
    fetched      calls get, and holds what it returned and no iteration has read yet
    wants_stats  there is a callback for statistics
    """

    def __init__(
        self,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        return_stats: ReturnBatchManagerStatsCallback | None,
        guard: Guard,
        after_responses: AfterResponsesHook | None = None,
        at_end: AtEndHook | None = None,
    ) -> None:
        self._send, self._poll, self._stats = send_response, poll_stop_signal, return_stats
        self._in_send, self._in_poll, self._in_stats = map(guard.containing, ("send", "poll", "stats"))
        self._after_responses, self._at_end = after_responses, at_end
        self._in_after_responses, self._in_at_end = map(guard.containing, ("after_responses", "at_end"))
        self._has_responded = False    # since `after_responses` was called
        self.wants_stats = return_stats is not None
        self.guard = guard
        self.unanswered = UnansweredItems()
        self.fetched = FetchedItems(get_inference_requests, guard, self.unanswered.undecided)
        guard.failures.update({"get": 0, "send": 0, "poll": 0, "stats": 0})

    @property
    def failures(self) -> dict[str, int]:
        """Callback -> calls that raised."""
        return self.guard.failures

    def take_seconds(self) -> float:
        """Seconds spent inside callbacks since the last call."""
        seconds = 0.0
        for block in (self.fetched.in_get, self._in_send, self._in_poll, self._in_stats, self._in_after_responses):
            seconds += block.seconds
            block.seconds = 0.0
        return seconds

    def send(self, responses: Iterable[tuple[int, list[NamedTensor]]]) -> None:
        """Responses that are not the last of their requests: (request id, tensors), in order.

        One guarded block holds all callbacks up to one that raises, because a block costs as much as a short callback.
        What a block does for one callback is done here for each: the heartbeat gets the time at which it begins, a
        process that was forked in it ends after it, and what it raises costs its own response only.
        """
        guard, process_id = self.guard, self.guard.process_id
        monotonic, heartbeat = guard.monotonic, guard.heartbeat
        self._has_responded = True
        # Nothing is called between taking a response and the callback, so no exception can come between and lose it.
        remaining, is_done = iter(responses), False
        while not is_done:
            with self._in_send:
                for request_id, tensors in remaining:
                    self._send(request_id, tensors, False, "")
                    if forked_child.current_process_id != process_id:
                        break    # the block ends it
                    heartbeat.since = monotonic()
                    if forked_child.current_process_id != process_id:    # forked in a clock of the user's
                        break
                is_done = True

    def send_final(self, request_id: int, tensors: list[NamedTensor], error_message: str = "",
                   code: ErrorCode | None = None) -> None:
        """The last response of a live request. Raises InternalError when it was sent before."""
        alive = self.unanswered.alive
        if request_id not in alive:
            raise InternalError(f"request {request_id} was to have a second final response")
        self._send_last(alive, request_id, request_id, tensors, error_message, code)

    def send_refusal(self, error_message: str, code: ErrorCode) -> None:
        """The only response to the oldest refused item."""
        refusals = self.unanswered.refusals
        self._send_last(refusals, 0, refusals[0].request_id, [], error_message, code)

    def _send_last(self, listed: Any, key: int, request_id: int, tensors: list[NamedTensor], error_message: str,
                   code: ErrorCode | None) -> None:
        unanswered = self.unanswered
        self._has_responded = True
        if code is not None:
            unanswered.errors.setdefault(code, 0)
        with self._in_send:
            # From here to the first instruction of the callback no exception of another thread can come between.
            if code is not None:
                unanswered.errors[code] += 1
            unanswered.num_sent += 1
            del listed[key]
            self._send(request_id, tensors, True, error_message)

    def after_responses(self) -> None:
        """Call the hook `after_responses` if a response was sent since its last call."""
        if self._has_responded:
            hook = self._after_responses
            if hook is None:
                self._has_responded = False
                return
            with self._in_after_responses:
                # As in `_send_last`: no exception of another thread can come between these two.
                self._has_responded = False
                hook()

    def at_end(self, health: Callable[[], dict[str, Any]]) -> None:
        """Call the hook `at_end` with what `health` returns, unless it was called before."""
        for _ in range(ATTEMPTS_AT_END):    # an exception that strikes before the hook runs costs one
            if self._at_end is None:
                return
            with self._in_at_end:
                told = health()
                hook, self._at_end = self._at_end, None
                hook(told)

    def poll_stops(self) -> set[int]:
        """The ids to stop; what is not an integer is skipped."""
        stops: set[int] = set()
        if self._poll is not None:
            signals = None
            with self._in_poll:
                signals = self._poll()
                if type(signals) not in NO_IDS and (type(signals) is not set or signals):
                    stops = _integers(signals)
            if type(signals) in NO_IDS:
                self.guard.note_misuse("poll", signals, "a set of request ids is expected")
        return stops

    def return_stats(self, record: str) -> None:
        """Only where `wants_stats`."""
        assert self._stats is not None
        with self._in_stats:
            self._stats(record)


def _integers(signals: Any) -> set[int]:
    """The integers among the signals. Runs code of the user."""
    if type(signals) is set:
        signals = signals.copy()    # its owner may add to it meanwhile
    elif not hasattr(type(signals), "__len__"):
        signals = islice(() if signals is None else signals, MOST_STOPS_OF_AN_ITERATOR)
    integers = set()
    for signal in signals:
        if type(signal) is not bool:
            with suppress(BaseException):    # what raises here is no integer
                integers.add(index(signal))
    return integers
