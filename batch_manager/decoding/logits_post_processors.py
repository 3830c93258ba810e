"""Logits post-processors are users' functions that change the logits of a step before all stages.

A function has one of two forms. Both run on the worker thread while a step is launched, once for each token to sample:
after the last chunk of a context and in each generation step. If a step fails and is run again, the function is called
again for the same token with the same arguments. Its result must therefore depend on its arguments only, and not on the
number of calls. The logits are float32 tensors on the engine's device. On a GPU, a function runs with the engine's
stream as the current stream.

    one request     (request_id: int, logits [1, beams, vocab], token_ids: list[list[int]]) -> logits
                    The function changes the tensor and returns it, or returns another tensor of the same shape, dtype
                    and device
    batched         (request_ids: list[int], logits [n, 1, beams, vocab], token_ids: list[list[list[int]]]) -> None
                    One call serves all requests of a step with this function and the same number of beams.
                    The function changes the tensor in place. logits[i] is the tensor [1, beams, vocab] of request i

token_ids has prompt and output, one list per beam. The function may keep the lists. For the first token after the
prompt there is one beam, even if the request has several.

A function with the method allowed_drafts(request_id, token_ids, drafts) -> int lets its requests be drafted. The method
gets prompt and output as one list, and returns how many of the drafts may be verified. The function is then called for
each place of the step, with the drafts before it in token_ids; a batched one gets such a request several times in a
call. If a function fails at a place after drafts, the text goes on from the place before. Without the method, requests
with the function get no drafts.

A request ends with an error if its function raises, returns another value, or leaves a row with NaN, +inf or no finite
logit. To send a message in the response, raise InvalidRequestError. If a batched function raises for several requests,
the step is bisected, and the function is called with fewer requests until the failing ones are found. If a batched
function returns another value, all requests of the call end with an error.

Source   TensorRT-LLM's LogitsPostProcessor and LogitsPostProcessorBatched, without their stream argument.
"""

from collections.abc import Iterable, Sequence
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
from .slots import Send, share

NO_TOKEN = ("the logits post-processor of this request left a NaN, a +inf, or no token to sample; each row needs at "
            "least one finite logit, and the others finite or -inf; correct the function")


