"""Compare two programs that served the same workload in turn: ratios, and whether they exceed the spread.

    python -m batch_manager.tools.compare --first a1.json a2.json a3.json --second b1.json b2.json b3.json

Each file is one result as `batch_manager.tools.benchmark` writes it; other programs may write the same keys. Run both
programs in turn (a1, b1, a2, b2, ...): pair i is the i-th file of each side, taken under about the same conditions.

A ratio above 1 means that the first program is better: first / second for rates, second / first for times. For every
figure the smallest, the median and the largest ratio of the pairs are printed. The difference is larger than the spread
when the median ratio is further from 1, as a factor, than the smallest and the largest ratio are from each other. With
one pair the spread is unknown and nothing is concluded.

Files of different workloads, numbers of requests, generated tokens or precisions are refused, and so are files with
outputs of the wrong length. A run is marked as disturbed where other processes or the hypervisor took more cores than
--foreign allows; its pair still counts.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

RATES = ("output_tok_s", "total_tok_s")
TIMES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "itl_ms_mean", "e2e_ms_p50", "e2e_ms_p99",
         "peak_rss_mb")
FIGURES = (*RATES, *TIMES)
SAME_IN_ALL = ("workload", "n", "threads", "precision", "prompt_tokens", "output_tokens")
FOREIGN_CORES = 0.12


class ComparisonError(Exception):
    """The files cannot be compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of two programs.

    first, second   medians of each side's runs
    ratios          of the pairs, in order; above 1: the first program is better
    """

    figure: str
    first: float
    second: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def exceeds_spread(self) -> bool | None:
        """None: a single pair has no spread."""
        if len(self.ratios) < 2:
            return None
        return abs(math.log(self.ratio)) > math.log(max(self.ratios) / min(self.ratios))

    def record(self) -> dict[str, Any]:
        return {"figure": self.figure, "first": self.first, "second": self.second, "ratio": round(self.ratio, 4),
                "smallest_ratio": round(min(self.ratios), 4), "largest_ratio": round(max(self.ratios), 4),
                "pairs": len(self.ratios), "exceeds_spread": self.exceeds_spread}


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in the files. Raises ComparisonError for a file that holds none."""
    results = []
    for path in paths:
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ComparisonError(f"{path} cannot be read: {error}") from error
        missing = {"peer", *SAME_IN_ALL} - (result.keys() if isinstance(result, dict) else set())
        if missing:
            raise ComparisonError(f"{path} has no {', '.join(sorted(missing))}; a result of "
                                  "batch_manager.tools.benchmark has them")
        if result.get("wrong_length"):
            raise ComparisonError(f"{path} has {result['wrong_length']} outputs of the wrong length; run it again")
        results.append(result)
    return results


def compare(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]],
            figures: Sequence[str] = FIGURES) -> list[Comparison]:
    """Every figure that all runs have, in the order of `figures`.

    Raises ComparisonError where the two sides are of different size, or not of one workload.
    """
    if len(first) != len(second):
        raise ComparisonError(f"there are {len(first)} results of the first program and {len(second)} of the second; "
                              "pass one of each for every pair of runs")
    for name in SAME_IN_ALL:
        values = {json.dumps(result[name]) for result in [*first, *second]}
        if len(values) > 1:
            raise ComparisonError(f"{name} differs between the files: {', '.join(sorted(values))}")
    comparisons = []
    for figure in figures:
        ours, theirs = ([result.get(figure) for result in side] for side in (first, second))
        if not all(isinstance(value, int | float) and value > 0 for value in [*ours, *theirs]):
            continue
        ratios = [a / b if figure in RATES else b / a for a, b in zip(ours, theirs, strict=True)]
        comparisons.append(Comparison(figure, median(ours), median(theirs), tuple(ratios)))
    if not comparisons:
        raise ComparisonError(f"no run has a positive {', '.join(figures)}")
    return comparisons


def disturbed(results: Sequence[dict[str, Any]], foreign_cores: float) -> int:
    """Runs during which others took more than `foreign_cores` cores."""
    meters = [result.get("cpu") or {} for result in results]
    return sum(meter.get("foreign_cores", 0.0) + meter.get("steal_cores", 0.0) > foreign_cores for meter in meters)


def name_of(results: Sequence[dict[str, Any]]) -> str:
    """Program and variant, as the results name them."""
    names = {f"{result['peer']} {result.get('variant', '')}".strip() for result in results}
    return ", ".join(sorted(names))


def table(comparisons: Sequence[Comparison], first_name: str, second_name: str) -> str:
    """Markdown, one row for each figure."""
    verdicts = {True: "yes", False: "no", None: "one pair"}
    lines = [f"| figure | {first_name} | {second_name} | ratio (smallest to largest) | larger than the spread |",
             "|---|---|---|---|---|"]
    lines += [f"| {one.figure} | {one.first:.6g} | {one.second:.6g} "
              f"| {one.ratio:.3f} ({min(one.ratios):.3f} to {max(one.ratios):.3f}) | {verdicts[one.exceeds_spread]} |"
              for one in comparisons]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m batch_manager.tools.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--first", type=Path, nargs="+", required=True, help="results of the first program, in the order of the runs")
    add("--second", type=Path, nargs="+", required=True, help="results of the second program, likewise")
    add("--figure", choices=FIGURES, nargs="+", default=FIGURES, help="only these (all that every run has)")
    add("--foreign", type=float, default=FOREIGN_CORES,
        help=f"cores that others may take before a run counts as disturbed ({FOREIGN_CORES})")
    add("--out", type=Path, help="write the comparison here, as JSON")
    options = parser.parse_args(argv)
    try:
        first, second = read_results(options.first), read_results(options.second)
        comparisons = compare(first, second, options.figure)
    except ComparisonError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    names = name_of(first), name_of(second)
    print(f"{first[0]['workload']}: {len(first)} pairs of runs; a ratio above 1 means that {names[0]} is better\n")
    print(table(comparisons, *names))
    for name, side in zip(names, (first, second), strict=True):
        if count := disturbed(side, options.foreign):
            print(f"\n{count} of {len(side)} runs of {name} were disturbed: others took more than {options.foreign} "
                  "cores")
    if options.out is not None:
        options.out.write_text(json.dumps({
            "tool": "compare", "first": names[0], "second": names[1],
            **{name: first[0][name] for name in SAME_IN_ALL},
            "disturbed": [disturbed(first, options.foreign), disturbed(second, options.foreign)],
            "figures": [one.record() for one in comparisons]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
