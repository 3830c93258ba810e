"""Statistics for Prometheus, by prometheus_client: the extra `prometheus`.

    statistics = PrometheusStatistics(model="austen-4m")
    prometheus_client.REGISTRY.register(statistics)      # or a /metrics of one's own: statistics.exposition()
    manager = GptManager(..., return_batch_manager_stats_cb=statistics,
                         optional_params=TrtGptModelOptionalParams(flush_stats_when_idle=True))
    statistics.observe(metrics, num_tokens)        # where requests ask for `return_perf_metrics`

An iteration parses its record and adds up some numbers. Metrics are made when they are scraped.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..responses.perf_metrics import PerfMetrics
from .statistic_families import NV_TRT_LLM

__all__ = ["CONTENT_TYPE", "PrometheusStatistics"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
MICROSECONDS = 1e-6

# Names that dashboards of other engines read. family -> (text, key of the latest record)
GAUGES = {
    "vllm:num_requests_running": ("Requests in the last step", "Scheduled Requests"),
    "vllm:num_requests_waiting": ("Requests that wait for a place among the active ones", "Queued Requests"),
    "sglang:num_running_reqs": ("Requests in the last step", "Scheduled Requests"),
    "sglang:num_queue_reqs": ("Requests that wait for a place among the active ones", "Queued Requests"),
    "batch_manager_oldest_wait_microseconds": ("Wait of the oldest request that was in no step yet",
                                               "Oldest Wait Microseconds"),
    "batch_manager_queued_tokens": ("Prompt tokens of waiting requests", "Queued Tokens"),
    "batch_manager_cached_kv_blocks": ("Free blocks whose content prompts may still find", "Cached KV cache blocks"),
}
# likewise; the key counts since the start of the engine
COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens of accepted requests", "Accepted Prompt Tokens"),
    "sglang:prompt_tokens": ("Prompt tokens of accepted requests", "Accepted Prompt Tokens"),
    "vllm:prefix_cache_queries": ("Prompt tokens that were looked up in the KV cache", "Cache Lookup Tokens"),
    "vllm:prefix_cache_hits": ("Of those, the ones that were found", "Cache Hit Tokens"),
    "batch_manager_recomputed_tokens": ("Computed tokens that pauses threw away", "Recomputed Tokens"),
    "batch_manager_failed_steps": ("Steps that raised", "Failed Steps"),
}
# Numbers of an iteration that are added up here. key -> families that count them
SUMMED = {
    "Generated Tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "Paused Requests": ("vllm:num_preemptions",),
    "Refused Requests": ("batch_manager_refused_requests",),
}
# Summed too, and shown as seconds.
SUMMED_MICROSECONDS = {
    "Callback Time Microseconds": "batch_manager_callback_seconds",
    "Iteration Latency Microseconds": "batch_manager_iteration_seconds",
}
FINALS = {"Finals End ID": "stop", "Finals Stop Words": "stop", "Finals Length": "length",
          "Finals Timed Out": "timeout", "Finals Cancelled": "abort"}
LATENCIES = {
    "time_to_first_token": (("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
                            "Arrival to first token"),
    "time_per_token": (("vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds",
                        "sglang:inter_token_latency_seconds"), "Mean time between two tokens of a request"),
    "queue": (("vllm:request_queue_time_seconds",), "Arrival to the first step"),
    "end_to_end": (("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
                   "Arrival to the last token"),
}


class PrometheusStatistics:
    """A statistics callback, and a collector for a registry of prometheus_client.

    model   value of the labels `model` and `model_name`

    Records are those of one engine. Any thread may observe and collect. Gauges fall to zero where the engine has
    `flush_stats_when_idle=True`, which sends a record when the last request has left.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._latest: dict[str, Any] = {}
        self._received_at_s = 0.0
        self._sums = dict.fromkeys([*SUMMED, *SUMMED_MICROSECONDS], 0)
        self._histograms = {name: _Histogram() for name in LATENCIES}

    def __call__(self, record: str) -> None:
        """A record of the statistics."""
        values, sums = orjson.loads(record), self._sums
        for key in sums:
            sums[key] += values.get(key, 0)
        self._latest, self._received_at_s = values, time.time()

    def observe(self, metrics: PerfMetrics, num_tokens: int) -> None:
        """A request has ended.

        metrics      of its final response; see PerfMetrics.of, and Delta.metrics
        num_tokens   that it generated
        """
        for name, seconds in (("time_to_first_token", metrics.time_to_first_token_s), ("queue", metrics.queue_s),
                              ("time_per_token", metrics.time_per_output_token_s(num_tokens)),
                              ("end_to_end", metrics.end_to_end_s)):
            if seconds is not None:
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
        record, sums, name = self._latest, dict(self._sums), {"model_name": self._model}
        if record:
            yield from self._of_the_original(record)
            for family, (text, key) in GAUGES.items():
                yield _with_sample(GaugeMetricFamily(family, text, labels=[*name]), name, record.get(key, 0))
            share = record["Used KV cache blocks"] / max(record["Max KV cache blocks"], 1)
            for family in ("vllm:kv_cache_usage_perc", "sglang:token_usage"):
                metric = GaugeMetricFamily(family, "Used share of the KV cache, 0 to 1", labels=[*name])
                yield _with_sample(metric, name, share)
            for family, (text, key) in COUNTERS.items():
                yield _with_sample(CounterMetricFamily(family, text, labels=[*name]), name, record.get(key, 0))
            yield from self._ends(record)
        for key, families in SUMMED.items():
            for family in families:
                yield _with_sample(CounterMetricFamily(family, f"{key}, since the start", labels=[*name]), name,
                                   sums[key])
        for key, family in SUMMED_MICROSECONDS.items():
            yield _with_sample(CounterMetricFamily(family, f"{key}, since the start, in seconds", labels=[*name]), name,
                               sums[key] * MICROSECONDS)
        for latency, (families, text) in LATENCIES.items():
            buckets, total = self._histograms[latency].cumulative()
            for family in families:
                metric = HistogramMetricFamily(family, text, labels=[*name])
                metric.add_metric([self._model], buckets, total)
                yield metric

    def _of_the_original(self, record: dict[str, Any]) -> Iterator[Metric]:
        for family, (label, categories) in NV_TRT_LLM.items():
            if not record.keys() >= set(categories.values()):    # V1 and the other schemes have keys of their own
                continue
            metric = GaugeMetricFamily(family, f"{label} of the batch manager", labels=["model", "version", label])
            for category, key in categories.items():
                value = self._received_at_s if key == "Timestamp" else record[key]
                metric.add_metric([self._model, "1", category], value)
            yield metric

    def _ends(self, record: dict[str, Any]) -> Iterator[Metric]:
        ended: dict[str, int] = {}
        for key, reason in FINALS.items():
            ended[reason] = ended.get(reason, 0) + record.get(key, 0)
        metric = CounterMetricFamily("vllm:request_success", "Requests that ended without an error",
                                     labels=["model_name", "finished_reason"])
        for reason, count in ended.items():
            metric.add_metric([self._model, reason], count)
        yield metric
        metric = CounterMetricFamily("batch_manager_errors", "Final responses with an error",
                                     labels=["model_name", "code"])
        for key, count in record.items():
            if key.startswith("Errors "):
                metric.add_metric([self._model, key.removeprefix("Errors ")], count)
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


def _with_sample(metric: GaugeMetricFamily | CounterMetricFamily, labels: dict[str, str], value: float) -> Metric:
    metric.add_metric([*labels.values()], value)
    return metric
