import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.runtime.device.running import ALIGNMENT, Uploads
from batch_manager.runtime.forms.fixed.inputs import StepInputs
from batch_manager.runtime.forms.fixed.shapes import StepShape
from batch_manager.triton_kernels.context_work_list import MostContextTileWork

CPU, MOST_ROWS, MOST_TOKENS, MOST_CONTEXTS = torch.device("cpu"), 24, 40, 5
LARGEST = [StepShape(MOST_ROWS, True, True), StepShape(MOST_ROWS, True, True, MOST_TOKENS, MOST_CONTEXTS)]
SHAPES = st.one_of(
    st.tuples(st.integers(1, MOST_ROWS), st.booleans(), st.booleans()),
    st.tuples(st.integers(1, MOST_ROWS), st.booleans(), st.just(True), st.integers(1, MOST_TOKENS),
              st.integers(1, MOST_CONTEXTS))).map(lambda numbers: StepShape(*numbers))


class Attention:
    windows = (None, 100)

    def most_parts(self, num_rows, max_blocks):
        return 3 * num_rows + max_blocks

    def most_context_work(self, num_tokens, num_contexts, max_blocks, may_split):
        split = num_tokens // 20 if may_split else 0
        return MostContextTileWork(num_tokens + num_contexts + max_blocks, split)


def make(largest=LARGEST):
    return StepInputs(largest, Attention(), torch.zeros((5, 7), dtype=torch.int32), 16, Uploads(CPU))


def arrays_of(step):
    """Return {name of an array on the host: the device tensor that receives the array when it is uploaded}."""
    attention, contexts = step.generation, step.contexts
    there = {"slots": step.slots, "positions": step.positions, "table_entries": step.table_entries,
             "table_blocks": step.table_blocks, "kv_lengths": step.sampled_positions}
    rows = len(attention.kv_lengths)
    assert attention.kv_lengths.tolist() == step.sampled_positions[:rows].tolist()
    if contexts is None:
        there["table_rows"] = attention.table_rows
        assert len(step.input_tokens) == 0 and step.logits_rows is None
    else:
        there |= {"table_rows": torch.cat([attention.table_rows, contexts.table_rows]),
                  "input_tokens": step.input_tokens, "pool_slots": contexts.pool_slots, "logits_rows": step.logits_rows,
                  "query_starts": contexts.query_starts}
        assert contexts.positions.tolist() == step.positions[rows:].tolist()
        assert contexts.kv_lengths.tolist() == step.sampled_positions[rows:].tolist()
    for index, window in enumerate(Attention.windows):
        work, starts = attention.work[window]
        there |= {f"work_{index}": work} | ({} if starts is None else {f"starts_{index}": starts})
        if contexts is not None:
            work, starts, merged_rows = contexts.work[window]
            there |= {f"context_work_{index}": work}
            there |= {} if starts is None else {f"context_starts_{index}": starts, f"merged_rows_{index}": merged_rows}
    return there


@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(0, 2**32))
def test_what_is_written_arrives_at_addresses_that_the_shape_gives(shapes, seed):
    inputs, draw, known = make(), np.random.default_rng(seed), {}
    for shape in shapes:
        written = {}
        for name, array in inputs.arrays(shape).items():
            array[...] = written[name] = draw.integers(-2**31, 2**31, array.shape)
        inputs.send(shape)
        for array in inputs.arrays(shape).values():       # later writes must not change the sent arrays
            array[...] = 0
        given, rows = inputs.tensors(shape), shape.rows
        there = arrays_of(given)
        unused = set() if shape.is_split else {"starts_0", "starts_1"}
        if shape.context_tokens and (shape.context_tokens < 20 or not shape.is_split):
            unused |= {f"{name}_{index}" for name in ("context_starts", "merged_rows") for index in (0, 1)}
        assert written.keys() - there.keys() == unused
        for name, tensor in there.items():
            assert np.array_equal(tensor.numpy(), written[name]), name
        for tensor in (given.slots, given.positions, given.sampled_positions, given.table_entries, given.table_blocks,
                       *([given.input_tokens, given.logits_rows] if given.contexts else []),
                       *(given.contexts.work[None][:1] if given.contexts else [])):
            assert (tensor.data_ptr() - inputs._buffer.data_ptr()) % ALIGNMENT == 0
        assert given.results.shape == (4, shape.num_sampled) and given.results.is_contiguous()
        assert given.context_sums.shape == (shape.context_tokens,)
        assert given.read_back.data_ptr() == given.results.data_ptr()
        assert len(given.read_back) == given.results.numel() + len(given.context_sums)
        if shape.contexts:
            assert given.context_sums.data_ptr() == given.results.data_ptr() + given.results.nbytes
        assert given.generation.work[None][0].shape == (3 * rows + 7 if shape.is_split else rows, 4)
        addresses = [tensor.data_ptr() for tensor in (*there.values(), given.results) if tensor.data_ptr()]
        if shape.contexts:                                # arrays_of concatenates these tensors, so use the originals
            addresses = [given.generation.table_rows.data_ptr(), given.contexts.table_rows.data_ptr(),
                         given.contexts.positions.data_ptr(), given.input_tokens.data_ptr()]
        assert known.setdefault(shape, addresses) == addresses


@pytest.mark.parametrize("largest, shape", [
    (LARGEST[:1], StepShape(MOST_ROWS + 1, True, True)),
    (LARGEST, StepShape(MOST_ROWS, True, True, MOST_TOKENS + 1, MOST_CONTEXTS))])
def test_a_shape_beyond_the_largest_is_refused(largest, shape):
    with pytest.raises(AssertionError, match="larger than the largest shape"):
        make(largest).arrays(shape)
