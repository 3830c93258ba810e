"""Results of a simulation or of a sweep of simulations, as text and as plots."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..bench.saturation import Saturation
from ..bench.summary import aligned, number, table
from ..line_plot import Line, LinePlot, Point
from .capacity import Capacity
from .study import value_words, words_of

Result = Mapping[str, Any]
MOST_LINES = 6
SUSTAINED = {True: "yes", False: "no", None: "-"}


def run_table(result: Result) -> str:
    """Format one simulation as a table."""
    replicas, rows = result["replicas"], []
    if replicas["count"] > 1:
        rows += [["replicas", str(replicas["count"])],
                 ["requests of one", f"{replicas['requests'][0]:,} to {replicas['requests'][1]:,}"],
                 ["its generated tokens", f"{replicas['output_tokens'][0]:,} to {replicas['output_tokens'][1]:,}"]]
    rows += [["time in steps", f"{result['busy_share']:.1%}"],
             ["prompt tokens found in the cache", f"{result['reused_tokens']:,}"],
             ["tokens computed again after pauses", f"{result['recomputed_tokens']:,}"],
             ["cost model", result["cost"]["error"]],
             ["simulated in", f"{result['simulated_in_s']:.1f} s"]]
    return "\n".join([table(result), "", *aligned(rows), *warnings([result])])


def sweep_table(result: Result) -> str:
    """Format a sweep as a table with a row per simulation. An asterisk marks the best simulation."""
    points = result["points"]
    names, best, finding = list(points[0]["settings"]), best_point(points), _finding(result)
    if finding is not None:
        best = next((point for point in points if finding.sustained in point["settings"].values()), None)
    has_goodput = points[0]["goodput"] is not None
    is_search = finding is not None
    rows = [["", *names, *(["sustained"] if is_search else []), "requests/s", "tokens/s", "ttft p50", "p99", "itl p50",
             "p99", "failed",
             *(["good/s", "share"] if has_goodput else [])]]
    rows += [["*" if point is best else "", *(value_words(point["settings"][name]) for name in names),
              *([SUSTAINED[point["sustained"]]] if is_search else []),
              number(point["requests_s"]), number(point["output_tok_s"]),
              *(number(point[f"{name}_ms_{which}"]) for name in ("ttft", "itl") for which in ("p50", "p99")),
              str(point["failed"]),
              *([number(point["goodput"]["requests_s"]), f"{point['goodput']['share']:.1%}"] if has_goodput else [])]
             for point in points]
    told = "most requests a second within bounds" if has_goodput else "most tokens a second"
    if finding is not None:
        told = "what the search found"
    return "\n".join([*aligned(rows), "", f"ttft and itl in milliseconds; *: {told}",
                      f"cost model: {result['cost']['error']}", *warnings(points),
                      *([] if finding is None else ["", finding.words()])])


def _finding(result: Result) -> Saturation | None:
    """Return what a search found; None if there was no search."""
    if "saturation" in result:
        return Saturation(**result["saturation"])
    return Capacity(**result["capacity"]) if "capacity" in result else None


def best_point(points: Sequence[Result]) -> Result:
    """Return the point with the most requests/s within the bounds on latency; without bounds, the most tokens/s."""
    return max(points, key=lambda point: point["output_tok_s"] if point["goodput"] is None
               else point["goodput"]["requests_s"])


def warnings(points: Sequence[Result]) -> list[str]:
    """Return lines that warn of steps beyond the range of the cost model, or an empty list."""
    told = []
    share = max(point["extrapolated"]["share"] for point in points)
    if share:
        names = sorted({name for point in points for name in point["extrapolated"]["steps"]})
        told.append(f"extrapolated: up to {share:.1%} of the steps are beyond the range of the fitted cost model, "
                    f"in {', '.join(name.replace('_', ' ') for name in names)}")
    return [""] * bool(told) + told


def sweep_plots(result: Result) -> dict[str, LinePlot]:
    """Return file name -> plot of a latency against generated tokens/s.

    Each simulation is a point. With several swept settings, each value of the first setting is a line; only the first
    MOST_LINES values are shown. With one swept setting, all points are on one line.
    """
    points = result["points"]
    first, *others = points[0]["settings"]
    groups: dict[str, list[Result]] = {}
    for point in points:
        groups.setdefault(value_words(point["settings"][first]) if others else "", []).append(point)
    found = {}
    for latency, title in (("ttft", "Time to the first token"), ("itl", "Time between tokens")):
        lines = []
        for name, group in list(groups.items())[:MOST_LINES]:
            drawn = [Point(point["output_tok_s"], point[f"{latency}_ms_p99"], point[f"{latency}_ms_p50"],
                           point[f"{latency}_ms_p99"], words_of({each: point["settings"][each] for each in
                                                                 others or [first]}))
                     for point in group if point[f"{latency}_ms_p99"] is not None]
            if drawn:
                lines.append(Line(f"{first} {name}" if others else "", drawn))
        if lines:
            found[f"simulated-{latency}.svg"] = LinePlot(
                f"{title} by throughput, simulated", "points: 99th percentiles; bars: down to the medians",
                "generated tokens a second", "milliseconds", lines)
    return found
