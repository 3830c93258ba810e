"""Static batching (TrtGptModelType.V1) in the loop: the running batch, and the final responses of its members.

The final responses are held back until the last member ends.

scheduling/lockstep.py schedules static batches. runtime/layouts.py has the padded layout of their steps.
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
    """Keeps the statistics of the newest static batch, whose steps have one padded row for each of its members.

    stats   statistics of the batch at the time when it was formed
    """

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self.stats = StaticBatchStats()

    def padded(self, batch: ScheduledBatch, plan: SchedulerOutput) -> ScheduledBatch:
        """Return `batch` with `num_padded_rows` set to the number of members of the static batch.

        Finished members count too. If `plan` has context requests, these requests first form a new static batch.
        """
        if plan.context_requests:
            self.stats = StaticBatchStats.of(plan.context_requests, self._max_seq_len)
        return replace(batch, num_padded_rows=self.stats.members)


class HeldFinals(Finals):
    """Ends the requests of static batches, and holds back their finals until the last member of the batch ends.

    A completed request stays active, keeps its blocks and no longer runs. Its final is sent when the last running
    member has ended for any reason. A request that is cancelled, fails or times out gets its final at once, and the
    batch goes on. If the request had completed before, its final has the reason of the completion.
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
