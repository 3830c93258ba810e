"""The unread responses of a request. The worker writes them, and a coroutine reads them."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ..errors import BatchManagerError
from ..names import ErrorCode, FinishReason, RequestType
from ..requests.context_phase import ContextPhaseParams
from ..requests.inference_request import TENSORS, InferenceRequest
from ..requests.tensor_values import scalar
from ..responses.named_tensor import NamedTensor, OneTokenTensor
from ..responses.perf_metrics import PerfMetrics
from ..responses.tensors import RESPONSE_TENSORS, TOP_TENSORS
from .adapter_names import Lease

OUTPUT_IDS, SEQUENCE_LENGTH, LOG_PROBS, CUM_LOG_PROBS, FINISH_REASON = map(RESPONSE_TENSORS.index, (
    "output_ids", "sequence_length", "output_log_probs", "cum_log_probs", "finish_reason"))
TOP_IDS, TOP_LOG_PROBS = len(RESPONSE_TENSORS), len(RESPONSE_TENSORS) + 1      # in responses that have them


class RequestFailed(BatchManagerError):
    """The request was refused, or ended with an error.

    code           ErrorCode
    message        error text, without the code
    is_retryable   the same request may succeed later, or on another instance
    tokens         list of the tokens that a stream gave before the failure
    """

    def __init__(self, code: ErrorCode, message: str, tokens: list[int] | None = None) -> None:
        super().__init__(f"[{code.value}] {message}")
        self.code, self.message, self.tokens = code, message, tokens or []

    @property
    def is_retryable(self) -> bool:
        return self.code.is_retryable


@dataclass(slots=True)
class Delta:
    """The output since the last delta of a stream; for `generate`, the whole output.

    tokens         new tokens, without the end id
    log_probs      log-probability of each new token, for requests with `return_log_probs`
    top_log_probs  for each new token, the likeliest tokens and their log-probabilities, likeliest first, for requests
                   with `return_top_log_probs`; without tokens of probability 0
    cum_log_prob   sum of log-probabilities of all tokens so far, for requests with `return_log_probs`
    finish_reason  reason why the output ended; NOT_FINISHED in all deltas but the last
    responses      for requests with logits or beams: the responses with these tokens. Each is the list of NamedTensor
                   that `send_response_cb` gets
    metrics        PerfMetrics, in the last delta of a request with `return_perf_metrics`; otherwise None
    context_phase_params   ContextPhaseParams, in the last delta of a context_only request; otherwise None
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    cum_log_prob: float = 0.0
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    responses: list[list[NamedTensor]] = field(default_factory=list)
    metrics: PerfMetrics | None = None
    context_phase_params: ContextPhaseParams | None = None


class Wants(NamedTuple):
    """Which parts of a response a request needs besides its tokens."""

    log_probs: bool
    top_log_probs: bool
    tensors: bool
    metrics: bool
    context_phase: bool = False

    @classmethod
    def of(cls, request: InferenceRequest) -> "Wants":
        """Read the flags of a request. The engine, not this function, refuses invalid values."""
        return cls(_asks(request, "return_log_probs"), _asks(request, "return_top_log_probs"),
                   any(_asks(request, name) for name in (
                       "return_context_logits", "return_generation_logits", "beam_width")),
                   _asks(request, "return_perf_metrics"),
                   request.request_type in (RequestType.CONTEXT_ONLY, RequestType.CONTEXT_ONLY.value))


def pieces(tensors: list[NamedTensor], final: bool, wants: Wants) -> "Piece":
    """Return the parts of a response that a mailbox keeps: tokens, finish reason, and the tensors if the request needs
    them."""
    ids = tensors[OUTPUT_IDS]
    if isinstance(ids, OneTokenTensor):        # a single streamed token, without an array
        return [ids.token], FinishReason.NOT_FINISHED, tensors if any(wants) else None
    reason = FinishReason.NOT_FINISHED if not final else FinishReason(int(tensors[FINISH_REASON].array[0, 0]))
    tokens = ids.array[0, 0]
    if wants.tensors:                          # shorter beams are padded
        tokens = tokens[: int(tensors[SEQUENCE_LENGTH].array[0, 0])]
    return tokens.tolist(), reason, tensors if any(wants) else None


Piece = tuple[list[int], FinishReason, list[NamedTensor] | None]


