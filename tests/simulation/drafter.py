"""The drafter of a simulated engine. It knows the texts, is right at times, and breaks its contract."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from batch_manager.requests.llm_request import LlmRequest

from .faults import Faults, Place
from .history import Handed, scripted_oracle

if TYPE_CHECKING:
    from .world import SimulatedWorld


class Texts:
    """The texts of the requests of a world, by its oracle."""

    def __init__(self, world: "SimulatedWorld", model: dict[str, Any]) -> None:
        self._world, self._oracle = world, scripted_oracle(model)
        self._of: dict[int, tuple[Handed, list[int]]] = {}

    def after(self, request: LlmRequest, count: int) -> list[int]:
        """Return the next `count` tokens of a request, or as many as its text has."""
        handed = self._world.handed(request.request_id)
        if handed is None:
            return []
        known, text = self._of.get(request.request_id, (None, []))
        if known is not handed:
            text = self._oracle.text(handed, request.max_new_tokens, request.max_new_tokens).tokens
            self._of[request.request_id] = handed, text
        place = request.num_tokens - request.orig_prompt_len
        return text[place : place + count]


class SimulatedDrafter:
    """Drafts for requests of the swarm. `held` are the requests that were asked for and not released since."""

    def __init__(self, world: "SimulatedWorld", model: dict[str, Any]) -> None:
        swarm = world.swarm
        self._world, self._vocab_size, self._right = world, swarm.vocab_size, swarm.drafts_right
        self._texts, self._rng = Texts(world, model), Random(f"drafter {swarm.seed}")
        self.faults = Faults(self._rng, swarm.faults, swarm.fault_rate)
        self.held: set[LlmRequest] = set()
        self._drafted: dict[LlmRequest, tuple[int, int]] = {}    # turn and number of tokens when it got drafts

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Any:
        world = self._world
        world.check(all(most > 0 for most in max_lengths) and len(requests) == len({*requests}),
                    "I36: the drafter is asked for nothing, or twice")
        for request in requests:
            world.check(request.is_generating and not world.loop.window.holds(request) and request.speculation,
                        f"I36: the drafter is asked for {request}")
        self.held.update(requests)
        name = self.faults.draw(Place.DRAFTER)
        if name is not None:
            self.faults.hit(name)
            world.client.failures["propose"] += 1
            if name == "drafter.raises":
                raise self._rng.choice([RuntimeError, SystemExit, GeneratorExit, MemoryError])("planted")
            return self._rng.choice([None, 5, [], [[0]] * (len(requests) + 1), [[self._vocab_size]] * len(requests),
                                     [[-1]] * len(requests), [[0.5]] * len(requests), [None] * len(requests),
                                     [[True]] * len(requests), [[0] * (most + 1) for most in max_lengths]])
        return [self._drafts(request, most) if self._rng.random() < 0.9 else []
                for request, most in zip(requests, max_lengths)]

    def release(self, request: LlmRequest) -> None:
        self.held.discard(request)
        if request in self._drafted:
            turn, _ = self._drafted.pop(request)
            if not request.is_finished:
                self._world.mark("a request with drafts is paused")
            elif self._world.step_number - turn < self._world.swarm.depth:
                self._world.mark("drafts with the end of a request")

    def _drafts(self, request: LlmRequest, most: int) -> list[int]:
        rng = self._rng
        turn, before = self._drafted.get(request, (0, request.num_tokens))
        if request.num_tokens - before > self._world.step_number - turn:
            self._world.mark("drafts accepted")
        self._drafted[request] = self._world.step_number, request.num_tokens
        drafts = [token if rng.random() < self._right else rng.randrange(self._vocab_size)
                  for token in self._texts.after(request, most)]
        handed = self._world.handed(request.request_id)
        if handed is not None and handed.end_ids and rng.random() < 0.1:
            drafts.append(min(handed.end_ids))
        drafts += [rng.randrange(self._vocab_size) for _ in range(rng.choice([0, 0, 1, most]))]
        return drafts[:most]
