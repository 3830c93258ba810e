"""The menu of faults that the simulator can cause. Each fault has a name and a place. Its occurrences are counted."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from random import Random


class Place(Enum):
    """The part of the engine or of its environment in which a fault occurs."""

    GET = "get"
    SEND = "send"
    STOP = "stop"
    STATS = "stats"
    HOOK = "hook"
    MODEL = "model"
    ALLOCATOR = "allocator"
    CLOCK = "clock"
    RANK = "rank"
    INPUTS = "inputs"
    ADAPTER = "adapter"
    DRAFTER = "drafter"
    STORE = "store"
    TRANSFER = "transfer"
    LIFE = "life"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the menu.

    needs   the feature of the engine without which the fault cannot happen, if any
    """

    name: str
    place: Place
    what: str
    needs: str | None = None


def _menu(*rows: tuple) -> dict[str, Fault]:
    return {f"{place.value}.{name}": Fault(f"{place.value}.{name}", place, what, *more)
            for place, name, what, *more in rows}


MENU: dict[str, Fault] = _menu(
    (Place.GET, "raises", "raises an Exception"),
    (Place.GET, "exits", "raises SystemExit"),
    (Place.GET, "none", "returns None"),
    (Place.GET, "no_iterable", "returns something that cannot be iterated"),
    (Place.GET, "breaks_midway", "an iterator that raises after a few items"),
    (Place.GET, "endless", "a generator that never ends"),
    (Place.GET, "more_than_asked", "more items than there is room for"),
    (Place.GET, "same_object_twice", "one object twice in one list"),
    (Place.GET, "duplicate", "the id of a living request"),
    (Place.GET, "flood", "more than a thousand items in one call; 100,000 in one of two hundred"),

    (Place.SEND, "raises", "raises on a response that is not final"),
    (Place.SEND, "raises_on_final", "raises on a final one"),
    (Place.SEND, "shuts_down", "asks for a shutdown"),
    (Place.SEND, "hands_over_again", "has the next get return the id again"),
    (Place.SEND, "mutates", "overwrites the tensors"),
    (Place.SEND, "keeps", "keeps the tensors, which nobody may change"),

    (Place.STOP, "raises", "raises, before or after naming some"),
    (Place.STOP, "junk", "returns what are no ids among some that are"),
    (Place.STOP, "unknown", "names ids nobody has"),
    (Place.STOP, "all", "names everybody"),
    (Place.STOP, "finisher", "names who has just come to its end"),
    (Place.STOP, "reused", "names an id that was handed over again this iteration"),

    (Place.STATS, "raises", "raises"),
    (Place.STATS, "blocks", "takes forty seconds"),

    (Place.HOOK, "raises", "after_responses raises"),
    (Place.HOOK, "exits", "at_end raises SystemExit"),
    (Place.HOOK, "blocks", "after_responses takes forty seconds"),

    (Place.MODEL, "raises_for_one", "raises whenever a certain request is in the step"),
    (Place.MODEL, "raises_once", "raises, and works when it is run again"),
    (Place.MODEL, "raises_for_all", "raises for every part of the step"),
    (Place.MODEL, "memory_above", "is out of memory above a batch size"),
    (Place.MODEL, "memory_always", "is out of memory for every part of the step"),
    (Place.MODEL, "nan_in_row", "yields a row of logits that is not finite"),
    (Place.MODEL, "nan_in_block", "has a value in a block that is not finite"),
    (Place.MODEL, "wrong_token", "chooses a token outside the vocabulary"),
    (Place.MODEL, "wrong_rows", "returns other rows than the batch has"),
    (Place.MODEL, "device_lost", "loses the device for good"),

    (Place.ALLOCATOR, "fails_once", "has fewer blocks than the plan counted on"),
    (Place.ALLOCATOR, "fails_for_a_while", "the same, several times in a row"),
    (Place.ALLOCATOR, "smallest_pool", "a pool that just holds the longest request, and it comes"),
    (Place.ALLOCATOR, "full_of_shared", "no free block, and some with several owners", "reuse"),

    (Place.CLOCK, "forward", "jumps ahead by an hour"),
    (Place.CLOCK, "backward", "goes back by a moment"),
    (Place.CLOCK, "stands_still", "does not move for a while"),

    (Place.RANK, "late", "another rank does nothing for a while"),
    (Place.RANK, "asks_for_the_end", "another rank asks for a shutdown"),
    (Place.RANK, "killed", "another rank is gone"),
    (Place.RANK, "stopped", "another rank is silent"),
    (Place.RANK, "altered", "a bit of a frame is another one"),
    (Place.RANK, "twice", "a frame comes twice"),
    (Place.RANK, "cut", "a frame ends in the middle, and then the connection"),

    (Place.INPUTS, "missing", "another rank is not handed an item"),
    (Place.INPUTS, "more", "another rank is handed an item of its own"),
    (Place.INPUTS, "another", "another rank is handed another item under an id"),
    (Place.INPUTS, "reordered", "another rank is handed two items in the other order"),
    (Place.INPUTS, "raises", "a callback of another rank raises"),

    (Place.ADAPTER, "forgotten", "an id is forgotten, and then stands for other content", "adapters"),
    (Place.ADAPTER, "other_content", "an id comes with other content while it is cached", "adapters"),
    (Place.ADAPTER, "check_late", "the check of an adapter takes another turn", "adapters"),
    (Place.ADAPTER, "upload_fails", "the load of an adapter fails once", "adapters"),

    (Place.DRAFTER, "raises", "raises", "drafts"),
    (Place.DRAFTER, "nonsense", "returns what are no drafts", "drafts"),

    (Place.STORE, "raises", "a method of the store raises", "host blocks"),
    (Place.STORE, "full", "the store has no room for a block", "host blocks"),
    (Place.STORE, "promises", "the store counts blocks that it does not have", "host blocks"),
    (Place.STORE, "damaged", "a block in the store is damaged", "host blocks"),
    (Place.STORE, "slow", "the threads of the store do nothing for a while", "host blocks"),
    (Place.STORE, "other_process", "another process deletes half of the store", "host blocks"),

    (Place.TRANSFER, "gone", "the engine that has the blocks cannot be reached", "host blocks"),
    (Place.TRANSFER, "breaks", "an exchange of blocks breaks in the middle", "host blocks"),
    (Place.TRANSFER, "raises", "a fetch raises", "host blocks"),
    (Place.TRANSFER, "slow", "the threads of the transfers do nothing for a while", "host blocks"),
    (Place.TRANSFER, "guessed", "a request has a ticket that nobody has given", "host blocks"),
    (Place.TRANSFER, "used_twice", "a ticket comes again", "host blocks"),
    (Place.TRANSFER, "another_prompt", "a request has the ticket of another prompt", "host blocks"),
    (Place.TRANSFER, "another_model", "an engine with another model asks for blocks", "host blocks"),

    (Place.LIFE, "shutdown", "is asked for without draining"),
    (Place.LIFE, "twice", "is asked for again"),
    (Place.LIFE, "from_a_callback", "is asked for from inside a callback"),
    (Place.LIFE, "collected", "the last reference is dropped"),
    (Place.LIFE, "endless_arrivals", "requests keep coming while the rest is drained"),
    (Place.LIFE, "killed", "an exception is injected into the worker"),
    (Place.LIFE, "interpreter_exit", "the interpreter comes to its end"),
)
assert len(MENU) == 83

ENDINGS = [name for name, fault in MENU.items() if fault.place is Place.LIFE]


def menu_of(place: Place) -> list[Fault]:
    return [fault for fault in MENU.values() if fault.place is place]


class Faults:
    """Chooses faults at random, and counts those that happened.

    hits   name of a fault -> number of times that it happened; a chosen fault that could not happen is not counted
    """

    def __init__(self, rng: Random, enabled: Collection[str], rate: float) -> None:
        self._random = rng.random
        self.rng = rng
        self._rate = rate
        self._enabled = {place: [fault.name for fault in menu_of(place) if fault.name in enabled] for place in Place}
        self.hits: Counter[str] = Counter()

    def draw(self, place: Place) -> str | None:
        """Choose at random whether a fault of `place` is to happen now. Returns its name, or None."""
        names = self._enabled[place]
        if not names or self._random() >= self._rate:
            return None
        return self.rng.choice(names)

    def hit(self, name: str) -> None:
        self.hits[name] += 1
