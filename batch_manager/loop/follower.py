"""The loop of every rank but rank 0: it runs the steps that rank 0 sends."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from ..errors import BatchManagerError, DeviceLostError, is_a, type_name
from ..guard import ForeignCodeError, Guard
from ..handover import ScheduledBatch
from ..kv.event_log import EventLog
from ..requests.admission import Admission
from ..requests.inference_request import InferenceRequest
from ..seams import ModelBackend, PendingStep
from ..steps.runner import is_out_of_memory
from ..stores.stored_blocks import StoredBlocks
from .followed_callbacks import FollowedCallbacks
from .preparing import Preparing

SECONDS_FOR_RANK_0 = 4.0         # to end all ranks after this one was aborted
SECONDS_BETWEEN_LOOKS = 1.0      # without a frame and without a wake-up


class LinkToRank0(Protocol):
    """What a Follower uses of parallel.link.Link, which documents it."""

    rank: int
    end: str | None
    lost: DeviceLostError | None

    def next_frame(self, seconds: float) -> tuple[str, Any] | None: ...
    def done(self, number: int, error: tuple[str, bool, bool] | None) -> None: ...
    def waits_for_end(self) -> bool: ...
    def ask_to_end(self, drain: bool) -> None: ...
    def close(self, reason: str = "") -> None: ...


class FollowingBackend(ModelBackend, Protocol):
    """The backend of a rank that draws no tokens. What `finish` of its steps returns is not used.

    `start` applies the updates of the block tables before anything that can fail. If a step fails here, on rank 0 or on
    another rank, it is run again, whole or in parts, as on rank 0.
    """

    def put_drawn(self, *arrays: Any) -> None:
        """Take what the backend of rank 0 returned from `take_drawn`, before the step that comes with it."""
        ...


class Follower:
    """What the worker of another rank runs, in place of a GenerationLoop.

    Every STEP frame is run and answered with a DONE frame, which has the exception if the step raised one. Steps that
    rank 0 runs again, such as the halves of a failed batch, come as further frames. A frame that is there is started
    before the last step is finished, so that an asynchronous device does not wait.

    link      the connection to rank 0
    ranks     the same, as GenerationLoop has them
    wake      what wakes the thread that waits for rank 0
    failure   why this rank ended; None while it runs, and after a shutdown
    """

    preparing: Preparing | None = None                 # rank 0 has the adapters
    kv_events: EventLog | None = None                  # and the cache of beginnings
    stored: StoredBlocks | None = None

    def __init__(self, link: LinkToRank0, backend: FollowingBackend, guard: Guard, *, limits: Any = None,
                 admission: Admission | None = None, callbacks: FollowedCallbacks | None = None,
                 wake: Any = None) -> None:
        """
        limits, admission   as those of rank 0
        callbacks           those of this rank; None: it has none
        wake                an object with the methods of worker.WakeUp and `close`; None: the link never waits
        """
        self.limits, self._admission, self._callbacks = limits, admission, callbacks
        self.ranks = self.link = link
        self.wake = wake
        self.backend = backend
        self.failure: BatchManagerError | None = None
        self._guard = guard
        self._in_step = guard.raising("model step", passing=DeviceLostError)
        self._in_close = guard.containing("close", kind="method of the backend")
        self._running: deque[tuple[int, PendingStep | None, BaseException | None]] = deque()
        self._num_steps = 0
        self._has_asked = self._has_asked_to_abort = False
        self._abort_at = float("inf")
        guard.failures.update({"get": 0, "send": 0, "poll": 0, "stats": 0})

    @property
    def num_alive(self) -> int:
        """The number of live requests that were handed over on this rank."""
        return 0 if self._callbacks is None else len(self._callbacks.guarded.unanswered.alive)

    @property
    def is_busy(self) -> bool:
        """Whether a step was started and not answered yet."""
        return bool(self._running)

    # ---------------------------------------------------------------- what the worker calls

    def step(self, *, accept_new: bool) -> bool:
        """Wait for a frame and do what it says. Returns True: the wait was here.

        Raises DeviceLostError if rank 0 is lost, and if this rank's device is.
        """
        heartbeat, monotonic = self._guard.heartbeat, self._guard.monotonic
        if self._running:
            frame = self.link.next_frame(0.0)
        else:
            heartbeat.beat("idle", monotonic())
            frame = self.link.next_frame(SECONDS_BETWEEN_LOOKS)
            heartbeat.beat("loop", monotonic())
        if frame is None:
            if self._running:
                self._finish_oldest()
        elif frame[0] == "STEP":
            self._start(*frame[1])
        elif self._callbacks is not None:
            self._callbacks.take(frame[1])
        return True

    def is_done(self, *, draining: bool, aborting: bool) -> bool:
        """Whether this rank may end: rank 0 has ended, or does not answer.

        draining, aborting   whether the end was asked for on this rank, which is passed on to rank 0
        """
        if self.failure is not None or self.link.end is not None:
            return True
        if aborting and not self._has_asked_to_abort:
            self._has_asked = self._has_asked_to_abort = True
            self._abort_at = time.monotonic() + SECONDS_FOR_RANK_0
            self.link.ask_to_end(drain=False)
        elif draining and not self._has_asked:
            self._has_asked = True
            self.link.ask_to_end(drain=True)
        return time.monotonic() > self._abort_at

    def fail(self, error: BatchManagerError) -> None:
        """Note why this rank cannot go on. It ends then."""
        if self.failure is None:
            self.failure = error
        if self._callbacks is not None:
            self._hand_out_the_rest(self._callbacks)
            self._callbacks.fail(self.failure)

    def end(self, error: BatchManagerError, health: Callable[[], dict[str, Any]]) -> None:
        """Answer what is left here, leave the other ranks and close the backend."""
        self._running.clear()
        callbacks = self._callbacks
        if callbacks is not None:
            self._hand_out_the_rest(callbacks)
            callbacks.fail(error if self.failure is None and not self.link.end else self._reason())
        self.link.close("" if self.failure is None else f"{type_name(self.failure)}: {self.failure.fact}")
        with self._in_close:
            self.backend.close()
        if callbacks is not None:
            callbacks.guarded.at_end(health)
        if self.wake is not None:
            self.wake.close()

    def _hand_out_the_rest(self, callbacks: FollowedCallbacks) -> None:
        """Hand out what rank 0 had sent when this rank began to end. No step is run.

        get and poll are called only if rank 0 was shut down: else a collective inside them might wait for a lost rank.
        """
        with suppress(DeviceLostError):                # rank 0 is lost, and all that it had sent is handed out
            while (frame := self.link.next_frame(0.0)) is not None:
                if frame[0] == "ASK" and (self.link.end == "" or frame[1][0] not in ("get", "poll")):
                    callbacks.take(frame[1])

    def _reason(self) -> BatchManagerError:
        """Why this rank ended before its time."""
        return self.failure or DeviceLostError(self.link.end or "", "an engine of several ranks needs all of them")

    def check(self, request: InferenceRequest) -> None:
        """Raise the error with which rank 0 would refuse the request. Can be called from any thread."""
        assert self._admission is not None
        self._admission.admit(request)

    def health(self) -> dict[str, Any]:
        """The part of GptManager.health that the loop knows."""
        failure = None if self.failure is None and not self.link.end else self._reason()
        unanswered = None if self._callbacks is None else self._callbacks.guarded.unanswered
        return {
            "state": "FAILED" if failure is not None else "RUNNING",
            "failure": "" if failure is None else failure.response_text(),
            "active_requests": self.num_alive,
            "queued_requests": 0,
            "iterations": self._num_steps,
            "final_responses": 0 if unanswered is None else unanswered.num_sent,
            "errors": {} if unanswered is None else {
                code.value: count for code, count in unanswered.errors.copy().items()},
            "unaddressable_items": 0,
            "callback_failures": dict(self._guard.failures),
        }

    # ---------------------------------------------------------------- steps

    def _start(self, number: int, batch: ScheduledBatch, drawn: tuple[Any, ...]) -> None:
        pending, error = None, None
        try:
            with self._in_step:
                if drawn:
                    self.backend.put_drawn(*drawn)
                pending = self.backend.start(batch)
        except ForeignCodeError as failure:
            error = failure.error
        except DeviceLostError as lost:
            self._lose(number, lost)
            return
        self._running.append((number, pending, error))
        if not self.backend.info.is_asynchronous:      # rank 0 may wait for it before it takes part in the next step
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        number, pending, error = self._running.popleft()
        if pending is not None:
            try:
                with self._in_step:
                    pending.finish()
            except ForeignCodeError as failure:
                error = failure.error
            except DeviceLostError as lost:
                self._lose(number, lost)
                return
        self._report(number, error)
        self._num_steps += 1

    def _lose(self, number: int, lost: DeviceLostError) -> None:
        """End after a step that lost its device. Raises DeviceLostError, unless rank 0 was shut down meanwhile.

        If another rank is gone, an exchange with it may fail before rank 0 says which one it is.
        """
        if not self.link.waits_for_end():
            self._report(number, lost)
            raise lost
        if self.link.end is None:
            raise self.link.lost or lost
        if self.link.end:
            raise self._reason() from lost

    def _report(self, number: int, error: BaseException | None) -> None:
        if error is not None:
            self._guard.note_failure("model step", error, kind="of rank 0")
        self.link.done(number, None if error is None else (
            type_name(error), is_out_of_memory(error), is_a(error, DeviceLostError)))
