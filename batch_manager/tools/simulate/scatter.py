"""Random factors by which step times scatter around their predictions."""

import numpy as np

from .cost_model import CostModel

AT_A_TIME = 1 << 11


class Scatter:
    """Random factors of the step times of one engine: simulated time / predicted time.

    The factor of a step depends on the seed, the number of the step, and whether the step has a context. Calls must be
    in ascending order of steps.
    """

    def __init__(self, cost: CostModel, seed: tuple[int, ...]) -> None:
        self._spreads = {True: np.array(cost.mixed_spread or (1.0,)),
                         False: np.array(cost.generation_spread or (1.0,))}
        self._random = np.random.default_rng(seed)
        self._draws = np.empty(0)
        self._factors: dict[bool, np.ndarray] = {}    # for the draws; made when one of them is needed
        self._first = 0                               # step of the first of the draws

    def factor(self, step: int, *, has_context: bool) -> float:
        return float(self.factors(step, 1, has_context=has_context)[0])

    def factors(self, step: int, count: int, *, has_context: bool) -> np.ndarray:
        """Return the factors [count] of the times of steps `step` .. `step + count - 1`."""
        if step + count > self._first + len(self._draws):
            self._draw(step, count)
        found = self._factors.get(has_context)
        if found is None:
            found = self._factors[has_context] = _at(self._spreads[has_context], self._draws)
        return found[step - self._first:step - self._first + count]

    def _draw(self, step: int, count: int) -> None:
        while step + count > self._first + len(self._draws):
            kept = max(step - self._first, 0)       # steps come in ascending order
            self._draws = np.concatenate([self._draws[kept:], self._random.random(AT_A_TIME)])
            self._first += kept
        self._factors.clear()


def _at(spread: np.ndarray, draws: np.ndarray) -> np.ndarray:
    places = draws * (len(spread) - 1)
    below = places.astype(np.int64)
    above = np.minimum(below + 1, len(spread) - 1)
    return spread[below] + (spread[above] - spread[below]) * (places - below)
