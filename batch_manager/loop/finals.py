"""The end of a request: off every book first, then one final response. Finals are sent from here alone."""

from ..contained_log import log
from ..errors import BatchManagerError, error_text
from ..names import ErrorCode, FinishReason
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from .active_requests import ActiveRequests
from .intake import Intake
from .resources import Resources
from .responder import Delivery, Responder
from .step_window import StepWindow
from .unanswered import UnansweredItems


class Finals:
    """Ends requests. When a final callback runs, the request's blocks, slot and id are free already.

    num_sent       final responses so far, refusals included
    errors         error finals by code
    """

    def __init__(self, unanswered: UnansweredItems, active: ActiveRequests, intake: Intake, resources: Resources,
                 responder: Responder, window: StepWindow) -> None:
        self._unanswered = unanswered
        self._active = active
        self._intake = intake
        self._resources = resources
        self._responder = responder
        self._window = window
        self._ended: list[int] = []

    @property
    def num_sent(self) -> int:
        return self._unanswered.num_sent

    @property
    def errors(self) -> dict[ErrorCode, int]:
        return self._unanswered.errors

    def end(self, request: LlmRequest, reason: FinishReason) -> None:
        """A request that ran ends well: its final carries what it has not been told yet."""
        delivery = self._off_the_books(request, keep_computed=True)
        self._responder.send_final(request, delivery, reason)

    def send_held(self) -> None:
        """Send what was held back and no longer need be. Here nothing is: a request that is done is told at once."""

    def fail(self, request: LlmRequest, code: ErrorCode, message: str, *, clear_blocks: bool = False) -> None:
        """A request that ran ends with an error.

        clear_blocks   a step left something in its blocks that the next owner must not read
        """
        self._off_the_books(request, keep_computed=False, clear_blocks=clear_blocks)
        self._send_error(request.request_id, code, error_text(code, f"request {request.request_id}: {message}"))

    def end_waiting(self, admitted: Admitted, reason: FinishReason) -> None:
        """A request that never ran ends well, with no tokens."""
        self._intake.forget(admitted.request.request_id)
        self._responder.admit(admitted)
        self._responder.send_final(admitted.request, self._responder.forget(admitted.request.request_id), reason)

    def fail_waiting(self, admitted: Admitted, code: ErrorCode, message: str) -> None:
        request_id = admitted.request.request_id
        self._intake.forget(request_id)
        self._send_error(request_id, code, error_text(code, f"request {request_id}: {message}"))

    def answer_refusals(self) -> None:
        """To be called before any other final: a double is refused while the request it is a double of is alive."""
        refusals = self._unanswered.refusals
        while refusals:
            error, text = refusals[0].error, refusals[0].error.response_text()
            log.info("request %d was refused: %s", refusals[0].request_id, text)
            self._responder.send_refusal(text, error.code)

    def fail_everything(self, error: BatchManagerError) -> None:
        """Answer every unanswered item: refusals with their own text, living requests with this error.

        Goes by `UnansweredItems` alone, and touches no pool and no device: any other state may be what broke. If this
        raises, the rest is left for the next call.
        """
        self.answer_refusals()
        self._ended += [request.request_id for request in self._active]
        self._active.clear()
        self._intake.clear()
        self._responder.clear()
        text = error.response_text()
        for request_id in list(self._unanswered.alive):
            self._send_error(request_id, error.code, text)

    def take_ended(self) -> tuple[int, ...]:
        """Ids of requests that ran and ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _off_the_books(self, request: LlmRequest, *, keep_computed: bool, clear_blocks: bool = False) -> Delivery:
        request.finish()
        self._resources.release(request, keep_computed=keep_computed, clear_blocks=clear_blocks,
                                is_in_flight=self._window.holds(request))
        self._active.remove(request)
        self._intake.forget(request.request_id)
        self._ended.append(request.request_id)
        return self._responder.forget(request.request_id)

    def _send_error(self, request_id: int, code: ErrorCode, text: str) -> None:
        log.info("request %d ended: %s", request_id, text)
        self._responder.send_error(request_id, text, code)
