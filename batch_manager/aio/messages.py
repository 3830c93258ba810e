"""What a host and its engine process send each other, one pickled message at a time.

Both ends of the connection are processes of one user: the host starts the engine process and hands it one end of a
socket pair that has no name. Neither end reads from anything else.
"""

import pickle
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ..engine_info import EngineInfo
from ..errors import InvalidRequestError, type_name
from ..requests.inference_request import InferenceRequest
from ..responses.named_tensor import NamedTensor

PICKLE_PROTOCOL = 5


# ---------------------------------------------------------------------- to the engine process


class Start(NamedTuple):
    """The first message.

    arguments    of GptManager without callbacks: by name
    takes_all    see AsyncEngine.start
    wants_stats  statistics records are to be sent
    log_level    least level of log records that are to be sent
    """

    arguments: dict[str, Any]
    takes_all: bool
    wants_stats: bool
    log_level: int


class PackedRequest(NamedTuple):
    """A request, pickled by itself, so that one that cannot be unpickled costs only itself."""

    request_id: int
    pickled: bytes


class Handed(NamedTuple):
    """Requests, and the ids of requests to stop. A request comes no later than its stop."""

    requests: list[PackedRequest]
    stops: list[int]


class End(NamedTuple):
    """See GptManager.shutdown."""

    drain: bool
    timeout: float | None


# ---------------------------------------------------------------------- to the host


class Started(NamedTuple):
    """The engine runs."""

    info: EngineInfo


class NotStarted(NamedTuple):
    """The constructor of GptManager raised; `error` is what it raised, or an error that says so."""

    error: Exception


class Response(NamedTuple):
    """What a mailbox keeps of a response.

    reason   FinishReason as an integer: pickling a member of an enumeration costs ten times as much
    error    text of an error response; the other fields then say nothing
    """

    request_id: int
    tokens: list[int]
    reason: int
    tensors: list[NamedTensor] | None
    error: str


class Responses(NamedTuple):
    """All responses of an iteration, as plain tuples of the fields of Response, and `GptManager.health` after them."""

    responses: list[tuple[Any, ...]]
    health: dict[str, Any] | None


class Record(NamedTuple):
    """A statistics record."""

    json: str


class Beat(NamedTuple):
    """The engine process lives. Sent several times a second."""

    health: dict[str, Any]


class Logged(NamedTuple):
    """Attributes of a log record whose message is formatted."""

    attributes: dict[str, Any]


class Ended(NamedTuple):
    """The last message: the worker has ended."""

    health: dict[str, Any]


# ---------------------------------------------------------------------- the wire


class Wire:
    """A connection that several threads send on and one receives from."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._one_at_a_time = threading.Lock()

    def send(self, message: NamedTuple) -> None:
        """Raises OSError where the other process has ended."""
        pickled = pickle.dumps(message, PICKLE_PROTOCOL)
        with self._one_at_a_time:
            self.connection.send_bytes(pickled)

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError where the other process has ended."""
        return pickle.loads(self.connection.recv_bytes())


def packed(request: InferenceRequest) -> PackedRequest:
    """Raises InvalidRequestError where something of the request cannot be pickled."""
    try:
        return PackedRequest(request.request_id, pickle.dumps(request, PICKLE_PROTOCOL))
    except Exception as error:    # of any class: a logits post-processor and values of tensors are the user's objects
        raise InvalidRequestError(
            f"the request cannot be sent to the engine process: pickling it raised {type_name(error)}",
            "a logits post-processor is a function of an importable module, tensors are arrays, numbers or lists",
            "correct it, or start the engine with process=False") from error


def unpacked(request: PackedRequest) -> InferenceRequest:
    """Raises InvalidRequestError where something of the request cannot be unpickled in this process."""
    try:
        unpickled: InferenceRequest = pickle.loads(request.pickled)
        return unpickled
    except BaseException as error:    # likewise; and what left here would take the requests before it with it
        raise InvalidRequestError(
            f"the request cannot be read in the engine process: unpickling it raised {type_name(error)}",
            "functions and classes that it names are in modules that the engine process can import, not in __main__",
            "move them into a module, or start the engine with process=False") from error
