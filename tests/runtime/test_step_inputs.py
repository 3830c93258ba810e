import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.runtime.device import ALIGNMENT, Uploads
from batch_manager.runtime.step_inputs import StepInputs, StepShape

CPU, MOST_ROWS, WINDOWS = torch.device("cpu"), 24, (None, 100)


def make():
    tables = torch.zeros((5, 7), dtype=torch.int32)
    return StepInputs(MOST_ROWS, WINDOWS, lambda rows: 3 * rows + 1, tables, Uploads(CPU))


@given(st.lists(st.builds(StepShape, st.integers(1, MOST_ROWS), st.booleans(), st.booleans()), min_size=1, max_size=5),
       st.integers(0, 2**32))
def test_what_is_written_arrives_at_addresses_that_the_shape_gives(shapes, seed):
    inputs, draw, known = make(), np.random.default_rng(seed), {}
    for shape in shapes:
        written = {}
        for name, array in inputs.arrays(shape).items():
            array[...] = written[name] = draw.integers(-2**31, 2**31, array.shape)
        inputs.send(shape)
        for array in inputs.arrays(shape).values():       # what is written next does not change what was sent
            array[...] = 0
        given = inputs.tensors(shape)
        attention = given.attention
        there = {"slots": given.slots, "positions": given.positions, "table_entries": given.table_entries,
                 "table_blocks": given.table_blocks,
                 "kv_lengths": attention.kv_lengths, "table_rows": attention.table_rows}
        for index, window in enumerate(WINDOWS):
            there |= dict(zip((f"work_{index}", f"starts_{index}"), attention.work[window]))
        assert there.keys() == written.keys()
        for name, tensor in there.items():
            assert np.array_equal(tensor.numpy(), written[name]), name
            assert (tensor.data_ptr() - inputs._there.data_ptr()) % ALIGNMENT == 0
        assert given.results.shape == (4, shape.rows) and given.results.is_contiguous()
        assert attention.work[None][0].shape == (3 * shape.rows + 1 if shape.is_split else shape.rows, 4)
        addresses = [tensor.data_ptr() for tensor in (*there.values(), given.results)]
        assert known.setdefault(shape, addresses) == addresses


def test_a_shape_beyond_the_largest_is_refused():
    with pytest.raises(AssertionError, match="larger than the largest shape"):
        make().arrays(StepShape(MOST_ROWS + 1, True, True))
