"""Compare results of batch-manager bench: ratios of figures, and whether differences exceed the spread of the runs.

    batch-manager compare before.json after.json                                  one run each: no spread
    batch-manager compare a1.json a2.json a3.json -- b1.json b2.json b3.json      several runs each
    batch-manager compare --first a1.json a2.json --second b1.json b2.json        pairs of runs of two programs

Side A is the first file, or all files before --. Side B is the other files. For each figure, the table says whether
higher or lower is better, and has the median of each side, the ratio B / A of the medians, and the smallest and the
largest ratio of a run of B to a run of A. The table calls a side better only if the difference exceeds the spread: the
factor between the medians must be larger than the factor between any two runs of the same side. If a side has a single
run, there is no spread and no conclusion. A file may have a list of results. Points of a sweep are compared with points
of the same load.

The program warns of runs during which other processes and the hypervisor together used more cores than --foreign
allows. For sides A and B, it also warns of different settings, machines, versions and commits. It refuses different
workloads, models, precisions and token counts, and runs with outputs of the wrong length, unless --anyway is given.

For --first and --second, run both programs in turn (a1, b1, a2, b2, ...). Pair i is the i-th file of each side, and its
two runs have similar conditions. The ratio is first / second for rates and second / first for times and memory. A
ratio above 1 means that the first program is better. The table has the smallest, median and largest ratio of the
pairs. The difference exceeds the spread if the factor between 1 and the median ratio is larger than the factor between
the smallest and the largest ratio. The program refuses pairs with different workloads, threads, precisions or token
counts, and runs with outputs of the wrong length, even if --anyway is given.
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

from ...errors import counted
from ...option_values import unique_names
from ..__main__ import run_as
from ..command_parser import CommandParser, within
from ..output_file import output_file, why_not_distinct
from ..shared_options import add_shared
from .figures import FIGURES as SIDE_FIGURES
from .results import FOREIGN_CORES, ComparisonError, check_figures, compare_results, compared, disturbed

__all__ = ["Comparison", "ComparisonError", "compare", "compare_results", "main", "read_results"]
RATES = ("output_tok_s", "total_tok_s")
TIMES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "itl_ms_mean", "e2e_ms_p50", "e2e_ms_p99",
         "peak_rss_mb")
FIGURES = (*RATES, *TIMES)
SAME_IN_ALL = ("workload", "n", "threads", "precision", "prompt_tokens", "output_tokens")
WRONG = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of one measured quantity, such as a rate or a latency, in paired runs of two programs.

    figure          name of the quantity in the results
    first, second   median of the runs of each program
    ratios          ratio of the values of each pair of runs, in order; above 1: the first program is better
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
        """Whether the difference exceeds the spread of the ratios. None: one pair has no spread."""
        if len(self.ratios) < 2:
            return None
        return abs(math.log(self.ratio)) > math.log(max(self.ratios) / min(self.ratios))

    def record(self) -> dict[str, Any]:
        return {"figure": self.figure, "first": self.first, "second": self.second, "ratio": round(self.ratio, 4),
                "smallest_ratio": round(min(self.ratios), 4), "largest_ratio": round(max(self.ratios), 4),
                "pairs": len(self.ratios), "exceeds_spread": self.exceeds_spread}


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read one result per file. Raises ComparisonError for an invalid result or outputs of the wrong length."""
    results = []
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_names)
        except (OSError, ValueError, RecursionError) as error:
            raise ComparisonError(f"{path} cannot be read: {error}; expected a result as JSON") from error
        missing = {"peer", *SAME_IN_ALL} - (result.keys() if isinstance(result, dict) else set())
        if missing:
            raise ComparisonError(f"{path} does not have the fields {', '.join(sorted(missing))}; expected a result "
                                  "of batch-manager bench; name another file")
        if result.get("wrong_length"):
            raise ComparisonError(f"{path} has {result['wrong_length']} outputs of the wrong length; "
                                  "expected none; measure again")
        check_figures(result, str(path))
        results.append(result)
    return results


def compare(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]],
            figures: Sequence[str] = FIGURES) -> list[Comparison]:
    """Compare every figure that is positive in all runs, in the order of `figures`.

    first, second   results of the two programs; results with the same index are a pair

    Raises ComparisonError if the programs have different numbers of results, if results differ in a field that must
    be equal (SAME_IN_ALL), or if no figure is positive in all runs.
    """
    if len(first) != len(second):
        raise ComparisonError(f"there are {len(first)} results of the first program and {len(second)} of the second; "
                              "expected pairs; pass the same number of each")
    for name in SAME_IN_ALL:
        values = {json.dumps(result[name]) for result in [*first, *second]}
        if len(values) > 1:
            raise ComparisonError(f"{name} differs between the files: {', '.join(sorted(values))}; expected the "
                                  "same in all")
    comparisons = []
    for figure in figures:
        ours, theirs = ([result.get(figure) for result in side] for side in (first, second))
        if not all(isinstance(value, int | float) and value > 0 for value in [*ours, *theirs]):
            continue
        ratios = [a / b if figure in RATES else b / a for a, b in zip(ours, theirs, strict=True)]
        comparisons.append(Comparison(figure, median(ours), median(theirs), tuple(ratios)))
    if not comparisons:
        raise ComparisonError(f"no figure is positive in all runs; expected one of {', '.join(figures)} to be; "
                              "measure again with batch-manager bench")
    return comparisons


