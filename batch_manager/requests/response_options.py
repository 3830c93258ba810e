"""The response options of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The response options of a request, and its deadline.

    is_streaming     send a response for each new token
    exclude_input    leave the prompt out of output_ids in a response that is not streamed
    return_log_probs, return_context_logits, return_generation_logits   return the tensors with these values
    top_log_probs    number of likeliest tokens to return with each token; 0: return no likeliest tokens
    return_perf_metrics   add the metrics to the final response
    is_context_only  the final response says where the blocks of the prompt wait
    deadline_s       seconds from arrival; None: no deadline
    pad_id           token that pads the rows of output_ids after shorter beams
    """

    is_streaming: bool = False
    exclude_input: bool = False
    return_log_probs: bool = False
    top_log_probs: int = 0
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False
    is_context_only: bool = False
    deadline_s: float | None = None
    pad_id: int = 0

    @property
    def asks_for_more(self) -> bool:
        """Whether the request asks for log-probabilities, likeliest tokens or logits."""
        return (self.return_log_probs or self.return_context_logits or self.return_generation_logits
                or self.top_log_probs > 0)
