"""Times of a request and its use of the KV cache, as additional tensors of its final response."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from .named_tensor import NamedTensor, UniformArray

INT64 = np.dtype(np.int64)
NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class PerfMetrics:
    """The metrics in the final response of a request with `return_perf_metrics`. Each field is a tensor int64 [1].

    Times are nanoseconds of the engine's clock: `time.monotonic`, unless Parts has another clock. 0 means that the
    event did not happen.

    arrival_time_ns             `arrival_time` of the request; without it, the time of admission
    first_scheduled_time_ns     time at which the first chunk of the request was put into a step
    first_token_time_ns         time at which the loop read the first token of the request; an end id counts as a token
    last_token_time_ns          time at which the loop read the last token of the request; an end id counts as a token
    kv_cache_alloc_new_blocks   blocks taken from the pool, including those taken after pauses
    kv_cache_reused_blocks      blocks found in the cache, including those found after pauses
    cached_tokens               prompt tokens that were cached at the first start of the request
    num_pauses                  number of pauses
    recomputed_tokens           tokens computed again after the pauses, without those in reused blocks
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
        """Read the metrics from the tensors of a response. Returns None for a response without metrics."""
        found = {tensor.name: int(tensor.array[0]) for tensor in tensors if tensor.name in PERF_TENSORS}
        return cls(**found) if found else None

    def tensors(self, to_tensor: Callable[[np.ndarray], Any] | None = None) -> list[NamedTensor]:
        """Return one tensor for each field, in order.

        to_tensor   function that converts a NumPy array to a tensor; None: keep the array
        """
        return [NamedTensor(name, UniformArray((1,), INT64, getattr(self, name)), to_tensor) for name in PERF_TENSORS]

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first step; None if the request was in no step."""
        return self._seconds(self.first_scheduled_time_ns)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token or end id; None if no step sampled any for the request."""
        return self._seconds(self.first_token_time_ns)

    @property
    def end_to_end_s(self) -> float | None:
        """Seconds from arrival to the last token or end id; None if neither was sampled for the request."""
        return self._seconds(self.last_token_time_ns)

    def time_per_output_token_s(self, num_tokens: int) -> float | None:
        """Mean seconds between two successive tokens; None if there are fewer than two tokens.

        num_tokens   number of generated tokens
        """
        if num_tokens < 2 or not self.first_token_time_ns:
            return None
        return (self.last_token_time_ns - self.first_token_time_ns) / NANOSECONDS / (num_tokens - 1)

    def _seconds(self, moment: int) -> float | None:
        return (moment - self.arrival_time_ns) / NANOSECONDS if moment else None


PERF_TENSORS = tuple(field.name for field in fields(PerfMetrics))
