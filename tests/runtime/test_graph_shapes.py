from hypothesis import given
from hypothesis import strategies as st

from batch_manager.runtime.graph_shapes import LARGE_ROWS, MOST_ROWS, SMALL_ROWS, graph_rows, padded_rows


@given(st.integers(1, 2 * MOST_ROWS), st.integers(1, 2 * MOST_ROWS))
def test_every_step_gets_the_smallest_shape_that_holds_it_or_none(most_rows, num_rows):
    rows = graph_rows(most_rows)
    assert list(rows) == sorted(set(rows)) and rows[: len(SMALL_ROWS)] == SMALL_ROWS[: len(rows)]
    assert (rows[-1] >= most_rows) == (most_rows <= MOST_ROWS)
    assert len(rows) == 1 or rows[-2] < most_rows                 # none that no step needs
    found = padded_rows(num_rows, rows)
    if found is None:
        assert num_rows > rows[-1]
        return
    assert found in rows and found >= num_rows and not any(num_rows <= other < found for other in rows)
    padding = found - num_rows
    assert padding < num_rows or found == 1
    if num_rows > 4:
        assert padding < (8 if found <= LARGE_ROWS else 32)


def test_without_shapes_no_step_has_one():
    assert padded_rows(1, ()) is None
