"""Lengths of prompts and outputs, drawn from a distribution. Units: tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

MOST_TOKENS = 2**31 - 1


class LengthDistribution(Protocol):
    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """So many whole numbers of at least 1."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths, clipped.

    fixed   every length; 0: drawn
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
    """Normal lengths, rounded up, at least 1."""

    mean: float
    deviation: float

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        return np.clip(np.ceil(random.normal(self.mean, self.deviation, count)), 1, MOST_TOKENS).astype(int)


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Every length from shortest to longest is as likely as the others."""

    shortest: int
    longest: int

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        return random.integers(self.shortest, self.longest, count, endpoint=True)
