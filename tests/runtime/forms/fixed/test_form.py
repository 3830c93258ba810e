"""The result of a step at fixed addresses: the right StepOutput of the numbers that the step wrote.

test_recorded_steps.py tests how a step computes these numbers.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from batch_manager.handover import ContextWork, GenerationWork, ScheduledBatch
from batch_manager.names import ErrorCode
from batch_manager.runtime.forms.fixed.form import FixedResult
from batch_manager.runtime.forms.fixed.shapes import Shape

SHAPE = Shape(4, True, True, context_tokens=16, contexts=5)


def finished(batch, shape, results, sums=(), asking=None):
    """Return the StepOutput of a step that wrote these results and sums.

    results   [4, sampled rows] int32: tokens, finish, finite flags, bits of the log-probs
    sums      sum of the hidden state of each context token; one that is not finite fails its sequence
    asking    slots that request log-probs; None: no slot does
    """
    memory = np.concatenate([np.asarray(results, np.int32).ravel(), np.asarray(sums, np.float32).view(np.int32)])
    asks = None if asking is None else np.isin(batch.yielding, asking)
    return FixedResult(batch, shape, asks, SimpleNamespace(wait=lambda: {"results": memory})).finish()


def results_of(num_sampled):
    """Return the argument `results` of `finished` with tokens 100, 101, ..., and log-probs 0.5, 1.5, ...

    Every third row has finish 1, the others 0. All rows are finite.
    """
    rows = np.arange(num_sampled, dtype=np.int32)
    return np.stack([100 + rows, rows % 3 == 0, np.ones(num_sampled, np.int32),
                     (rows + np.float32(0.5)).astype(np.float32).view(np.int32)])


def context(slot, num_tokens, is_last_chunk):
    return ContextWork(slot, np.zeros(num_tokens, np.int32), 0, is_last_chunk)


def generation(*slots):
    return GenerationWork(np.array(slots, np.int32), np.ones(len(slots), np.int32))


def test_contexts_whose_last_chunk_it_is_come_first_then_the_rows_that_generate():
    batch = ScheduledBatch(0, context=(context(7, 3, True), context(2, 4, False), context(5, 1, True)),
                           generation=generation(6, 1), micro_batch_id=3)
    output = finished(batch, SHAPE, results_of(9), np.zeros(16), asking=(5, 6))
    assert output.micro_batch_id == 3 and output.failures == {}
    assert output.slots.tolist() == [7, 5, 6, 1] and output.tokens.tolist() == [104, 106, 100, 101]
    assert output.finish.tolist() == [0, 1, 1, 0] and output.log_probs.tolist() == [0, 6.5, 0.5, 0]


@pytest.mark.parametrize("token, failed", [(0, 7), (2, 7), (3, 2), (6, 2), (7, 5), (8, None), (15, None)])
def test_a_context_token_that_is_not_finite_fails_its_sequence_alone(token, failed):
    batch = ScheduledBatch(0, context=(context(7, 3, True), context(2, 4, False), context(5, 1, True)))
    sums = np.zeros(16, np.float32)
    sums[token] = np.nan
    output = finished(batch, SHAPE, results_of(9), sums)
    assert output.slots.tolist() == [7, 5] and output.log_probs is None
    assert list(output.failures) == [failed] * (failed is not None)
    assert all(failure.code is ErrorCode.NON_FINITE_LOGITS for failure in output.failures.values())


def test_logits_that_are_not_finite_fail_a_row_and_those_of_padding_nobody():
    results = results_of(9)
    results[2, [1, 3, 4, 5, 8]] = 0                   # row 3, context 4: padding; context 1 samples nothing
    batch = ScheduledBatch(0, context=(context(7, 3, True), context(2, 4, False)), generation=generation(6, 1))
    assert set(finished(batch, SHAPE, results, np.zeros(16)).failures) == {7, 1}
    output = finished(ScheduledBatch(0, generation=generation(6, 1)), Shape(4, False, False), results[:, :4])
    assert output.slots.tolist() == [6, 1] and output.tokens.tolist() == [100, 101] and set(output.failures) == {1}
