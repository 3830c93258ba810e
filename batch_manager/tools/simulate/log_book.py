"""Token times of the requests of a simulation."""

import numpy as np

FIRST_SIZE = 1 << 12


class LogBook:
    """Token times in columns, with a row for each request. Times are seconds since the simulation began.

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
        self._gaps = np.empty(FIRST_SIZE)
        self._counts = np.empty(FIRST_SIZE, np.int64)
        self._used = 0

    def note(self, indices: np.ndarray, now: float) -> None:
        """Record a token at `now` for each request of `indices`, which are unique."""
        before = self.last_s[indices]
        gaps = now - before
        self.last_s[indices] = now
        self.tokens[indices] += 1
        count = len(gaps)
        # Usual case: all requests were in the previous step, so their gaps are equal.
        if count and (gaps == gaps[-1]).all():
            self._add(gaps[-1:], np.array([count]))
            return
        is_first = np.isnan(before)
        if is_first.any():
            self.first_s[indices[is_first]] = now
            gaps = gaps[~is_first]
        self._add(*np.unique(gaps, return_counts=True))

    def note_run(self, indices: np.ndarray, times: np.ndarray) -> None:
        """Record k tokens for each request of `indices`: one at each of `times` [k], which ascend.

        Each request must have a recorded token already.
        """
        self.note(indices, float(times[0]))
        self.tokens[indices] += len(times) - 1
        self.last_s[indices] = times[-1]
        self._add(np.diff(times), np.full(len(times) - 1, len(indices)))

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (seconds [k], counts [k]): the times between successive tokens of the same request, for all requests.

        The time seconds[i] occurred counts[i] times. If several entries have the same time, the sum of their counts is
        the number of its occurrences.
        """
        return self._gaps[:self._used], self._counts[:self._used]

    def _add(self, gaps: np.ndarray, counts: np.ndarray) -> None:
        end = self._used + len(gaps)
        if end > len(self._gaps):
            size = max(2 * len(self._gaps), end)
            self._gaps, self._counts = np.resize(self._gaps, size), np.resize(self._counts, size)
        self._gaps[self._used:end] = gaps
        self._counts[self._used:end] = counts
        self._used = end
