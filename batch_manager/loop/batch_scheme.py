"""The two ways in which requests share steps: in-flight batching, and static batches (TrtGptModelType.V1).

scheduling/lockstep.py schedules static batches. runtime/packing.py has the padded layout of their steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..errors import BatchManagerError
from ..handover import ScheduledBatch
from ..names import ErrorCode, FinishReason
from ..requests.llm_request import LlmRequest
from ..scheduling.interfaces import SchedulerOutput
from .finals import Finals
from .iteration_record import IterationRecord


class BatchScheme(Protocol):
    """What the loop does differently for each way.

    is_static   whether no request joins a batch that runs
    finals      the class that ends requests
    """

    is_static: bool
    finals: type[Finals]

    def padded(self, batch: ScheduledBatch, plan: SchedulerOutput) -> ScheduledBatch:
        """Return the claimed batch of a plan with the rows that the scheme adds to it."""
        ...

    def figures(self, record: IterationRecord) -> dict[str, int]:
        """Return the statistics that describe the step of an iteration."""
        ...


class InFlight:
    """Requests join and leave every iteration."""

    is_static = False
    finals = Finals

    def padded(self, batch: ScheduledBatch, plan: SchedulerOutput) -> ScheduledBatch:
        return batch

    def figures(self, record: IterationRecord) -> dict[str, int]:
        plan = record.plan
        contexts, generations = len(plan.context_requests), len(plan.generation_requests)
        return {
            "Scheduled Requests": contexts + generations,
            "Context Requests": contexts,
            "Generation Requests": generations,
            "Total Context Tokens": sum([size for _, _, size in record.chunks]) if contexts else 0,
            "Paused Requests": len(plan.paused_requests),
            "MicroBatch ID": record.micro_batch_id,
        }


class HeldFinals(Finals):
    """Ends the requests of static batches, and holds back their finals until the last member of the batch ends.

    A completed request stays active, keeps its blocks and no longer runs. Its final is sent when the last running
    member has ended for any reason. A request that is cancelled, fails or times out gets its final at once, and the
    batch goes on. If the request had completed before, its final has the reason of the completion.
    """

    def __init__(self, *owners: Any) -> None:
        super().__init__(*owners)
        self._held: dict[int, FinishReason] = {}    # request id -> reason of the completion

    def end(self, request: LlmRequest, reason: FinishReason) -> None:
        if reason.is_natural:
            request.finish()
            self._held[request.request_id] = reason
        else:
            super().end(request, self._held.pop(request.request_id, reason))
        self._send_held()

    def fail(self, request: LlmRequest, code: ErrorCode, message: str, *, clear_blocks: bool = False) -> None:
        if request.request_id in self._held:
            super().end(request, self._held.pop(request.request_id))
        else:
            super().fail(request, code, message, clear_blocks=clear_blocks)
        self._send_held()

    def fail_everything(self, error: BatchManagerError) -> None:
        self._held.clear()
        super().fail_everything(error)

    def _send_held(self) -> None:
        """Send the held finals if every member of the batch has ended."""
        if not any(request.is_started or request.is_finished and request.request_id not in self._held
                   for request in self._active):
            for request in [request for request in self._active if request.request_id in self._held]:
                super().end(request, self._held.pop(request.request_id))


class StaticBatches:
    """A batch runs until its last member ends. Its steps have one padded row for each member, ended ones included."""

    is_static = True
    finals: type[Finals] = HeldFinals

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self._none = self._newest = batch_figures([], max_seq_len)

    def padded(self, batch: ScheduledBatch, plan: SchedulerOutput) -> ScheduledBatch:
        if plan.context_requests:
            self._newest = batch_figures(plan.context_requests, self._max_seq_len)
        return replace(batch, num_padded_rows=self._newest["Scheduled Requests"])

    def figures(self, record: IterationRecord) -> dict[str, int]:
        plan = record.plan
        return self._newest if plan.context_requests or plan.generation_requests else self._none


def batch_figures(members: Sequence[LlmRequest], max_seq_len: int) -> dict[str, int]:
    """Return the statistics of a static batch, which stay the same until its last member ends.

    Total Context Tokens does not count padding. Total Generation Tokens is an upper bound. Empty Generation Slots is
    the number of padding tokens if each member generates its max_new_tokens: members with fewer than the largest of the
    batch are padded to the largest.
    """
    longest_prompt = max([request.prompt_len for request in members], default=0)
    max_new_tokens = min(max([request.max_new_tokens for request in members], default=0), max_seq_len - longest_prompt)
    total = sum(min(request.max_new_tokens, max_new_tokens) for request in members)
    return {
        "Scheduled Requests": len(members),
        "Context Requests": len(members),
        "Total Context Tokens": sum(request.prompt_len for request in members),
        "Total Generation Tokens": total,
        "Empty Generation Slots": len(members) * max_new_tokens - total,
    }
