"""Statistics as Prometheus metrics. Needs prometheus_client: the extra `prometheus`.

    statistics = PrometheusStatistics(model="austen-4m")
    prometheus_client.REGISTRY.register(statistics)      # or serve statistics.exposition() at /metrics
    manager = GptManager(..., return_batch_manager_stats_cb=statistics,
                         optional_params=TrtGptModelOptionalParams(flush_stats_when_idle=True))
    statistics.observe(metrics, num_tokens)        # for requests with `return_perf_metrics`

Per iteration, the callback parses one record and updates a few sums. Metrics are built on each scrape.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..responses.perf_metrics import PerfMetrics
from .statistic_families import FAMILIES, LATENCIES, LatestStatistics, latencies

__all__ = ["CONTENT_TYPE", "PrometheusStatistics"]

RUNNING_TASKS, WAITING_TASKS = "Running LoRA Tasks", "Waiting LoRA Tasks"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)


class PrometheusStatistics(LatestStatistics):
    """A statistics callback, and a collector for a prometheus_client registry.

    model           value of the labels `model` and `model_name`
    max_lora        value of the label `max_lora`: how many adapters the device holds
    adapter_name    task id -> name of an adapter; None: its id

    Use one object per engine. Any thread may observe and collect. With `flush_stats_when_idle=True`, the engine sends
    a record after its last request ends, so gauges fall to zero.
    """

    def __init__(self, model: str, max_lora: int = 0, adapter_name: Callable[[int], str | None] | None = None) -> None:
        super().__init__(model)
        self._max_lora, self.adapter_name = max_lora, adapter_name
        self._model = model
        self._histograms = {name: _Histogram() for name in LATENCIES}

    def observe(self, metrics: PerfMetrics, num_tokens: int) -> None:
        """Add the latencies of a finished request to the histograms.

        metrics      metrics of the final response; see PerfMetrics.of and Delta.metrics
        num_tokens   number of generated tokens
        """
        for name, seconds in latencies(metrics, num_tokens):
            self._histograms[name].add(seconds)

    def exposition(self) -> bytes:
        """Return the current metrics as the body for /metrics, whose content type is CONTENT_TYPE."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Metric]:
        """Return []. Without this method, registration would collect metrics to learn their names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        for family in FAMILIES:
            values = family.values(self)
            if not values:
                continue
            labels = {"model": self._model, "version": "1"} if family.is_nv_trt_llm else {
                "model_name": self._model}
            names = [*labels, family.label] if family.label else [*labels]
            for name in family.names:
                kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
                metric = kind(name, family.description, labels=names)
                for category, value in values.items():
                    metric.add_metric([*labels.values(), category] if family.label else [*labels.values()], value)
                yield metric
        if RUNNING_TASKS in self.record:
            metric = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running and waiting requests; the value "
                                       "is the time", labels=["max_lora", "running_lora_adapters",
                                                              "waiting_lora_adapters"])
            metric.add_metric([str(self._max_lora), self._adapters(RUNNING_TASKS), self._adapters(WAITING_TASKS)],
                              self.received_at_s)
            yield metric
        for latency, (description, names) in LATENCIES.items():
            buckets, total = self._histograms[latency].cumulative()
            for name in names:
                metric = HistogramMetricFamily(name, description, labels=["model_name"])
                metric.add_metric([self._model], buckets, total)
                yield metric


    def _adapters(self, key: str) -> str:
        """Return the names of the adapters whose task ids a text of the record lists."""
        tasks = filter(None, self.record[key].split(","))
        return ",".join(self.adapter_name and self.adapter_name(int(task)) or task for task in tasks)


class _Histogram:
    """A histogram of times, with fixed bucket bounds from 1 ms to 120 s."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return ([(upper bound, cumulative count), ...], sum of the values), in the format of prometheus_client."""
        counts, so_far, buckets = list(self._counts), 0, []
        for bound, count in zip([*map(str, SECONDS), "+Inf"], counts):
            so_far += count
            buckets.append((bound, float(so_far)))
        return buckets, self._sum
