"""What each request has not been told yet, and the final response exactly once."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..handover import StepOutput
from ..names import FinishReason
from ..requests.admission import Admitted, ResponseOptions
from ..requests.llm_request import LlmRequest
from ..requests.response import build_response
from .callbacks import GuardedCallbacks


@dataclass(slots=True)
class Delivery:
    """One living request as its receiver sees it.

    num_sent            generated tokens already sent (streaming)
    log_probs           of every generated token, when asked
    generation_logits   [vocab] rows of every generated token not sent yet, when asked
    context_logits      [prompt, vocab], filled chunk by chunk, when asked
    context_was_sent    a streaming response carries the context logits once
    is_plain            nothing but tokens was asked for
    """

    options: ResponseOptions
    is_plain: bool
    num_sent: int = 0
    log_probs: list[float] = field(default_factory=list)
    generation_logits: list[np.ndarray] = field(default_factory=list)
    context_logits: np.ndarray | None = None
    context_was_sent: bool = False


class Responder:
    """Keeps what was promised to each living request and sends it.

    listeners   deliveries of the requests that take something from every token: those that stream, or asked for more
                than tokens

    A final response is sent after `forget` was called for the request: whoever ends a request frees everything first.
    """

    def __init__(self, callbacks: GuardedCallbacks, to_tensor: Callable[[np.ndarray], object]) -> None:
        self._callbacks = callbacks
        self._to_tensor = to_tensor
        self._deliveries: dict[int, Delivery] = {}
        self.listeners: dict[int, Delivery] = {}

    def __len__(self) -> int:
        return len(self._deliveries)

    def admit(self, admitted: Admitted) -> None:
        options = admitted.response
        asks = options.return_log_probs or options.return_context_logits or options.return_generation_logits
        request_id = admitted.request.request_id
        self._deliveries[request_id] = delivery = Delivery(options, is_plain=not asks)
        if asks or options.is_streaming:
            self.listeners[request_id] = delivery

    def note_context_logits(self, request: LlmRequest, start: int, logits: np.ndarray) -> None:
        """Keep the rows that belong to the user's prompt; after a pause generated tokens run as context too."""
        delivery = self._deliveries[request.request_id]
        if delivery.context_logits is None:
            delivery.context_logits = np.zeros((request.orig_prompt_len, logits.shape[1]), np.float32)
        rows = min(len(logits), request.orig_prompt_len - start)
        if rows > 0:
            delivery.context_logits[start:start + rows] = logits[:rows]

    def note_token(self, request: LlmRequest, row: int, output: StepOutput) -> bool:
        """Keep what belongs to the token this row added to a listener. True when the token is to be streamed."""
        delivery = self.listeners[request.request_id]
        options = delivery.options
        if not delivery.is_plain:
            if options.return_log_probs:
                delivery.log_probs.append(0.0 if output.log_probs is None else float(output.log_probs[row]))
            if options.return_generation_logits and request.seq_slot in output.generation_logits:
                delivery.generation_logits.append(output.generation_logits[request.seq_slot])
        return options.is_streaming

    def send_new_tokens(self, request: LlmRequest) -> None:
        delivery = self._deliveries[request.request_id]
        tensors = self._build(request, delivery, FinishReason.NOT_FINISHED)
        delivery.num_sent = request.total_generated_tokens
        self._callbacks.send(request.request_id, tensors, False, "")

    def forget(self, request_id: int) -> Delivery | None:
        """Take the request off the books; what it has not been told yet is returned for the final."""
        self.listeners.pop(request_id, None)
        return self._deliveries.pop(request_id, None)

    def send_final(self, request: LlmRequest, delivery: Delivery, reason: FinishReason) -> None:
        self._callbacks.send(request.request_id, self._build(request, delivery, reason), True, "")

    def send_error(self, request_id: int, text: str) -> None:
        self._callbacks.send(request_id, [], True, text)

    def _build(self, request: LlmRequest, delivery: Delivery, reason: FinishReason) -> list:
        options, tokens, prompt_len = delivery.options, request.tokens[0], request.orig_prompt_len
        if delivery.is_plain:
            if options.is_streaming:
                return build_response(options, (), tokens[prompt_len + delivery.num_sent:], reason,
                                      to_tensor=self._to_tensor)
            return build_response(options, tokens[:prompt_len], tokens[prompt_len:], reason, to_tensor=self._to_tensor)

        first = delivery.num_sent if options.is_streaming else 0
        context_logits, generation_logits = None, None
        if not delivery.context_was_sent:
            context_logits = delivery.context_logits
            delivery.context_was_sent = context_logits is not None
        if delivery.generation_logits:    # a streamed response takes its rows along; nothing is kept twice
            generation_logits = np.stack(delivery.generation_logits)
            delivery.generation_logits = []
        return build_response(
            options, tokens[:prompt_len], tokens[prompt_len + first:], reason,
            log_probs=delivery.log_probs[first:],
            cum_log_prob=sum(delivery.log_probs),
            context_logits=context_logits,
            generation_logits=generation_logits,
            to_tensor=self._to_tensor)
