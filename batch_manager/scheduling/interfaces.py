"""The interfaces of schedulers, with TensorRT-LLM's names and signatures.

Subclassing is optional: any object with the interface's method works. An object is a RequestScheduler if its
`schedule_request` has two parameters, and a CapacityScheduler if it has one parameter. A scheduler changes neither
requests nor blocks, and returns the same result for the same arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..requests.llm_request import CONTEXT, GENERATING, LlmRequest

RequestList = list[LlmRequest]

SCHEDULABLE = (*GENERATING, CONTEXT)


def schedulable(requests: RequestList) -> RequestList:
    """Return the requests that can run: in CONTEXT_INIT or a generation state."""
    return [request for request in requests if request.state in SCHEDULABLE]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one iteration.

    context_requests      requests that compute a chunk of their context
    generation_requests   requests that generate
    paused_requests       requests that release their blocks and start over later
    chunk_sizes           tokens of each context request's chunk; None: all remaining tokens
    draft_lengths         draft tokens that each context request keeps, for those that run their last chunk; None: all.
                          The loop keeps fewer if blocks or the request's length require it
    """

    context_requests: RequestList = field(default_factory=list)
    generation_requests: RequestList = field(default_factory=list)
    paused_requests: RequestList = field(default_factory=list)
    chunk_sizes: Sequence[int] | None = None
    draft_lengths: Sequence[int] | None = None

    @property
    def sizes(self) -> Sequence[int]:
        """The number of tokens of each context request's chunk."""
        if self.chunk_sizes is not None:
            return self.chunk_sizes
        return [request.remaining_context for request in self.context_requests]


class RequestScheduler(ABC):
    """Makes the complete plan of an iteration."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Collection[int]) -> SchedulerOutput:
        """Return the plan of the next iteration.

        active_requests        all active requests, in service order
        inflight_request_ids   ids of requests that cannot run in this iteration, because they are in a step in
                               flight. If a plan pauses any request in flight, the loop drops the plan, reads a
                               step, and calls the scheduler again
        """


class CapacityScheduler(ABC):
    """Decides which requests get KV cache blocks."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """Return (fitting requests, paused requests).

        The loop also accepts three lists, which newer versions of TensorRT-LLM return. The second list must be empty.
        """


MicroBatch = (tuple[RequestList, RequestList] | tuple[RequestList, RequestList, Sequence[int] | None]
              | tuple[RequestList, RequestList, Sequence[int] | None, Sequence[int] | None])


class MicroBatchScheduler(ABC):
    """Decides which of the fitting requests are in the step."""

    @abstractmethod
    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Collection[int]) -> MicroBatch:
        """Return (context requests, generation requests[, chunk sizes[, draft lengths]]), as in SchedulerOutput."""
