"""Compare the results of two sides, A and B: read them, check that they are comparable, and report differences."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import printable
from ...option_values import unique_names
from .figures import FIGURES, Difference, differences, is_number, left_out, table

FORMAT, FORMAT_VERSION = "batch-manager bench", 1
SAME = ("workload", "n", "prompt_tokens", "output_tokens", "precision", "model")
SETTINGS = ("peer", "variant", "threads", "max_batch", "max_tokens_per_step", "tokens_per_block", "kv_tokens",
            "kv_precision", "engine", "scheduler", "chunked_context", "block_reuse", "streaming", "beam_width",
            "cpu_compile", "model_implementation", "quantization", "quantized_activations", "tensor_parallel_size",
            "pipeline_parallel_size", "busy_neighbours")
ORIGIN = ("machine", "packages", "version", "commit", "python")
FOREIGN_CORES = 0.12
SATURATION = "saturation"
ANYWAY = "pass --anyway to compare them nevertheless"

Paths = str | os.PathLike | Sequence[str | os.PathLike]


class ComparisonError(Exception):
    """The files cannot be compared."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload.

    place   the file, with the number of the result if the file has several
    """

    place: str
    load: str
    result: dict[str, Any]


@dataclass(slots=True)
class Report:
    """The comparison of two sides.

    warnings      sentences about differences in settings and origin, about disturbed runs, and about figures and loads
                  that were left out. If `compared` was called with anyway=True, also the reasons for which it would
                  otherwise refuse the comparison
    differences   load -> differences of the figures at this load
    """

    runs_a: list[Run]
    runs_b: list[Run]
    warnings: list[str] = field(default_factory=list)
    differences: dict[str, list[Difference]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Format the report as lines of text."""
        out = [f"{name}: {_count(runs)} of {', '.join(dict.fromkeys(run.place.partition('[')[0] for run in runs))}"
               for name, runs in (("A", self.runs_a), ("B", self.runs_b))]
        out += [f"warning: {text}" for text in self.warnings]
        for load, found in self.differences.items():
            out += ["", *([f"{load}:"] if len(self.differences) > 1 or load == SATURATION else []), *table(found)]
        return out

    def record(self) -> dict[str, Any]:
        return {"tool": "compare", "a": [run.place for run in self.runs_a], "b": [run.place for run in self.runs_b],
                "warnings": self.warnings, "loads": [{"load": load, "figures": [one.record() for one in found]}
                                                     for load, found in self.differences.items()]}


def compare_results(a: Paths, b: Paths, *, anyway: bool = False, figures: Sequence[str] = tuple(FIGURES),
                    foreign_cores: float = FOREIGN_CORES) -> list[str]:
    """Compare two sides, and return warnings and a table of the figures as lines of text.

    The table has the medians of both sides and their ratio. It says whether higher or lower is better, and whether the
    difference exceeds the spread of the runs.

    a, b     the files of each side: results of `batch-manager bench --out`, or lists of such results. Points of a sweep
             are compared with points of the same load
    anyway   compare even if the workload, precision, model or load differs, or outputs have the wrong length
    foreign_cores   warn of runs during which other processes and the hypervisor together used more cores than this

    Raises ComparisonError for files that cannot be read or compared.
    """
    return compared(a, b, anyway=anyway, figures=figures, foreign_cores=foreign_cores).lines()


