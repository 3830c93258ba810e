"""Random factors by which step times scatter around their predictions."""

import numpy as np

from .cost_model import CostModel

AT_A_TIME = 1 << 14


class Scatter:
    """Random factors of the step times of one engine: simulated time / predicted time.

    The factor of a step depends on the seed, the number of the step, and whether the step has a context. Calls must be
    in ascending order of steps.
    """

    def __init__(self, cost: CostModel, seed: tuple[int, ...]) -> None:
        self._generation = np.array(cost.generation_spread or (1.0,))
        self._mixed = np.array(cost.mixed_spread or (1.0,))
        self._random = np.random.default_rng(seed)
        self._draws = np.empty(0)
        self._first = 0             # step of the first random number in `_draws`

    def factor(self, step: int, *, has_context: bool) -> float:
        spread = self._mixed if has_context else self._generation
        return float(_at(spread, self._draws_for(step, 1))[0])

    def generation_factors(self, step: int, count: int) -> np.ndarray:
        """Return the factors [count] of the times of steps `step` .. `step + count - 1`, all without contexts."""
        return _at(self._generation, self._draws_for(step, count))

    def _draws_for(self, step: int, count: int) -> np.ndarray:
        while step + count > self._first + len(self._draws):
            kept = max(step - self._first, 0)       # steps come in ascending order
            self._draws = np.concatenate([self._draws[kept:], self._random.random(AT_A_TIME)])
            self._first += kept
        return self._draws[step - self._first:step - self._first + count]


def _at(spread: np.ndarray, draws: np.ndarray) -> np.ndarray:
    places = draws * (len(spread) - 1)
    below = places.astype(np.int64)
    above = np.minimum(below + 1, len(spread) - 1)
    return spread[below] + (spread[above] - spread[below]) * (places - below)
