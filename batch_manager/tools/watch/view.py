"""The live view of `batch-manager watch`, drawn by rich."""

from collections import deque
from collections.abc import Sequence
from math import inf
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .figures import COUNTS, QUANTILES, Figures
from .sources import Source

WIDEST = 80
NUM_RATES = 24                  # values in the sparkline
STALE_S = 3.0                   # the view shows the age of the latest record if it is older
LABEL, ACCENT, QUIET, BAD = "dim", "cyan", "dim", "bold red"
SPARKS, PLAIN_SPARKS = "▁▂▃▄▅▆▇█", "_.-=*#"
BLOCKS, PLAIN_BLOCKS = "━━━", "#=."      # used, free with content, free
TITLES = {"first_token": "first token", "per_token": "per token", "queue": "in the queue"}
UNWANTED = {"paused": "bold yellow", "refused": BAD, "errors": BAD}
UNKNOWN = "–"


class Picture:
    """The live view in the terminal. Each call within `with` redraws it. The last view stays on the screen."""

    def __init__(self, source: Source) -> None:
        self._source, self._rates = source, deque(maxlen=NUM_RATES)
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, figures: Figures, problem: str) -> None:
        if figures.tokens_per_s is not None and not problem:
            self._rates.append(figures.tokens_per_s)
        age_s = self._source.age_s or 0.0
        note = f"the latest record is {duration(age_s)} old" if age_s > STALE_S else ""
        self._live.update(View(self._source.name, figures, self._rates, problem, note), refresh=True)


class View:
    """The content of the live view at one time.

    title      name of the source
    figures    the numbers to show
    rates      generated tokens/s of the latest figures, oldest first. Figures shown with a problem have no entry
    problem    why new figures are missing; "": no figures are missing
    note       a warning that is less severe than a problem
    """

    def __init__(self, title: str, figures: Figures, rates: Sequence[float], problem: str = "",
                 note: str = "") -> None:
        self.title, self.figures, self.rates, self.problem, self.note = title, figures, rates, problem, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._is_plain = not options.encoding.startswith("utf")
        now = Table.grid(padding=(0, 2))
        now.add_column(style=LABEL, min_width=12)
        now.add_column()
        for label, row in (("requests", self._requests()), ("KV blocks", self._blocks()), ("tokens/s", self._tokens()),
                           ("time", self._shares())):
            now.add_row(label, row)
        width = min(options.max_width, WIDEST)
        title = Text.assemble(("batch-manager", "bold"), "  ", _short(self.title, max(width - 22, 4)))
        foot = Text(self.problem, BAD) if self.problem else Text(self.note) if self.note else None
        parts = [now, Text(), self._recent()]
        if self.figures.latencies:
            parts += [Text(), self._latencies()]
        yield Panel(Group(*parts), title=title, title_align="left", subtitle=foot, subtitle_align="left", width=width,
                    padding=(0, 1), box=box.ASCII if self._is_plain else box.ROUNDED,
                    border_style="red" if self.problem else QUIET)

    def _gauge(self, name: str) -> str:
        value = self.figures.gauges.get(name)
        return self._unknown if value is None else f"{value:,.0f}"

    @property
    def _unknown(self) -> str:
        return "-" if self._is_plain else UNKNOWN

    def _requests(self) -> Text:
        most, wait_s = self.figures.gauges.get("max_active", -1), self.figures.gauges.get("oldest_wait", 0)
        row = Text.assemble((self._gauge("active"), "bold"), (f" of {most:,.0f}" if most > 0 else "", QUIET), " active",
                            "   ", (self._gauge("scheduled"), "bold"), " in the step   ",
                            (self._gauge("queued"), "bold"), " queued")
        if wait_s > 0:
            row.append(f", oldest {duration(wait_s)}", QUIET)
        return row

    def _blocks(self) -> "Bar":
        gauges = self.figures.gauges
        return Bar(gauges.get("kv_used", 0), gauges.get("kv_cached", 0), gauges.get("kv_max", 0), self._is_plain)

    def _tokens(self) -> Table:
        figures = self.figures
        current = Text(self._unknown if figures.tokens_per_s is None else rate(figures.tokens_per_s), "bold")
        row = Table.grid(padding=(0, 2))
        row.add_column(min_width=7)
        row.add_column(style=ACCENT)
        row.add_column(style=QUIET)
        peak = f"peak {rate(max(self.rates))}" if self.rates else ""
        if figures.prompt_tokens_per_s:
            peak += f"   prompts {rate(figures.prompt_tokens_per_s)}"
        marks = PLAIN_SPARKS if self._is_plain else SPARKS
        row.add_row(current, sparkline(self.rates, marks).ljust(NUM_RATES), peak)
        return row

    def _shares(self) -> Text:
        iterations, callbacks = self.figures.iteration_share, self.figures.callback_share
        row = Text()
        for share, where in ((iterations, "in iterations"), (callbacks, "in callbacks")):
            row.append(self._unknown if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}", "bold")
            row.append(f" {where}   ")
        return row

    def _recent(self) -> Table:
        recent, row = self.figures.recent, Table.grid(padding=(0, 2))
        row.add_column(style=LABEL, min_width=12)
        row.add_column()
        counts = Text()
        for name in COUNTS:
            count = recent.get(name)
            style = UNWANTED.get(name, "bold") if count else QUIET
            counts.append(self._unknown if count is None else f"{count:,}", style)
            counts.append(f" {name}   ")
        row.add_row(f"last {self.figures.window_s:.0f} s" if self.figures.window_s else "recently", counts)
        return row

    def _latencies(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style=LABEL, min_width=12)
        for _ in range(len(QUANTILES) + 2):
            table.add_column(justify="right", min_width=8)
        heads = [*(f"p{each * 100:g}" for each in QUANTILES), "mean", "requests"]
        table.add_row("since start" if self.figures.latency_over == "start" else "",
                      *(Text(head, QUIET) for head in heads))
        for name, spread in self.figures.latencies.items():
            if spread is None:
                cells = [self._unknown] * len(QUANTILES) + [self._unknown, "0"]
            else:
                quantiles = spread.quantiles or [None] * len(QUANTILES)
                cells = [*(self._unknown if each is None else duration(each) for each in quantiles),
                         duration(spread.mean), f"{spread.count:,}"]
            table.add_row(TITLES[name], *cells)
        return table


