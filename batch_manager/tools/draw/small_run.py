"""The iterations of a small run, for pictures that have a cell for each request and iteration."""

from dataclasses import dataclass

from ...stats.trace import IterationTrace


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest numbers of iterations and requests of a run that one kind of picture shows.

    name   words for this kind of picture in messages, such as "an SVG"
    """

    name: str
    iterations: int
    requests: int

    def __str__(self) -> str:
        return f"at most {self.iterations:,} iterations and {self.requests:,} requests"


FOR_SVG = Bounds("an SVG", 2_000, 200)        # cells of larger runs are thinner than a pixel
FOR_TEXT = Bounds("text", 5_000, 500)         # larger runs need too much scrolling


class SmallRun:
    """Collects the iterations of a run, and refuses a run with more iterations or requests than `bounds` allows."""

    def __init__(self, bounds: Bounds) -> None:
        self.iterations: list[IterationTrace] = []
        self._bounds = bounds
        self._request_ids: set[int] = set()

    def append(self, iteration: IterationTrace) -> None:
        """Add an iteration. Raises ValueError if the run now has too many iterations or requests."""
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