def compared(a: Paths, b: Paths, *, anyway: bool = False, figures: Sequence[str] = tuple(FIGURES),
             foreign_cores: float = FOREIGN_CORES) -> Report:
    """Like `compare_results`, but returns a Report."""
    runs_a, runs_b = ([run for path in _listed(side) for run in read_runs(Path(path))] for side in (a, b))
    report = Report(runs_a, runs_b)
    refusals = [*_unlike(runs_a, runs_b, SAME), *_failed("A", runs_a), *_failed("B", runs_b)]
    loads = _common_loads(report, refusals)
    if refusals and not anyway:
        raise ComparisonError(f"{'. '.join(refusals)}; expected runs of the same workload, model, precision "
                              f"and load, in which every output has the right length; {ANYWAY}")
    report.warnings = [*refusals, *report.warnings, *_unlike(runs_a, runs_b, SETTINGS),
                       *_unlike(runs_a, runs_b, ORIGIN), *_disturbed("A", runs_a, foreign_cores),
                       *_disturbed("B", runs_b, foreign_cores)]
    for load, side_a, side_b in loads:
        sides = [run.result for run in side_a], [run.result for run in side_b]
        if found := differences(*sides, figures):
            report.differences[load] = found
        if names := left_out(*sides, figures):
            report.warnings.append(f"left out{f' at {load}' if len(loads) > 1 else ''}, because not every run has a "
                                   f"value above 0: {', '.join(names)}")
    if not report.differences:
        raise ComparisonError(f"no figure is positive in all runs; expected one of {', '.join(figures)} to be; "
                              "measure again with batch-manager bench")
    return report


def read_runs(path: Path) -> list[Run]:
    """Read the runs of a file: a result, the points of a sweep, or a list of results. Raises ComparisonError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_names)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ComparisonError(f"{path} cannot be read: {reason}; expected a result of batch-manager bench; "
                              "correct the path, or measure again with --out") from None
    if content == []:
        raise ComparisonError(f"{path} is an empty list; expected at least one result; name another file")
    if isinstance(content, list):
        return [run for number, result in enumerate(content) for run in _runs_of(result, f"{path}[{number}]")]
    return _runs_of(content, str(path))


def _runs_of(result: Any, place: str) -> list[Run]:
    if not isinstance(result, dict):
        raise ComparisonError(f"{place} is of type {type(result).__name__}; expected an object of batch-manager bench; "
                              "name another file")
    if result.get("format") == FORMAT and result.get("format_version") != FORMAT_VERSION:
        raise ComparisonError(f"{place} has format_version {result.get('format_version')!r}; this program reads "
                              f"version {FORMAT_VERSION}; measure again, or use the program that wrote it")
    # Files that do not say so had no neighbours: those of other engines, of the simulator and of older versions.
    shared = {"busy_neighbours": 0} | {name: value for name, value in result.items() if name != "points"}
    if "model" not in shared and (model := model_of(result.get("command"))):
        shared["model"] = model
    points = result.get("points")
    if result.get("kind") == SATURATION:
        runs = [Run(place, SATURATION, shared)]
    elif isinstance(points, list):
        runs = [Run(f"{place}[{number}]", _load_of(point), {**shared, **point})
                for number, point in enumerate(points) if isinstance(point, dict)]
    else:
        runs = [Run(place, _load_of(shared), shared)]
    for run in runs:
        check_figures(run.result, run.place)
    if not runs or any(not _has_figure(run.result) for run in runs):
        raise ComparisonError(f"{place} has no figures; expected a result of batch-manager bench, with "
                              f"{', '.join(list(FIGURES)[1:4])} and others; name another file")
    return runs


def check_figures(result: Mapping[str, Any], place: str) -> None:
    """Raise ComparisonError for a figure that is not a number of at least 0. Figures may be null or missing.

    place   the file of the result, for the message
    """
    for figure in FIGURES.values():
        if fault := figure.fault(result):
            raise ComparisonError(f"{place}: {fault}; measure again, or correct the file")


def _has_figure(result: Mapping[str, Any]) -> bool:
    return any(figure.value(result) is not None for figure in FIGURES.values())


def model_of(command: Any) -> str | None:
    """Return the name of the model's folder from the arguments of a benchmark, or None if they name no model."""
    if not isinstance(command, list):
        return None
    arguments = [part for argument in map(str, command) for part in argument.split("=", 1)]
    for option in ("--model", "--engine_dir", "--engine-dir"):
        if option in arguments[:-1]:
            return Path(arguments[arguments.index(option) + 1]).name
    return None


