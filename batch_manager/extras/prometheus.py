"""Statistics for Prometheus, by prometheus_client: the extra `prometheus`.

    statistics = PrometheusStatistics(model="austen-4m")
    prometheus_client.REGISTRY.register(statistics)      # or a /metrics of one's own: statistics.exposition()
    manager = GptManager(..., return_batch_manager_stats_cb=statistics,
                         optional_params=TrtGptModelOptionalParams(flush_stats_when_idle=True))
    statistics.observe(metrics, num_tokens)        # where requests ask for `return_perf_metrics`

An iteration parses its record and adds up some numbers. Metrics are made when they are scraped.
"""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..responses.perf_metrics import PerfMetrics
from .statistic_families import FAMILIES, LATENCIES, LatestStatistics, latencies

__all__ = ["CONTENT_TYPE", "PrometheusStatistics"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


class PrometheusStatistics(LatestStatistics):
    """A statistics callback, and a collector for a registry of prometheus_client.

    model   value of the labels `model` and `model_name`

    Records are those of one engine. Any thread may observe and collect. Gauges fall to zero where the engine has
    `flush_stats_when_idle=True`, which sends a record when the last request has left.
    """

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._model = model
        self._histograms = {name: _Histogram() for name in LATENCIES}

    def observe(self, metrics: PerfMetrics, num_tokens: int) -> None:
        """A request has ended.

        metrics      of its final response; see PerfMetrics.of, and Delta.metrics
        num_tokens   that it generated
        """
        for name, seconds in latencies(metrics, num_tokens):
            self._histograms[name].add(seconds)

    def exposition(self) -> bytes:
        """What a server answers at /metrics, in CONTENT_TYPE."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Metric]:
        """None: a registry would collect to find names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of now."""
        for family in FAMILIES:
            values = family.values(self)
            if not values:
                continue
            labels = {"model": self._model, "version": "1"} if family.is_of_the_original else {
                "model_name": self._model}
            names = [*labels, family.label] if family.label else [*labels]
            for name in family.names:
                kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
                metric = kind(name, family.text, labels=names)
                for category, value in values.items():
                    metric.add_metric([*labels.values(), category] if family.label else [*labels.values()], value)
                yield metric
        for latency, (text, families) in LATENCIES.items():
            buckets, total = self._histograms[latency].cumulative()
            for family in families:
                metric = HistogramMetricFamily(family, text, labels=["model_name"])
                metric.add_metric([self._model], buckets, total)
                yield metric


class _Histogram:
    """Counts of values by SECONDS. A value is counted in one operation of the interpreter."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as prometheus_client wants them, and the sum of the values."""
        counts, so_far, buckets = list(self._counts), 0, []
        for bound, count in zip([*map(str, SECONDS), "+Inf"], counts):
            so_far += count
            buckets.append((bound, float(so_far)))
        return buckets, self._sum
