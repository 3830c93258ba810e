"""The steps in flight: launched and not read yet. Reruns of a step that failed are made here."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..handover import ScheduledBatch, StepOutput
from ..names import LlmRequestState
from ..requests.llm_request import LlmRequest
from .resources import Resources
from .runner import RunningStep, StepRunner

LAST_TOKEN = LlmRequestState.GENERATION_TO_COMPLETE
COMPLETE = LlmRequestState.GENERATION_COMPLETE
NO_REQUESTS: frozenset[int] = frozenset()


@dataclass(slots=True)
class StepInFlight:
    """A step that was launched and not read yet.

    requests   in batch order
    void       those of them for which the step before it failed: their rows ran on what that should have left
    """

    requests: list[LlmRequest]
    step: RunningStep
    void: set[LlmRequest] = field(default_factory=set)

    def holds(self, request: LlmRequest) -> bool:
        """Whether the step is to yield something for the request."""
        return request in self.requests and request not in self.void

    @property
    def batch(self) -> ScheduledBatch:
        return self.step.batch


class StepWindow:
    """Up to `depth` steps, oldest first.

    runs_ahead   a request may be in successive steps: the next one is launched before the tokens of the last one are
                 read. All that must be known for that are lengths. Where it is False the steps in flight are of
                 disjoint requests

    A request can be in a step that is launched while it is in flight if the window runs ahead and

        the step in flight does not yield its last token,
        nothing on the host has to see its tokens first (`LlmRequest.in_lockstep`), and
        it does not give back blocks of a context that was not read.

    So one of its steps is in flight at most when the next one is planned.

    A row of a step is dropped when its request has ended since the launch. A step that fails is run again without the
    requests that have ended. What was launched after it for the same requests ran on what it should have left: those
    rows are void, their claims are taken back, and the loop goes on from there.

    num_discarded_tokens   tokens that were computed and dropped so, since construction
    """

    def __init__(self, runner: StepRunner, resources: Resources, depth: int, runs_ahead: bool = False) -> None:
        self._runner = runner
        self._resources = resources
        self._steps: deque[StepInFlight] = deque()
        self.depth = depth
        self.runs_ahead = runs_ahead
        self.num_discarded_tokens = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) == self.depth

    @property
    def must_be_read(self) -> bool:
        """Whether nothing can be planned on top of the newest step: it could not be launched."""
        return bool(self._steps) and self._steps[-1].step.error is not None

    def holds(self, request: LlmRequest) -> bool:
        """Whether the request is in a step that was not read yet."""
        return any(flight.holds(request) for flight in self._steps)

    def holds_any(self, requests: Iterable[LlmRequest]) -> bool:
        return bool(self._steps) and any(map(self.holds, requests))

    def blocked_request_ids(self) -> Collection[int]:
        """Requests that are in flight and can be in no other step before that is read."""
        if not self._steps:
            return NO_REQUESTS
        if not self.runs_ahead:
            return frozenset([request.request_id for flight in self._steps for request in flight.requests])
        in_flight = [request for flight in self._steps for request in flight.requests
                     if request.state is not COMPLETE and request not in flight.void]
        blocked = [request.request_id for request in in_flight
                   if request.state is LAST_TOKEN or request.in_lockstep or request.draft_len]
        # Blocks of a context that was not read must not be given to others: a step may have left anything in them.
        unread_contexts = [request for request in in_flight if request.context_read < request.prompt_len]
        blocked += [request.request_id for request in self._resources.leaving_window(unread_contexts)]
        return frozenset(blocked)

    def launch(self, batch: ScheduledBatch, requests: list[LlmRequest]) -> None:
        """Start a step. requests: of the batch, in its order. Raises DeviceLostError."""
        self._steps.append(StepInFlight(requests, self._runner.start(batch)))

    def read(self) -> tuple[StepInFlight, StepOutput]:
        """Wait for the oldest step. Raises DeviceLostError.

        Rows of requests that have ended since it was launched, and void ones, may be missing, or of any content.
        """
        flight = self._steps.popleft()
        output = self._runner.read(flight.step)
        if output is None:
            self._take_back(flight)
            output = self._run_again(flight)
        return flight, output

    def drop_all(self) -> None:
        """Wait for all steps and drop what they yield: no request needs it any more. Raises DeviceLostError."""
        while self._steps:
            flight = self._steps.popleft()
            self._runner.read(flight.step)
            self.num_discarded_tokens += num_yielded_tokens(flight.batch)

    def forget(self) -> None:
        """Drop all steps without waiting for them: nothing runs any more."""
        self._steps.clear()

    def _take_back(self, failed: StepInFlight) -> None:
        """Take back what was claimed for the requests of a step that failed in the steps after it, the newest first."""
        for flight in reversed(self._steps):
            void = [request for request in flight.requests if not request.is_finished and failed.holds(request)]
            flight.void.update(void)
            self._resources.unclaim(flight.batch, flight.requests, void)

    def _run_again(self, flight: StepInFlight) -> StepOutput:
        batch, step = flight.batch, flight.step
        assert step.error is not None
        alive = [index for index, request in enumerate(flight.requests)
                 if not request.is_finished and request not in flight.void]
        if len(alive) == len(flight.requests):
            return self._runner.narrow_down(batch, step.asked, step.error)
        if not alive:
            return StepOutput.merge([], batch.micro_batch_id)
        return self._runner.run_again(batch.take(alive), step.asked)


def num_yielded_tokens(batch: ScheduledBatch) -> int:
    """Rows of a batch that yield a token or more."""
    return len(batch.generation) + sum(work.is_last_chunk for work in batch.context)