class Bar:
    """A bar of used, cached and free KV cache blocks, followed by the numbers of blocks.

    The bar is at most 40 cells wide, and narrower in a narrow terminal.
    """

    def __init__(self, used: float, cached: float, most: float, is_plain: bool) -> None:
        self.used, self.cached, self.most, self.marks = used, cached, most, PLAIN_BLOCKS if is_plain else BLOCKS
        self.is_plain = is_plain

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.most:
            yield Text("-" if self.is_plain else UNKNOWN)
            return
        share = self.used / self.most
        numbers = f" {share:4.0%}  {self.used:,.0f} of {self.most:,.0f}"
        cached = f", {self.cached:,.0f} cached" if self.cached else ""
        width = max(min(options.max_width - len(numbers) - len(cached), 40), 4)
        parts = [_cells(self.used, self.most, width), _cells(self.cached, self.most, width)]
        parts[1] = min(parts[1], width - parts[0])
        styles = "yellow" if share > 0.95 else ACCENT, f"{ACCENT} dim", "bright_black"
        for mark, count, style in zip(self.marks, [*parts, width - sum(parts)], styles):
            yield Segment(mark * count, Style.parse(style))
        yield Segment(numbers, Style(bold=True))
        yield Segment(cached, Style.parse(QUIET))


def _cells(count: float, most: float, width: int) -> int:
    """Return the width, in cells, of the part of a bar that shows `count`. At least 1 for a count above 0."""
    return max(round(count / most * width), 1 if count else 0)


def sparkline(values: Sequence[float], marks: str) -> str:
    """Return one mark per value. The largest value has the highest mark."""
    largest = max(values, default=0.0)
    return "".join(marks[round(value / largest * (len(marks) - 1))] if largest else marks[0] for value in values)


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Format a duration with a unit, in about three digits. Infinity is "off scale"."""
    if seconds == inf:
        return "off scale"
    for below, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"),
                                (inf, 1 / 3600, "h")):
        if seconds < below:
            value = seconds * factor
            return f"{value:,.{0 if value >= 100 or value == 0 else 1 if value >= 10 else 2}f} {unit}"
    return UNKNOWN


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"...{text[3 - most:]}"
