"""The items that still need a final response. This list of items stays exact through any exception.

Another thread may raise an exception in the worker at any moment (`PyThreadState_SetAsyncExc`). If the iterations run
on the main thread, a signal handler can raise an exception in them. CPython checks for such asynchronous exceptions at
three points: where a Python function starts or resumes after a yield, after a call returns, and at the backward jump
of a loop. The code that moves an item from one state to the next contains none of these points:

-  Consecutive assignments and `del`s of plain attributes, lists, deques, and dicts whose keys are hashed in C
   take effect together if there is no call between them. If a call follows them, no exception can occur between
   them and the start of this call. Example: `del alive[request_id]`, then `send(...)`.
-  In `value = call(argument)`, an exception between the return and the assignment would lose the return value.
   The code therefore keeps a single value in a list with at most one element, and fills the list with one C call:
   `kept.extend(map(call, [argument]))` or `kept.extend(islice(iterator, 1))`. This `extend` stores the value before
   an exception can occur.

Any other state of the loop may be inconsistent after an exception. A failed engine uses only this list
(`Finals.fail_everything`), and every item gets exactly one final response.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from ..errors import BatchManagerError
from ..names import ErrorCode, FinishReason

FINALS_BY_REASON = {
    FinishReason.END_ID: "Finals End ID",
    FinishReason.STOP_WORDS: "Finals Stop Words",
    FinishReason.LENGTH: "Finals Length",
    FinishReason.TIMED_OUT: "Finals Timed Out",
    FinishReason.CANCELLED: "Finals Cancelled",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An item that was not accepted. Its final response carries the error's text."""

    request_id: int
    error: BatchManagerError


class UnansweredItems:
    """Lists each item from its fetch to the start of its final callback.

    An item is `undecided` until it is accepted, refused, counted as unaddressable, or dropped. An accepted or refused
    item stays listed until its final callback starts.

    undecided    list with the item that is being decided, or empty
    refusals     refused items, in order
    alive        ids of the accepted requests, in order
    num_accepted, num_refused, num_unaddressable   numbers of items with each decision
    num_sent     number of final callbacks that were started
    errors       error code -> number of final callbacks that were started with this code
    reasons      name of a statistic, such as "Finals Length" -> number of finals for this reason, without errors
    """

    __slots__ = ("undecided", "refusals", "alive", "num_accepted", "num_refused", "num_unaddressable", "num_sent",
                 "errors", "reasons")

    def __init__(self) -> None:
        self.undecided: list[Any] = []
        self.refusals: deque[Refusal] = deque()
        self.alive: dict[int, None] = {}
        self.num_accepted = 0
        self.num_refused = 0
        self.num_unaddressable = 0
        self.num_sent = 0
        self.errors: dict[ErrorCode, int] = {}
        self.reasons = dict.fromkeys(FINALS_BY_REASON.values(), 0)

    # Decisions on the undecided item. They make no calls: see the docstring of the module.

    def accept(self, request_id: int) -> None:
        self.num_accepted += 1
        self.alive[request_id] = None
        del self.undecided[0]

    def refuse(self, refusal: Refusal) -> None:
        self.num_refused += 1
        self.refusals += (refusal,)
        del self.undecided[0]

    def note_unaddressable(self) -> None:
        """Drop the item in `undecided`. It has no usable id, so no response can be sent for it."""
        self.num_unaddressable += 1
        del self.undecided[0]

    def drop(self) -> None:
        """Drop the item in `undecided` without a response.

        The item has the id `terminate_req_id`. Its arrival ends the worker.
        """
        del self.undecided[0]
