"""The steps in flight, and the reruns of failed steps."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..handover import ScheduledBatch, StepOutput
from ..requests.llm_request import COMPLETE, LAST_TOKEN, LlmRequest
from .resources import Resources
from .runner import RunningStep, StepRunner

NO_REQUESTS: frozenset[int] = frozenset()


@dataclass(slots=True)
class StepInFlight:
    """A step that was launched and not read yet.

    requests   the requests in batch order
    void       requests whose rows are void, because an earlier step of these requests failed
    """

    requests: list[LlmRequest]
    step: RunningStep
    void: set[LlmRequest] = field(default_factory=set)

    def holds(self, request: LlmRequest) -> bool:
        """Whether the step has a valid row for the request."""
        return request in self.requests and request not in self.void

    @property
    def batch(self) -> ScheduledBatch:
        return self.step.batch


class StepWindow:
    """Holds the steps in flight, at most `depth`, oldest first.

    runs_ahead   a request's next step may be launched before the request's previous step is read, because a launch
                 needs only the lengths of sequences. False: steps in flight have disjoint requests

    With runs_ahead, `depth` is 2, and a request in flight can be in the next step if

        the step in flight does not yield the last token of the request,
        nothing on the host needs the tokens of the request before the next step is launched (in this case,
        `LlmRequest.in_lockstep` is False),
        the request has no draft tokens, and will not get some for the next step, and
        all steps of its context were read, or its next claim frees no blocks.

    When a step is planned, each of its requests is therefore in at most one step in flight.

    A row is dropped if its request has ended since the launch. A failed step runs again without the requests that
    have ended. The later steps in flight have used its missing results: their rows for the same requests are void, and
    the claims for these rows are undone.

    num_discarded_tokens   computed tokens that were dropped, void rows included, since construction
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

    def figures(self) -> dict[str, int]:
        """Return the statistics of the window."""
        return {"Discarded Tokens": self.num_discarded_tokens, "Iterations In Flight": len(self._steps)}

    @property
    def is_full(self) -> bool:
        return len(self._steps) == self.depth

    @property
    def must_be_read(self) -> bool:
        """Whether the newest step failed to launch, so that nothing can be planned before it is read."""
        return bool(self._steps) and self._steps[-1].step.error is not None

    def holds(self, request: LlmRequest) -> bool:
        """Whether a step in flight has a valid row for the request."""
        return any(flight.holds(request) for flight in self._steps)

    def holds_any(self, requests: Iterable[LlmRequest]) -> bool:
        return bool(self._steps) and any(map(self.holds, requests))

    def blocked_request_ids(self) -> Collection[int]:
        """Return the ids of the requests in flight that cannot run before their step is read."""
        if not self._steps:
            return NO_REQUESTS
        if not self.runs_ahead:
            return frozenset([request.request_id for flight in self._steps for request in flight.requests])
        in_flight = [request for flight in self._steps for request in flight.requests
                     if request.state is not COMPLETE and request not in flight.void]
        blocked = [request.request_id for request in in_flight
                   if request.state is LAST_TOKEN or request.in_lockstep or request.draft_len]
        blocked += [request.request_id for request in self._resources.awaited(in_flight)]
        # Blocks of an unread context must not be freed for others, because a failed step may leave any values in them.
        unread_contexts = [request for request in in_flight if request.context_read < request.prompt_len]
        blocked += [request.request_id for request in self._resources.leaving_window(unread_contexts)]
        return frozenset(blocked)

    def launch(self, batch: ScheduledBatch, requests: list[LlmRequest]) -> None:
        """Launch a step. Raises DeviceLostError.

        requests   requests of the batch, in batch order
        """
        self._steps.append(StepInFlight(requests, self._runner.start(batch)))

    def newest_choice(self) -> tuple[str, Mapping[str, str]]:
        """Return the form of the newest step, and earlier form -> what kept the step out of it; see docs/steps.md.

        The form is "" if the launch failed, and if the backend has no forms.
        """
        with suppress(Exception):                      # of a custom backend's step
            choice: Any = getattr(self._steps[-1].step.pending, "choice", None)
            if isinstance(choice.form, str) and isinstance(choice.obstacles, Mapping):
                return choice.form, choice.obstacles
        return "", {}

    def read(self) -> tuple[StepInFlight, StepOutput]:
        """Wait for the oldest step, rerun it if it failed, and return it with its output. Raises DeviceLostError.

        Two kinds of rows may be missing from the output or have any content: rows of requests that have ended since
        the launch, and void rows.
        """
        flight = self._steps.popleft()
        output = self._runner.read(flight.step)
        if output is None:
            self._unclaim_later_steps(flight)
            output = self._run_again(flight)
        return flight, output

    def drop_all(self) -> None:
        """Wait for all steps and drop their results, which no request needs any more. Raises DeviceLostError."""
        while self._steps:
            flight = self._steps.popleft()
            self._runner.read(flight.step)
            self.num_discarded_tokens += len(flight.batch.yielding)

    def forget(self) -> None:
        """Drop all steps without waiting for them: the engine has ended or failed."""
        self._steps.clear()

    def _unclaim_later_steps(self, failed: StepInFlight) -> None:
        """Undo the claims of later steps, newest first, for the requests of a failed step."""
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
            return self._runner.bisect(batch, step.requested, step.error)
        if not alive:
            return StepOutput.merge([], batch.micro_batch_id)
        return self._runner.run_again(batch.take(alive), step.requested)
