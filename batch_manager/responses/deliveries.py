"""The values of each live request that were not sent yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..handover import Hypothesis, StepOutput, TopLogProbs
from ..names import FinishReason
from ..requests.admission import Admitted
from ..requests.llm_request import LlmRequest
from ..requests.response_options import ResponseOptions
from .beam_delivery import BeamDelivery
from .named_tensor import NamedTensor
from .perf_metrics import PerfMetrics
from .tensors import build_beam_response, build_response, streamed_token_classes


@dataclass(slots=True)
class Delivery:
    """The response values of one live request. Optional values are kept only if the request asked for them.

    tokens_only         the request asked for tokens only
    num_sent            number of generated tokens already streamed
    log_probs           log-probability of each generated token not sent yet
    cum_log_prob        sum of the log-probabilities of all generated tokens
    generation_logits   [vocab] row of each generated token not sent yet
    top_log_probs       likeliest tokens at the positions of the generated tokens not sent yet, one entry per step
    context_logits      [prompt, vocab], filled chunk by chunk; None before the first chunk and once it is sent
    context_rows        number of rows of context_logits that are filled, from the first on; context_logits is sent when
                        all rows are filled
    beams               with several beams, their log-probabilities and logits, in place of log_probs, cum_log_prob and
                        generation_logits
    """

    options: ResponseOptions
    tokens_only: bool
    num_sent: int = 0
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    generation_logits: list[np.ndarray] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    context_logits: np.ndarray | None = None
    context_rows: int = 0
    beams: BeamDelivery | None = None


class Deliveries:
    """Keeps the values of each live request that were not sent yet, and builds responses. It sends nothing.

    vocab_size   number of columns of the returned logits
    to_tensor    function that converts a NumPy array to the tensor of a response
    listeners    request id -> delivery, of requests that stream or asked for values other than tokens
    asking       ids of requests that asked for values other than tokens
    """

    def __init__(self, to_tensor: Callable[[np.ndarray], object], vocab_size: int) -> None:
        self._to_tensor = to_tensor
        self._no_rows = np.empty((0, vocab_size), np.float32)
        self._deliveries: dict[int, Delivery] = {}
        self.listeners: dict[int, Delivery] = {}
        self.asking: set[int] = set()

    def __len__(self) -> int:
        return len(self._deliveries)

    def admit(self, admitted: Admitted) -> None:
        options = admitted.response
        asks = options.asks_for_more
        request_id = admitted.request.request_id
        self._deliveries[request_id] = delivery = Delivery(options, tokens_only=not asks)
        if admitted.request.beam_width > 1:
            delivery.beams = BeamDelivery(admitted.request.beam_width, keeps_log_probs=options.return_log_probs,
                                          keeps_logits=options.return_generation_logits)
        if asks:
            self.asking.add(request_id)
        if asks or options.is_streaming:
            self.listeners[request_id] = delivery

    def note_context_logits(self, request: LlmRequest, start: int, logits: np.ndarray) -> None:
        """Keep the rows of `logits` that belong to the user's prompt and were not kept before.

        logits   [n, vocab] rows of the context from position `start` on. After a pause, rows are repeated, and the
                 context includes generated tokens
        """
        delivery = self._deliveries[request.request_id]
        first, end = delivery.context_rows, min(start + len(logits), request.orig_prompt_len)
        if first >= end:
            return
        assert start <= first, "rows of context logits were left out"
        if delivery.context_logits is None:
            delivery.context_logits = np.empty((request.orig_prompt_len, logits.shape[1]), np.float32)
        delivery.context_logits[first:end] = logits[first - start : end - start]
        delivery.context_rows = end

    def note_tokens(self, request: LlmRequest, output: StepOutput, start: int, stop: int) -> bool:
        """Keep the values of the tokens that were just added to a request. Returns whether the request streams them.

        The tokens are those with start <= index < stop in the step's output. The request must be in `listeners`: it
        streams, or asked for values other than tokens.
        """
        delivery = self.listeners[request.request_id]
        options = delivery.options
        if not delivery.tokens_only:
            if options.return_log_probs:
                assert output.log_probs is not None    # steps/output_check.py ensures it
                log_probs = output.log_probs[start:stop].tolist()
                delivery.log_probs += log_probs
                for log_prob in log_probs:
                    delivery.cum_log_prob += log_prob
            if options.return_generation_logits:
                # Copied, because the rows are a view that would keep the array of all requests alive.
                delivery.generation_logits.extend(output.generation_logits[request.seq_slot][:stop - start].copy())
            if options.top_log_probs:
                top = output.top_log_probs[request.seq_slot]
                delivery.top_log_probs.append(TopLogProbs(top.ids[:stop - start].copy(),
                                                          top.log_probs[:stop - start].copy()))
        return options.is_streaming

    def note_beams(self, request: LlmRequest, parents: Sequence[int], log_probs: np.ndarray,
                   logits: np.ndarray | None) -> None:
        """Keep the values of the tokens that were just added to the beams of a request."""
        beams = self._deliveries[request.request_id].beams
        assert beams is not None
        beams.follow(parents, log_probs, logits, is_first=request.num_generated_tokens == 1)

    def note_hypotheses(self, request: LlmRequest, hypotheses: Sequence[Hypothesis], logits: np.ndarray | None) -> None:
        """Keep the log-probabilities and logits of the results of a beam search.

        Must be called before the request replaces its live beams.
        """
        beams = self._deliveries[request.request_id].beams
        assert beams is not None
        beams.end(hypotheses, logits, is_first=request.num_generated_tokens == 0)

    def new_tokens(self, requests: Sequence[LlmRequest]) -> list[tuple[int, list[NamedTensor]]]:
        """Build a streamed response for each request, with its unsent tokens. Returns (request id, tensors) of each.

        The tokens count as sent afterwards.
        """
        responses, listeners = [], self.listeners
        output_ids, length, context, generation, log_probs, cum_log_probs, finish = streamed_token_classes(
            self._to_tensor)
        for request in requests:
            request_id = request.request_id
            delivery, tokens = listeners[request_id], request.tokens[0]
            num_generated = len(tokens) - request.orig_prompt_len
            if delivery.tokens_only and num_generated - delivery.num_sent == 1:
                ids = output_ids()    # without a call for each response: a quarter faster
                ids.token = tokens[-1]
                tensors = [ids, length(), context(), generation(), log_probs(), cum_log_probs(), finish()]
            else:
                tensors = self.response(request, delivery, FinishReason.NOT_FINISHED)
            delivery.num_sent = num_generated
            responses.append((request_id, tensors))
        return responses

    def tensors_of(self, metrics: PerfMetrics) -> list[NamedTensor]:
        """The performance metrics of a request as tensors, which follow the other tensors in its final response."""
        return metrics.tensors(self._to_tensor)

    def context_phase_params(self, values: np.ndarray) -> NamedTensor:
        """Where the blocks of a context_only request wait, as the last tensor of its final response."""
        return NamedTensor("context_phase_params", values, self._to_tensor)

    def forget(self, request_id: int) -> Delivery | None:
        """Forget an ended request, and return its delivery for the final response."""
        self.asking.discard(request_id)
        self.listeners.pop(request_id, None)
        return self._deliveries.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._deliveries.clear()
        self.listeners.clear()
        self.asking.clear()

    def response(self, request: LlmRequest, delivery: Delivery, reason: FinishReason) -> list[NamedTensor]:
        """Build the tensors of a response with all unsent values of the request.

        The log-probabilities and logits of the response are removed from `delivery`, so that no later response sends
        them again. Those of beams are not removed, because a request with beams has a single response.
        """
        options, tokens, prompt_len = delivery.options, request.tokens[0], request.orig_prompt_len
        if delivery.tokens_only:
            if options.is_streaming:
                return build_response(options, (), tokens[prompt_len + delivery.num_sent:], reason,
                                      to_tensor=self._to_tensor)
            if delivery.beams is None:
                return build_response(options, tokens[:prompt_len], tokens[prompt_len:], reason,
                                      to_tensor=self._to_tensor)

        # The response takes the kept values, so that no value is sent twice.
        first = delivery.num_sent if options.is_streaming else 0
        context_logits = delivery.context_logits if delivery.context_rows == prompt_len else None
        if delivery.beams is not None:
            return build_beam_response(options, tokens[:prompt_len], delivery.beams.outputs(request, reason),
                                       vocab_size=self._no_rows.shape[1], context_logits=context_logits,
                                       to_tensor=self._to_tensor)
        log_probs, generation_logits = delivery.log_probs, delivery.generation_logits
        top_log_probs = delivery.top_log_probs
        delivery.context_logits, delivery.log_probs, delivery.generation_logits = None, [], []
        delivery.top_log_probs = []
        return build_response(
            options, tokens[:prompt_len], tokens[prompt_len + first:], reason,
            log_probs=log_probs,
            cum_log_prob=delivery.cum_log_prob,
            context_logits=context_logits,
            generation_logits=generation_logits or self._no_rows,
            top_log_probs=top_log_probs,
            to_tensor=self._to_tensor)