def name_of(results: Sequence[dict[str, Any]]) -> str:
    """Return the names of the programs that were measured, with their variants, as one line of text."""
    names = {f"{result['peer']} {result.get('variant', '')}".strip() for result in results}
    return ", ".join(sorted(names))


def table(comparisons: Sequence[Comparison], first_name: str, second_name: str) -> str:
    """Format the comparisons as Markdown, one row per figure."""
    verdicts = {True: "yes", False: "no", None: "one pair"}
    lines = [f"| figure | {first_name} | {second_name} | ratio (smallest to largest) | larger than the spread |",
             "|---|---|---|---|---|"]
    lines += [f"| {one.figure} | {one.first:.6g} | {one.second:.6g} "
              f"| {one.ratio:.3f} ({min(one.ratios):.3f} to {max(one.ratios):.3f}) | {verdicts[one.exceeds_spread]} |"
              for one in comparisons]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    is_apart = "--" in arguments
    end = arguments.index("--") if is_apart else len(arguments)
    after = arguments[end + 1:]
    parser = _parser()
    options = parser.parse_args(arguments[:end])
    try:
        _check_out(options.out, [*options.files, *after, *(options.first or ()), *(options.second or ())])
        if options.first or options.second:
            if options.files or after or not (options.first and options.second):
                parser.error("--first and --second must be given together, without other files")
            _compare_pairs(options)
        else:
            _compare_sides(options, is_apart, after)
    except BrokenPipeError:
        raise
    except (ComparisonError, OSError) as error:
        print(f"batch-manager compare: {error}", file=sys.stderr)
        return WRONG
    return 0


def _check_out(out: Path | None, inputs: Sequence[str | Path]) -> None:
    for path in inputs if out is not None else ():
        if reason := why_not_distinct({"--out": out}, {"an input": path}):
            raise ComparisonError(reason)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="batch-manager compare", description=__doc__,
        usage="batch-manager compare A.json B.json [options]\n"
              "       batch-manager compare A.json ... [options] -- B.json ...",
        epilog="exit status: 0 compared; 2 an option or a file is wrong, or the results cannot be compared; 130 Ctrl-C")
    add = parser.add_argument
    add("files", type=Path, nargs="*", metavar="FILE", help="results of batch-manager bench --out")
    add("--first", type=Path, nargs="+", metavar="FILE", help="results of the first program, in run order")
    add("--second", type=Path, nargs="+", metavar="FILE", help="results of the second program, in run order")
    add("--figure", choices=tuple(dict.fromkeys((*SIDE_FIGURES, *FIGURES))), nargs="+", metavar="NAME",
        help=f"figures to compare (all): {', '.join(SIDE_FIGURES)}")
    add("--anyway", action="store_true", help="compare different workloads and models, too (not with --first)")
    add("--foreign", type=within(0, 1e6), default=FOREIGN_CORES, metavar="CORES",
        help=f"cores that others may use before a run counts as disturbed ({FOREIGN_CORES})")
    add_shared(add, "--out", "the comparison as JSON")
    return parser


def _compare_sides(options: argparse.Namespace, is_apart: bool, after: Sequence[str]) -> None:
    side_a, side_b = options.files[:1], options.files[1:]
    if is_apart:
        side_a, side_b = options.files, [*map(Path, after)]
    if not side_a or not side_b or (len(side_b) > 1 and not is_apart):
        given = f"{len(side_a)} before -- and {len(side_b)} after" if is_apart else f"{len(options.files)}"
        raise ComparisonError(f"the number of files is {given}; expected two files, or the files of A before -- and "
                              "the files of B after it; batch-manager compare --help shows examples")
    report = compared(side_a, side_b, anyway=options.anyway,
                      figures=options.figure or tuple(SIDE_FIGURES), foreign_cores=options.foreign)
    if options.out is not None:
        with output_file(options.out) as file:
            json.dump(report.record(), file, indent=1)
    print("\n".join(report.lines()))


def _compare_pairs(options: argparse.Namespace) -> None:
    if others := [name for name in options.figure or () if name not in FIGURES]:
        raise ComparisonError(f"--figure is {others[0]}; with --first and --second, expected {', '.join(FIGURES)}; "
                              "leave out these two options to compare other figures")
    first, second = read_results(options.first), read_results(options.second)
    comparisons = compare(first, second, options.figure or FIGURES)
    names = name_of(first), name_of(second)
    if options.out is not None:
        record = {"tool": "compare", "first": names[0], "second": names[1],
                  **{name: first[0][name] for name in SAME_IN_ALL},
                  "disturbed": [disturbed(first, options.foreign), disturbed(second, options.foreign)],
                  "figures": [one.record() for one in comparisons]}
        with output_file(options.out) as file:
            json.dump(record, file, indent=1)
    print(f"{first[0]['workload']}: {counted(len(first), 'pair')} of runs; a ratio above 1 means that {names[0]} is "
          "better\n")
    print(table(comparisons, *names))
    for name, side in zip(names, (first, second), strict=True):
        if count := disturbed(side, options.foreign):
            print(f"\n{count} of {counted(len(side), 'run')} of {name} {'was' if count == 1 else 'were'} disturbed: "
                  "other processes and the hypervisor "
                  f"used more than {options.foreign} cores")


if __name__ == "__main__":
    raise SystemExit(run_as("compare"))
