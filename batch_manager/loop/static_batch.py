"""Static batching (TrtGptModelType.V1) in the loop: the batch that runs, and finals that wait for its last member.

The scheduler of static batches is scheduling/static_batch.py, their padded layout runtime/layouts.py.
"""

from dataclasses import replace

from ..errors import BatchManagerError
from ..handover import ScheduledBatch
from ..names import ErrorCode, FinishReason
from ..requests.llm_request import LlmRequest
from ..scheduling.interfaces import SchedulerOutput
from ..stats.iteration_stats import StaticBatchStats
from .finals import Finals


class StaticBatch:
    """The batch that was formed last, in numbers.

    stats   of the batch when it was formed; they do not change with its members
    """

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self.stats = StaticBatchStats()

    def padded(self, batch: ScheduledBatch, plan: SchedulerOutput) -> ScheduledBatch:
        """The batch with a generation row for each member, finished members included. Contexts form a new batch."""
        if plan.context_requests:
            self.stats = StaticBatchStats.of(plan.context_requests, self._max_seq_len)
        return replace(batch, num_places=self.stats.members)


class HeldFinals(Finals):
    """Finals that wait for the last member of the batch.

    A request that has ended naturally stays active, keeps its blocks, and does not run any more. Its final is sent when
    the last running member has ended, for whatever reason. A request that is stopped, fails or times out gets its final
    at once, and the batch goes on; if it had ended naturally before, the final says so.
    """

    def end(self, request: LlmRequest, reason: FinishReason) -> None:
        if reason.is_natural:
            request.finish()
            self.held[request.request_id] = reason
        else:
            super().end(request, self.held.pop(request.request_id, reason))

    def fail(self, request: LlmRequest, code: ErrorCode, message: str, *, clear_blocks: bool = False) -> None:
        if request.request_id in self.held:
            super().end(request, self.held.pop(request.request_id))
        else:
            super().fail(request, code, message, clear_blocks=clear_blocks)

    def send_held(self) -> None:
        if not any(request.is_started for request in self._active):
            for request in [request for request in self._active if request.request_id in self.held]:
                super().end(request, self.held.pop(request.request_id))

    def fail_everything(self, error: BatchManagerError) -> None:
        self.held.clear()
        super().fail_everything(error)
