"""What a scheduler is asked and what it answers. The names and signatures are those of TensorRT-LLM.

Subclassing is a courtesy: any object with the method will do. A `schedule_request` of two arguments is that of a
RequestScheduler, of one that of a CapacityScheduler. A scheduler changes nothing, neither requests nor blocks; the same
question gives the same answer.
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
    """Those of the requests that can run: from CONTEXT_INIT on, before GENERATION_COMPLETE."""
    return [request for request in requests if request.state in SCHEDULABLE]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one iteration.

    context_requests      run a chunk of their context
    generation_requests   generate one token
    paused_requests       give their blocks back and start over later
    chunk_sizes           tokens of each context request's chunk; None: all that remains of each
    draft_lengths         draft tokens each context request keeps; None: all of them
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

        active_requests        all unfinished requests, in the order they are to be served
        inflight_request_ids   those of them that a launched step is working on; they cannot run in this one. A plan
                               that pauses one is dropped, and asked for again when that step was read
        """


class CapacityScheduler(ABC):
    """Decides who gets blocks."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """(fitting requests, paused requests).

        Three lists are understood as well, as newer versions of TensorRT-LLM return them; the second must be empty.
        """


class MicroBatchScheduler(ABC):
    """Decides which of the requests that have blocks get into the step."""

    @abstractmethod
    def schedule(self, fitting_requests: RequestList, inflight_request_ids: Collection[int]) -> tuple:
        """(context requests, generation requests[, chunk sizes[, draft lengths]]), as in SchedulerOutput."""
