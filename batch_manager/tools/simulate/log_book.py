"""Token times of the requests of a simulation."""

from collections import Counter

import numpy as np

US = 1e-6
FLUSHED_AT = 1 << 18    # gaps
LONGEST_IN_TABLE = 1 << 22    # microseconds; longer gaps are rare


class LogBook:
    """Token times in columns, with a row for each request. Times are seconds since the simulation began.

    The times between tokens are counted in whole microseconds, so that their memory does not grow with the simulation.

    first_s, last_s   time of the first and of the latest token; NaN: no token yet
    tokens            number of generated tokens
    replica           number of the replica that serves the request; -1: not assigned yet
    errors            index of a refused or failed request -> its error
    """

    def __init__(self, num_requests: int) -> None:
        self.first_s = np.full(num_requests, np.nan)
        self.last_s = np.full(num_requests, np.nan)
        self.tokens = np.zeros(num_requests, np.int64)
        self.replica = np.full(num_requests, -1, np.int32)
        self.errors: dict[int, str] = {}
        self._counts = np.zeros(1024, np.int64)         # by microseconds
        self._long: Counter[int] = Counter()
        self._gaps: list[np.ndarray] = []               # gaps in seconds that are not counted yet
        self._times: list[int] = []                     # how often each entry of _gaps occurred
        self._single: list[tuple[float, int]] = []      # (gap in seconds, how often it occurred)
        self._waiting = 0

    def note(self, indices: np.ndarray, now: float) -> None:
        """Record a token at `now` for each request of `indices`, which are unique."""
        before = self.last_s[indices]
        self.last_s[indices] = now
        self.tokens[indices] += 1
        is_first = np.isnan(before)
        self.first_s[indices[is_first]] = now
        for gap, count in Counter((now - before[~is_first]).tolist()).items():
            self.add_gap(gap, count)

    def end(self, index: int, tokens: int, last_s: float) -> None:
        """Record all tokens of a request at once, the last of them at `last_s`, instead of calling `note` for each."""
        self.tokens[index] = tokens
        self.last_s[index] = last_s

    def add_gap(self, gap_s: float, count: int) -> None:
        """Record that `count` requests got a token `gap_s` after their last one."""
        self._single.append((gap_s, count))
        self._waiting += 1
        if self._waiting >= FLUSHED_AT:
            self._flush()

    def add_gaps(self, gaps_s: np.ndarray, count: int) -> None:
        """Record that each of `count` requests got tokens with these times between them."""
        self._gaps.append(gaps_s)
        self._times.append(count)
        self._waiting += len(gaps_s)
        if self._waiting >= FLUSHED_AT:
            self._flush()

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (seconds [k], counts [k]): the times between successive tokens of the same request, for all requests.

        The time seconds[i], a whole number of microseconds, occurred counts[i] times. The times ascend.
        """
        self._flush()
        found = np.flatnonzero(self._counts)
        long = sorted(self._long)
        return (np.concatenate([found, np.array(long, np.int64)]) * US,
                np.concatenate([self._counts[found], np.array([self._long[gap] for gap in long], np.int64)]))

    def _flush(self) -> None:
        single = np.array(self._single).reshape(-1, 2)
        gaps = np.concatenate([*self._gaps, single[:, 0]])
        counts = np.concatenate([np.repeat(np.array(self._times, np.int64), list(map(len, self._gaps))),
                                 single[:, 1].astype(np.int64)])
        self._gaps, self._times, self._single, self._waiting = [], [], [], 0
        gaps = np.rint(gaps / US).astype(np.int64)
        is_long = gaps >= LONGEST_IN_TABLE
        for gap, count in zip(gaps[is_long].tolist(), counts[is_long].tolist(), strict=True):
            self._long[gap] += count
        gaps, counts = gaps[~is_long], counts[~is_long]
        longest = int(gaps.max(initial=0))
        if longest >= len(self._counts):
            self._counts = np.pad(self._counts, (0, max(2 * len(self._counts), longest + 1) - len(self._counts)))
        np.add.at(self._counts, gaps, counts)
