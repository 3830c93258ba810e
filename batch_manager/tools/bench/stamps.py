"""Token timestamps of all requests, in columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .client import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """Token timestamps of all requests. All arrays but gaps_s and gap_counts have one entry per request.

    Times are seconds since the start of the run, queue_s and gaps_s are durations in seconds; NaN: no value.

    arrival_s         time of the arrival
    first_s, last_s   times of the first and the last token
    final_s           time of the final response
    queue_s           duration from the arrival to the first step
    tokens            tokens generated
    wanted_tokens     tokens requested
    prompt_tokens     tokens of the prompt
    has_failed        the request ended with an error
    gaps_s, gap_counts   durations between consecutive tokens of requests that did not fail, and how often each entry
                      of gaps_s occurred
    """

    arrival_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    final_s: np.ndarray
    queue_s: np.ndarray
    tokens: np.ndarray
    wanted_tokens: np.ndarray
    prompt_tokens: np.ndarray
    has_failed: np.ndarray
    gaps_s: np.ndarray
    gap_counts: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def is_served(self) -> np.ndarray:
        """Return [n] bool: whether each request got a token and did not fail."""
        return (self.tokens > 0) & ~self.has_failed

    @property
    def mean_gaps_s(self) -> np.ndarray:
        """Return [n]: the mean seconds between the tokens of each request; NaN for fewer than two tokens."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.tokens > 1, (self.last_s - self.first_s) / (self.tokens - 1), np.nan)

    def without_gaps(self, chosen: np.ndarray) -> "Stamps":
        """Return the timestamps of the requests with these indices, without the durations between their tokens."""
        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        return Stamps(**{name: column[:0] if name in ("gaps_s", "gap_counts") else column[chosen]
                         for name, column in columns.items()})

    @classmethod
    def of_receipts(cls, requests: Sequence[Mapping[str, Any]], receipts: Mapping[int, Receipt]) -> "Stamps":
        """Return the timestamps of the receipts, in the order of the requests.

        requests   requests in the form of a workload
        receipts   request id -> Receipt
        """
        of = [receipts[request["id"]] for request in requests]
        gaps = np.concatenate([np.empty(0), *(np.diff(receipt.times) for receipt in of if not receipt.error)])
        return cls(
            arrival_s=np.array([receipt.arrival_s for receipt in of], float),
            first_s=_times([receipt.times[0] if receipt.times else None for receipt in of]),
            last_s=_times([receipt.times[-1] if receipt.times else None for receipt in of]),
            final_s=_times([receipt.final_s for receipt in of]),
            queue_s=_times([receipt.queue_s for receipt in of]),
            tokens=np.array([len(receipt.times) for receipt in of], np.int64),
            wanted_tokens=np.array([request["max_tokens"] for request in requests], np.int64),
            prompt_tokens=np.array([len(request["prompt"]) for request in requests], np.int64),
            has_failed=np.array([bool(receipt.error) for receipt in of], bool),
            gaps_s=gaps, gap_counts=np.ones(len(gaps), np.int64))


def _times(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], float)
