"""Delay arrived requests for a fixed time, or until a whole batch has arrived."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """Holds requests back until the delay has passed and, with batches, a whole batch has arrived.

    delay_s     seconds from the start of the run to the first request
    batch_size  requests per batch. No batch starts before the previous batch is done. 0: no batches
    at_most     requests in the manager at a time; 0: any number
    timeout_s   an incomplete batch may start once its oldest request has waited this many seconds
    """

    delay_s: float = 0.0
    batch_size: int = 0
    timeout_s: float = 0.0
    at_most: int = 0

    def allows(self, now: float, num_waiting: int, oldest_arrival: float, num_inside: int) -> int:
        """Return the largest number of requests that may start now. The number may exceed `num_waiting`.

        now              current time, in seconds since the start of the run
        oldest_arrival   arrival of the oldest waiting request, likewise
        num_inside       requests in the manager without a final response
        """
        if now < self.delay_s:
            return 0
        if self.at_most:
            num_waiting = min(num_waiting, max(self.at_most - num_inside, 0))
        if not self.batch_size:
            return num_waiting
        if num_inside or (num_waiting < self.batch_size and now - oldest_arrival < self.timeout_s):
            return 0
        return self.batch_size
