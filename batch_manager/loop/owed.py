"""Who must still hear a final response, in one place and exact whatever is raised, wherever.

Another thread may raise an exception in the worker at any moment (`PyThreadState_SetAsyncExc`); a signal handler does
the same to a loop on the main thread. CPython looks for such an exception where a Python function begins or goes on
behind a yield, when a call returns, and where a loop jumps back. What moves an item from one state to the next is
written so that none of these places lies in between:

-  Assignments and `del`s of plain attributes, lists, deques and dicts with integers as keys, one behind the other, are
   done all or not at all, and so is a call behind them as far as its beginning: `del book[key]`, then `send(...)`.
-  What a call returns would be lost between its return and the assignment. `kept.extend(map(call, [argument]))` and
   `kept.extend(islice(iterator, 1))` are one call of C: what was returned has been kept when anybody looks.

The other books of the loop may say anything after an exception. These two and `taken` are what a failed engine answers
by (`Finals.fail_everything`), so nobody is forgotten and nobody is told twice.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from ..errors import BatchManagerError
from ..names import ErrorCode


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item that was handed over and not accepted: one final response with this text."""

    request_id: int
    error: BatchManagerError


class Owed:
    """An item is in `taken` until it is accepted, refused or counted as unaddressable, all in one go; what follows from
    that is owed until the call of send that is its final response begins.

    taken       the item that is being decided, if there is one
    refusals    items that were refused and not answered yet, in order
    alive       ids of the accepted requests that have not been answered yet, in order
    num_accepted, num_refused, num_unaddressable   items decided
    num_sent    final responses that began
    errors      those of them with an error, by code
    """

    __slots__ = ("taken", "refusals", "alive", "num_accepted", "num_refused", "num_unaddressable", "num_sent", "errors")

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.refusals: deque[Refusal] = deque()
        self.alive: dict[int, None] = {}
        self.num_accepted = 0
        self.num_refused = 0
        self.num_unaddressable = 0
        self.num_sent = 0
        self.errors: Counter[ErrorCode] = Counter()

    def __bool__(self) -> bool:
        return bool(self.alive or self.refusals or self.taken)

    # What becomes of the item in `taken`. Nothing is called before the last line of each: see above.

    def accept(self, request_id: int) -> None:
        self.num_accepted += 1
        self.alive[request_id] = None
        del self.taken[0]

    def refuse(self, refusal: Refusal) -> None:
        self.num_refused += 1
        self.refusals += (refusal,)
        del self.taken[0]

    def note_unaddressable(self) -> None:
        """Nobody can be told."""
        self.num_unaddressable += 1
        del self.taken[0]

    def pass_over(self) -> None:
        """It was no request."""
        del self.taken[0]
