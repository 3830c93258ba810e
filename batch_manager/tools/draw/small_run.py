"""The iterations of a run, as long as it is small enough for a picture that shows each cell."""

from dataclasses import dataclass

from ...stats.trace import IterationTrace


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one kind of picture can show."""

    name: str
    iterations: int
    requests: int

    def __str__(self) -> str:
        return f"at most {self.iterations:,} iterations and {self.requests:,} requests"


FOR_SVG = Bounds("an SVG", 2_000, 200)        # beyond them a cell is thinner than a pixel
FOR_TEXT = Bounds("text", 5_000, 500)         # beyond them it is longer than a reader scrolls


class SmallRun:
    """An append-only list with bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self.iterations: list[IterationTrace] = []
        self._bounds = bounds
        self._request_ids: set[int] = set()

    def append(self, iteration: IterationTrace) -> None:
        """Raises ValueError where the run is larger than its bounds."""
        self.iterations.append(iteration)
        ids = self._request_ids
        ids.update(iteration.arrived, iteration.generation, iteration.paused, iteration.finished,
                   (chunk[0] for chunk in iteration.context))
        bounds = self._bounds
        if len(self.iterations) > bounds.iterations:
            self._refuse(f"{bounds.iterations:,} iterations")
        elif len(ids) > bounds.requests:
            self._refuse(f"{bounds.requests:,} requests")

    def _refuse(self, most: str) -> None:
        raise ValueError(f"the run has more than {most}; expected {self._bounds} for {self._bounds.name}; use --html "
                         "FILE, which draws runs of any size")
