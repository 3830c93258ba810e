"""Judges the idle points of a soak: violations at each point, and growth from point to point."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from .soak import Sample

MILLION = 1_000_000
MIB = 1 << 20
WARM_UP = 4                     # the first of 4 parts is not judged, because caches and dictionaries still grow


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest growth that is no leak, and the length of a run from which growth is judged.

    rss_per_million       growth of resident memory in bytes per million requests; None: not judged
    malloc_per_million    growth of the bytes in use in the C library's allocator, per million requests
    items_per_object      a type leaks if its number of objects grows by one per this many requests
    items_for_memory      smallest number of requests for which memory is judged; memory is not steady in shorter runs
    points                smallest number of idle points of an engine for which its objects are judged; see `growth`
    """

    rss_per_million: float | None = MIB
    malloc_per_million: float | None = MIB
    items_per_object: float = 10_000
    items_for_memory: int = 300_000
    points: int = 18


BOUNDS = {"Q": Bounds(rss_per_million=None, malloc_per_million=32 * MIB, items_per_object=30,
                      items_for_memory=0, points=9), "F": Bounds(),
          "C": Bounds()}


@dataclass(slots=True)
class Verdict:
    """The verdict on a soak.

    wrong     violations
    short     properties that could not be judged
    figures   name -> value with its unit
    """

    wrong: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)


