"""The figures that are compared, and the difference of one figure between two sides. A side is a group of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


def is_number(value: Any) -> bool:
    """Return whether the value is an int or float below 1e300 in absolute value. A bool and NaN are not numbers."""
    return type(value) in (int, float) and abs(value) < MOST    # this comparison is false for NaN


MOST = 1e300


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a result.

    path               keys of the result, outermost first
    higher_is_better   True for rates; False for times and memory
    """

    name: str
    path: tuple[str, ...]
    higher_is_better: bool = False

    def value(self, result: Mapping[str, Any]) -> float | None:
        """Return the value of the figure, or None if the result does not have the figure."""
        value: Any = result
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if is_number(value) else None

    def fault(self, result: Mapping[str, Any]) -> str:
        """Describe an invalid value of the figure. Returns "" for a number of at least 0, null, or a missing value."""
        value: Any = result
        for depth, key in enumerate(self.path):
            if value is None:
                return ""
            if not isinstance(value, Mapping):
                return f"{'.'.join(self.path[:depth])} is {value!r}; expected an object or null"
            value = value.get(key)
        if value is None or is_number(value) and value >= 0:
            return ""
        return f"{'.'.join(self.path)} is {value!r}; expected a number of at least 0, or null"


def _latency(name: str, which: str) -> Figure:
    return Figure(f"{name}_ms_{which}", ("latency_ms", name, which))


FIGURES = {figure.name: figure for figure in (
    Figure("sustained_requests_s", ("saturation", "sustained"), higher_is_better=True),
    Figure("output_tok_s", ("output_tok_s",), higher_is_better=True),
    Figure("total_tok_s", ("total_tok_s",), higher_is_better=True),
    Figure("requests_s", ("requests_s",), higher_is_better=True),
    Figure("goodput_requests_s", ("goodput", "requests_s"), higher_is_better=True),
    *(Figure(f"{name}_ms_{which}", (f"{name}_ms_{which}",)) for name in ("ttft", "itl") for which in ("p50", "p99")),
    Figure("itl_ms_mean", ("itl_ms_mean",)),
    *(_latency("tpot", which) for which in ("p50", "p99")),
    *(Figure(f"e2e_ms_{which}", (f"e2e_ms_{which}",)) for which in ("p50", "p99")),
    *(_latency("queue", which) for which in ("p50", "p99")),
    Figure("peak_rss_mb", ("peak_rss_mb",)),
    Figure("load_s", ("load_s",)),
)}


@dataclass(frozen=True, slots=True)
class Difference:
    """The values of one figure in the runs of two sides, A and B.

    a, b   positive values, one for each run of the side
    """

    figure: Figure
    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Ratio of the medians, B / A."""
        return median(self.b) / median(self.a)

    @property
    def smallest_ratio(self) -> float:
        """Smallest ratio of any run of B to any run of A."""
        return min(self.b) / max(self.a)

    @property
    def largest_ratio(self) -> float:
        return max(self.b) / min(self.a)

    @property
    def exceeds_spread(self) -> bool | None:
        """Whether the factor between the medians is larger than the factor between any two runs of one side.

        None: a side has only one run, and the spread is unknown.
        """
        if min(len(self.a), len(self.b)) < 2:
            return None
        spread = max(max(side) / min(side) for side in (self.a, self.b))
        return max(self.ratio, 1 / self.ratio) > spread

    @property
    def better(self) -> str:
        """The side with the better median: "A", "B", or "" if the medians are equal."""
        if self.ratio == 1:
            return ""
        return "B" if (self.ratio > 1) == self.figure.higher_is_better else "A"

    def verdict(self) -> str:
        """Return the last column of the table: the better side, or why no side is called better."""
        if self.exceeds_spread is None:
            single = [name for name, side in (("A", self.a), ("B", self.b)) if len(side) == 1]
            return f"one run {'each' if len(single) == 2 else f'of {single[0]}'}: no spread known"
        return f"{self.better} is better: larger than the spread" if self.exceeds_spread else "within the spread"

    def record(self) -> dict[str, Any]:
        return {"figure": self.figure.name, "higher_is_better": self.figure.higher_is_better, "a": list(self.a),
                "b": list(self.b), "ratio": round(self.ratio, 4), "smallest_ratio": round(self.smallest_ratio, 4),
                "largest_ratio": round(self.largest_ratio, 4), "better": self.better,
                "exceeds_spread": self.exceeds_spread}


def differences(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]],
                names: Sequence[str] = tuple(FIGURES)) -> list[Difference]:
    """Return a Difference for each figure in `names` that is positive in all runs.

    a, b   results of the runs of each side
    """
    found = []
    for name in names:
        sides = [[FIGURES[name].value(result) for result in side] for side in (a, b)]
        if all(value is not None and value > 0 for side in sides for value in side):
            found.append(Difference(FIGURES[name], tuple(sides[0]), tuple(sides[1])))
    return found


def left_out(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the names in `names` whose figures are positive in some runs, and 0 or missing in other runs."""
    is_positive = {name: [(FIGURES[name].value(result) or 0) > 0 for result in [*a, *b]] for name in names}
    return [name for name, each in is_positive.items() if any(each) and not all(each)]


def table(found: Sequence[Difference]) -> list[str]:
    """Format the differences as lines of text."""
    rows = [["", "better", "A", "B", "B / A", "of any two runs", ""]]
    rows += [[one.figure.name, "higher" if one.figure.higher_is_better else "lower", f"{median(one.a):,.6g}",
              f"{median(one.b):,.6g}", f"{one.ratio:.3f}",
              f"{one.smallest_ratio:.3f} to {one.largest_ratio:.3f}" if len(one.a) + len(one.b) > 2 else "-",
              one.verdict()] for one in found]
    if all(row[5] == "-" for row in rows[1:]):
        rows = [[*row[:5], *row[6:]] for row in rows]
    left = {0, 1, len(rows[0]) - 1}
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(f"{cell:<{width}}" if number in left else f"{cell:>{width}}"
                      for number, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