class Mailbox:
    """The unread responses of one request, in order, up to the final response.

    A mailbox has no lock: the worker appends and the reader takes, each by a single deque operation. An asynchronous
    exception or a run of the garbage collector is safe at any point.

    wants         which parts of a response the request needs besides its tokens
    loop          event loop of the reader; None: no coroutine has waited yet
    made_on       the event loop that ran when the request was submitted; None: none did
    is_listed     whether the mailbox is in the list of mailboxes to wake; used by the worker only
    is_cancelled  whether the reader has cancelled the request or is gone
    has_ended     whether the final response or an error has been added
    lease         of the request's adapter, which ends with the mailbox; None: it has none
    """

    __slots__ = ("request_id", "loop", "made_on", "is_listed", "is_cancelled", "has_ended", "wants", "lease",
                 "_arrived", "_waiter")

    def __init__(self, request_id: int, wants: Wants, made_on: asyncio.AbstractEventLoop | None = None) -> None:
        self.request_id, self.wants, self.made_on = request_id, wants, made_on
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_listed = self.is_cancelled = self.has_ended = False
        self.lease: Lease | None = None
        self._arrived: deque[Piece | str] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, tensors: list[NamedTensor], final: bool, error: str) -> None:
        """Add a response. Called on the worker's thread."""
        if error:
            self.end(error)
        else:
            self.add(*pieces(tensors, final, self.wants))

    def add(self, tokens: list[int], reason: FinishReason, tensors: list[NamedTensor] | None) -> None:
        """Add a response. The arguments are the results of the function `pieces`. Called on the worker's thread."""
        self._arrived.append((tokens, reason, tensors))
        if reason is not FinishReason.NOT_FINISHED:
            self.close()

    def end(self, error: str) -> None:
        """End the mailbox with the text of an error response. Idempotent."""
        if not self.has_ended:
            self._arrived.append(error)
            self.close()

    def close(self) -> None:
        """Note that no more is added."""
        self.has_ended = True
        if self.lease is not None:
            self.lease.end()

    def take(self) -> Delta | str | None:
        """Return all new responses as one delta, or the text of an error, or None if there is no new response.

        Called on the event loop.
        """
        arrived = self._arrived
        if not arrived:
            return None
        piece = arrived.popleft()
        if isinstance(piece, str):
            return piece
        tokens, reason, tensors = piece
        delta = Delta(tokens, [], [], 0.0, reason, [])
        if tensors is not None:
            self._add(delta, tensors)
        while arrived and not isinstance(piece := arrived[0], str):
            arrived.popleft()
            tokens, reason, tensors = piece
            delta.tokens += tokens
            delta.finish_reason = reason
            if tensors is not None:
                self._add(delta, tensors)
        return delta

    def _add(self, delta: Delta, tensors: list[NamedTensor]) -> None:
        if self.wants.log_probs:
            delta.log_probs += tensors[LOG_PROBS].array[0, 0].tolist()
            delta.cum_log_prob = float(tensors[CUM_LOG_PROBS].array[0, 0])
        if self.wants.top_log_probs and TOP_TENSORS[0] in {tensor.name for tensor in tensors[TOP_IDS:]}:
            delta.top_log_probs += [
                {token: log_prob for token, log_prob in zip(*row) if log_prob > -inf}
                for row in zip(tensors[TOP_IDS].array[0, 0].tolist(), tensors[TOP_LOG_PROBS].array[0, 0].tolist())]
        if self.wants.tensors:
            delta.responses.append(tensors)
        if self.wants.metrics:
            delta.metrics = PerfMetrics.of(tensors)
        if self.wants.context_phase and tensors[-1].name == "context_phase_params":
            delta.context_phase_params = ContextPhaseParams.of(tensors[-1].array)

    @property
    def is_awaited(self) -> bool:
        """Whether a coroutine awaits `arrival` on an open event loop."""
        waiter = self._waiter
        return waiter is not None and not waiter.done() and not waiter.get_loop().is_closed()

    def arrival(self) -> asyncio.Future[None]:
        """Return a future for the next response.

        Before the call, `loop` must be the running event loop, and `take` must have returned None.
        """
        assert self.loop is not None
        self._waiter = waiter = self.loop.create_future()
        return waiter

    def wake(self) -> None:
        """Complete the future of `arrival`. Called on the event loop."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _asks(request: InferenceRequest, name: str) -> bool:
    """Whether the flag or number `name` of the request is set, and neither False nor 0.

    True for an invalid value, which the engine refuses later.
    """
    value = getattr(request, name)
    try:
        return value is not None and bool(scalar(TENSORS[name], value))
    except Exception:      # user objects can raise anything
        return True
