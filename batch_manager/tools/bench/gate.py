"""When requests that have arrived are handed to the manager, where that is not at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """Holds requests back: until a delay is over, and until a whole batch has arrived.

    delay_s     no request is handed over earlier than so many seconds after the start of the serving
    batch_size  requests are handed over in batches of this size, and a batch only when the one before is done; 0: they
                are not held back
    timeout_s   a batch that the oldest of its requests has waited for so long is handed over as it is
    """

    delay_s: float = 0.0
    batch_size: int = 0
    timeout_s: float = 0.0

    def allows(self, now: float, num_waiting: int, oldest_arrival: float, num_inside: int) -> int:
        """How many of the waiting requests may go.

        now, oldest_arrival   seconds from the start of the serving
        num_inside            requests that the manager has and has not answered
        """
        if now < self.delay_s:
            return 0
        if not self.batch_size:
            return num_waiting
        if num_inside or (num_waiting < self.batch_size and now - oldest_arrival < self.timeout_s):
            return 0
        return self.batch_size
