"""The four callbacks, each behind the one guard: what a callback raises stays here.

get     items it gave before raising stand; the rest counts as nothing, and it is called again after a back-off
send    counts as delivered, never repeated
poll    counts as an empty set
stats   ignored
Every failure is counted; each callback's failures are logged at most once a second.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from ..seams import Clock

log = logging.getLogger("batch_manager")

SECONDS_BETWEEN_LOGS = 1.0
FIRST_BACK_OFF_S = 0.001
LONGEST_BACK_OFF_S = 0.1

GetInferenceRequestsCallback = Callable[[int], Iterable[Any]]
SendResponseCallback = Callable[[int, list, bool, str], None]
PollStopSignalCallback = Callable[[], set[int]]
ReturnBatchManagerStatsCallback = Callable[[str], None]


class HandedOver:
    """What one call of get returned, read in portions.

    A sized collection was handed over whole: what one iteration does not read waits for the next. Of anything else,
    generators above all, only what is read within the first portion was ever handed over.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._iterator = iter(items)
        self._is_sized = hasattr(type(items), "__len__")
        self.is_exhausted = self._is_sized and len(items) == 0

    def read(self, count: int) -> Iterator[Any]:
        given = 0
        for item in islice(self._iterator, count):
            given += 1
            yield item
        self.is_exhausted = given < count or not self._is_sized


class GuardedCallbacks:
    """The user's callbacks. No method raises, whatever the callbacks do.

    failures          callback name -> how many calls failed
    seconds_inside    time spent inside callbacks since the last `take_seconds`
    """

    def __init__(
        self,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        return_stats: ReturnBatchManagerStatsCallback | None,
        clock: Clock,
        heartbeat: Callable[[str, float], None] = lambda activity, now: None,
    ) -> None:
        self._get, self._send, self._poll, self._stats = (
            get_inference_requests, send_response, poll_stop_signal, return_stats)
        self._clock = clock
        self._heartbeat = heartbeat
        self._last_log: dict[str, float] = {}
        self._back_off_s = 0.0
        self._get_again_at = 0.0
        self._waiting: list[HandedOver] = []
        self.failures = {"get": 0, "send": 0, "poll": 0, "stats": 0}
        self.seconds_inside = 0.0

    @property
    def wants_stats(self) -> bool:
        return self._stats is not None

    @property
    def has_unread_items(self) -> bool:
        """Items were handed over that no iteration has looked at yet."""
        return bool(self._waiting)

    def take_seconds(self) -> float:
        seconds, self.seconds_inside = self.seconds_inside, 0.0
        return seconds

    def get(self, max_num_requests: int) -> None:
        """Ask for requests, unless the back-off after a failure still holds. `read` gives what was handed over."""
        started = self._enter("get")
        if started < self._get_again_at:
            return
        try:
            items = self._get(max_num_requests)
            if items is not None:
                handed_over = HandedOver(items)
                if not handed_over.is_exhausted:
                    self._waiting.append(handed_over)
            self._back_off_s = 0.0
        except BaseException as error:
            self._failed("get", error)
        finally:
            self._leave(started)

    def read(self, at_most: int) -> Iterator[Any]:
        """Items handed over and not read yet, oldest first, `at_most` of them."""
        while self._waiting and at_most > 0:
            source = self._waiting[0]
            items = source.read(at_most)
            while True:
                started = self._enter("get")
                try:
                    item = next(items)
                except StopIteration:
                    break
                except BaseException as error:
                    self._failed("get", error)
                    source.is_exhausted = True
                    break
                finally:
                    self._leave(started)
                at_most -= 1
                yield item
            if source.is_exhausted:
                self._waiting.pop(0)

    def send(self, request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        started = self._enter("send")
        try:
            self._send(request_id, tensors, final_response, error_message)
        except BaseException as error:
            self._failed("send", error)
        finally:
            self._leave(started)

    def poll_stops(self) -> set[int]:
        """The ids to stop; what is not an integer is skipped."""
        if self._poll is None:
            return set()
        started = self._enter("poll")
        stops: set[int] = set()
        try:
            signals = self._poll()
            if signals:
                for signal in signals:
                    if isinstance(signal, bool):
                        continue
                    try:
                        stops.add(signal.__index__())
                    except (AttributeError, TypeError):
                        continue
        except BaseException as error:
            self._failed("poll", error)
            stops = set()
        finally:
            self._leave(started)
        return stops

    def return_stats(self, record: str) -> None:
        if self._stats is None:
            return
        started = self._enter("stats")
        try:
            self._stats(record)
        except BaseException as error:
            self._failed("stats", error)
        finally:
            self._leave(started)

    def _enter(self, name: str) -> float:
        now = self._clock.monotonic()
        self._heartbeat(name, now)
        return now

    def _leave(self, started: float) -> None:
        now = self._clock.monotonic()
        self.seconds_inside += max(now - started, 0.0)
        self._heartbeat("loop", now)

    def _failed(self, name: str, error: BaseException) -> None:
        self.failures[name] += 1
        now = self._clock.monotonic()
        if name == "get":
            self._back_off_s = min(max(2 * self._back_off_s, FIRST_BACK_OFF_S), LONGEST_BACK_OFF_S)
            self._get_again_at = now + self._back_off_s
        if now - self._last_log.get(name, float("-inf")) >= SECONDS_BETWEEN_LOGS:
            self._last_log[name] = now
            # Where it was raised, not what it says: the message may quote a prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("the %s callback raised %s (%d so far); the loop goes on\n%s",
                      name, type(error).__name__, self.failures[name], where)
