import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.runtime.forms.fixed.shapes import (
    LARGE_ROWS,
    MIXED_ROWS,
    MIXED_TOKENS,
    MOST_OPERATIONS,
    MOST_ROWS,
    SMALL_ROWS,
    Shape,
    graph_rows,
    mixed_sizes,
    padded,
    padded_mixed,
)


@given(st.integers(1, 2 * MOST_ROWS), st.integers(1, 2 * MOST_ROWS))
def test_every_generation_step_gets_the_smallest_shape_that_holds_it_or_none(most_rows, num_rows):
    rows = graph_rows(most_rows)
    assert list(rows) == sorted(set(rows)) and rows[: len(SMALL_ROWS)] == SMALL_ROWS[: len(rows)]
    assert (rows[-1] >= most_rows) == (most_rows <= MOST_ROWS)
    assert len(rows) == 1 or rows[-2] < most_rows                 # no shape is superfluous
    found = padded(num_rows, rows)
    if found is None:
        assert num_rows > rows[-1]
        return
    assert found in rows and found >= num_rows and not any(num_rows <= other < found for other in rows)
    padding = found - num_rows
    assert padding < num_rows or found == 1
    if num_rows > 4:
        assert padding < (8 if found <= LARGE_ROWS else 32)


def test_without_shapes_no_step_has_one():
    assert padded(1, ()) is None and padded_mixed(1, 1, frozenset()) is None


@given(st.integers(1, 300), st.integers(1, 3000), st.integers(10**6, 10**11), st.integers(0, 300),
       st.integers(1, 3000))
def test_every_step_with_contexts_gets_the_smallest_shape_that_holds_it_or_none(most_rows, most_tokens, num_weights,
                                                                                num_rows, num_tokens):
    sizes = mixed_sizes(most_rows, most_tokens, num_weights)
    assert all(2 * num_weights * (rows + tokens) <= MOST_OPERATIONS for rows, tokens in sizes)
    found, holding = padded_mixed(num_rows, num_tokens, sizes), [
        size for size in sizes if size[0] >= num_rows and size[1] >= num_tokens]
    assert found == min(holding, key=sum, default=None)
    fits = num_rows <= min(most_rows, MIXED_ROWS[-1]) and num_tokens <= min(most_tokens, MIXED_TOKENS[-1])
    if found is None and fits:                      # the padded step would take too long to compute
        rows, tokens = padded(num_rows, MIXED_ROWS), padded(num_tokens, MIXED_TOKENS)
        assert 2 * num_weights * (rows + tokens) > MOST_OPERATIONS
    if found is not None:
        assert found[1] < 2 * num_tokens or found[1] == MIXED_TOKENS[0]


@pytest.mark.parametrize("num_weights, number, largest", [
    (134_500_000, 30, (256, 2048)), (1_240_000_000, 14, (256, 128)), (8_000_000_000, 1, (8, 64)), (10**11, 0, None)])
def test_the_larger_a_model_the_fewer_steps_with_contexts_have_graphs(num_weights, number, largest):
    sizes = mixed_sizes(256, 8192, num_weights)
    assert len(sizes) == number and max(sizes, default=None) == largest


def test_a_shape_counts_its_tokens_and_sampled_tokens():
    assert (Shape(4, False, True).num_tokens, Shape(4, False, True).num_sampled) == (4, 4)
    shape = Shape(4, False, True, context_tokens=64, contexts=32)
    assert (shape.num_tokens, shape.num_sampled) == (68, 36)