@dataclass(frozen=True, slots=True)
class PostProcessed:
    """The rows that post-processors changed.

    rows            [k] index of each of these rows
    slots           [k] slot of each
    model_finite    [k] bool, on the device: whether the largest logit of each row was finite before the
                    post-processors ran; False for a row with a NaN
    failures        slot -> error of its post-processor
    """

    rows: np.ndarray
    slots: np.ndarray
    model_finite: torch.Tensor
    failures: dict[int, RowFailure]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows first..end - 1 of a step, which belong to one sequence with a post-processor, one row for each beam.

    drafts   the tokens before the row that are drafts
    """

    slot: int
    first: int
    end: int
    processor: LogitsPostProcessor
    drafts: Sequence[int] = ()

    def token_ids(self) -> list[list[int]]:
        """Return prompt and output of each row.

        When the first token after the prompt is sampled, a sequence with several beams still has only one row.
        """
        token_ids = self.processor.token_ids()[: self.end - self.first]
        if self.drafts:
            token_ids[0] = [*token_ids[0], *self.drafts]
        return token_ids


class LogitsPostProcessors:
    """The post-processors of the sequences in the slots.

    send   function that uploads arrays in one copy. It does not wait for the copy
    """

    def __init__(self, send: Send = share) -> None:
        self._send = send
        # Weak references: the host drops the function with its request, and a free slot must not keep it alive.
        self._of_slot: WeakValueDictionary[int, LogitsPostProcessor] = WeakValueDictionary()
        self._in_post_processor = Guard().raising("logits post-processor")

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        """Store the post-processor of the sequence in a slot, if it has one."""
        if setup.logits_post_processor is not None:
            self._of_slot[slot] = setup.logits_post_processor
        elif self._of_slot:
            self._of_slot.pop(slot, None)

    def __len__(self) -> int:
        return len(self._of_slot)

    def apply(self, logits: torch.Tensor, slots: np.ndarray,
              drafts: tuple[np.ndarray, np.ndarray] | None = None) -> PostProcessed | None:
        """Run the post-processors on `logits` [r, vocab] float32, in place. Row i belongs to slots[i].

        drafts   ([n] number of drafts of each sequence, in the order of the rows, [their sum] tokens); None: no drafts

        Returns the changed rows; None if no row has a post-processor. Raises ForeignCodeError if a batched
        function raised in a call for several requests.
        """
        parts = list(self._rows(slots.tolist()) if drafts is None else self._rows_with_drafts(slots, *drafts))
        if not parts:
            return None
        rows = np.concatenate([np.arange(part.first, part.end) for part in parts])
        model_finite = self._picked(logits, rows)[0].amax(1).isfinite()
        failures: dict[int, RowFailure] = {}
        batches: dict[tuple[Any, int], list[_Rows]] = {}
        for part in parts:
            if part.processor.is_batched:
                batches.setdefault((part.processor.function, part.end - part.first), []).append(part)
            elif (failure := self._run_one(part, logits)) is not None:
                self._fail(part, failure, logits, failures)
        for batch in batches.values():
            self._run_batched(batch, logits, failures)
        return PostProcessed(rows, slots[rows], model_finite, failures)

    def _rows(self, slots: list[int]) -> Iterable[_Rows]:
        first = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[first]:
                processor = self._of_slot.get(slots[first])
                if processor is not None:
                    yield _Rows(slots[first], first, end, processor)
                first = end

    def _rows_with_drafts(self, slots: np.ndarray, counts: np.ndarray, drafts: np.ndarray) -> Iterable[_Rows]:
        starts, before = np.cumsum(1 + counts) - (1 + counts), np.cumsum(counts) - counts
        for first, count, start in zip(starts.tolist(), counts.tolist(), before.tolist()):
            slot = int(slots[first])
            if (processor := self._of_slot.get(slot)) is not None:
                tokens = drafts[start : start + count].tolist()
                for place in range(1 + count):
                    yield _Rows(slot, first + place, first + place + 1, processor, tokens[:place])

    @staticmethod
    def _fail(rows: _Rows, failure: RowFailure, logits: torch.Tensor, failures: dict[int, RowFailure]) -> None:
        """Note the failure of a request. After drafts, which may be to blame, it makes the row one that is rejected."""
        if rows.drafts:
            logits[rows.first : rows.end].fill_(torch.nan)
        else:
            failures[rows.slot] = failure

    def _run_one(self, rows: _Rows, logits: torch.Tensor) -> RowFailure | None:
        target = logits[None, rows.first : rows.end]
        given = target.detach()    # shares memory; the function may change its shape without affecting `target`
        try:
            with self._in_post_processor:
                result = rows.processor.function(rows.processor.request_id, given, rows.token_ids())
        except ForeignCodeError as failure:
            return _raised(failure.error)
        if result is given and (given.shape, given.data_ptr()) == (target.shape, target.data_ptr()):
            return None
        if not isinstance(result, torch.Tensor):
            return _failure(f"returned {_type_name(result)}", "it must return the logits")
        expected = tuple(target.shape), target.dtype, target.device, target.layout
        if (tuple(result.shape), result.dtype, result.device, result.layout) != expected:
            return _failure(f"returned a tensor of shape {_shape(result)}, {result.dtype}, on {result.device}",
                            f"it must be {_shape(target)}, {target.dtype}, on {target.device}, dense")
        target.copy_(result)
        return None

    def _run_batched(self, batch: list[_Rows], logits: torch.Tensor, failures: dict[int, RowFailure]) -> None:
        """Run a batched function in one call for all rows of `batch`.

        If it raises for the rows of a single request, it is called for one at a time.
        """
        width = batch[0].end - batch[0].first
        rows = np.concatenate([np.arange(rows.first, rows.end) for rows in batch])
        picked, device_rows = self._picked(logits, rows)
        if len(batch) > 1 and batch[-1].drafts and device_rows is None:    # the rows of a call that raises stay
            picked, device_rows = logits.clone(), slice(None)
        given = picked.view(len(batch), 1, width, logits.shape[1])
        try:
            with self._in_post_processor:
                result = batch[0].processor.function([rows.processor.request_id for rows in batch], given,
                                                     [rows.token_ids() for rows in batch])
        except ForeignCodeError as failure:
            if batch[0].slot != batch[-1].slot:
                raise                                              # the loop bisects the step
            for rows in batch:
                if len(batch) == 1:
                    self._fail(rows, _raised(failure.error), logits, failures)
                else:
                    self._run_batched([rows], logits, failures)
            return
        if result is not None and result is not given:
            failure = _failure(f"returned {_type_name(result)}",
                               "a batched post-processor must change the logits in place and return None")
            for rows in batch:
                self._fail(rows, failure, logits, failures)
            return
        if device_rows is not None:
            logits[device_rows] = picked

    def _picked(self, logits: torch.Tensor, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (copy of the given rows of `logits`, indices of these rows as a tensor on the device).

        If `rows` are all rows of `logits`, returns (logits, None).
        """
        if len(rows) == len(logits):
            return logits, None
        (device_rows,) = self._send([rows])
        return logits[device_rows], device_rows


def _raised(error: BaseException) -> RowFailure:
    """Return the failure of a request whose post-processor raised `error`.

    The message of a RequestError becomes part of the response. Other messages are left out, because they may quote
    tokens.
    """
    if is_a(error, RequestError):
        with suppress(BaseException):                              # a user's subclass may raise in __str__
            return RowFailure(ErrorCode(error.code), f"from the logits post-processor of this request: {error}")
    log.error("a logits post-processor raised %s\n%s", type_name(error), where_raised(error))
    return _failure(f"raised {type_name(error)}", "see the log of the engine")


def _failure(what: str, expectation: str) -> RowFailure:
    return RowFailure(ErrorCode.MODEL_ERROR, f"the logits post-processor of this request {what}; {expectation}")


def _type_name(value: object) -> str:
    return "None" if value is None else f"a value of type {type_name(value)}"


def _shape(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"
