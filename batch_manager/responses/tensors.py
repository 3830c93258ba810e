"""Builds the tensors of a response, a list of `NamedTensor`:

    output_ids          int32    [1, beam, n]                       streaming: the new tokens only
    sequence_length     int32    [1, beam]                          valid entries of each row of output_ids
    context_logits      float32  [1, prompt, vocab]                 zeros of shape [1, 1, 1] unless requested
    generation_logits   float32  [1, beam, generated, vocab]        zeros of shape [1, 1, 1, 1] unless requested
    output_log_probs    float32  [1, beam, generated]               zeros unless requested
    cum_log_probs       float32  [1, beam]                          zeros unless requested
    finish_reason       int32    [1, beam]

Requests with `return_top_log_probs` = k also get:

    top_log_prob_ids    int32    [1, 1, generated, k]               likeliest first, lower ids first among equals
    top_log_probs       float32  [1, 1, generated, k]               -inf, and id 0, if fewer than k are possible

The final response of a context_only request ends with context_phase_params, uint8 [n], for the generation_only request.

Logits are the model's unchanged logits. Row i of context_logits has the logits of the token after token i of the
prompt. Row i of generation_logits has the logits of generated token i, before penalties, temperature and all other
changes. Log-probabilities are taken after these changes and before top-k and top-p (triton_kernels/sample_token.py), or
from the unchanged logits with `raw_log_probs`.

For requests with beams, the temperature applies before biases, penalties and bans, which change the log-probabilities.
The exponentials then need not sum to one over the vocabulary (decoding/stages.py). Beams come best first, ranked by
cum_log_probs after len_penalty. With beams, cum_log_probs includes the end id, which is in no other tensor. A beam
without a possible output has finish_reason 0, no tokens and cum_log_probs -inf.

In a streamed response, *generated* is the number of its new tokens. The tensors output_ids (without the prompt),
output_log_probs, top_log_prob_ids, top_log_probs and, if requested, generation_logits can be concatenated over all
streamed responses. The result is the same tensor of a response that is not streamed. cum_log_probs always sums from
the start of the request. The first streamed response has the context logits. In later streamed responses,
context_logits are zeros of shape [1, 1, 1]. They are also zeros of this shape if a request ends before its prompt
is computed.

The tensors share no memory with the engine's buffers, with other responses or with each other. A callback may keep or
change them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy import empty, zeros

from ..handover import TopLogProbs
from ..names import FinishReason
from ..requests.response_options import ResponseOptions
from .named_tensor import INT32, NamedTensor, PreparedTensor, UniformArray, prepared, prepared_token

FLOAT32 = np.dtype(np.float32)

# The values of most responses.
ZERO, NO_GENERATION_LOGITS = UniformArray((1, 1, 1), FLOAT32), UniformArray((1, 1, 1, 1), FLOAT32)
ONE, ZERO_ROW = UniformArray((1, 1), INT32, 1), UniformArray((1, 1), FLOAT32)
FINISH_REASONS = {int(reason): UniformArray((1, 1), INT32, int(reason)) for reason in FinishReason}

TOP_TENSORS = ("top_log_prob_ids", "top_log_probs")
RESPONSE_TENSORS = ("output_ids", "sequence_length", "context_logits", "generation_logits", "output_log_probs",
                    "cum_log_probs", "finish_reason")


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """The output of one beam.

    generated           [n] tokens, without the end id
    finish_reason       FinishReason
    cum_log_prob        sum of the log-probabilities of the whole output, including an end id
    log_probs           [n]; None if the request did not ask for them
    generation_logits   [n, vocab]; None if the request did not ask for them, or n = 0
    """

    generated: Sequence[int]
    finish_reason: int
    cum_log_prob: float
    log_probs: Sequence[float] | np.ndarray | None = None
    generation_logits: np.ndarray | None = None


def build_response(
    options: ResponseOptions,
    prompt: Sequence[int],
    generated: Sequence[int],
    finish_reason: int,
    *,
    log_probs: Sequence[float] | np.ndarray | None = None,
    cum_log_prob: float | None = None,
    context_logits: np.ndarray | Sequence[np.ndarray] | None = None,
    generation_logits: np.ndarray | Sequence[np.ndarray] | None = None,
    top_log_probs: Sequence[TopLogProbs] = (),
    to_tensor: Callable[[np.ndarray], Any] | None = None,
) -> list[NamedTensor]:
    """Build the tensors of a response of a request with beam width 1.

    prompt              the user's prompt; ignored when streaming
    generated           all generated tokens; when streaming, the new tokens of this response. May be empty
    finish_reason       FinishReason; NOT_FINISHED for a streamed response that is not final
    log_probs           [n] log-probabilities of the tokens in `generated`; required if the options ask for them and
                        n > 0
    cum_log_prob        sum of log-probabilities since the start of the request; None: the sum of `log_probs`
    context_logits      [prompt, vocab], or its chunks in order; None: the response has zeros of shape [1, 1, 1]
    generation_logits   [n, vocab] or n rows, of the tokens in `generated`; None: the response has zeros of shape
                        [1, 1, 1, 1]
    top_log_probs       likeliest tokens at each position of `generated`. Each element covers the next one or more
                        positions
    to_tensor           function that converts a new NumPy array to a tensor, such as torch.from_numpy; None: keep the
                        array

    Values that the options do not ask for are ignored. All values are copied.
    """
    num_new = len(generated)
    length = num_new if options.is_streaming or options.exclude_input else len(prompt) + num_new
    output_ids = empty((1, 1, length), INT32)
    if length == 1 == num_new:    # a streamed token; much faster than assigning from a list
        output_ids.fill(generated[0])
    elif length:
        output_ids[0, 0, :length - num_new] = prompt if length > num_new else ()
        output_ids[0, 0, length - num_new:] = generated
    sequence_length = ONE if length == 1 else UniformArray((1, 1), INT32, length)

    log_prob_row: np.ndarray | UniformArray = ZERO if num_new == 1 else UniformArray((1, 1, num_new), FLOAT32)
    cum_log_probs = ZERO_ROW
    if options.return_log_probs:
        if num_new:
            assert log_probs is not None and len(log_probs) == num_new
            log_prob_row = np.array(log_probs, FLOAT32)[None, None]
        cum_log_probs = UniformArray((1, 1), FLOAT32, _sum(log_probs) if cum_log_prob is None else cum_log_prob)

    context = generation = None
    if options.return_context_logits and context_logits is not None:
        if isinstance(context_logits, np.ndarray):
            context = np.array(context_logits[None], FLOAT32)
        else:
            context = np.concatenate(context_logits, dtype=FLOAT32)[None]
    if options.return_generation_logits and generation_logits is not None:
        assert len(generation_logits) == num_new
        generation = np.array(generation_logits, FLOAT32)[None, None]

    tensors = [
        NamedTensor("output_ids", output_ids, to_tensor),
        NamedTensor("sequence_length", sequence_length, to_tensor),
        NamedTensor("context_logits", ZERO if context is None else context, to_tensor),
        NamedTensor("generation_logits", NO_GENERATION_LOGITS if generation is None else generation, to_tensor),
        NamedTensor("output_log_probs", log_prob_row, to_tensor),
        NamedTensor("cum_log_probs", cum_log_probs, to_tensor),
        NamedTensor("finish_reason", FINISH_REASONS[finish_reason], to_tensor),
    ]
    if options.top_log_probs:
        none = empty((0, options.top_log_probs))
        columns = ([none, *(top.ids for top in top_log_probs)], INT32), (
            [none, *(top.log_probs for top in top_log_probs)], FLOAT32)
        tensors += [NamedTensor(name, np.concatenate(pieces, dtype=dtype, casting="unsafe")[None, None], to_tensor)
                    for name, (pieces, dtype) in zip(TOP_TENSORS, columns, strict=True)]
        assert tensors[-1].array.shape[2] == num_new
    return tensors


@lru_cache(maxsize=8)
def streamed_token_classes(to_tensor: Callable[[np.ndarray], Any] | None) -> tuple[type[PreparedTensor], ...]:
    """Return the classes of the tensors of a response that streams one token and no other values, and is not final.

    Make an instance of each, without arguments, and set the attribute `token` of the first. The instances equal the
    result of `build_response`, which takes nine times as long. Most responses of a server stream one token and no other
    values.

    to_tensor   as in `build_response`
    """
    return prepared_token(RESPONSE_TENSORS[0], to_tensor), *(
        prepared(name, value, to_tensor) for name, value in zip(RESPONSE_TENSORS[1:], (
            ONE, ZERO, NO_GENERATION_LOGITS, ZERO, ZERO_ROW, FINISH_REASONS[FinishReason.NOT_FINISHED]), strict=True))


def build_beam_response(
    options: ResponseOptions,
    prompt: Sequence[int],
    outputs: Sequence[BeamOutput],
    *,
    vocab_size: int,
    context_logits: np.ndarray | None = None,
    to_tensor: Callable[[np.ndarray], Any] | None = None,
) -> list[NamedTensor]:
    """Build the tensors of the response of a request with beams.

    prompt              the user's prompt
    outputs             [beam], best first
    vocab_size          columns of generation_logits
    context_logits      [prompt, vocab]; None: the response has zeros of shape [1, 1, 1]
    to_tensor           as in `build_response`

    The rows of a tensor are as long as the row of the longest output. Shorter outputs are padded with pad_id in
    output_ids, and with zeros in the other tensors. Values that the options do not ask for are ignored. All values are
    copied.
    """
    num_beams, longest = len(outputs), max(len(output.generated) for output in outputs)
    start = 0 if options.exclude_input else len(prompt)
    output_ids = np.full((1, num_beams, start + longest), options.pad_id, INT32)
    output_ids[0, :, :start] = prompt if start else ()
    output_log_probs, cum_log_probs = zeros((1, num_beams, longest), FLOAT32), zeros((1, num_beams), FLOAT32)
    for beam, output in enumerate(outputs):
        count = len(output.generated)
        output_ids[0, beam, start:start + count] = output.generated
        if options.return_log_probs:
            cum_log_probs[0, beam] = output.cum_log_prob
            if count:
                output_log_probs[0, beam, :count] = output.log_probs

    context, generation = zeros((1, 1, 1), FLOAT32), zeros((1, 1, 1, 1), FLOAT32)
    if options.return_context_logits and context_logits is not None:
        context = np.array(context_logits[None], FLOAT32)
    if options.return_generation_logits:
        generation = zeros((1, num_beams, longest, vocab_size), FLOAT32)
        for beam, output in enumerate(outputs):
            if output.generation_logits is not None:
                generation[0, beam, :len(output.generated)] = output.generation_logits

    lengths = np.array([[start + len(output.generated) for output in outputs]], INT32)
    finish = np.array([[output.finish_reason for output in outputs]], INT32)
    return [NamedTensor(name, array, to_tensor) for name, array in zip(RESPONSE_TENSORS, (
        output_ids, lengths, context, generation, output_log_probs, cum_log_probs, finish), strict=True)]


def _sum(log_probs: Sequence[float] | np.ndarray | None) -> float:
    return 0.0 if log_probs is None else float(np.sum(log_probs, dtype=np.float64))
