"""Watch a running engine in the terminal.

    batch-manager watch --url http://127.0.0.1:8000/metrics     a server that exposes PrometheusStatistics
    batch-manager watch statistics.jsonl                        a growing file that JsonlStatistics writes

If the output is a terminal and the package rich is installed, the program redraws a screen every --interval. Otherwise,
or with --plain, it prints a line every --interval. Every line has the same fields, NAME=VALUE, in the same order, which
is not the order of this list; "-" means unknown:

    time, state, age_s      local time; ok or unreachable (all numbers are unknown); seconds since a file's last record
    active, queued, scheduled, kv_used, kv_free, kv_cached, oldest_wait_ms      current requests and KV cache blocks
    new, finished, paused, refused, errors          requests in this interval; errors include refused requests
    tokens_per_s, prompt_tokens_per_s               generated tokens; tokens of accepted prompts
    iteration_percent, callback_percent             share of the time in iterations and in callbacks; these four are
                            unknown if a file got no record in this interval
    first_token_*, per_token_*, queue_*             p50_ms, p90_ms, p99_ms and mean_ms of requests that ended
    latency_over            period of these latencies: usually 60s; "start" means since the engine's start, because no
                            request ended in the last 60 s

Percentiles are interpolated in the buckets of /metrics. A file of records gives one latency only: the mean time in the
queue of the requests that started. The program first reads the last MiB of a file. The file may be replaced or
truncated. If a busy engine has written nothing for 10 s, its current requests and blocks are unknown. The address must
belong to one engine. If gunicorn workers share the address, answers come from different engines, and rates are wrong.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from math import inf
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from ..__main__ import run_as
from ..command_parser import CommandParser
from .figures import COUNTS, LATENCIES, QUANTILES, Figures, History
from .sources import FileSource, MetricsSource, Source, SourceError, why_not_watchable

if TYPE_CHECKING:
    from .view import Picture

ENDED, UNREACHABLE, USAGE, INTERRUPTED = 0, 1, 2, 130
SHORTEST_INTERVAL_S = 0.1
LONGEST_INTERVAL_S = 86_400.0       # a day
SHORTEST_ANSWER_S, LONGEST_ANSWER_S = 1.0, 5.0      # bounds of the timeout of one answer

# (figures, problem) -> None. The problem is the reason why there are no new figures, or "".
Show = Callable[[Figures, str], None]
EXIT_STATUSES = ("exit status: 0 after --count; 1 the source was unreadable for longer than --timeout; 2 an argument "
                 "is wrong; 130 Ctrl-C")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    options = parse_options(argv)
    if options.url is None:
        source: Source = FileSource(options.file)
    else:
        try:
            import prometheus_client.parser  # noqa: F401
        except ImportError:
            print('watch: prometheus-client is not installed; --url needs it; pip install "batch-manager[tools]"',
                  file=sys.stderr)
            return USAGE
        source = MetricsSource(options.url, min(max(options.timeout, SHORTEST_ANSWER_S), LONGEST_ANSWER_S))
    try:
        with closing(source):
            picture = _picture(source) if sys.stdout.isatty() and not options.plain else None
            if picture is None:
                return follow(source, options, partial(show_line, source), shows_first=False)
            signal.signal(signal.SIGTERM, _terminated)       # to restore the cursor
            with picture:
                return follow(source, options, picture, shows_first=True)
    except KeyboardInterrupt:
        return INTERRUPTED


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="batch-manager watch", description=__doc__, epilog=EXIT_STATUSES)
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="a file of statistics, as JSON lines")
    add("--url", type=_metrics_url, help="an address for Prometheus; the default path is /metrics")
    add("--interval", type=_seconds(SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S), default=1.0, metavar="SECONDS",
        help="at most a day (1)")
    add("--count", type=int, default=0, metavar="N", help="end after N intervals; 0: never (0)")
    add("--timeout", type=_seconds(0.0), default=10.0, metavar="SECONDS",
        help="give up after the source is unreadable for this long (10)")
    add("--plain", action="store_true", help="print lines in a terminal too")
    options = parser.parse_args(argv)
    if (options.file is None) == (options.url is None):
        parser.error("neither a file of statistics nor --url was given; pass one of them" if options.file is None else
                     "a file of statistics and --url were both given; expected only one of them; leave one out")
    if options.file is not None and (reason := why_not_watchable(options.file)):
        parser.error(reason)
    if options.count < 0:
        parser.error(f"--count is {options.count}; expected at least 0; leave it out to watch without end")
    return options


def _seconds(least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not least <= value <= most:      # refuses NaN too
            expected = f"at least {least:g}" if most == sys.float_info.max else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text} seconds is out of range; expected {expected}")
        return value
    read.__name__ = "number of seconds"
    return read


def _metrics_url(text: str) -> str:
    try:
        parts = urlsplit(text if "//" in text else f"//{text}", scheme="http")
        _ = parts.port                  # raises ValueError for a port that is not 0 to 65535
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address; expected http://HOST:PORT/metrics")
    return (parts if parts.path not in ("", "/") else parts._replace(path="/metrics")).geturl()


def follow(source: Source, options: argparse.Namespace, show: Show, shows_first: bool) -> int:
    """Read the source and show its figures once per interval, and return the exit status.

    The function returns after --count intervals, or if the source is unreadable for longer than --timeout.

    shows_first   whether to show the first reading, which has no rates
    """
    history, shown, good_at = History(), -1, time.monotonic()
    next_at = good_at
    while True:
        try:
            for reading in source.poll():
                history.add(reading)
            problem, good_at = "", time.monotonic()
        except SourceError as error:
            problem, away_s = str(error), time.monotonic() - good_at
            if away_s > options.timeout:
                print(f"watch: {source.name} was not readable for {away_s:.1f} s: {problem}; expected the statistics "
                      "of an engine; start the engine, correct the name, or wait longer with --timeout",
                      file=sys.stderr)
                return UNREACHABLE
        shown += 1
        if shown or shows_first:
            show(history.figures(options.interval), problem)
        if options.count and shown >= options.count:
            return ENDED
        next_at = max(next_at + options.interval, time.monotonic())
        time.sleep(max(next_at - time.monotonic(), 0.0))


# ---------------------------------------------------------------------- lines


def show_line(source: Source, figures: Figures, problem: str) -> None:
    print(line(Figures() if problem else figures, problem, time.time(), source.age_s), flush=True)


def line(figures: Figures, problem: str, now_s: float, age_s: float | None) -> str:
    """Format one line, with the fields described in the docstring of this module.

    age_s   age of the latest record in seconds; None: unknown
    """
    gauges, counts = figures.gauges, figures.counts
    fields: dict[str, str] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now_s)),
                              "state": "unreachable" if problem else "ok", "age_s": _number(age_s, 1)}
    for name in ("active", "queued", "scheduled"):
        fields[name] = _number(gauges.get(name))
    for name in COUNTS:
        fields[name] = _number(counts.get(name))
    for name in ("kv_used", "kv_free", "kv_cached"):
        fields[name] = _number(gauges.get(name))
    fields["tokens_per_s"] = _number(figures.tokens_per_s, 1)
    fields["prompt_tokens_per_s"] = _number(figures.prompt_tokens_per_s, 1)
    fields["iteration_percent"] = _number(figures.iteration_share, 1, 100)
    fields["callback_percent"] = _number(figures.callback_share, 1, 100)
    fields["oldest_wait_ms"] = _number(gauges.get("oldest_wait"), 3, 1000)
    for name in LATENCIES:
        spread = figures.latencies.get(name)
        quantiles = spread.quantiles if spread and spread.quantiles else [None] * len(QUANTILES)
        for share, value in zip(QUANTILES, quantiles):
            fields[f"{name}_p{share * 100:g}_ms"] = _number(value, 3, 1000)
        fields[f"{name}_mean_ms"] = _number(spread.mean if spread else None, 3, 1000)
    fields["latency_over"] = figures.latency_over or "-"
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _number(value: float | None, digits: int = 0, factor: float = 1) -> str:
    if value is None:
        return "-"
    return "inf" if value == inf else f"{value * factor:.{digits}f}"


# ---------------------------------------------------------------------- the picture


def _picture(source: Source) -> "Picture | None":
    """Return the live view, or None if the terminal cannot show it or rich is not installed."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        from .view import Picture
    except ImportError:
        return None
    return Picture(source)


def _terminated(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(run_as("watch"))
