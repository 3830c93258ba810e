"""The plots of a benchmark."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import counted
from ..line_plot import Line, LinePlot, Point
from ..output_file import OutputFiles
from ..stacked_plot import Panels, Span, StackedPlot
from .composition import MOST_SPANS, Iteration, iterations_of, over_time, times_by_batch, with_idle_times
from .session import Served
from .summary import load_words

WORTH_A_LINE = 0.3      # the plot has a line for the pool's size if at least this share of the pool is in use
SHORT_S = 2.0           # shorter times are given in milliseconds
LATENCIES = {"ttft": ("Time to the first token", "time-to-first-token"),
             "itl": ("Time between tokens", "between-tokens"), "e2e": ("Time to the last token", "end-to-end")}
LABELS = {"request_rate": "beside the points: requests a second that arrive",
          "concurrency": "beside the points: requests under way at a time"}

LONGEST_WORDS = 36      # most characters of the workload's description below a title

Result = Mapping[str, Any]
Plot = LinePlot | StackedPlot | Panels


def plots(result: Result, points: Sequence[Result], served: Sequence[Served]) -> dict[str, Plot]:
    """Return file name -> plot.

    Each run with kept statistics has plots of the tokens in its steps, of the KV cache and of the time between tokens.
    A sweep also has plots of latency against throughput.
    """
    found: dict[str, Plot] = {}
    if result["kind"] != "run":
        # In the first run of a search all requests arrive at once. This run is not a point of the curve.
        found |= latency_plots(result["swept"], points[1:] if result["kind"] == "saturation" else points)
    for point, one in zip(points, served, strict=True):
        suffix = "" if result["kind"] == "run" else f"-{file_words(load_words(point))}"
        iterations = iterations_of(one.records)
        words = f"{result['workload']}, {load_words(point)}"
        words = words if len(words) <= LONGEST_WORDS else load_words(point)
        if iterations:
            found[f"batch{suffix}.svg"] = batch_plot(iterations, words, result["beam_width"])
            found[f"kv-cache{suffix}.svg"] = kv_cache_plot(iterations, words)
            if (plot := batch_size_plot(iterations, words)) is not None:
                found[f"between-tokens-by-batch{suffix}.svg"] = plot
    return found


def write_plots(folder: Path, drawn: Mapping[str, Plot], files: OutputFiles) -> None:
    """Write the plots into the folder, which is created if it does not exist. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in drawn.items():
        files.open(folder / name).write(plot.render())


def file_words(words: str) -> str:
    """Return `words` in a form for file names: "2.5-requests-s" for "2.5 requests/s"."""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


# ---------------------------------------------------------------------- of a sweep


def latency_plots(swept: str, points: Sequence[Result]) -> dict[str, Plot]:
    """Return file name -> plot of one latency: its median and 99th percentile against generated tokens/s.

    There is a plot for each latency that at least one point has.

    swept   result field that the sweep varies: request_rate or concurrency
    """
    at_once = [point for point in points if not point[swept]]
    ordered = sorted((point for point in points if point[swept]), key=lambda point: point[swept]) + at_once
    found: dict[str, Plot] = {}
    for name, (title, file) in LATENCIES.items():
        known = [point for point in ordered if point[f"{name}_ms_p50"] is not None]
        if not known:
            continue
        unit, scale = _time_unit(max(point[f"{name}_ms_p99"] for point in known) / 1e3)
        lines = []
        for percent in (50, 99):
            values = [(point["output_tok_s"], point[f"{name}_ms_p{percent}"] / 1e3 * scale,
                       f"{point[swept]:.3g}" if point[swept] else "at once") for point in known]
            lines.append(Line("median" if percent == 50 else "99th percentile",
                              [Point(x, y, y, y, label) for x, y, label in values]))
        found[f"throughput-{file}.svg"] = LinePlot(
            f"{title} by throughput", LABELS[swept], "generated tokens a second", unit, lines)
    return found


# ---------------------------------------------------------------------- of one run


def batch_plot(iterations: Sequence[Iteration], words: str, beam_width: int) -> Panels:
    """Plot generated tokens and prompt tokens per step over time.

    There are two panels with separate scales, because steps with prompts have many more tokens.

    words   description of the workload and its load, printed below the title
    """
    generating = [float(one.generating * beam_width) for one in iterations]
    contexts = [float(one.context) for one in iterations]
    return Panels([
        _over_time("Tokens generated in a step", words, "tokens a step", [("", generating)], iterations),
        _over_time("Tokens of prompts computed in a step", words, "tokens a step", [("", contexts)], iterations)])


def kv_cache_plot(iterations: Sequence[Iteration], words: str) -> StackedPlot:
    """Plot the blocks that requests hold, and the cached blocks, over time.

    A line shows the size of the pool if at least the share WORTH_A_LINE of the pool is in use at some time. Otherwise,
    the text below the title has the size.
    """
    count, iterations = len(iterations), with_idle_times(iterations)
    used, cached = ([float(getattr(one, name)) for one in iterations] for name in ("used", "cached"))
    pool = iterations[0].blocks
    layers = [("held by running requests", used), *([("cached", cached)] if any(cached) else [])]
    is_near = max(map(sum, zip(used, cached))) >= WORTH_A_LINE * pool
    return _over_time("The KV cache", words if is_near else f"{words}; pool: {counted(pool, 'block')}", "blocks",
                      layers, iterations, count=count, limit=(float(pool), "the pool") if is_near else None)


def batch_size_plot(iterations: Sequence[Iteration], words: str) -> LinePlot | None:
    """Plot the time between two tokens of a request by batch size. Returns None if there are no consecutive steps."""
    by_contexts = {name: times_by_batch(iterations, with_contexts=with_contexts)
                   for name, with_contexts in (("generation only", False), ("with prompts in the step", True))}
    if not any(by_contexts.values()):
        return None
    unit, scale = _time_unit(max(high for rows in by_contexts.values() for *_, high in rows))
    lines = [Line(name, [Point(size, middle * scale, low * scale, high * scale) for size, low, middle, high in rows])
             for name, rows in by_contexts.items()]
    return LinePlot("Time between tokens by batch", f"{words}; points: medians; bars: 10th to 90th percentile",
                    "requests that generate in the step", unit, lines)


def _over_time(title: str, words: str, y_label: str, layers: Sequence[tuple[str, Sequence[float]]],
               iterations: Sequence[Iteration], *, count: int | None = None,
               limit: tuple[float, str] | None = None) -> StackedPlot:
    """Return a plot of stacked layers of amounts over time.

    words    first part of the text below the title
    layers   (name, amount for each iteration) of each layer
    count    number of steps to state in the text below the title; None: the length of `iterations`
    limit    (amount, label) of a dashed line; None: no line
    """
    unit, scale = _time_unit(iterations[-1].end_s)
    rows = zip(*(over_time(iterations, amounts) for _, amounts in layers))
    spans = [Span(row[0][0] * scale, row[0][1] * scale, tuple(amount for *_, amount in row)) for row in rows]
    means = f" in {MOST_SPANS} means" if len(iterations) > MOST_SPANS else ""
    how = counted(count or len(iterations), "step") + means
    return StackedPlot(title, f"{words}; {how}", f"{unit} from the first step", y_label, [name for name, _ in layers],
                       spans, limit)


def _time_unit(most_s: float) -> tuple[str, float]:
    """Return the name of the unit for times up to `most_s` seconds, and the number of these units in a second."""
    return ("milliseconds", 1e3) if most_s < SHORT_S else ("seconds", 1.0)

