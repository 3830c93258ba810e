"""Ends requests: releases their resources, then sends their final responses. Only this file sends finals."""

from collections.abc import Callable

import numpy as np

from ..contained_log import log
from ..errors import BatchManagerError, error_text
from ..names import ErrorCode, FinishReason
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..responses.deliveries import Deliveries, Delivery
from ..responses.perf_metrics import PerfMetrics
from ..steps.resources import Resources
from ..steps.window import StepWindow
from .active_requests import ActiveRequests
from .callbacks import GuardedCallbacks
from .intake import Intake
from .unanswered import FINALS_BY_REASON


class Finals:
    """Ends requests. The blocks, slot and id of a request are free before its final callback runs.

    num_sent       final responses sent so far, refusals included
    ended          ids of accepted requests that ended since the last call of `take_ended`
    end_reasons    name of a FinishReason or an ErrorCode -> ids of requests that got a final for this reason since the
                   last call of `take_end_reasons`, refused requests included; None without a trace hook
    ended_at       request id -> when its final was sent, in seconds of the engine's clock, of the accepted requests
                   that ended since the last call of `take_end_times`; empty without a trace hook
    errors         error code -> number of finals with this code
    hand_over      holds the blocks of a context_only request for another engine, and returns the tensor that says where
                   they are; None: there are no such requests
    """

    def __init__(self, callbacks: GuardedCallbacks, active: ActiveRequests, intake: Intake, resources: Resources,
                 deliveries: Deliveries, window: StepWindow) -> None:
        self._callbacks = callbacks
        self._unanswered = callbacks.unanswered
        self._active = active
        self._intake = intake
        self._timings = intake.timings
        self._resources = resources
        self._deliveries = deliveries
        self._window = window
        self.ended: list[int] = []
        self.end_reasons: dict[str, list[int]] | None = None
        self.ended_at: dict[int, float] = {}
        self.hand_over: Callable[[LlmRequest], np.ndarray] | None = None

    @property
    def num_sent(self) -> int:
        return self._unanswered.num_sent

    @property
    def errors(self) -> dict[ErrorCode, int]:
        return self._unanswered.errors

    def end(self, request: LlmRequest, reason: FinishReason) -> None:
        """End an active request without an error. Its final response has all tokens and values that were not sent yet.
        """
        metrics = self._timings.take(request, self._resources)
        delivery = self._take_out(request, keep_computed=True)
        assert delivery is not None
        self._send_final(request, delivery, reason, metrics)

    def fail(self, request: LlmRequest, code: ErrorCode, message: str, *, clear_blocks: bool = False) -> None:
        """End an active request with an error.

        clear_blocks   clear the request's blocks, because a failed step may have left undefined content in them
        """
        self._take_out(request, keep_computed=False, clear_blocks=clear_blocks)
        self._send_error(request.request_id, code, error_text(code, f"request {request.request_id}: {message}"))

    def end_waiting(self, admitted: Admitted, reason: FinishReason) -> None:
        """End a queued request without an error. Its final response has no generated tokens."""
        metrics = self._timings.take(admitted.request, self._resources)
        self._intake.forget(admitted.request.request_id)
        self.ended.append(admitted.request.request_id)
        self._deliveries.admit(admitted)
        delivery = self._deliveries.forget(admitted.request.request_id)
        assert delivery is not None
        self._send_final(admitted.request, delivery, reason, metrics)

    def fail_waiting(self, admitted: Admitted, code: ErrorCode, message: str) -> None:
        """End a queued request with an error."""
        request_id = admitted.request.request_id
        self._intake.forget(request_id)
        self.ended.append(request_id)
        self._send_error(request_id, code, error_text(code, f"request {request_id}: {message}"))

    def answer_refusals(self) -> None:
        """Answer all refused items.

        Call the method before any other final is sent: the refusal of a duplicate must precede the final of the live
        request.
        """
        refusals = self._unanswered.refusals
        while refusals:
            error, text = refusals[0].error, refusals[0].error.response_text()
            log.info("request %d was refused: %s", refusals[0].request_id, text)
            self._note_reason(error.code.name, refusals[0].request_id)
            self._callbacks.send_refusal(text, error.code)

    def fail_everything(self, error: BatchManagerError) -> None:
        """Answer every refused item with the error of its refusal, and every live request with `error`.

        The method relies on `UnansweredItems` only, because any other state may be inconsistent. It uses neither the
        pool nor the device. If the method raises, the next call answers the remaining items.
        """
        self.answer_refusals()
        self.ended += [request.request_id for request in self._active]
        self._active.clear()
        self._intake.clear()
        self._deliveries.clear()
        text = error.response_text()
        for request_id in list(self._unanswered.alive):
            self._send_error(request_id, error.code, text)

    def take_ended(self) -> tuple[int, ...]:
        """Return the ids of accepted requests that ended since the last call of this method."""
        ended, self.ended = tuple(self.ended), []
        return ended

    def take_end_reasons(self) -> dict[str, tuple[int, ...]]:
        """Return reason -> ids of the requests that got their final since the last call of this method."""
        reasons, self.end_reasons = self.end_reasons or {}, {}
        return {reason: tuple(ids) for reason, ids in reasons.items()}

    def take_end_times(self, ended: tuple[int, ...]) -> tuple[float, ...]:
        """Return when the finals of the requests `ended` were sent, in seconds of the engine's clock."""
        times, self.ended_at = self.ended_at, {}
        now = self._callbacks.guard.monotonic()
        return tuple([times.get(request_id, now) for request_id in ended])

    def _note_end(self, reason: str, request_id: int) -> None:
        if self.end_reasons is not None:
            self._note_reason(reason, request_id)
            self.ended_at[request_id] = self._callbacks.guard.monotonic()

    def _note_reason(self, reason: str, request_id: int) -> None:
        if self.end_reasons is not None:
            self.end_reasons.setdefault(reason, []).append(request_id)

    def _take_out(self, request: LlmRequest, *, keep_computed: bool, clear_blocks: bool = False) -> Delivery | None:
        request.finish()
        self._resources.release(request, keep_computed=keep_computed, clear_blocks=clear_blocks,
                                is_in_flight=self._window.holds(request))
        self._active.remove(request)
        self._intake.forget(request.request_id)
        self.ended.append(request.request_id)
        return self._deliveries.forget(request.request_id)

    def _send_final(self, request: LlmRequest, delivery: Delivery, reason: FinishReason,
                    metrics: PerfMetrics | None) -> None:
        tensors = self._deliveries.response(request, delivery, reason)
        if metrics is not None:
            tensors += self._deliveries.tensors_of(metrics)
        if delivery.options.is_context_only and reason.is_natural and self.hand_over is not None:
            tensors.append(self._deliveries.context_phase_params(self.hand_over(request)))
        self._unanswered.reasons[FINALS_BY_REASON[reason]] += 1
        self._note_end(reason.name, request.request_id)
        self._callbacks.send_final(request.request_id, tensors)

    def _send_error(self, request_id: int, code: ErrorCode, text: str) -> None:
        log.info("request %d ended: %s", request_id, text)
        self._note_end(code.name, request_id)
        self._callbacks.send_final(request_id, [], text, code)
