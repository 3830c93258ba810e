"""The prompts whose blocks wait for another engine."""

from dataclasses import dataclass, field
from secrets import token_bytes
from threading import Lock

from ..kv.prefix_index import BlockKey, Domain
from ..one_shot_event import OneShotEvent
from ..requests.context_phase import TICKET_BYTES


@dataclass(eq=False, slots=True)
class HeldContext:
    """The first blocks of a prompt, in host blocks.

    domain, keys   what names the blocks
    host_ids       the host blocks, in order
    ticket         number of operations after which the device has copied them
    expires_at     in seconds of the engine's clock
    is_copied      set once the host blocks have their contents
    num_bytes, microseconds   what was sent of them, and how long that took
    """

    domain: Domain
    keys: list[BlockKey]
    host_ids: list[int]
    ticket: int
    expires_at: float
    is_copied: OneShotEvent = field(default_factory=OneShotEvent)
    num_bytes: int = 0
    microseconds: int = 0


class HeldContexts:
    """Held contexts by their tickets. A ticket works once. Any thread may call `take`; the worker calls the others.

    num_blocks   host blocks of all, also of those that are being sent
    """

    def __init__(self) -> None:
        self._held: dict[bytes, HeldContext] = {}              # in order of age
        self._lock = Lock()
        self.num_blocks = 0

    def put(self, held: HeldContext) -> bytes:
        """Hold a context, unless it has no block, and return its ticket."""
        ticket = token_bytes(TICKET_BYTES)
        if not held.host_ids:
            return ticket
        with self._lock:
            self._held[ticket] = held
        self.num_blocks += len(held.host_ids)
        return ticket

    def take(self, ticket: bytes) -> HeldContext | None:
        """Use a ticket. Returns None if it is unknown, used or lapsed."""
        with self._lock:
            return self._held.pop(ticket, None)

    def lapse(self, now: float, count: int = 0) -> list[HeldContext]:
        """End the tickets that have expired, and the `count` oldest ones, and return what was held for them."""
        with self._lock:
            ended = [ticket for number, (ticket, held) in enumerate(self._held.items())
                     if number < count or held.expires_at <= now]
            return [self._held.pop(ticket) for ticket in ended]
