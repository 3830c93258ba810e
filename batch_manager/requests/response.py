"""What is sent back: the list of `NamedTensor`, in the documented order, shapes and dtypes.

    output_ids          int32    [1, beam, n]                       streaming: the new tokens only
    sequence_length     int32    [1, beam]                          valid entries of each row of output_ids
    context_logits      float32  [1, prompt, vocab] or [1, 1, 1]
    generation_logits   float32  [1, beam, generated, vocab] or [1, 1, 1, 1]
    output_log_probs    float32  [1, beam, generated]               zeros unless asked for
    cum_log_probs       float32  [1, beam]                          zeros unless asked for
    finish_reason       int32    [1, beam]

In a streamed response *generated* is the number of its new tokens, everywhere but in cum_log_probs, which sums from
the start of the request. Context logits go with the first streamed response; later ones carry the dummy.

Nothing in a response is shared: not with our buffers, not with another response, not one tensor with another. A
callback may keep or change what it got.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .inference_request import NamedTensor

RESPONSE_TENSORS = ("output_ids", "sequence_length", "context_logits", "generation_logits", "output_log_probs",
                    "cum_log_probs", "finish_reason")


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a request wants to hear, and until when.

    is_streaming     a response for each new token
    exclude_input    output_ids of a response that is not streamed leaves the prompt out
    deadline_s       seconds from admission; None: no deadline
    """

    is_streaming: bool = False
    exclude_input: bool = False
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    deadline_s: float | None = None


def build_response(
    options: ResponseOptions,
    prompt: Sequence[int],
    generated: Sequence[int],
    finish_reason: int,
    *,
    log_probs: Sequence[float] | np.ndarray | None = None,
    cum_log_prob: float | None = None,
    context_logits: np.ndarray | None = None,
    generation_logits: np.ndarray | None = None,
    to_tensor: Callable[[np.ndarray], Any] | None = None,
) -> list[NamedTensor]:
    """The tensors of one response of a request of beam width 1.

    prompt              the user's prompt; not looked at when streaming
    generated           not streaming: all generated tokens; streaming: this response's new ones. May be empty
    finish_reason       FinishReason; NOT_FINISHED for a streamed response that is not the last
    log_probs           [n] one for each of `generated`; needed when options ask for them and n > 0
    cum_log_prob        since the start of the request; None: the sum of `log_probs`
    context_logits      [prompt, vocab], or None for the dummy
    generation_logits   [n, vocab] one row for each of `generated`, or None for the dummy
    to_tensor           makes the outgoing tensor of a fresh numpy array, such as torch.from_numpy; None: leave it

    What the options do not ask for is not sent, even if it is given.
    """
    raise NotImplementedError
