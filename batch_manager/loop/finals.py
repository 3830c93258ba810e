"""The end of a request: off every book first, then one final response. Finals are sent from here alone."""

import logging
from collections import Counter

from ..errors import BatchManagerError, error_text
from ..names import ErrorCode, FinishReason
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..seams import ModelBackend
from .active_requests import ActiveRequests
from .intake import Intake, Refusal
from .resources import Resources
from .responder import Delivery, Responder

log = logging.getLogger("batch_manager")


class Finals:
    """Ends requests. When a final callback runs, the request's blocks, slot and id are free already.

    num_sent       final responses so far, refusals included
    errors         error finals by code
    """

    def __init__(self, active: ActiveRequests, intake: Intake, resources: Resources, responder: Responder,
                 backend: ModelBackend) -> None:
        self._active = active
        self._intake = intake
        self._resources = resources
        self._responder = responder
        self._backend = backend
        self._ended: list[int] = []
        self.num_sent = 0
        self.errors: Counter[ErrorCode] = Counter()

    def end(self, request: LlmRequest, reason: FinishReason, *, clear_blocks: bool = False) -> None:
        """A request that ran ends well: its final carries what it has not been told yet. clear_blocks as in `fail`."""
        if clear_blocks:
            self._backend.clear_blocks(self._resources.blocks_to_clear(request))
        delivery = self._off_the_books(request, keep_computed=not clear_blocks)
        self.num_sent += 1
        self._responder.send_final(request, delivery, reason)

    def send_held(self) -> None:
        """Send what was held back and no longer need be. Here nothing is: a request that is done is told at once."""

    def fail(self, request: LlmRequest, code: ErrorCode, message: str, *, clear_blocks: bool = False) -> None:
        """A request that ran ends with an error.

        clear_blocks   a step left something in its blocks that the next owner must not read
        """
        if clear_blocks:
            self._backend.clear_blocks(self._resources.blocks_to_clear(request))
        self._off_the_books(request)
        self._send_error(request.request_id, code, error_text(code, f"request {request.request_id}: {message}"))

    def end_waiting(self, admitted: Admitted, reason: FinishReason) -> None:
        """A request that never ran ends well, with no tokens."""
        self._intake.forget(admitted.request.request_id)
        self._responder.admit(admitted)
        self.num_sent += 1
        self._responder.send_final(admitted.request, self._responder.forget(admitted.request.request_id), reason)

    def fail_waiting(self, admitted: Admitted, code: ErrorCode, message: str) -> None:
        request_id = admitted.request.request_id
        self._intake.forget(request_id)
        self._send_error(request_id, code, error_text(code, f"request {request_id}: {message}"))

    def refuse(self, refusal: Refusal) -> None:
        self._send_error(refusal.request_id, refusal.error.code, refusal.error.response_text())

    def fail_everything(self, error: BatchManagerError) -> None:
        """Answer every living request with one error. Touches no pool and no device: they may be what broke."""
        text = error.response_text()
        for request in self._active.in_order():
            self._active.remove(request)
            self._intake.forget(request.request_id)
            self._responder.forget(request.request_id)
            self._ended.append(request.request_id)
            self._send_error(request.request_id, error.code, text)
        for admitted in self._intake.withdraw_all():
            self._intake.forget(admitted.request.request_id)
            self._send_error(admitted.request.request_id, error.code, text)

    def take_ended(self) -> tuple[int, ...]:
        """Ids of requests that ran and ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _off_the_books(self, request: LlmRequest, *, keep_computed: bool = False) -> Delivery:
        request.finish()
        self._resources.release(request, keep_computed=keep_computed)
        self._active.remove(request)
        self._intake.forget(request.request_id)
        self._ended.append(request.request_id)
        return self._responder.forget(request.request_id)

    def _send_error(self, request_id: int, code: ErrorCode, text: str) -> None:
        self.num_sent += 1
        self.errors[code] += 1
        log.info("request %d ended: %s", request_id, text)
        self._responder.send_error(request_id, text)
