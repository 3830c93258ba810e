"""Run a GptManager in Triton Inference Server's Python backend.

The get callback returns the requests that `execute` has queued. The send callback uses the response sender of the
request. The poll callback returns the ids of requests whose client has disconnected or sent `stop`. Statistics become
metrics.
"""

import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from difflib import get_close_matches

import triton_python_backend_utils as pb_utils
import triton_settings
from triton_metrics import Metrics

from batch_manager import ErrorCode, GptManager, InferenceRequest, InvalidRequestError, TrtGptModelType

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(eq=False, slots=True)
class Live:
    """A request without a final response.

    client_id   id set by the client; "": no id
    outputs     names of the output tensors that the client requests
    is_left     whether the client has disconnected
    """

    client_id: str
    sender: object
    outputs: frozenset
    is_left: bool = False


class TritonPythonModel:
    """The model class for Triton. Triton calls `initialize`, `execute` with new requests, and `finalize` at unload.

    Each request has a response sender, whose method `is_cancelled` must not be called after the final response.
    For this reason, only the worker uses the response sender of a request that `execute` has queued.
    """

    def initialize(self, args: dict) -> None:
        config = json.loads(args["model_config"])
        self._inputs = [entry["name"] for entry in config.get("input", ())]
        given = config.get("parameters", {})
        settings = triton_settings.read({name: value["string_value"] for name, value in given.items()
                                         if name != "FORCE_CPU_ONLY_INPUT_TENSORS"})
        self._lock = threading.Lock()                            # of the next three, which `execute` and the worker use
        self._live: dict[int, Live] = {}
        self._ids: dict[str, int] = {}                           # client's id -> engine's id
        self._stops: set[int] = set()                            # kept until the final response
        self._queue: deque[InferenceRequest] = deque()
        self._next_id, self._next_look, self._cancel_period_s = 0, 0.0, settings.cancel_period_s
        self._metrics = Metrics(pb_utils, args["model_name"], args["model_version"],
                                settings.positional[1] is TrtGptModelType.V1, settings.stats_period_s)
        self._manager = GptManager(
            *settings.positional, self._get, self._send, self._poll, self._metrics.keep, settings.optional_params,
            exclude_input_in_output=settings.exclude_input_in_output)

    def execute(self, requests: list) -> None:
        """Queue each request, unless its tensor `stop` is set.

        The worker sends the responses of queued requests later. A request with `stop` is answered at once. It marks
        the earlier request with the same id, which the worker then stops.
        """
        for request in requests:
            sender = request.get_response_sender()
            # Copies, because the server reuses the memory of these arrays after this call.
            tensors = {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}
            try:
                _check(request, self._inputs)
                if _flag(tensors.pop("stop", None)):
                    self._stop(request.request_id())
                    sender.send(flags=FINAL)
                else:
                    self._take(request, sender, tensors)
            except InvalidRequestError as error:
                sender.send(_error(error.code, str(error)), flags=FINAL)
        self._manager.notify()

    def finalize(self) -> None:
        """End the engine. The server calls this after all open streams have ended."""
        self._manager.shutdown(drain=False)
        self._metrics = None

    def _take(self, request: object, sender: object, tensors: dict) -> None:
        client_id, streaming = request.request_id(), _flag(tensors.pop("streaming", None))
        with self._lock:
            if client_id and client_id in self._ids:
                raise InvalidRequestError(f"id {client_id!r} is in use by an earlier request", "expected a unique id",
                                          "use another id, or none")
            ours, self._next_id = self._next_id, self._next_id + 1
            made = InferenceRequest(ours, tensors, is_streaming=streaming,
                                    deadline_s=request.timeout() / 1e6 or None, arrival_time=time.monotonic())
            self._live[ours] = Live(client_id, sender, frozenset(request.requested_output_names()))
            if client_id:
                self._ids[client_id] = ours
        self._queue.append(made)

    def _stop(self, client_id: str) -> None:
        with self._lock:
            if client_id not in self._ids:
                raise InvalidRequestError(f"stop is set for request {client_id!r}, which is unknown or has ended",
                                          "expected the id of an unanswered request", "ignore this if it has ended")
            self._stops.add(self._ids[client_id])

    # ------------------------------------------------------------------ callbacks, on the worker's thread

    def _get(self, max_num_requests: int) -> list[InferenceRequest]:
        """Return all queued requests. The manager refuses requests beyond the limit of its own queue."""
        return [self._queue.popleft() for _ in range(len(self._queue))]

    def _send(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        live = self._live[request_id]
        if final:
            with self._lock:
                del self._live[request_id]
                self._ids.pop(live.client_id, None)
                self._stops.discard(request_id)
        if live.is_left:
            response = _response(pb_utils.TritonError("the client has disconnected", pb_utils.TritonError.CANCELLED))
        elif error:
            response = _error(*ErrorCode.of(error))
        else:
            response = pb_utils.InferenceResponse([pb_utils.Tensor(tensor.name, tensor.array) for tensor in tensors
                                                   if tensor.name in live.outputs])
        if final or not live.is_left:
            live.sender.send(response, flags=FINAL if final else 0)

    def _poll(self) -> set[int]:
        self._metrics.publish()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self._cancel_period_s
            for request_id, live in list(self._live.items()):
                if not live.is_left and live.sender.is_cancelled():
                    live.is_left = True
                    with self._lock:
                        self._stops.add(request_id)
        with self._lock:
            return set(self._stops)


def _check(request: object, inputs: list[str]) -> None:
    """Refuse what Triton passes on beside the tensors, except the timeout. `inputs` are the names of all tensors.

    The server's HTTP route `generate` makes a parameter of each field of the body that is no input.
    """
    names = sorted(name for name in json.loads(request.parameters() or "{}") if not name.startswith("triton_"))
    if names:
        near = get_close_matches(names[0], inputs, n=1)
        raise InvalidRequestError(f"the parameter {names[0][:64]!r} is unknown", "expected tensors, and no parameters",
                                  f"did you mean the input {near[0]!r}?" if near else "leave it out")
    if request.correlation_id() not in (0, "") or request.flags():
        raise InvalidRequestError("the request has a sequence_id, sequence_start or sequence_end",
                                  "expected a request that belongs to no sequence", "use the request id instead")


def _flag(array: object) -> bool:
    return array is not None and bool(array.any())


def _error(code: ErrorCode, message: str) -> object:
    triton = pb_utils.TritonError
    kinds = {400: triton.INVALID_ARG, 409: triton.ALREADY_EXISTS, 413: triton.INVALID_ARG, 429: triton.UNAVAILABLE,
             503: triton.UNAVAILABLE, 504: triton.CANCELLED}
    return _response(triton(f"[{code.value}] {message}", kinds.get(code.http_status, triton.INTERNAL)))


def _response(error: object) -> object:
    return pb_utils.InferenceResponse(error=error)
