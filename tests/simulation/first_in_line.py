"""C10: under MAX_UTILIZATION the first in line is never a victim (I23) and advances in every iteration."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from batch_manager.names import SchedulerPolicy
from batch_manager.requests.llm_request import LlmRequest

if TYPE_CHECKING:
    from .world import SimulatedWorld


class FirstInLine:
    """Follows whoever is first among those who have not ended.

    He is in every plan that is made while nothing is in flight. While a step of others is, he may have to wait for the
    blocks they hold; so he is left out once, and not by the next plan as well. A step he is in has moved him on when
    it was read, or has ended him.

    One exception: with chunking, generation goes first. Should it leave less than a block of the tokens of a step, a
    context waits, also the first one, and also one that came to the front by its priority.
    """

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self._applies = not world.swarm.is_static and world.swarm.policy is SchedulerPolicy.MAX_UTILIZATION
        self._left_out: LlmRequest | None = None
        self._runs: deque[tuple[int, LlmRequest, int]] = deque()     # until which turn, who, where he stood

    def planned(self, active: list, inflight: frozenset, plan) -> Iterator[str]:
        """What a plan does to him, as it leaves the scheduler."""
        if not self._applies:
            return
        first = next((request for request in active if not request.is_finished), None)
        if first in plan.paused_requests:
            yield f"I23: {first} is the oldest and is paused"
        left_out, self._left_out = self._left_out, None
        if first is None or first.request_id in inflight:
            return
        if self._world.loop.window.holds_any(plan.paused_requests):    # nothing of it is carried out yet
            return
        yield from self._judge([run for run in self._runs if run[1] in plan.paused_requests])    # overtaken meanwhile
        if first in plan.context_requests or first in plan.generation_requests:
            self._runs.append((self._world.step_number + self._world.swarm.depth - 1, first, _progress(first)))
        elif first.is_context and self._tokens_left(plan) < self._world.swarm.tokens_per_block:
            self._world.mark("the first in line waits for tokens")
        elif not inflight:
            yield f"C10: {first} is the first in line, nothing is in flight, and he is not in the plan"
        elif left_out is first:
            yield f"C10: {first} is the first in line and is left out of a second plan"
        else:
            self._left_out = first
            self._world.mark("the first in line waits for those in flight")

    def _tokens_left(self, plan) -> int:
        """What generation leaves a chunk of."""
        swarm = self._world.swarm
        if swarm.chunking is None:
            return swarm.tokens_per_block
        return swarm.max_num_tokens - sum(request.beam_width for request in plan.generation_requests)

    def taken_back(self, void: set[LlmRequest]) -> None:
        """Their newest steps do not count."""
        self._runs = deque(run for run in self._runs if run[1] not in void)

    def step_ended(self) -> Iterator[str]:
        """Whether the step he was in moved him on."""
        yield from self._judge([run for run in self._runs if run[0] <= self._world.step_number])

    def _judge(self, runs: list[tuple[int, LlmRequest, int]]) -> Iterator[str]:
        for run in runs:
            self._runs.remove(run)
            _, request, before = run
            if not request.is_finished and _progress(request) <= before and self._world.loop.failure is None:
                yield f"C10: {request} is the first in line, ran, and stands where it stood"


def _progress(request: LlmRequest) -> int:
    return request.context_read + request.num_tokens
