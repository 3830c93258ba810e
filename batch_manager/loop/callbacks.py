"""The four callbacks and three hooks, each in a guarded block. A callback that raises has this effect:

get     items read before the exception are kept, and the loop calls get again after a back-off
send    the response counts as delivered and is not repeated
poll    the result counts as an empty set
stats, after_responses, at_end, kv_events   the exception is ignored and the call is not repeated
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from operator import index
from typing import Any

from .. import forked_child
from ..errors import InternalError
from ..guard import Guard
from ..kv_events import KvEvent
from ..names import ErrorCode
from ..requests.inference_request import InferenceRequest
from ..responses.named_tensor import NamedTensor
from .fetched_items import AlikeItems, FetchedItems
from .unanswered import UnansweredItems

NO_IDS: tuple[type, ...] = (int, bool, float, str, bytes)
ATTEMPTS_AT_END = 3
MAX_STOPS_OF_ITERATOR = 1 << 20    # an iterator may be endless

GetInferenceRequestsCallback = Callable[[int], Iterable[InferenceRequest]]
SendResponseCallback = Callable[[int, list[NamedTensor], bool, str], None]
PollStopSignalCallback = Callable[[], Iterable[int]]
ReturnBatchManagerStatsCallback = Callable[[str], None]
AfterResponsesHook = Callable[[], None]
AtEndHook = Callable[[dict[str, Any]], None]
KvEventsHook = Callable[[Sequence[KvEvent]], None]


class GuardedCallbacks:
    """Calls the user's callbacks. No method raises an exception of a callback.

    Another thread may raise an asynchronous exception in the thread that runs the loop. The exception is contained
    while a callback runs, and propagates otherwise. In both cases no item is lost and no final response is repeated;
    unanswered.py explains how.

    guard        the engine's guard
    unanswered   items that still need a final response
    fetched      the FetchedItems, which call get and hold the items that no iteration has decided yet
    wants_stats  whether there is a statistics callback
    has_after_responses   whether there is a hook after_responses
    """

    def __init__(
        self,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        return_stats: ReturnBatchManagerStatsCallback | None,
        guard: Guard,
        max_admissions_per_iteration: int,
        after_responses: AfterResponsesHook | None = None,
        at_end: AtEndHook | None = None,
        kv_events: KvEventsHook | None = None,
        alike: AlikeItems | None = None,
    ) -> None:
        self._send, self._poll, self._stats = send_response, poll_stop_signal, return_stats
        self._in_send, self._in_poll, self._in_stats = map(guard.containing, ("send", "poll", "stats"))
        self._after_responses, self._at_end = after_responses, at_end
        self.has_after_responses = after_responses is not None
        self._in_after_responses = guard.containing("after_responses", kind="hook")
        self._in_at_end = guard.containing("at_end", kind="hook")
        self._kv_events, self._in_kv_events = kv_events, guard.containing("kv_events", kind="hook")
        self._has_responded = False    # since `after_responses` was called
        self.wants_stats = return_stats is not None
        self.guard = guard
        self.unanswered = UnansweredItems()
        self.fetched = FetchedItems(get_inference_requests, guard, self.unanswered.undecided,
                                    max_admissions_per_iteration, alike)
        guard.failures.update({"get": 0, "send": 0, "poll": 0, "stats": 0})

    @property
    def failures(self) -> dict[str, int]:
        """Callback -> number of calls that raised."""
        return self.guard.failures

    def figures(self) -> dict[str, int]:
        """Return the statistics of finals and callbacks; those of one iteration count from the previous call."""
        seconds, unanswered = 0.0, self.unanswered
        for block in (self.fetched.in_get, self._in_send, self._in_poll, self._in_stats, self._in_after_responses,
                      self._in_kv_events):
            seconds += block.seconds
            block.seconds = 0.0
        figures = {
            "Callback Time Microseconds": round(seconds * 1e6),
            "Final Responses": unanswered.num_sent,
            **unanswered.reasons,
        }
        for code, count in unanswered.errors.items():
            figures[f"Errors {code.value}"] = count
        for name, count in self.guard.failures.items():
            figures[f"Failed {name} Callbacks"] = count
        return figures

    def send(self, responses: Iterable[tuple[int, list[NamedTensor]]]) -> None:
        """Send responses that are not final.

        responses   (request id, tensors) of each response, in order

        All callbacks run in one guarded block, because entering a block takes as long as a short callback. After an
        exception, the remaining callbacks run in a new block, and only the response of the failed callback is lost.
        After each callback, the method updates the heartbeat. If a callback forks, the method leaves the guarded block
        in the child process, and the guard ends the child there.
        """
        guard, process_id = self.guard, self.guard.process_id
        monotonic, heartbeat = guard.monotonic, guard.heartbeat
        self._has_responded = True
        # No call runs between taking a response and its callback. An asynchronous exception cannot lose the response.
        remaining, is_done = iter(responses), False
        while not is_done:
            with self._in_send:
                for request_id, tensors in remaining:
                    self._send(request_id, tensors, False, "")
                    if forked_child.current_process_id != process_id:
                        break    # the block ends the child
                    heartbeat.since = monotonic()
                    if forked_child.current_process_id != process_id:    # forked in a custom clock
                        break
                is_done = True

    def send_final(self, request_id: int, tensors: list[NamedTensor], error_message: str = "",
                   code: ErrorCode | None = None) -> None:
        """Send the final response of a live request. Raises InternalError if the response was sent before."""
        alive = self.unanswered.alive
        if request_id not in alive:
            raise InternalError(f"request {request_id} would get a second final response")
        self.send_last(alive, request_id, request_id, tensors, error_message, code)

    def send_refusal(self, error_message: str, code: ErrorCode) -> None:
        """Send the only response to the oldest refused item."""
        refusals = self.unanswered.refusals
        self.send_last(refusals, 0, refusals[0].request_id, [], error_message, code)

    def send_last(self, listed: Any, key: int, request_id: int, tensors: list[NamedTensor], error_message: str,
                  code: ErrorCode | None) -> None:
        """Send a final response, and delete `listed[key]`, which stands for its item, as the callback starts."""
        unanswered = self.unanswered
        self._has_responded = True
        if code is not None:
            unanswered.errors.setdefault(code, 0)
        with self._in_send:
            # No asynchronous exception can occur from here to the first instruction of the callback.
            if code is not None:
                unanswered.errors[code] += 1
            unanswered.num_sent += 1
            del listed[key]
            self._send(request_id, tensors, True, error_message)

    def after_responses(self) -> None:
        """Call the hook `after_responses` if responses were sent since its last call."""
        if self._has_responded:
            hook = self._after_responses
            if hook is None:
                self._has_responded = False
                return
            with self._in_after_responses:
                # No asynchronous exception can occur between these two lines.
                self._has_responded = False
                hook()

    def kv_events(self, events: Sequence[KvEvent]) -> None:
        """Call the hook `kv_events`, if there is one and there are events."""
        if self._kv_events is not None and events:
            with self._in_kv_events:
                self._kv_events(events)

    def at_end(self, health: Callable[[], dict[str, Any]]) -> None:
        """Call the hook `at_end` with the result of `health`, unless the hook was called before."""
        for _ in range(ATTEMPTS_AT_END):    # an asynchronous exception before the hook runs costs one attempt
            if self._at_end is None:
                return
            with self._in_at_end:
                result = health()
                hook, self._at_end = self._at_end, None
                hook(result)

    def poll_stops(self) -> set[int]:
        """Call the poll callback, if there is one, and return the request ids in its result.

        Values that are not integers are skipped.
        """
        stops: set[int] = set()
        if self._poll is not None:
            signals = None
            with self._in_poll:
                signals = self._poll()
                if type(signals) not in NO_IDS and (type(signals) is not set or signals):
                    stops = _integers(signals)
            if type(signals) in NO_IDS:
                self.guard.note_misuse("poll", signals, "expected a set of request ids")
        return stops

    def return_stats(self, record: str) -> None:
        """Call the statistics callback with `record`, a JSON text. Requires `wants_stats`."""
        assert self._stats is not None
        with self._in_stats:
            self._stats(record)


def _integers(signals: Any) -> set[int]:
    """Return the integers in `signals`, the result of the poll callback. Runs user code."""
    if type(signals) is set:
        signals = signals.copy()    # another thread may add to it
    elif not hasattr(type(signals), "__len__"):
        signals = islice(() if signals is None else signals, MAX_STOPS_OF_ITERATOR)
    integers = set()
    for signal in signals:
        if type(signal) is not bool:
            with suppress(BaseException):    # not an integer
                integers.add(index(signal))
    return integers
