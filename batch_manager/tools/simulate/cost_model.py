"""The cost model and its file format. The model predicts the times of device and host from the shape of a step."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from ...option_values import unique_names
from ..bench.errors import InputError
from ..datasets.errors import quoted
from ..output_file import output_file
from .step_shape import StepShape

FORMAT, FORMAT_VERSION = "batch-manager cost model", 1
MOST_ERROR, P90_TO_MEDIAN = 0.25, 4.0
MOST_SECONDS = 1e6          # per unit; a larger number means a damaged file, and sums of it could overflow
CONSTANT = "constant"
AMOUNTS = tuple(f.name for f in fields(StepShape))
KNOTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# The terms of a knot: min(number of generating sequences, knot), and the excess of the number over the knot. With
# non-negative factors, sums of these terms are rising piecewise linear functions of the number.
UP_TO = {f"generation_requests_up_to_{knot}": knot for knot in KNOTS}
BEYOND = {f"generation_requests_beyond_{knot}": knot for knot in KNOTS}
# cached_tokens - shared_tokens: the tokens that attention reads from memory.
DISTINCT = "distinct_tokens"
GENERATION_TERMS = (CONSTANT, "generation_requests", "cached_tokens", DISTINCT, *UP_TO, *BEYOND)
MIXED_TERMS = (CONSTANT, *(name for name in AMOUNTS if name != "shared_tokens"), DISTINCT, *UP_TO, *BEYOND)
HOST_TERMS = (CONSTANT, "context_requests", "generation_requests")


@dataclass(frozen=True, slots=True)
class StepError:
    """Prediction error on held-out steps.

    steps          number of held-out steps
    median, p90    median and 90th percentile of |predicted - measured| / measured
    total          (predicted - measured) / measured for the total time of the steps
    """

    steps: int
    median: float
    p90: float
    total: float

    def check(self, most: float) -> None:
        """Raise InputError if the error is too large for predictions.

        most   largest accepted `median` and |`total`|. The largest accepted `p90` is P90_TO_MEDIAN times as large
        """
        if max(self.median, self.p90 / P90_TO_MEDIAN, abs(self.total)) > most:
            raise InputError(f"the cost model has an {self.words()}; expected at most {most:.0%} median, "
                             f"{P90_TO_MEDIAN * most:.0%} p90 and {most:.0%} of the total time; fit it on a longer run "
                             "on a quiet machine, with short and long prompts and few and many sequences, or accept "
                             "the error with --max-fit-error")

    def words(self) -> str:
        return (f"error on {self.steps:,} held-out steps: {self.median:.1%} median, {self.p90:.1%} p90, "
                f"{self.total:+.1%} of their total time")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the seconds of a step and of the host's part of an iteration.

    generation_s    term of GENERATION_TERMS -> seconds per unit, for steps without contexts
    mixed_s         term of MIXED_TERMS -> seconds per unit, for steps with contexts
    host_s          term of HOST_TERMS -> seconds per unit, for the host's part of an iteration
    most            name of an amount of work -> its largest value in the steps of the fit
    generation_spread, mixed_spread   equally spaced quantiles of measured / predicted time, from the minimum to the
                    maximum; their mean is 1. Empty: simulated steps take exactly the predicted time
    is_asynchronous   whether the host plans a step while the device computes the previous step
    error           prediction error on held-out steps. It was measured with another model, which was fitted without
                    these steps; None: unknown
    about           origin: machine, versions, traces, ...
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
        """Return the predicted seconds in which the device, which may be a CPU, computes a step of this shape."""
        return _linear(self.mixed_s if shape.context_requests else self.generation_s, shape)

    def beyond(self, shape: StepShape) -> tuple[str, ...]:
        """Return the names of the amounts of the shape that are above the range to which the model was fitted."""
        return tuple(name for name, most in self.most.items() if getattr(shape, name) > most)

    def write(self, path: Path) -> None:
        """Write either the whole file or no file. Raises OSError."""
        with output_file(path) as file:
            json.dump(self.record(), file, indent=1)

    def record(self) -> dict[str, Any]:
        """Return the content of a cost model's file, as values for JSON."""
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a cost model. Raises InputError if the file cannot be read or is not a cost model of this version."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_names)
        except (OSError, ValueError, RecursionError) as error:
            reason = "it has too many nested arrays and objects" if isinstance(error, RecursionError) else error
            raise InputError(f"{path} cannot be read: {reason}; expected a cost model; batch-manager simulate --fit "
                             "writes one") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise InputError(f"{path} is not a cost model; expected the format {FORMAT!r}; "
                             "batch-manager simulate --fit writes one")
        if record.get("format_version") != FORMAT_VERSION:
            raise InputError(f"{path} has format_version {record.get('format_version')!r}; this program reads version "
                             f"{FORMAT_VERSION}; fit the cost model again")
        names = {"format", "format_version", *cls.__dataclass_fields__}
        if unknown := sorted(record.keys() - names):
            raise InputError(f"{path} has the field {quoted(unknown[0])}, which nothing reads; expected "
                             f"{', '.join(sorted(names))}; correct its name, or fit the cost model again")
        try:
            return cls(_step_seconds("generation_s", record), _step_seconds("mixed_s", record),
                       _seconds(record["host_s"], HOST_TERMS), _amounts(record["most"]),
                       _flag(record["is_asynchronous"]),
                       _step_error(record["error"]),
                       _factors(record["generation_spread"]), _factors(record["mixed_spread"]), _about(record["about"]))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged: {type(error).__name__}: {error}; expected a file as --fit writes it; "
                             "fit the cost model again") from error


def amount(term: str, shape: StepShape) -> int:
    """Return the number of units of `term` in a step of this shape. The term takes a fixed time per unit."""
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
            raise ValueError(f"unknown term {term!r}; the terms are {', '.join(terms)}")
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError(f"{term} is {seconds}, not 0 to {MOST_SECONDS:g} seconds")
    return found


def _step_seconds(name: str, record: Mapping[str, Any]) -> dict[str, float]:
    found = _seconds(record[name], MIXED_TERMS)
    if not any(found.values()):
        raise ValueError(f"{name} has no term above 0, so steps would take no time")
    return found


def _amounts(record: Mapping[str, Any]) -> dict[str, int]:
    if unknown := sorted(record.keys() - set(AMOUNTS)):
        raise ValueError(f"unknown amount {unknown[0]!r}; the amounts are {', '.join(AMOUNTS)}")
    return {str(name): _count(f"most.{name}", most) for name, most in record.items()}


def _factors(record: list[Any]) -> tuple[float, ...]:
    found = tuple(float(factor) for factor in record)
    for factor in found:
        if not 0 <= factor <= MOST_SECONDS:
            raise ValueError(f"generation_spread or mixed_spread has the factor {factor:g}, outside "
                             f"0..{MOST_SECONDS:g}")
    return found


def _step_error(record: Mapping[str, Any] | None) -> StepError | None:
    if record is None:
        return None
    error = StepError(**record)
    _count("error.steps", error.steps)
    for name in ("median", "p90", "total"):
        if type(value := getattr(error, name)) not in (int, float) or not abs(value) <= MOST_SECONDS:
            raise ValueError(f"error.{name} is {quoted(value)}, not a number of at most {MOST_SECONDS:g}")
    return error


def _about(record: Mapping[str, Any]) -> dict[str, Any]:
    about = dict(record)
    for name in ("num_blocks", "tokens_per_block"):
        if about.get(name) is not None:
            _count(f"about.{name}", about[name])
    return about


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {quoted(value)}, not an integer of at least 0")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError("is_asynchronous is neither true nor false")
    return value
