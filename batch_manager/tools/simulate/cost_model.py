"""The time of a step and of the host, as a function of the step's shape; and the file that holds it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..bench.errors import InputError
from ..output_file import output_file
from .step_shape import StepShape

FORMAT, FORMAT_VERSION = "batch-manager cost model", 1
MOST_SECONDS = 1e6          # per unit; more is damage, and sums of it could overflow
CONSTANT = "constant"
AMOUNTS = tuple(f.name for f in fields(StepShape))
KNOTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# min(sequences that generate, knot), and what they are more than it: any curve of lines that rises is a sum of these.
UP_TO = {f"generation_requests_up_to_{knot}": knot for knot in KNOTS}
BEYOND = {f"generation_requests_beyond_{knot}": knot for knot in KNOTS}
# cached_tokens less shared_tokens: what attention reads from memory, where it computes cached_tokens.
DISTINCT = "distinct_tokens"
GENERATION_TERMS = (CONSTANT, "generation_requests", "cached_tokens", DISTINCT, *UP_TO, *BEYOND)
MIXED_TERMS = (CONSTANT, *(name for name in AMOUNTS if name != "shared_tokens"), DISTINCT, *UP_TO, *BEYOND)
HOST_TERMS = (CONSTANT, "context_requests", "generation_requests")


@dataclass(frozen=True, slots=True)
class StepError:
    """How far predictions were from steps that the fit did not see.

    steps          such steps
    median, p90    of |predicted - measured| / measured
    total          (predicted - measured) / measured, of the time of all of them together
    """

    steps: int
    median: float
    p90: float
    total: float

    def words(self) -> str:
        return (f"{self.steps:,} steps that the fit did not see: off by {self.median:.1%} in the median, "
                f"{self.p90:.1%} at p90, their sum by {self.total:+.1%}")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step and of the host's part of an iteration.

    generation_s    term -> seconds a unit, of steps without a context; the terms are GENERATION_TERMS
    mixed_s         likewise, of steps with one; the terms are MIXED_TERMS
    host_s          likewise, of the host's part of an iteration; the terms are HOST_TERMS
    most            amount -> the largest one that was fitted
    generation_spread, mixed_spread   quantiles, from the smallest to the largest at equal distances, of what a step
                    took over what is predicted; their mean is 1. Empty: every step takes what is predicted
    is_asynchronous   the host plans a step while the device computes the one before it
    error           of the fit; None: it is not known
    about           where it comes from: machine, versions, traces, ...
    """

    generation_s: Mapping[str, float]
    mixed_s: Mapping[str, float]
    host_s: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    is_asynchronous: bool = False
    error: StepError | None = None
    generation_spread: tuple[float, ...] = ()
    mixed_spread: tuple[float, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def step_seconds(self, shape: StepShape) -> float:
        """Of the device, or of the CPU that computes the step."""
        return _linear(self.mixed_s if shape.context_requests else self.generation_s, shape)

    def generation_step_seconds(self, shape: StepShape, cached_tokens: np.ndarray) -> np.ndarray:
        """Of steps of this shape but for its cached tokens, one for each entry of cached_tokens [n]."""
        each = self.generation_s.get("cached_tokens", 0.0) + self.generation_s.get(DISTINCT, 0.0)
        return _linear(self.generation_s, shape) + each * cached_tokens

    def host_seconds(self, shape: StepShape) -> float:
        """Of everything else in the iteration that launches the step."""
        return _linear(self.host_s, shape)

    def beyond(self, shape: StepShape) -> tuple[str, ...]:
        """The amounts that are larger than any that was fitted."""
        return tuple(name for name, most in self.most.items() if getattr(shape, name) > most)

    def write(self, path: Path) -> None:
        """Whole, or not at all. Raises OSError."""
        with output_file(path) as file:
            json.dump(self.record(), file, indent=1)

    def record(self) -> dict[str, Any]:
        """As it stands in a file."""
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises InputError for a file that cannot be read, is no cost model, or has another version."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}; expected a cost model; batch-manager simulate --fit "
                             "writes one") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise InputError(f"{path} is no cost model; expected the format {FORMAT!r}; batch-manager simulate --fit "
                             "writes one")
        if record.get("format_version") != FORMAT_VERSION:
            raise InputError(f"{path} has format_version {record.get('format_version')!r}; this program reads "
                             f"{FORMAT_VERSION}; fit it again")
        try:
            return cls(_step_seconds("generation_s", record), _step_seconds("mixed_s", record),
                       _seconds(record["host_s"], HOST_TERMS), _amounts(record["most"]),
                       _flag(record["is_asynchronous"]),
                       None if record["error"] is None else StepError(**record["error"]),
                       _factors(record["generation_spread"]), _factors(record["mixed_spread"]), dict(record["about"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged: {type(error).__name__}: {error}; expected a file as --fit writes it; "
                             "fit it again") from error


def amount(term: str, shape: StepShape) -> int:
    """How many units of a term a step has."""
    if term == CONSTANT:
        return 1
    if term in UP_TO:
        return min(shape.generation_requests, UP_TO[term])
    if term in BEYOND:
        return max(shape.generation_requests - BEYOND[term], 0)
    if term == DISTINCT:
        return shape.cached_tokens - shape.shared_tokens
    units: int = getattr(shape, term)
    return units


def _linear(seconds: Mapping[str, float], shape: StepShape) -> float:
    total = 0.0
    for term, each in seconds.items():
        total += each * amount(term, shape)
    return total


def _seconds(record: Mapping[str, Any], terms: tuple[str, ...]) -> dict[str, float]:
    found = {str(term): float(seconds) for term, seconds in record.items()}
    for term, seconds in found.items():
        if term not in terms:
            raise ValueError(f"there is no term {term!r}; the terms are {', '.join(terms)}")
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError(f"{term} is {seconds}, not 0 to {MOST_SECONDS:g} seconds")
    return found


def _step_seconds(name: str, record: Mapping[str, Any]) -> dict[str, float]:
    found = _seconds(record[name], MIXED_TERMS)
    if not any(found.values()):
        raise ValueError(f"{name} has no term above 0, so steps would take no time")
    return found


def _amounts(record: Mapping[str, Any]) -> dict[str, int]:
    if not record.keys() <= set(AMOUNTS):
        raise ValueError(f"the amounts are {', '.join(AMOUNTS)}")
    return {str(name): int(most) for name, most in record.items()}


def _factors(record: list[Any]) -> tuple[float, ...]:
    found = tuple(float(factor) for factor in record)
    if not all(0 <= factor <= MOST_SECONDS for factor in found):
        raise ValueError(f"a factor of a spread is not 0 to {MOST_SECONDS:g}")
    return found


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError("is_asynchronous is neither true nor false")
    return value
