"""Which responses and tensors a request asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The responses and tensors of a request, and its deadline.

    is_streaming     a response for each new token
    exclude_input    output_ids of a response that is not streamed leaves the prompt out
    deadline_s       seconds from arrival; None: no deadline
    top_log_probs    how many of the likeliest tokens are returned with each token; 0: none
    return_perf_metrics   the final response has the metrics
    pad_id           fills the rows of output_ids after shorter beams
    """

    is_streaming: bool = False
    exclude_input: bool = False
    return_log_probs: bool = False
    top_log_probs: int = 0
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False
    deadline_s: float | None = None
    pad_id: int = 0

    @property
    def asks_for_more(self) -> bool:
        """Whether a response holds more than tokens and metrics."""
        return (self.return_log_probs or self.return_context_logits or self.return_generation_logits
                or self.top_log_probs > 0)
