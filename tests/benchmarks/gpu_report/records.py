"""The records of a GPU report: one JSON object for each case of a performance goal (goals.py)."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .goals import ALL

MEASURED, DRY, NOT_REACHED, FAILED = "measured", "dry", "not reached", "failed"
STATUSES = (MEASURED, DRY, NOT_REACHED, FAILED)
NUMBERS = ("numerator", "denominator", "ratio", "spread")

# field -> types of its value. A line has exactly these fields.
SCHEMA: dict[str, tuple[type, ...]] = {
    "goal": (str,), "case": (str,), "status": (str,),
    "numerator": (int, float, type(None)), "denominator": (int, float, type(None)), "unit": (str,),
    "ratio": (int, float, type(None)), "floor": (int, float, type(None)), "met": (bool, type(None)),
    "spread": (int, float, type(None)), "note": (str,),
    "device": (str,), "versions": (dict,), "commit": (str,), "date": (str,),
}


@dataclass(frozen=True, slots=True)
class Record:
    """One case of a goal.

    numerator, denominator   in `unit`; the goal is about their ratio
    spread                   relative difference between repeated measurements of one of the two numbers: largest /
                             smallest - 1, or `Timing.spread`; None: measured once
    judged                   False: the ratio is not comparable with the goal, so `met` stays None
    note                     remark for the reader; for a case without numbers, why it has none
    figures                  text with further figures, appended to the note except in a dry run
    """

    goal: str
    case: str
    numerator: float | None = None
    denominator: float | None = None
    unit: str = ""
    spread: float | None = None
    judged: bool = True
    note: str = ""
    figures: str = ""
    status: str = MEASURED

    @property
    def ratio(self) -> float | None:
        if self.numerator is None or not self.denominator:
            return None
        return self.numerator / self.denominator

    @property
    def met(self) -> bool | None:
        goal, ratio = ALL[self.goal], self.ratio
        if goal.floor is None or ratio is None or not self.judged:
            return None
        # `bool`, because a comparison of numpy's numbers gives numpy's type, which JSON does not have.
        return bool(ratio <= goal.floor if goal.lower_is_better else ratio >= goal.floor)

    def line(self, header: dict[str, Any], *, dry: bool) -> dict[str, Any]:
        """Return the record as a line of the report. In a dry run, the numbers are meaningless and therefore null.

        header   fields that all lines of the report share
        """
        note = self.note if dry else "; ".join(filter(None, [self.note, self.figures]))
        numbers = {name: None if dry else _rounded(getattr(self, name)) for name in NUMBERS}
        return {"goal": self.goal, "case": self.case,
                "status": DRY if dry and self.status == MEASURED else self.status, **numbers, "unit": self.unit,
                "floor": ALL[self.goal].floor, "met": None if dry else self.met, "note": note, **header}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def check(line: Any) -> None:
    """Raise ValueError if `line` is not a line of a report."""
    if not isinstance(line, dict) or line.keys() != SCHEMA.keys():
        raise ValueError(f"the line is {line!r:.200}; expected the fields {', '.join(SCHEMA)}")
    for name, types in SCHEMA.items():
        if not isinstance(line[name], types) or isinstance(line[name], bool) and bool not in types:
            raise ValueError(f"{name} is {line[name]!r}; expected {', '.join(one.__name__ for one in types)}")
    if line["goal"] not in ALL or line["status"] not in STATUSES:
        raise ValueError(f"the goal is {line['goal']!r} and the status is {line['status']!r}; expected a goal that "
                         f"this version reports, and one of the statuses {', '.join(STATUSES)}; use the version that "
                         "wrote the report")
    if line["status"] != MEASURED and any(line[name] is not None for name in (*NUMBERS, "met")):
        raise ValueError(f"a case with the status {line['status']!r} has numbers; expected null for each number: "
                         f"{line}")
    if line["status"] == MEASURED and line["numerator"] is None:
        raise ValueError(f"the numerator of a measured case is None: {line}; expected a number")


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a report. Raises ValueError for an invalid line."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text:
            try:
                lines.append(json.loads(text))
                check(lines[-1])
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from None
    return lines


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Format the lines as Markdown, one row per case."""
    rows = ["| goal | case | value | of | ratio | floor | met | spread | note |",
            "|---|---|---|---|---|---|---|---|---|"]
    rows += [f"| {line['goal']} | {line['case']} | {value(line)} "
             f"| {number(line['denominator'])} | {number(line['ratio'])} | {number(line['floor'])} | {verdict(line)} "
             f"| {number(line['spread'])} | {line['note']} |" for line in lines]
    return "\n".join(rows)


def value(line: dict[str, Any]) -> str:
    """Format the measured value of a report's line, its `numerator`, with the unit."""
    return "-" if line["numerator"] is None else f"{number(line['numerator'])} {line['unit']}".strip()


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def verdict(line: dict[str, Any]) -> str:
    """Return whether a measured case meets its goal: "yes", "no" or "-" (not judged).

    For a case that was not measured, return its status.
    """
    if line["status"] != MEASURED:
        return line["status"]
    return {True: "yes", False: "no", None: "-"}[line["met"]]
