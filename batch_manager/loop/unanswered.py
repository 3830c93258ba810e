"""The items that still need a final response: exact whatever is raised, wherever.

Another thread may raise an exception in the worker at any moment (`PyThreadState_SetAsyncExc`); a signal handler does
the same to a loop on the main thread. CPython looks for such an exception where a Python function begins or goes on
after a yield, when a call returns, and where a loop jumps back. The code that moves an item from one state to the next
is written so that none of these places lies in between:

-  Assignments and `del`s of plain attributes, lists, deques, and dicts whose keys are hashed in C are carried out all
   or not at all when nothing is called between them. So is a call that follows them, as far as its beginning:
   `del alive[request_id]`, then `send(...)`.
-  The value a call returns would be lost between the return and the assignment. `kept.extend(map(call, [argument]))`
   and `kept.extend(islice(iterator, 1))` are one call of C: the value is kept before anything can be raised. So a place
   for one value is a list of none or one.

All other state of the loop may be inconsistent after an exception. A failed engine uses this state only
(`Finals.fail_everything`), so every item gets its final response, and none gets a second.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from ..errors import BatchManagerError
from ..names import ErrorCode


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item that was not accepted. Its final response carries the error's text."""

    request_id: int
    error: BatchManagerError


class UnansweredItems:
    """From the moment an item was fetched until its final callback begins.

    An item is `undecided` until it is accepted, refused or counted as unaddressable, in one piece. An accepted or
    refused item stays listed until its final callback begins.

    undecided    the item that is being decided, if there is one
    refusals     refused items, in order
    alive        ids of the accepted requests, in order
    num_accepted, num_refused, num_unaddressable   items decided
    num_sent     final callbacks that began
    errors       error code -> final callbacks with it that began
    """

    __slots__ = ("undecided", "refusals", "alive", "num_accepted", "num_refused", "num_unaddressable", "num_sent",
                 "errors")

    def __init__(self) -> None:
        self.undecided: list[Any] = []
        self.refusals: deque[Refusal] = deque()
        self.alive: dict[int, None] = {}
        self.num_accepted = 0
        self.num_refused = 0
        self.num_unaddressable = 0
        self.num_sent = 0
        self.errors: dict[ErrorCode, int] = {}

    # Decisions on the undecided item. Nothing is called before the last line of each: see above.

    def accept(self, request_id: int) -> None:
        self.num_accepted += 1
        self.alive[request_id] = None
        del self.undecided[0]

    def refuse(self, refusal: Refusal) -> None:
        self.num_refused += 1
        self.refusals += (refusal,)
        del self.undecided[0]

    def note_unaddressable(self) -> None:
        """The item has no usable id, so no response can be sent."""
        self.num_unaddressable += 1
        del self.undecided[0]

    def pass_over(self) -> None:
        """The item was no request."""
        del self.undecided[0]
