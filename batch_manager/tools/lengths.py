"""Random lengths of prompts and outputs, in tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

MOST_TOKENS = 2**31 - 1


class LengthDistribution(Protocol):
    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Return `count` random lengths, which are integers of at least 1."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths, clipped to [shortest, longest].

    fixed   length of all prompts or outputs, without randomness; 0: random lengths
    """

    median: float
    sigma: float
    shortest: int
    longest: int
    fixed: int = 0

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        if self.fixed:
            return np.full(count, self.fixed)
        lengths = np.exp(random.normal(np.log(self.median), self.sigma, count))
        return np.clip(np.rint(lengths), self.shortest, self.longest).astype(int)


@dataclass(frozen=True, slots=True)
class NormalLengths:
    """Normally distributed lengths, rounded up, at least 1."""

    mean: float
    deviation: float

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        return np.clip(np.ceil(random.normal(self.mean, self.deviation, count)), 1, MOST_TOKENS).astype(int)


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniformly distributed lengths from shortest to longest, both included."""

    shortest: int
    longest: int

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        return random.integers(self.shortest, self.longest, count, endpoint=True)
