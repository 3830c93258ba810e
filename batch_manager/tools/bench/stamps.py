"""When the tokens of requests came, in columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .client import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """A row for each request; times in seconds from the start of the serving, NaN where there is none.

    arrival_s         when it arrived
    first_s, last_s   when its first and its last token came
    final_s           when its final response came
    queue_s           from its arrival to its first step
    tokens            that came
    wanted_tokens     that it asked for
    prompt_tokens     of its prompt
    has_failed        whether it was answered with an error
    gaps_s, gap_counts   times between two tokens that follow each other, of the requests that have not failed, and how
                      often there was each
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
        """[n] bool: the request got a token and has not failed."""
        return (self.tokens > 0) & ~self.has_failed

    @property
    def mean_gaps_s(self) -> np.ndarray:
        """[n] The mean time between the tokens of each request; NaN: it has fewer than two."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.tokens > 1, (self.last_s - self.first_s) / (self.tokens - 1), np.nan)

    @classmethod
    def of_receipts(cls, requests: Sequence[Mapping[str, Any]], receipts: Mapping[int, Receipt]) -> "Stamps":
        """requests: as a workload has them"""
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
