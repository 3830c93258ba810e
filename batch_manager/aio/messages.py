"""Messages between a host and its engine process. Each message is pickled.

Unpickling is safe here: the host starts the engine process and passes it one end of an unnamed socket pair, so only
these two processes can write to it.
"""

import pickle
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ..arguments import EngineArguments
from ..config import Limits, Parts
from ..engine_info import EngineInfo
from ..errors import InvalidRequestError, type_name
from ..kv_events import KvEvent
from ..requests.inference_request import InferenceRequest
from ..responses.named_tensor import NamedTensor

PICKLE_PROTOCOL = 5


# ---------------------------------------------------------------------- to the engine process


class Start(NamedTuple):
    """The first message, from which the engine process makes its GptManager.

    parts        parts without the hooks that run in the host
    wants_stats, wants_kv_events   whether to send statistics records, and events of the prefix cache
    log_level    lowest level of log records to send
    models       architecture -> (module, name) of the classes of register_model
    """

    arguments: EngineArguments
    parts: Parts
    wants_stats: bool
    wants_kv_events: bool
    log_level: int
    models: dict[str, tuple[str, str]]


class PackedRequest(NamedTuple):
    """A request that is pickled separately, so that a failure to unpickle it fails this request only."""

    request_id: int
    pickled: bytes


class Requests(NamedTuple):
    """New requests, and ids of requests to stop. A request is never in a later message than its id in `stops`."""

    requests: list[PackedRequest]
    stops: list[int]


class End(NamedTuple):
    """A request to shut the engine down, with the arguments of GptManager.shutdown."""

    drain: bool
    timeout: float | None


class Call(NamedTuple):
    """A call of a method of the GptManager, which is answered by a Returned with the same number."""

    number: int
    method: str
    arguments: tuple[Any, ...]


# ---------------------------------------------------------------------- to the host


class Started(NamedTuple):
    """The engine has started. The fields are those of GptManager, and the limits of its admission."""

    info: EngineInfo
    health: dict[str, Any]
    limits: Limits


class NotStarted(NamedTuple):
    """The constructor of GptManager raised `error`, or an exception that `error` describes."""

    error: Exception


class Response(NamedTuple):
    """The parts of a response that a mailbox keeps.

    reason   FinishReason as an integer; pickling an enumeration member takes ten times as long
    error    text of an error response; the other fields are then unused
    """

    request_id: int
    tokens: list[int]
    reason: int
    tensors: list[NamedTensor] | None
    error: str


class Responses(NamedTuple):
    """All responses of an iteration, as plain tuples with the fields of Response.

    health   result of `GptManager.health`; None while the constructor of GptManager runs
    """

    responses: list[tuple[Any, ...]]
    health: dict[str, Any] | None


class Record(NamedTuple):
    """A statistics record, as JSON text."""

    json: str


class KvEvents(NamedTuple):
    """Events of the prefix cache."""

    events: Sequence[KvEvent]


class Beat(NamedTuple):
    """A heartbeat of the engine process, sent when it has received nothing for SECONDS_BETWEEN_BEATS."""

    health: dict[str, Any]


class Logged(NamedTuple):
    """Attributes of a log record with a formatted message."""

    attributes: dict[str, Any]


class Returned(NamedTuple):
    """The result of the Call with this number, or the exception that it raised."""

    number: int
    result: Any
    error: Exception | None


class Ended(NamedTuple):
    """The last message: the worker has ended."""

    health: dict[str, Any]


# ---------------------------------------------------------------------- the wire


class Wire:
    """A connection for several sending threads and one receiving thread."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._one_at_a_time = threading.Lock()

    def send(self, message: NamedTuple) -> None:
        """Send a message. Raises OSError if the other process has ended."""
        pickled = pickle.dumps(message, PICKLE_PROTOCOL)
        with self._one_at_a_time:
            self.connection.send_bytes(pickled)

    def receive(self) -> Any:
        """Return the next message. Raises EOFError or OSError if the other process has ended."""
        return pickle.loads(self.connection.recv_bytes())


def packed(request: InferenceRequest) -> PackedRequest:
    """Pickle a request. Raises InvalidRequestError if it cannot be pickled."""
    try:
        return PackedRequest(request.request_id, pickle.dumps(request, PICKLE_PROTOCOL))
    except Exception as error:    # user objects (tensors, logits post-processor) can raise anything
        raise InvalidRequestError(
            f"the request cannot be sent to the engine process: pickling it raised {type_name(error)}",
            "expected arrays, numbers or lists as tensors, and an importable function as logits post-processor",
            "change the request, or start the engine with process=False") from error


def unpacked(request: PackedRequest) -> InferenceRequest:
    """Unpickle a request. Raises InvalidRequestError if it cannot be unpickled in this process."""
    try:
        unpickled: InferenceRequest = pickle.loads(request.pickled)
        return unpickled
    except BaseException as error:    # user objects; an escaping exception would lose the requests already fetched
        raise InvalidRequestError(
            f"the request cannot be read in the engine process: unpickling it raised {type_name(error)}",
            "expected functions and classes from modules that the engine process can import, not from __main__",
            "move them into a module, or start the engine with process=False") from error