def slope_per_million(items: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return (growth of the values per million items, its standard error), by least squares."""
    if len(items) < 3:
        return 0.0, float("inf")
    x, y = np.asarray(items, float) / MILLION, np.asarray(values, float)
    x = x - x.mean()
    slope = float(x @ (y - y.mean()) / (x @ x))
    rest = y - y.mean() - slope * x
    return slope, float(np.sqrt(rest @ rest / max(len(x) - 2, 1) / (x @ x)))


def growth(values: Sequence[float]) -> float:
    """Return the lowest of the last third of `values` minus the highest of all values before. Above 0 means growth.

    If 17 values are random, the result is above 0 once in a few thousand times.
    """
    third = max(len(values) // 3, 1)
    return min(values[-third:]) - max(values[:-third])


def judge(samples: Iterable[Sample], bounds: Bounds) -> Verdict:
    """Judge one process. `samples` are what `soak` passed to `tell`; the last one is the summary."""
    *points, summary = samples
    verdict = Verdict()
    for point in points:
        verdict.wrong += [f"after {point['handed']:,} requests, {point['engine']}: {wrong}" for wrong in point["wrong"]]
    warm = points[len(points) // WARM_UP:]
    _judge_memory(warm, bounds, verdict)
    _judge_objects(warm, bounds, verdict)
    _judge_handles(points, summary, verdict)
    _measure_time(warm, verdict)

    counts = summary["counts"]
    errors = {name.removeprefix("errors "): count for name, count in counts.items() if name.startswith("errors ")}
    verdict.figures |= {
        "requests": f"{counts['items']:,}, of them {counts['cancelled']:,} cancelled, errors "
                    f"{', '.join(f'{code} {count:,}' for code, count in sorted(errors.items()))}",
        "iterations": f"{sum(point['steps'] for point in points):,}, {summary['virtual_hours']} h at 20 ms",
        "tokens": f"{counts['tokens']:,}",
        "faults planted": f"{summary['callback_faults']:,} in callbacks, {summary['model_faults']:,} in steps",
        "idle points": f"{len(points):,}, {len(warm):,} of them after the warm-up",
    }
    return verdict


def _judge_memory(warm: Sequence[Sample], bounds: Bounds, verdict: Verdict) -> None:
    items = [point["handed"] for point in warm]
    limits = {"rss": bounds.rss_per_million, "malloc": bounds.malloc_per_million, "rss_untrimmed": None,
              "rss_anonymous": None}
    is_long_enough = items[-1] >= bounds.items_for_memory
    if not is_long_enough:
        verdict.short.append(f"{items[-1]:,} requests in a process are too few to judge its memory, which takes "
                             f"{bounds.items_for_memory:,}")
    for name, limit in limits.items():
        values = [point[name] for point in warm]
        slope, error = (number / MIB for number in slope_per_million(items, values))
        text = (f"{slope:+.2f} MiB (standard error {error:.2f}; {values[0] / MIB:.2f} to {values[-1] / MIB:.2f} in "
                f"{items[-1] - items[0]:,})")
        verdict.figures[f"{name} per million requests"] = text
        if limit is not None and is_long_enough and slope - 2 * error > limit / MIB:
            verdict.wrong.append(f"{name} grows in a million requests by {text}; {limit / MIB:.2f} are allowed")
    verdict.figures["blocks of Python's allocator per million requests"] = "{:+.0f} (standard error {:.0f})".format(
        *slope_per_million(items, [point["blocks"] for point in warm]))


def _judge_objects(warm: Sequence[Sample], bounds: Bounds, verdict: Verdict) -> None:
    """Judge the objects that each manager keeps alive, and the objects that the process' garbage collector tracks."""
    num_series = 0
    for engine in {point["engine"]: None for point in warm}:
        own = [point for point in warm if point["engine"] == engine]
        series = {f"objects of type {name}": [point["objects"].get(name, 0) for point in own]
                  for name in sorted({name for point in own for name in point["objects"]})}
        series["entries of containers"] = [point["entries"] for point in own]
        num_series += len(series)
        _judge_series(engine, series, sum(point["items"] for point in own), bounds, verdict)
    tracked = {f"objects of type {name} in the process": [point["tracked"].get(name, 0) for point in warm]
               for name in sorted({name for point in warm for name in point["tracked"]})}
    _judge_series("all", tracked, sum(point["items"] for point in warm), bounds, verdict)
    verdict.figures["series of objects that do not grow"] = f"{num_series + len(tracked):,}"


def _judge_series(whose: str, series: dict[str, list[int]], items: int, bounds: Bounds, verdict: Verdict) -> None:
    num_points = min((len(values) for values in series.values()), default=0)
    if num_points < bounds.points:
        verdict.short.append(f"{whose}: {num_points} idle points after the warm-up, {bounds.points} tell growth from "
                             "chance")
        return
    for name, values in series.items():
        if growth(values) > 0 and values[-1] - values[0] > items / bounds.items_per_object:
            verdict.wrong.append(f"{whose}: {name} grow: {values[0]:,} to {values[-1]:,} in {items:,} requests")


def _judge_handles(points: Sequence[Sample], summary: Sample, verdict: Verdict) -> None:
    for name in ("threads", "descriptors"):
        values = sorted({point[name] for point in points})
        verdict.figures[name] = f"{', '.join(map(str, values))} at idle, {summary['handles_after'][name]} at the end"
        if len(values) > 1:
            verdict.wrong.append(f"{name} at idle: {values}")
        if summary["handles_after"][name] != summary["handles_before"][name]:
            verdict.wrong.append(f"{name} at the end: {summary['handles_after'][name]}, before the first engine: "
                                 f"{summary['handles_before'][name]}")


def _measure_time(warm: Sequence[Sample], verdict: Verdict) -> None:
    """Add two figures: the CPU time of a worker per step, with callbacks and model, and the growth of this time.

    The growth is the time at the last tenth of the idle points, divided by the time at the first tenth. It is not
    judged, because other load on the cores changes it more than the engine does.
    """
    ratios = []
    for engine in {point["engine"]: None for point in warm}:
        times = [point["worker_s"] / max(point["steps"], 1) for point in warm if point["engine"] == engine]
        tenth = max(len(times) // 10, 1)
        ratios.append(median(times[-tenth:]) / median(times[:tenth]))
    verdict.figures["worker time per step, last tenth to first"] = (
        f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f} among the engines)")
    verdict.figures["worker time per step"] = (
        f"{1e6 * sum(point['worker_s'] for point in warm) / sum(point['steps'] for point in warm):.0f} us")


def table(verdict: Verdict) -> str:
    lines = [f"{name:>52}  {value}" for name, value in verdict.figures.items()]
    return "\n".join([*lines, *(f"short: {short}" for short in verdict.short),
                      *(f"WRONG: {wrong}" for wrong in verdict.wrong)])
