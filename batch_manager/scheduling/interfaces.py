"""The interfaces of schedulers. Names and signatures are those of TensorRT-LLM.

Subclassing is optional: any object with the method will do. A `schedule_request` with two arguments makes an object a
RequestScheduler, with one a CapacityScheduler. A scheduler changes neither requests nor blocks; the same arguments give
the same result.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..names import LlmRequestState
from ..requests.llm_request import LlmRequest

RequestList = list[LlmRequest]

GENERATING = (LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE)
SCHEDULABLE = (*GENERATING, LlmRequestState.CONTEXT_INIT)


def schedulable(requests: RequestList) -> RequestList:
    """The requests that can run: from CONTEXT_INIT on, before GENERATION_COMPLETE."""
    return [request for request in requests if request.state in SCHEDULABLE]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one iteration.

    context_requests      run a chunk of their context
    generation_requests   generate one token
    paused_requests       release their blocks and start over later
    chunk_sizes           tokens of each context request's chunk; None: all remaining ones of each
    draft_lengths         draft tokens that each context request keeps; None: all of them
    """

    context_requests: RequestList = field(default_factory=list)
    generation_requests: RequestList = field(default_factory=list)
    paused_requests: RequestList = field(default_factory=list)
    chunk_sizes: Sequence[int] | None = None
    draft_lengths: Sequence[int] | None = None


class RequestScheduler(ABC):
    """Decides everything about one iteration."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Collection[int]) -> SchedulerOutput:
        """The plan of the next iteration.

        active_requests        all unfinished requests, in the order in which they are to be served
        inflight_request_ids   those that a launched step is working on; they cannot run in this one. A plan that pauses
                               one is dropped; the scheduler is called again when that step has been read
        """


class CapacityScheduler(ABC):
    """Decides who gets blocks."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """(fitting requests, paused requests).

        Three lists are accepted as well, as newer versions of TensorRT-LLM return them; the second must be empty.
        """


MicroBatch = (tuple[RequestList, RequestList] | tuple[RequestList, RequestList, Sequence[int] | None]
              | tuple[RequestList, RequestList, Sequence[int] | None, Sequence[int] | None])


class MicroBatchScheduler(ABC):
    """Decides which of the requests that have blocks get into the step."""

    @abstractmethod
    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Collection[int]) -> MicroBatch:
        """(context requests, generation requests[, chunk sizes[, draft lengths]]), as in SchedulerOutput."""
