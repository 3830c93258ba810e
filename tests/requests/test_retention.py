"""Valid retention configurations are accepted and copied at admission, and invalid ones are refused."""

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheRetentionConfig, TokenRangeRetentionConfig
from batch_manager.errors import InvalidRequestError
from batch_manager.kv.retention import priorities_of_blocks

NAN = float("nan")


def a_name(value):
    """Return a test id for a value. The id is the same in every process."""
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize("ranges, more, message", [
    ([(0, 4, 101)], (), "priority is 101; it must be an integer in 0..100"),
    ([(0, 4, -1)], (), "priority is -1"),
    ([(0, 4, 50.0)], (), "priority is 50.0"),
    ([(0, 4, True)], (), "priority is True"),
    ([(0, 4, None)], (), "priority is no number"),
    ([(-1, 4, 50)], (), "token_start is -1"),
    ([(None, 4, 50)], (), "token_start is no number"),
    ([(0, 2**31, 50)], (), "token_end is 2147483648"),
    ([(0, "4", 50)], (), "token_end is no number"),
    ([], (101,), "decode_retention_priority is 101"),
    ([(0, 4, 50, -1)], (), "duration_ms is -1"),
    ([(0, 4, 50, 0.5)], (), "duration_ms is 0.5; it must be an integer"),
    ([(0, 4, 50, NAN)], (), "duration_ms is nan"),
    ([(0, 4, 50, 10**400)], (), "duration_ms is "),
    ([], (35, -1), "decode_duration_ms is -1"),
    ([(0, 4, 50), (3, 8, 50)], (), "from token 3 overlaps"),
    ([(0, None, 50), (8, 12, 50)], (), "from token 8 overlaps"),
    ([(4, 4, 50)], (), "4..4 is empty"),
    ([(place, place + 1, 50) for place in range(1025)], (), "more than 1,024"),
], ids=lambda value: str(value)[:40])
def test_a_retention_that_means_nothing_is_refused(ranges, more, message):
    with pytest.raises(InvalidRequestError, match=message):
        KvCacheRetentionConfig([TokenRangeRetentionConfig(*one) for one in ranges], *more)


@pytest.mark.parametrize("ranges", [{}, "ranges", 3, None, iter(()), [(0, 4, 50)], [None]], ids=a_name)
def test_ranges_are_a_list_of_ranges(ranges):
    with pytest.raises(InvalidRequestError, match="token_range_retention_configs"):
        KvCacheRetentionConfig(ranges)


def test_ranges_may_come_in_any_order_and_the_last_may_be_open():
    ranges = [TokenRangeRetentionConfig(9, None, np.int64(100), 0), TokenRangeRetentionConfig(0, 8, 0)]
    retention = KvCacheRetentionConfig(ranges, decode_retention_priority=np.uint8(100))
    assert retention.decode_duration_ms is None and type(retention.decode_retention_priority) is int
    assert [part.token_start for part in retention.token_range_retention_configs] == [0, 9]
    assert priorities_of_blocks(retention, 4, 20) == [0, 0, None, 100, 100]
    assert KvCacheRetentionConfig().decode_retention_priority == 35


def test_admission_copies_what_is_right(admit):
    given = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, 2, 80, 5),), 60, 7)
    taken = admit(flags={"kv_cache_retention_config": given}).request.retention
    assert taken == given and taken is not given
    assert taken.token_range_retention_configs[0] is not given.token_range_retention_configs[0]
    assert admit().request.retention is None


class Sly(KvCacheRetentionConfig):
    pass


def changed(config, **fields):
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


class Endless:
    def __iter__(self):
        while True:
            yield TokenRangeRetentionConfig(0, 1, 50)


@pytest.mark.parametrize("given, message", [
    ({"decode_retention_priority": 5}, "kv_cache_retention_config is of type dict"), (50, "is of type int"),
    (Sly(), "is of type Sly"),
    (changed(KvCacheRetentionConfig(), decode_retention_priority=500), "decode_retention_priority is 500"),
    (changed(KvCacheRetentionConfig(), decode_duration_ms=object()), "decode_duration_ms is "),
    (changed(KvCacheRetentionConfig(), token_range_retention_configs=Endless()), "is of type Endless"),
    (KvCacheRetentionConfig([changed(TokenRangeRetentionConfig(0, 4, 50), token_end=-7)]), "token_end is -7"),
    (KvCacheRetentionConfig([changed(TokenRangeRetentionConfig(0, 4, 50), priority=True)]), "priority is True"),
], ids=a_name)
def test_admission_refuses_what_is_wrong_whoever_made_it(refusal, given, message):
    text = refusal(InferenceRequest(7, {"input_ids": [1], "request_output_len": 1}, kv_cache_retention_config=given))
    assert message in text and text.startswith("[INVALID_REQUEST] request 7: ") and text.count("; ") in (1, 2)
