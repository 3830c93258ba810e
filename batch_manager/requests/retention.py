"""TensorRT-LLM's configuration for keeping the KV cache blocks of a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ..errors import InvalidRequestError, type_name
from ..sampling_config import INT32_MAX, Range

DEFAULT_RETENTION_PRIORITY = 35
MAX_TOKEN_RANGES = 1024

_PRIORITY = Range(0, 100, whole=True)
_POSITION = Range(0, INT32_MAX, whole=True)
_MILLISECONDS = Range(0, 2**53, whole=True)


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """How long to keep the KV cache blocks of a part of the prompt. A block belongs to the range that contains its
    first token.

    token_start   first token, 0 or more
    token_end     end of the range, exclusive; None: the end of the prompt
    priority      0..100; blocks of lower priority are evicted first. Blocks without a stated priority have 35
    duration_ms   whole milliseconds from the release of a block until its priority returns to 35; None: the priority
                  never changes

    Raises InvalidRequestError for a value of another type or out of range, and for an empty range.
    """

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        _check(self, "token_start", _POSITION)
        _check(self, "token_end", _POSITION, optional=True)
        _check(self, "priority", _PRIORITY)
        _check(self, "duration_ms", _MILLISECONDS, optional=True)
        if self.token_end is not None and self.token_end <= self.token_start:
            raise InvalidRequestError(f"the retention range {self.token_start}..{self.token_end} is empty",
                                      "token_end must be above token_start", "leave the range out")


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """How long to keep a request's KV cache blocks. The configuration affects the order of eviction only, and has no
    effect without KvCacheConfig.enable_block_reuse.

    token_range_retention_configs   at most 1,024 ranges of the prompt, which must not overlap. Prompt blocks outside
                                    the ranges get priority 35, but reused ones keep their priority
    decode_retention_priority       priority of blocks whose first token is generated, 0..100
    decode_duration_ms              duration of decode_retention_priority, as in TokenRangeRetentionConfig.duration_ms

    Raises InvalidRequestError for a value of another type or out of range, and for overlapping ranges.
    """

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_RETENTION_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        _check(self, "decode_retention_priority", _PRIORITY)
        _check(self, "decode_duration_ms", _MILLISECONDS, optional=True)
        ranges = self.token_range_retention_configs
        if type(ranges) not in (list, tuple):
            raise InvalidRequestError(f"token_range_retention_configs is of type {type_name(ranges)}",
                                      "it must be a list or a tuple", "pass a list of TokenRangeRetentionConfig")
        ranges = tuple(islice(ranges, MAX_TOKEN_RANGES + 1))
        if len(ranges) > MAX_TOKEN_RANGES:
            raise InvalidRequestError(f"there are more than {MAX_TOKEN_RANGES:,} token_range_retention_configs",
                                      f"the limit is {MAX_TOKEN_RANGES:,}", "join adjacent ranges of equal priority")
        for part in ranges:
            if type(part) is not TokenRangeRetentionConfig:
                raise InvalidRequestError(f"token_range_retention_configs holds an object of type {type_name(part)}",
                                          "it must hold TokenRangeRetentionConfig objects (objects of subclasses are "
                                          "refused)")
        ranges = tuple(sorted(ranges, key=lambda part: part.token_start))
        for part, following in zip(ranges, ranges[1:], strict=False):
            if part.token_end is None or following.token_start < part.token_end:
                raise InvalidRequestError(
                    f"the retention range from token {following.token_start} overlaps the one before it",
                    "ranges must not overlap, and only the last may have no token_end", "shorten one of the two")
        object.__setattr__(self, "token_range_retention_configs", ranges)


def copied_retention(given: object) -> KvCacheRetentionConfig | None:
    """Return a checked copy of a request's retention configuration. Raises InvalidRequestError if it is not valid."""
    if given is None:
        return None
    if type(given) is not KvCacheRetentionConfig:
        raise InvalidRequestError(f"kv_cache_retention_config is of type {type_name(given)}",
                                  "it must be a batch_manager.KvCacheRetentionConfig or None (objects of subclasses "
                                  "are refused)")
    ranges = given.token_range_retention_configs
    if type(ranges) is tuple:
        ranges = tuple(TokenRangeRetentionConfig(part.token_start, part.token_end, part.priority, part.duration_ms)
                       if type(part) is TokenRangeRetentionConfig else part
                       for part in ranges[:MAX_TOKEN_RANGES + 1])
    return KvCacheRetentionConfig(ranges, given.decode_retention_priority, given.decode_duration_ms)


def _check(config: Any, name: str, allowed: Range, optional: bool = False) -> None:
    value = getattr(config, name)
    if optional and value is None:
        return
    if isinstance(value, np.integer):
        value = np.integer.item(value)
        object.__setattr__(config, name, value)
    allowed.check(name, value)
