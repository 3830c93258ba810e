"""Compute the figures of `batch-manager watch`, for the last period and the last minute, from readings."""

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

from .sources import Bounds, Latency, Reading, rise

WINDOW_S = 60.0
COUNTS = ("new", "finished", "paused", "refused", "errors")
LATENCIES = ("first_token", "per_token", "queue")
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Latencies of a group of requests, in seconds.

    count       number of requests
    quantiles   the latencies at the quantiles 0.5, 0.9 and 0.99; None: unknown
    """

    count: int
    mean: float
    quantiles: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Current figures. Missing entries are unknown.

    gauges             the gauges of the last Reading
    counts             kind of event, such as "finished" (see COUNTS) -> number of requests since the previous
                       figures; 0 in the first ones
    recent             kind of event -> number of requests in the window, which is the last window_s seconds
    window_s           length of the window: 60 seconds, less at first, more if readings are rare; 0: only one reading
    tokens_per_s, prompt_tokens_per_s   generated tokens, and tokens of accepted prompts, per second of the last
                       period, which is the time from an earlier reading to the last reading (see History.figures)
    iteration_share    share of the last period that the worker spent in iterations
    callback_share     share of the last period that the worker spent in callbacks. It includes the get and
                       statistics callbacks, which iteration_share excludes
    latencies          kind of latency, such as "first_token" (see LATENCIES) -> latencies of requests that ended in the
                       window; None: no request ended
    latency_over       period of the latencies, such as "60s"; "start": since the engine's start, because no request
                       ended in the window; "": no latencies
    """

    gauges: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, int] = field(default_factory=dict)
    window_s: float = 0.0
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    iteration_share: float | None = None
    callback_share: float | None = None
    latencies: dict[str, Spread | None] = field(default_factory=dict)
    latency_over: str = ""


class History:
    """Keeps the readings of the last minute, and computes the current figures from them."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()
        self._counted: Reading | None = None      # the last reading of the previous figures

    def add(self, reading: Reading) -> None:
        readings = self._readings
        if readings and reading.at_s <= readings[-1].at_s:           # a repeated reading, or an earlier time
            reading = replace(reading, at_s=readings.pop().at_s)
        readings.append(reading)
        while len(readings) > 2 and readings[1].at_s <= reading.at_s - WINDOW_S:
            readings.popleft()

    def figures(self, period_s: float) -> Figures:
        """Return the current figures.

        `counts`, the rates and the shares are of the last period, which is the time since the last reading of the
        previous call; without a newer reading, rates and shares are None. In the first call, the rates and shares are
        of about period_s seconds.
        """
        if not self._readings:
            return Figures()
        now, first = self._readings[-1], self._readings[0]
        window_s, previous, self._counted = now.at_s - first.at_s, self._counted, now
        counted = previous or now
        latencies, over = _latencies(first, now), f"{window_s:.0f}s"
        if now is first or not any(latencies.values()):
            latencies, over = _latencies(None, now), "start"
        over = over if any(latencies.values()) else ""
        if now is first:
            return Figures(now.gauges, latencies=latencies, latency_over=over)
        start = previous or min(list(self._readings)[:-1], key=lambda each: abs(now.at_s - period_s - each.at_s))
        took_s = now.at_s - start.at_s
        if took_s <= 0:
            return Figures(now.gauges, _counts(counted, now), _counts(first, now), window_s, latencies=latencies,
                           latency_over=over)
        return Figures(
            now.gauges, _counts(counted, now), _counts(first, now), window_s,
            *(_rise(name, start, now) / took_s for name in ("tokens", "prompt_tokens")),
            *(min(_rise(name, start, now) / took_s, 1.0) for name in ("iteration", "callback")),
            latencies, over)


def _rise(name: str, start: Reading, now: Reading) -> float:
    return rise(start.counters.get(name, 0.0), now.counters.get(name, 0.0))


def _counts(start: Reading, now: Reading) -> dict[str, int]:
    return {name: round(_rise(name, start, now)) for name in COUNTS if name in now.counters}


def _latencies(start: Reading | None, now: Reading) -> dict[str, Spread | None]:
    """Return name of a latency -> its spread over the requests that ended between two readings.

    The spread is None if no request ended. Names that `now.latencies` lacks are left out.

    start   the earlier of the two readings; None: count from the engine's start
    """
    found: dict[str, Spread | None] = {}
    for name in (name for name in LATENCIES if name in now.latencies):
        latency = now.latencies[name]
        before = start.latencies.get(name, Latency()) if start else Latency()
        if latency.count < before.count:                 # the engine restarted
            before = Latency()
        count = latency.count - before.count
        buckets = {bound: value - before.buckets.get(bound, 0.0) for bound, value in latency.buckets.items()}
        found[name] = Spread(round(count), (latency.sum - before.sum) / count, tuple(
            quantile(buckets, share) for share in QUANTILES) if buckets else None) if count > 0 else None
    return found


def quantile(buckets: Bounds, share: float) -> float:
    """Return a quantile, interpolated linearly within its bucket; a quantile above the last finite bound is infinite.

    buckets   bound of a bucket -> cumulative count; the last count is at least 1
    share     0 to 1
    """
    bounds = sorted(buckets)
    wanted = share * buckets[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted and buckets[bound] > below:
            return inf if bound == inf else lower + (bound - lower) * (wanted - below) / (buckets[bound] - below)
        lower, below = bound, buckets[bound]
    return inf
