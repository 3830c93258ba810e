"""Users' functions on the logits of a step: the first thing that is done to what the model computed.

Either form runs on the worker thread while the step is launched, once for every token that is drawn: after the last
chunk of a context and in every generation step. It may be called again for the same token, with the same tokens before
it, when a step failed and is run again; so what it does must follow from its arguments, not from how often it was
called. Logits are float32 tensors on the engine's device; on a GPU the current stream is the engine's.

    one request     (request_id: int, logits [1, beams, vocab], token_ids: list[list[int]]) -> logits
                    changes the tensor and returns it, or returns another one like it
    batched         (request_ids: list[int], logits [n, 1, beams, vocab], token_ids: list[list[list[int]]]) -> None
                    one call for all requests of a step that asked for it; changes the tensor in place. Indexed or
                    iterated over, the tensor is a list of the requests' [1, beams, vocab]

token_ids holds, per beam, the prompt and what was generated so far; the lists are the function's to keep. After the
prompt there is one beam, however many a request asked for.

A function that raises, returns something else, or leaves NaN, +inf or no token at all in a row ends its own request.
One with a message for the receiver of the response raises InvalidRequestError with it.
A batched one that raises for several requests is called again for fewer of them, with the step, until it is known whom
it cannot do.

Source   TensorRT-LLM's LogitsPostProcessor and LogitsPostProcessorBatched, without their stream argument.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..contained_log import log
from ..errors import RequestError, is_a, type_name, where_raised
from ..guard import ForeignCodeError, Guard
from ..handover import LogitsPostProcessor, RowFailure, SlotSetup
from ..names import ErrorCode

NO_TOKEN = ("after its logits post-processor a logit is NaN or +inf, or no token is left that may be drawn; each row "
            "needs a finite logit; correct the function")


@dataclass(frozen=True, slots=True)
class PostProcessed:
    """What became of the rows that have a post-processor.

    slots           [k] of these rows
    model_finite    [k] bool, on the device: whether the model's logits were finite, before the functions changed them
    failures        slot -> what its function did wrong
    """

    slots: np.ndarray
    model_finite: torch.Tensor
    failures: dict[int, RowFailure]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows first..end - 1 of a step, one for each beam of a request."""

    slot: int
    first: int
    end: int
    processor: LogitsPostProcessor

    def token_ids(self) -> list[list[int]]:
        """After a context there is one row still, whatever the beams."""
        return self.processor.token_ids()[: self.end - self.first]


class LogitsPostProcessors:
    """The functions of the sequences that have one, by slot."""

    def __init__(self) -> None:
        # The host drops a request's function with the request; a slot without a new owner must not keep it.
        self._of_slot: WeakValueDictionary[int, LogitsPostProcessor] = WeakValueDictionary()
        self._in_post_processor = Guard().raising("logits post-processor")

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """A sequence takes the slot."""
        if setup.logits_post_processor is not None:
            self._of_slot[slot] = setup.logits_post_processor
        elif self._of_slot:
            self._of_slot.pop(slot, None)

    def __len__(self) -> int:
        return len(self._of_slot)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> PostProcessed | None:
        """Change `logits` [r, vocab] float32 in place; row i belongs to slots[i]. None when no row has a function.

        Raises ForeignCodeError when a batched function that was called for several requests raised.
        """
        wanted = list(self._rows(slots.tolist()))
        if not wanted:
            return None
        rows = np.concatenate([np.arange(of.first, of.end) for of in wanted])
        model_finite = _picked(logits, rows).amax(1).isfinite()
        failures: dict[int, RowFailure] = {}
        batches: dict[tuple[Any, int], list[_Rows]] = {}
        for of in wanted:
            if of.processor.is_batched:
                batches.setdefault((of.processor.function, of.end - of.first), []).append(of)
            elif (wrong := self._run_one(of, logits)) is not None:
                failures[of.slot] = wrong
        for batch in batches.values():
            failures |= self._run_batched(batch, logits)
        return PostProcessed(slots[rows], model_finite, failures)

    def _rows(self, slots: list[int]) -> Iterable[_Rows]:
        first = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[first]:
                processor = self._of_slot.get(slots[first])
                if processor is not None:
                    yield _Rows(slots[first], first, end, processor)
                first = end

    def _run_one(self, of: _Rows, logits: torch.Tensor) -> RowFailure | None:
        place = logits[None, of.first : of.end]
        given = place.detach()    # the same numbers; what becomes of its shape is for the function to answer for
        try:
            with self._in_post_processor:
                result = of.processor.function(of.processor.request_id, given, of.token_ids())
        except ForeignCodeError as failure:
            return _raised(failure.error)
        if result is given and (given.shape, given.data_ptr()) == (place.shape, place.data_ptr()):
            return None
        if not isinstance(result, torch.Tensor):
            return _wrong(f"returned {_type_name(result)}", "it must return the logits")
        expected = tuple(place.shape), place.dtype, place.device, place.layout
        if (tuple(result.shape), result.dtype, result.device, result.layout) != expected:
            return _wrong(f"returned a tensor of shape {_shape(result)}, {result.dtype}, on {result.device}",
                          f"it must be {_shape(place)}, {place.dtype}, on {place.device}, dense")
        place.copy_(result)
        return None

    def _run_batched(self, batch: list[_Rows], logits: torch.Tensor) -> dict[int, RowFailure]:
        """Failures by slot."""
        width = batch[0].end - batch[0].first
        rows = np.concatenate([np.arange(of.first, of.end) for of in batch])
        picked = _picked(logits, rows)
        given = picked.view(len(batch), 1, width, logits.shape[1])
        try:
            with self._in_post_processor:
                result = batch[0].processor.function([of.processor.request_id for of in batch], given,
                                                     [of.token_ids() for of in batch])
        except ForeignCodeError as failure:
            if len(batch) > 1:
                raise                                              # the loop runs the step again in halves
            return {batch[0].slot: _raised(failure.error)}
        if result is not None and result is not given:
            wrong = _wrong(f"returned {_type_name(result)}",
                           "the batched form changes the logits in place and returns None")
            return {of.slot: wrong for of in batch}
        if picked is not logits:
            logits[torch.from_numpy(rows).to(logits.device)] = picked
        return {}


def _picked(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """These rows: `logits` itself where they are all of it, else a copy."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]


def _raised(error: BaseException) -> RowFailure:
    """The words of a RequestError are made for the response; those of others may quote tokens and go nowhere."""
    if is_a(error, RequestError):
        with suppress(BaseException):                              # it may be of a class of the user's
            return RowFailure(ErrorCode(error.code), f"from the logits post-processor of this request: {error}")
    log.error("a logits post-processor raised %s\n%s", type_name(error), where_raised(error))
    return _wrong(f"raised {type_name(error)}", "the others go on; see the log of the engine")


def _wrong(what: str, expectation: str) -> RowFailure:
    return RowFailure(ErrorCode.MODEL_ERROR, f"the logits post-processor of this request {what}; {expectation}; "
                                             "correct the function")


def _type_name(value: object) -> str:
    return "None" if value is None else f"a {type_name(value)}"


def _shape(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"
