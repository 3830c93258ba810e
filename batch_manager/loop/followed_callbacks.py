"""The callbacks of another rank than 0, which are called when rank 0 asks for it; see parallel/same_inputs.py."""

from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import BatchManagerError, InvalidRequestError
from ..names import ErrorCode
from ..requests.admission import usable_id
from ..requests.item_digest import item_digest, item_fields
from ..responses.named_tensor import NamedTensor
from .callbacks import GuardedCallbacks
from .unanswered import Refusal


class FollowedCallbacks:
    """Calls the callbacks of this rank as rank 0 says. Every item that is handed over here gets one final response.

    guarded      the callbacks, which may raise
    """

    def __init__(self, guarded: GuardedCallbacks, answer: Callable[[Any], None],
                 to_tensor: Callable[[Any], Any] | None, terminate_req_id: int | None) -> None:
        """
        answer      (value) sends a frame to rank 0
        to_tensor   as for NamedTensor
        """
        self.guarded = guarded
        self._unanswered = guarded.unanswered
        self._answer, self._to_tensor, self._terminate_req_id = answer, to_tensor, terminate_req_id
        self._handed: deque[tuple[int | None, Any]] = deque()      # id and item, without a verdict
        self._again: list[int] = []                    # one for each accepted item beyond the first of a live id

    def take(self, value: tuple[Any, ...]) -> None:
        """Do what an ASK frame says. Raises TypeError, ValueError or KeyError for a frame of another form."""
        kind, *content = value
        actions: dict[str, Callable[..., None]] = {
            "get": self._get, "fields": self._describe, "verdict": self._verdict, "responses": self._respond,
            "poll": self._poll, "stats": self._stats}
        actions[kind](*content)

    def fail(self, error: BatchManagerError) -> None:
        """Answer every item of this rank that has no final response."""
        text, unanswered = error.response_text(), self._unanswered
        while self._handed or self._read_next():
            self._refuse(text)
        while unanswered.refusals:                     # an exception in the worker has interrupted a refusal
            self.guarded.send_refusal(text, ErrorCode.of(text)[0])
        for request_id in [*self._again, *unanswered.alive]:
            self._send_final(request_id, [], text)
        self.guarded.after_responses()

    def _get(self, max_num_requests: int) -> None:
        fetched = self.guarded.fetched
        fetched.back_off.seconds = 0.0                 # rank 0 has waited already
        fetched.ask(max_num_requests)
        described = []
        while self._read_next():
            described.append(item_digest(self._handed[-1][1]))
        self._answer(("items", tuple(described)))

    def _read_next(self) -> bool:
        """Move the oldest item that get returned to those without a verdict. Returns False if there is none.

        No exception in the worker can lose the item, see unanswered.py.
        """
        undecided = self._unanswered.undecided
        if not undecided and not self.guarded.fetched.read_next():
            return False
        handed = (usable_id(undecided[0]), undecided[0]),
        self._handed += handed
        del undecided[0]
        return True

    def _describe(self, indices: tuple[int, ...]) -> None:
        self._answer(("fields", tuple([item_fields(self._handed[index][1]) for index in indices])))

    def _verdict(self, refusals: tuple[tuple[int, str], ...]) -> None:
        refused, unanswered = dict(refusals), self._unanswered
        for index in range(len(self._handed)):
            request_id = self._handed[0][0]
            if index in refused:
                self._refuse(refused[index])
            elif request_id is None or request_id == self._terminate_req_id:
                del self._handed[0]
            elif request_id in unanswered.alive:
                unanswered.num_accepted += 1
                self._again += (request_id,)
                del self._handed[0]
            else:
                unanswered.num_accepted += 1
                unanswered.alive[request_id] = None
                del self._handed[0]
        self.guarded.after_responses()

    def _respond(self, responses: tuple[Any, ...]) -> None:
        """Hand out responses of rank 0. Of items with one id, it does not matter which one gets which final.

        A final for an item that is not here is dropped: rank 0 has refused it, or this rank has.
        """
        for request_id, tensors, final, error in responses:
            named = [NamedTensor(name, array, self._to_tensor) for name, array in tensors]
            if not final:
                self.guarded.send([(request_id, named)])
            else:
                self._send_final(request_id, named, error)
        self.guarded.after_responses()

    def _send_final(self, request_id: int, tensors: list[NamedTensor], error: str) -> None:
        code = ErrorCode.of(error)[0] if error else None
        if request_id in self._again:
            self.guarded.send_last(self._again, self._again.index(request_id), request_id, tensors, error, code)
        elif request_id in self._unanswered.alive:
            self.guarded.send_final(request_id, tensors, error, code)

    def _refuse(self, text: str) -> None:
        """Refuse the oldest item without a verdict."""
        request_id, unanswered = self._handed[0][0], self._unanswered
        if request_id is None or request_id == self._terminate_req_id:
            del self._handed[0]
            return
        refusals = Refusal(request_id, InvalidRequestError(text, "")),
        unanswered.num_refused += 1
        unanswered.refusals += refusals
        del self._handed[0]
        self.guarded.send_refusal(text, ErrorCode.of(text)[0])

    def _poll(self) -> None:
        self.guarded.poll_stops()

    def _stats(self, record: str) -> None:
        if self.guarded.wants_stats:
            self.guarded.return_stats(record)
