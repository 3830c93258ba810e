"""Finals of a static batch: none of its members hears that it is done before all are."""

from typing import Any

from ..errors import BatchManagerError
from ..names import ErrorCode, FinishReason
from ..requests.llm_request import LlmRequest
from .finals import Finals


class HeldFinals(Finals):
    """Finals that wait for the last member of the batch.

    A request that came to its natural end stays among the active ones, with its blocks, and does not run any more. Its
    final goes out when the last one that runs has ended, however it ended. Who is stopped, fails or runs out of time is
    told at once, and the batch goes on; one of them that had come to its natural end before is told just that.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._held: dict[int, FinishReason] = {}

    def end(self, request: LlmRequest, reason: FinishReason) -> None:
        if reason.is_natural:
            request.finish()
            self._held[request.request_id] = reason
        else:
            super().end(request, self._held.pop(request.request_id, reason))

    def fail(self, request: LlmRequest, code: ErrorCode, message: str, *, clear_blocks: bool = False) -> None:
        if request.request_id in self._held:
            super().end(request, self._held.pop(request.request_id))
        else:
            super().fail(request, code, message, clear_blocks=clear_blocks)

    def send_held(self) -> None:
        if self._held and not any(request.is_started for request in self._active):
            for request in [request for request in self._active if request.request_id in self._held]:
                super().end(request, self._held.pop(request.request_id))

    def fail_everything(self, error: BatchManagerError) -> None:
        self._held.clear()
        super().fail_everything(error)
