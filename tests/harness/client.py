"""The client of the tests: the four callbacks of an engine, and a record of their calls.

A suite with other callbacks overrides `items`, `received`, `named_stops` or `record_received`. Each callback calls
`begins` and `ends`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

SECONDS_UNTIL_A_TEST_GIVES_UP = 60.0


@dataclass
class Response:
    tensors: dict
    names: list[str]
    final: bool
    error: str

    def tokens(self, beam: int = 0) -> list[int]:
        length = int(self.tensors["sequence_length"][0, beam])
        return [int(t) for t in self.tensors["output_ids"][0, beam][:length]]

    @property
    def finish_reason(self) -> int:
        return int(self.tensors["finish_reason"][0, 0])

    @property
    def code(self) -> str:
        return self.error[1:].split("]")[0]


def nothing(*_: Any) -> None:
    """A hook that does nothing."""


class ListsById(dict[int, list]):
    """Lists by request id. A missing list is made on the first access, by whichever thread comes first.

    A defaultdict loses values here: when the garbage collector runs inside the access of one thread and a callback of
    it lets another thread run, which adds to the same list, the first thread then puts an empty list in its place.
    """

    def __missing__(self, request_id: int) -> list:
        return self.setdefault(request_id, [])


class Client:
    """The callbacks of one engine.

    pending      items that get returns; each call takes at most its argument, or all items if it is negative
    stops        ids that poll returns
    responses    request id -> responses to this id, in order
    stats        the records that return_stats received
    asked        the arguments of the calls of get
    events       the calls in order: "get", "send 3", "poll", "stats"
    threads      idents of the threads that called the callbacks
    complaints   descriptions of calls that break a rule of callbacks (I26, I27)
    over         the reason why no callback may begin any more; "" as long as callbacks may begin
    has_poll, has_stats   whether the engine gets these two callbacks

    on_get, on_send, on_poll, on_stats   called at the end of their callback; on_send gets the request id and the
                                         response
    """

    has_poll = has_stats = True

    def __init__(self) -> None:
        self.pending: list = []
        self.stops: set[int] = set()
        self.responses: dict[int, list[Response]] = ListsById()
        self.stats: list[str] = []
        self.asked: list[int] = []
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.complaints: list[str] = []
        self.over = ""
        self.on_get: Callable[[], Any] = nothing
        self.on_send: Callable[[int, Any], Any] = nothing
        self.on_poll: Callable[[], Any] = nothing
        self.on_stats: Callable[[], Any] = nothing
        self._running: list[str] = []

    def callbacks(self) -> dict[str, Callable | None]:
        """Return the callbacks as arguments of `GptManager` and `Callbacks`."""
        return {"get_inference_requests_cb": self.get, "send_response_cb": self.send,
                "poll_stop_signal_cb": self.poll if self.has_poll else None,
                "return_batch_manager_stats_cb": self.return_stats if self.has_stats else None}

    # the four callbacks

    def get(self, max_num_requests: int) -> Any:
        with self.callback("get"):
            self.asked.append(max_num_requests)
            items = self.items(max_num_requests)
            self.on_get()
            return items

    def send(self, request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        with self.callback("send", f"send {request_id}"):
            self.on_send(request_id, self.received(request_id, tensors, final_response, error_message))

    def poll(self) -> Any:
        with self.callback("poll"):
            stops = self.named_stops()
            self.on_poll()
            return stops

    def return_stats(self, record: str) -> None:
        with self.callback("stats"):
            self.record_received(record)
            self.on_stats()

    # the contents of the callbacks

    def items(self, max_num_requests: int) -> Any:
        """Return the items for one call of get, and remove them from `pending`."""
        count = len(self.pending) if max_num_requests < 0 else max_num_requests
        items = self.pending[:count]
        del self.pending[:len(items)]      # not [:count]: another thread may have added items meanwhile
        return items

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> Any:
        """Append a response to `responses`, and return the object that `on_send` gets as its second argument."""
        response = Response({t.name: np.asarray(t.tensor) for t in tensors}, [t.name for t in tensors], final, error)
        self.responses[request_id].append(response)
        return response

    def named_stops(self) -> Any:
        """Return the ids for poll."""
        return self.stops

    def record_received(self, record: str) -> None:
        """Append a record of the statistics to `stats`."""
        self.stats.append(record)

    # the rules of all callbacks

    def callback(self, name: str, event: str | None = None) -> "_Callback":
        """Return a context in which a callback runs. `event` is the entry in `events`; the default is `name`."""
        return _Callback(self, name, event or name)

    def begins(self, name: str) -> None:
        """Note that a callback begins. A call inside another callback, or after `over` is set, is a complaint."""
        if self._running:
            self.wrong(f"I27: {name} began inside {self._running[-1]}")
        if self.over:
            self.wrong(f"I26: {name} was called although {self.over}")
        self._running.append(name)
        self.threads.add(threading.get_ident())

    def ends(self, name: str) -> None:
        """Note that a callback has returned or raised."""
        self._running.pop()

    def wrong(self, complaint: str) -> None:
        """Add to `complaints`."""
        self.complaints.append(complaint)

    # questions

    def finals(self, request_id: int) -> list[Response]:
        return [response for response in self.responses[request_id] if response.final]

    def final(self, request_id: int) -> Response:
        (only,) = self.finals(request_id)
        assert self.responses[request_id][-1] is only, "a response came after the final one"
        return only

    def streamed(self, request_id: int) -> list[int]:
        return [token for response in self.responses[request_id] if not response.error for token in response.tokens()]

    def wait_for_finals(self, *request_ids: int) -> None:
        deadline = time.monotonic() + SECONDS_UNTIL_A_TEST_GIVES_UP
        for request_id in request_ids:
            while not self.finals(request_id):
                assert time.monotonic() < deadline, f"no final for {[i for i in request_ids if not self.finals(i)]}"
                time.sleep(0.001)


class ArrivingClient(Client):
    """A client that hands over each request in a given iteration. The code that steps the loop increments `iteration`.

    arrivals   [(iteration, request)]; requests of the same iteration keep their order
    """

    def __init__(self, arrivals: list[tuple[int, Any]]) -> None:
        super().__init__()
        self.iteration, self.waiting = 0, list(arrivals)

    def items(self, max_num_requests: int) -> list:
        due = [entry for entry in self.waiting if entry[0] <= self.iteration]
        due = due if max_num_requests < 0 else due[:max_num_requests]
        for entry in due:
            self.waiting.remove(entry)
        return [request for _, request in due]


class StaggeredClient(Client):
    """A client that limits the items of each call of get to a random element of `numbers`, which may be 0."""

    def __init__(self, items: list, draw: Random, numbers: list[int]) -> None:
        super().__init__()
        self.pending, self._draw, self._numbers = items, draw, numbers

    def items(self, max_num_requests: int) -> list:
        return super().items(min(max_num_requests, self._draw.choice(self._numbers)))


class _Callback:
    """Context manager of a running callback: notes `event`, and calls `begins` and `ends` of the client."""

    __slots__ = ("_client", "_event", "_name")

    def __init__(self, client: Client, name: str, event: str) -> None:
        self._client, self._name, self._event = client, name, event

    def __enter__(self) -> None:
        self._client.events.append(self._event)
        self._client.begins(self._name)

    def __exit__(self, *_: object) -> None:
        self._client.ends(self._name)
