"""Timings of a request and its use of the KV cache: the tensors after the seven of a final response."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from .named_tensor import NamedTensor, UniformArray

INT64 = np.dtype(np.int64)
NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """The metrics in the final response of a request with `return_perf_metrics`; each field is a tensor int64 [1].

    Times are nanoseconds of the engine's clock, which is `time.monotonic` unless Parts has another one. 0 stands for a
    moment that never came.

    arrival_time_ns             `arrival_time` of the request; without one, its admission
    first_scheduled_time_ns     its first chunk was put into a step
    first_token_time_ns         the step with its first token was read
    last_token_time_ns          the last step that sampled a token for it was read; an end id is one
    kv_cache_alloc_new_blocks   blocks that were taken from the pool for it, those after a pause included
    kv_cache_reused_blocks      blocks found in the cache instead, likewise
    cached_tokens               tokens of its prompt that were cached when it started for the first time
    num_pauses                  how often it was paused
    recomputed_tokens           computed tokens that these pauses discarded
    """

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    kv_cache_alloc_new_blocks: int = 0
    kv_cache_reused_blocks: int = 0
    cached_tokens: int = 0
    num_pauses: int = 0
    recomputed_tokens: int = 0

    @classmethod
    def of(cls, tensors: Iterable[NamedTensor]) -> Self | None:
        """The metrics in a response; None where it has none."""
        found = {tensor.name: int(tensor.array[0]) for tensor in tensors if tensor.name in PERF_TENSORS}
        return cls(**found) if found else None

    def tensors(self, to_tensor: Callable[[np.ndarray], Any] | None = None) -> list[NamedTensor]:
        """One tensor for each field, in order. to_tensor: as in `build_response`"""
        return [NamedTensor(name, UniformArray((1,), INT64, getattr(self, name)), to_tensor) for name in PERF_TENSORS]

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first step; None: it was in none."""
        return self._seconds(self.first_scheduled_time_ns)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None: there was none."""
        return self._seconds(self.first_token_time_ns)

    @property
    def end_to_end_s(self) -> float | None:
        """Seconds from arrival to the last token; None: there was none."""
        return self._seconds(self.last_token_time_ns)

    def time_per_output_token_s(self, num_tokens: int) -> float | None:
        """Mean seconds between two tokens. None: there are fewer than two.

        num_tokens   generated, without the prompt
        """
        if num_tokens < 2 or not self.first_token_time_ns:
            return None
        return (self.last_token_time_ns - self.first_token_time_ns) / NANOSECONDS / (num_tokens - 1)

    def _seconds(self, moment: int) -> float | None:
        return (moment - self.arrival_time_ns) / NANOSECONDS if moment else None


PERF_TENSORS = tuple(field.name for field in fields(PerfMetrics))