def _load_of(result: Mapping[str, Any]) -> str:
    """Describe how the requests arrived. For a point of a simulated sweep, describe the settings of the point."""
    if settings := result.get("settings"):
        return ", ".join(f"{name} {value}" for name, value in settings.items())
    if result.get("concurrency") is not None:
        return f"concurrency {result['concurrency']}"
    if is_number(rate := result.get("request_rate")) and rate:
        return f"{rate:g} requests/s"
    return "all at once" if result.get("mode", "offline") == "offline" else "arrival times of the workload"


def _common_loads(report: Report, refusals: list[str]) -> list[tuple[str, list[Run], list[Run]]]:
    """Return (load, runs of A, runs of B) for each load that both sides have.

    If there is a common load, adds a warning to the report for loads that only one side has.

    Without a common load, raises ComparisonError if a side has several loads or the result of a search for the
    saturation rate. Otherwise adds a refusal to `refusals`, and returns all runs under the load "".
    """
    sides = [_by_load(runs) for runs in (report.runs_a, report.runs_b)]
    common = [load for load in sides[0] if load in sides[1]]
    if not common:
        text = f"the load differs: A {', '.join(sides[0])}; B {', '.join(sides[1])}"
        if len(sides[0]) > 1 or len(sides[1]) > 1 or SATURATION in (*sides[0], *sides[1]):
            raise ComparisonError(f"{text}; expected a load that both sides have; measure one side again")
        refusals.append(text.replace(";", ","))
        return [("", report.runs_a, report.runs_b)]
    for name, side in zip("AB", sides):
        if alone := [load for load in side if load not in common]:
            report.warnings.append(f"only {name} has {', '.join(alone)}")
    return [(load, sides[0][load], sides[1][load]) for load in common]


def _by_load(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.load, []).append(run)
    return found


def _unlike(a: Sequence[Run], b: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return a sentence for each field of `names` that differs between runs. Objects are compared key by key."""
    texts = []
    for name in names:
        values = [run.result.get(name) for run in (*a, *b)]
        inner = sorted({key for value in values if isinstance(value, dict) for key in value})
        for path in [(name, key) for key in inner] or [(name,)]:
            texts_of = [list(dict.fromkeys(_text(run.result, path) for run in side)) for side in (a, b)]
            if len({*texts_of[0], *texts_of[1]}) > 1:
                texts.append(f"{'.'.join(path)} differs: A {' and '.join(texts_of[0])}, B {' and '.join(texts_of[1])}")
    return texts


def _text(result: Mapping[str, Any], path: Sequence[str]) -> str:
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None or value == "":
        return "none"
    return printable(value) if isinstance(value, str) else json.dumps(value)


def _failed(name: str, runs: Sequence[Run]) -> list[str]:
    return [f"{name} has {wrong} {'output' if wrong == 1 else 'outputs'} of the wrong length in {run.place}"
            for run in runs if (wrong := run.result.get("wrong_length"))]


def _disturbed(name: str, runs: Sequence[Run], foreign_cores: float) -> list[str]:
    count = disturbed([run.result for run in runs], foreign_cores)
    return [f"{count} of {_count(runs)} of {name} {'was' if count == 1 else 'were'} disturbed: other "
            f"processes and the hypervisor used more than {foreign_cores} cores"] if count else []


def disturbed(results: Sequence[Mapping[str, Any]], foreign_cores: float) -> int:
    """Count the runs during which other processes and the hypervisor together used more than `foreign_cores` cores."""
    meters = [meter if isinstance(meter := result.get("cpu"), Mapping) else {} for result in results]
    taken = [[value for name in ("foreign_cores", "steal_cores") if is_number(value := meter.get(name))]
             for meter in meters]
    return sum(sum(cores) > foreign_cores for cores in taken)


def _count(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) != 1)}"


def _listed(paths: Paths) -> list[str | os.PathLike]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)
