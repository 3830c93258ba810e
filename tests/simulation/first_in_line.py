"""C10: under MAX_UTILIZATION the first request in line is never paused (I23) and advances in every iteration."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from batch_manager.names import SchedulerPolicy
from batch_manager.requests.llm_request import LlmRequest

if TYPE_CHECKING:
    from .world import SimulatedWorld


class FirstInLine:
    """Checks C10 and I23 for the request that is first in line: the first active request that has not ended.

    Every plan that is made while nothing is in flight includes this request. While other requests are in flight, it may
    have to wait for their blocks: one plan may leave it out, but not two in a row. Each step that includes it advances
    or ends it.

    There is one exception. With chunking, generation requests get tokens of a step first. If they leave fewer tokens
    than a block has, every context waits, including a context that is first in line.
    """

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self._applies = not world.swarm.is_static and world.swarm.policy is SchedulerPolicy.MAX_UTILIZATION
        self._left_out: LlmRequest | None = None
        self._runs: deque[tuple[int, LlmRequest, int]] = deque()     # (turn to judge it, request, progress)

    def planned(self, active: list, inflight: frozenset, plan) -> Iterator[str]:
        """Yield the violations in `plan`, which the scheduler returns."""
        if not self._applies:
            return
        first = next((request for request in active if not request.is_finished), None)
        if first in plan.paused_requests:
            yield f"I23: {first} is the oldest and is paused"
        left_out, self._left_out = self._left_out, None
        if first is None or first.request_id in inflight:
            return
        if self._world.loop.window.holds_any(plan.paused_requests):    # the pause waits for the step in flight
            return
        yield from self._judge([run for run in self._runs if run[1] in plan.paused_requests])    # overtaken meanwhile
        if first in plan.context_requests or first in plan.generation_requests:
            self._runs.append((self._world.step_number + self._world.swarm.depth - 1, first, _progress(first)))
        elif first.is_context and self._tokens_left(plan) < self._world.swarm.tokens_per_block:
            self._world.mark("the first in line waits for tokens")
        elif not inflight:
            yield f"C10: {first} is the first in line, nothing is in flight, and it is not in the plan"
        elif left_out is first:
            yield f"C10: {first} is the first in line and is left out of a second plan"
        else:
            self._left_out = first
            self._world.mark("the first in line waits for those in flight")

    def _tokens_left(self, plan) -> int:
        """Return how many tokens of the step the generation requests of `plan` leave for chunks."""
        swarm = self._world.swarm
        if swarm.chunking is None:
            return swarm.tokens_per_block
        return swarm.max_num_tokens - sum(request.beam_width for request in plan.generation_requests)

    def taken_back(self, void: set[LlmRequest]) -> None:
        """Forget the steps of the requests `void` that are not judged yet, because these steps were taken back."""
        self._runs = deque(run for run in self._runs if run[1] not in void)

    def step_ended(self) -> Iterator[str]:
        """Yield a violation for each finished step that did not advance the request that was first in line."""
        yield from self._judge([run for run in self._runs if run[0] <= self._world.step_number])

    def _judge(self, runs: list[tuple[int, LlmRequest, int]]) -> Iterator[str]:
        for run in runs:
            self._runs.remove(run)
            _, request, before = run
            if not request.is_finished and _progress(request) <= before and self._world.loop.failure is None:
                yield f"C10: {request} is the first in line, ran, and stands where it stood"


def _progress(request: LlmRequest) -> int:
    return request.context_read + request.num_tokens
