"""What a retention must be."""

import pytest

from batch_manager.errors import InvalidRequestError
from batch_manager.requests.llm_request import Retention, RetentionRange

NAN = float("nan")


@pytest.mark.parametrize("ranges, more, message", [
    ([(0, 4, 101)], (), "priority is 101"),
    ([(0, 4, -1)], (), "priority is -1"),
    ([], (101,), "priority is 101"),
    ([(0, 4, 50, -1.0)], (), "duration is negative"),
    ([(0, 4, 50, NAN)], (), "duration is negative or no number"),
    ([], (35, -0.5), "duration is negative"),
    ([(0, 4, 50), (3, 8, 50)], (), "overlaps"),
    ([(0, None, 50), (8, 12, 50)], (), "overlaps"),
    ([(4, 4, 50)], (), "is empty"),
], ids=str)
def test_a_retention_that_means_nothing_is_refused(ranges, more, message):
    with pytest.raises(InvalidRequestError, match=message):
        Retention(tuple(RetentionRange(*one) for one in ranges), *more)


def test_ranges_may_come_in_any_order_and_the_last_may_be_open():
    retention = Retention((RetentionRange(8, None, 100, 0.0), RetentionRange(0, 8, 0)), decode_priority=100)
    assert retention.decode_duration_s is None
