"""The callbacks of the other ranks: they hand over what rank 0 was handed, or something else.

Rules, beside those of the history of rank 0:

    R2  each item that is handed over on a rank gets one final there
    R3  get and poll are called as often as on rank 0, get with the same numbers
    R4  what every rank was handed has the same responses everywhere, byte for byte and in one order
    R5  a callback that raises is counted on its own rank
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from batch_manager.guard import Guard
from batch_manager.loop.callbacks import GuardedCallbacks
from batch_manager.loop.followed_callbacks import FollowedCallbacks
from batch_manager.parallel.link import Link
from batch_manager.requests.inference_request import InferenceRequest

from .faults import Place
from .swarm import TERMINATE_ID

if TYPE_CHECKING:
    from .world import SimulatedWorld

OF_COMPARISON = "with callbacks on every rank"       # in the refusals of unequal items
FIRST_OWN_ID = 1 << 62


def heard(request_id: int, tensors: list, final: bool, error: str) -> tuple:
    """Return a response as a value."""
    return request_id, final, error, tuple([(named.name, named.array.tobytes()) for named in tensors])


class RankClient:
    """The callbacks of one rank. `handed` counts the items of each id, `finals` the finals."""

    def __init__(self, world: "SimulatedWorld", rank: int) -> None:
        self.world, self.rank, self.rng = world, rank, world.faults.rng
        self.handed: Counter[int] = Counter()
        self.finals: Counter[int] = Counter()
        self.failures: Counter[str] = Counter()
        self.asked: list[int] = []
        self.heard: list[tuple] = []
        self.num_polls = self.endings = 0

    def followed(self, link: Link, guard: Guard) -> FollowedCallbacks:
        stats = self.stats if self.world.swarm.has_stats else None
        guarded = GuardedCallbacks(self.get, self.send, self.poll, stats, guard, self.world.swarm.max_admissions,
                                   None, self.at_end)
        return FollowedCallbacks(guarded, link.answer, None, TERMINATE_ID)

    def get(self, max_num_requests: int) -> Any:
        self.asked.append(max_num_requests)
        client = self.world.client
        items = [item for item, _, _ in client.read]
        fault = self._fault(Place.INPUTS) if len(self.asked) == len(client.asked) else None
        kind = "" if fault is None else fault.removeprefix("inputs.")
        if kind == "raises" and not items:
            self._fail("get", fault)
        ids = Counter(handed.request_id for _, handed, _ in client.read if handed is not None)
        victims = [index for index, (item, handed, _) in enumerate(client.read)
                   if handed is not None and ids[handed.request_id] == 1 and handed.request_id is not None
                   and not self.world.is_alive(handed.request_id) and isinstance(item, InferenceRequest)]
        if kind == "more":
            items.insert(self.rng.randint(0, len(items)), InferenceRequest(
                FIRST_OWN_ID + self.rank * 10**6 + len(self.asked), {"input_ids": [0], "request_output_len": 2}))
        elif kind == "reordered" and len(victims) > 1:
            first, second = sorted(self.rng.sample(victims, 2))
            items[first], items[second] = items[second], items[first]
            self._refuse(first, second)
        elif kind == "missing" and victims:
            victim = self.rng.choice(victims)
            del items[victim]
            self._refuse(victim)
        elif kind == "another" and victims:
            victim = self.rng.choice(victims)
            item = items[victim]
            items[victim] = InferenceRequest(item.request_id, item.input_tensors, priority=item.priority / 2 + 0.7)
            self._refuse(victim)
        elif kind:
            kind = ""
        if kind:
            self.world.faults.hit(fault)
            client.calls_with_a_difference.add(len(self.asked))
        for item in items:
            if isinstance(item, InferenceRequest) and item.request_id != TERMINATE_ID:
                self.handed[item.request_id] += 1
        return items

    def _fault(self, place: Place) -> str | None:
        name = self.world.faults.draw(place)
        return None if len(self.asked) in self.world.client.calls_with_a_difference else name

    def _refuse(self, *indices: int) -> None:
        """Expect that items are refused. Once a rank is gone, nothing is compared, and the engine fails as it would."""
        for index in indices:
            self.world.client.read[index][1].must = None if self.world.ranks.may_be_lost else "INVALID_REQUEST"

    def send(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        world = self.world
        world.check(self.finals[request_id] < self.handed[request_id],
                    f"R2: rank {self.rank} has a response for request {request_id} after its final")
        self.finals[request_id] += final
        if OF_COMPARISON not in error:
            self.heard.append(heard(request_id, tensors, final, error))
        for named in tensors:                          # nobody else has these arrays
            if named.array.flags.writeable:
                named.array.fill(77)
        self._may_raise("send")

    def poll(self) -> set[int]:
        self.num_polls += 1
        self._may_raise("poll")
        return set(self.world.alive())                 # rank 0's answer holds

    def stats(self, record: str) -> None:
        self._may_raise("stats")

    def at_end(self, health: dict) -> None:
        self.endings += 1

    def _may_raise(self, name: str) -> None:
        if self._fault(Place.INPUTS) == "inputs.raises":
            self._fail(name, "inputs.raises")

    def _fail(self, name: str, fault: str) -> None:
        self.world.faults.hit(fault)
        self.failures[name] += 1
        raise self.rng.choice([RuntimeError, SystemExit, GeneratorExit])("planted")

    def judge(self, failures: dict[str, int], is_exact: bool) -> None:
        """Check the rules at the end. is_exact: whether the engine was shut down."""
        check, client, rank = self.world.check, self.world.client, f"rank {self.rank}"
        check(self.finals == self.handed, f"R2: {rank} has finals {self.finals - self.handed} too many and "
                                          f"{self.handed - self.finals} too few")
        check(self.endings == 1, f"I31: {self.endings} calls of at_end on {rank}")
        for name in ("get", "send", "poll", "stats"):
            check(failures[name] == self.failures[name], f"R5: {failures[name]} failures of {name} on {rank}")
        if is_exact:
            check(self.asked == client.asked, f"R3: get was called {len(self.asked)} times on {rank}, and "
                                              f"{len(client.asked)} times on rank 0, or with other numbers")
            if self.world.swarm.has_poll:
                check(self.num_polls == client.num_polls, f"R3: poll was called {self.num_polls} times on {rank}, and "
                                                          f"{client.num_polls} times on rank 0")
            check(self.heard == client.heard, f"R4: {rank} has other responses than rank 0")
