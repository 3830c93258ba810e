"""What every iteration did to whom: for pictures, simulations and bug reports. Ids and counts, no tokens."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class IterationTrace:
    """One iteration.

    context      (request id, first position, tokens) of each chunk
    generation   request ids
    paused, finished   request ids
    """

    iteration: int
    context: tuple[tuple[int, int, int], ...]
    generation: tuple[int, ...]
    paused: tuple[int, ...]
    finished: tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """An append-only list of iterations; give its `append` to `Parts(trace=...)`."""

    iterations: list[IterationTrace] = field(default_factory=list)

    def append(self, iteration: IterationTrace) -> None:
        self.iterations.append(iteration)
