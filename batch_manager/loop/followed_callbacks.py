"""The callbacks of another rank than 0, which are called when rank 0 asks for it; see parallel/same_inputs.py."""

from collections.abc import Callable
from typing import Any

from ..errors import BatchManagerError, InvalidRequestError
from ..names import ErrorCode
from ..requests.item_digest import item_digest
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
        self._handed: list[int | None] = []            # ids of the items without a verdict
        self._again: list[int] = []                    # one for each accepted item beyond the first of a live id

    def take(self, value: tuple[Any, ...]) -> None:
        """Do what an ASK frame says. Raises TypeError, ValueError or KeyError for a frame of another form."""
        kind, *content = value
        actions: dict[str, Callable[..., None]] = {
            "get": self._get, "verdict": self._verdict, "responses": self._respond, "poll": self._poll,
            "stats": self._stats}
        actions[kind](*content)

    def fail(self, error: BatchManagerError) -> None:
        """Answer every item of this rank that has no final response."""
        text, unanswered = error.response_text(), self._unanswered
        for request_id in self._handed:
            self._refuse(request_id, text)
        self._handed = []
        for request_id in [*self._again, *unanswered.alive]:
            self._send_final(request_id, [], text)
        self.guarded.after_responses()

    def _get(self, max_num_requests: int) -> None:
        fetched, undecided = self.guarded.fetched, self._unanswered.undecided
        fetched.back_off.seconds = 0.0                 # rank 0 has waited already
        fetched.ask(max_num_requests)
        described = []
        while fetched.read_next():
            described.append(item_digest(undecided[0]))
            del undecided[0]
        self._handed = [request_id for request_id, _ in described]
        self._answer(("items", tuple(described)))

    def _verdict(self, refusals: tuple[tuple[int, str], ...]) -> None:
        handed, self._handed, refused = self._handed, [], dict(refusals)
        for index, request_id in enumerate(handed):
            if index in refused:
                self._refuse(request_id, refused[index])
            elif request_id is not None and request_id != self._terminate_req_id:
                self._unanswered.num_accepted += 1
                if request_id in self._unanswered.alive:
                    self._again.append(request_id)
                else:
                    self._unanswered.alive[request_id] = None
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

    def _refuse(self, request_id: int | None, text: str) -> None:
        if request_id is not None and request_id != self._terminate_req_id:
            self._unanswered.num_refused += 1
            self._unanswered.refusals.append(Refusal(request_id, InvalidRequestError(text, "")))
            self.guarded.send_refusal(text, ErrorCode.of(text)[0])

    def _poll(self) -> None:
        self.guarded.poll_stops()

    def _stats(self, record: str) -> None:
        if self.guarded.wants_stats:
            self.guarded.return_stats(record)
