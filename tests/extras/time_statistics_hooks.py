"""The cost of the statistics hooks per iteration: python -m tests.extras.time_statistics_hooks

The program prints the microseconds per call of each hook and of `observe`: the median and the range of seven rounds of
20,000 calls. The hooks run in turn. The record comes from an engine with a scripted model. OpenTelemetry runs with the
SDK and a reader in memory.
"""

import statistics
import tempfile
from time import perf_counter_ns

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from batch_manager import GptManager, InferenceRequest, Parts, PerfMetrics, SchedulerPolicy, TrtGptModelType
from batch_manager.extras.jsonl import JsonlStatistics
from batch_manager.extras.opentelemetry import OpenTelemetryStatistics
from batch_manager.extras.prometheus import PrometheusStatistics
from batch_manager.testing.scripted_backend import ScriptedBackend

ROUNDS, CALLS, LAST = 7, 20_000, 99


def records_of_an_engine():
    records, waiting = [], [InferenceRequest(1, {"input_ids": [1, 2, 3], "request_output_len": 9}),
                            InferenceRequest(LAST)]

    def get(_):
        taken, waiting[:] = waiting[:], []
        return taken

    manager = GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, get,
                         lambda *_: None, None, records.append, None, LAST, parts=Parts(backend=ScriptedBackend()))
    assert manager.wait_until_terminate(60)
    return records


def main():
    record = records_of_an_engine()[-2]
    metrics = PerfMetrics(1, 10_000, 2_000_000, 90_000_000)
    with tempfile.TemporaryDirectory() as folder, JsonlStatistics(f"{folder}/s.jsonl") as lines:
        provider = MeterProvider([InMemoryMetricReader()])
        open_telemetry, prometheus = OpenTelemetryStatistics("m", provider.get_meter("m")), PrometheusStatistics("m")
        called = {"PrometheusStatistics": (prometheus, record), "JsonlStatistics": (lines, record),
                  "OpenTelemetryStatistics": (open_telemetry, record),
                  "PrometheusStatistics.observe": (prometheus.observe, metrics, 50),
                  "OpenTelemetryStatistics.observe": (open_telemetry.observe, metrics, 50)}
        took = {name: [] for name in called}
        for _ in range(ROUNDS):
            for name, (function, *arguments) in called.items():
                start = perf_counter_ns()
                for _ in range(CALLS):
                    function(*arguments)
                took[name].append((perf_counter_ns() - start) / CALLS / 1000)
    print(f"a record of {len(record):,} characters")
    for name, rounds in took.items():
        print(f"{name:32} {statistics.median(rounds):6.1f} us ({min(rounds):.1f} to {max(rounds):.1f})")


if __name__ == "__main__":
    main()
