"""The hooks for Prometheus, OpenTelemetry and JSON lines give the statistics of a running engine."""

import errno
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batch_manager import (
    ConfigError,
    GptManager,
    InferenceRequest,
    Parts,
    PerfMetrics,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.extras.jsonl import JsonlStatistics
from batch_manager.testing.scripted_backend import ScriptedBackend

prometheus_client = pytest.importorskip("prometheus_client", reason="NOT RUN: the extra [prometheus] is not installed")
LAST = 99

PER_REQUEST = {"gen_ai.server.time_to_first_token": "vllm:time_to_first_token_seconds",
               "gen_ai.server.time_per_output_token": "vllm:request_time_per_output_token_seconds",
               "gen_ai.server.request.duration": "vllm:e2e_request_latency_seconds",
               "batch_manager.request_queue_time": "vllm:request_queue_time_seconds"}


def run(stats, model_type=TrtGptModelType.InflightFusedBatching, on_final=lambda tensors: None):
    waiting = [InferenceRequest(number, {"input_ids": [1, 2, number + 3], "request_output_len": 4 + number,
                                         "return_perf_metrics": True}) for number in range(3)]
    waiting += [InferenceRequest(7, {"input_ids": [-1], "request_output_len": 1}), InferenceRequest(LAST)]

    def get(_):
        taken, waiting[:] = waiting[:], []
        return taken

    manager = GptManager(None, model_type, 1, SchedulerPolicy.MAX_UTILIZATION, get,
                         lambda _, tensors, final, error: None if error else on_final(tensors), None, stats,
                         TrtGptModelOptionalParams(max_batch_size=4, flush_stats_when_idle=True), LAST,
                         parts=Parts(backend=ScriptedBackend()))
    assert manager.wait_until_terminate(60)


@pytest.mark.parametrize("model_type", TrtGptModelType)
def test_what_is_scraped_is_what_happened(model_type):
    from batch_manager.extras.prometheus import PrometheusStatistics
    registry, statistics, records = prometheus_client.CollectorRegistry(), PrometheusStatistics("m"), []
    registry.register(statistics)
    assert prometheus_client.generate_latest(registry)               # before the first record
    run(lambda record: (records.append(json.loads(record)), statistics(record)), model_type,
        lambda tensors: statistics.observe(PerfMetrics.of(tensors), 5))
    scraped = prometheus_client.generate_latest(registry).decode()
    assert statistics.exposition().decode() == scraped
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in scraped.splitlines()
              if not line.startswith("#")}
    name = 'model_name="m"'
    assert values[f"vllm:prompt_tokens_total{{{name}}}"] == 9
    assert values[f"vllm:generation_tokens_total{{{name}}}"] == 4 + 5 + 6
    assert values[f'vllm:request_success_total{{finished_reason="length",{name}}}'] == 3
    assert values[f'batch_manager_errors_total{{code="INVALID_REQUEST",{name}}}'] == 1
    assert values[f"batch_manager_refused_requests_total{{{name}}}"] == 1
    for family in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds",
                   "vllm:request_queue_time_seconds", "vllm:request_time_per_output_token_seconds"):
        assert values[f"{family}_count{{{name}}}"] == values[f'{family}_bucket{{le="+Inf",{name}}}'] == 3, family
        assert values[f"{family}_sum{{{name}}}"] > 0
    assert values[f"vllm:num_requests_running{{{name}}}"] == 0        # idle
    assert values['nv_trt_llm_request_metrics{model="m",request_type="active",version="1"}'] == 0
    assert values['nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"}'] == records[-1][
        "Max KV cache blocks"]
    assert ("nv_trt_llm_v1_metrics" in scraped) == (model_type is TrtGptModelType.V1)
    assert ("nv_trt_llm_inflight_batcher_metrics" in scraped) == (model_type is not TrtGptModelType.V1)
    assert scraped.endswith("\n") and len(values) == len(set(values))


def collected(reader):
    """Collect the metrics of an OpenTelemetry reader. Return {(metric name, attributes): data point}."""
    data, points = reader.get_metrics_data(), {}
    for resource in data.resource_metrics if data else ():
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            for point in metric.data.data_points:
                points[metric.name, frozenset(point.attributes.items())] = point
    return points


@pytest.mark.parametrize("model_type", TrtGptModelType)
def test_opentelemetry_shows_the_numbers_that_prometheus_shows(model_type, caplog):
    metrics = pytest.importorskip("opentelemetry.sdk.metrics", reason="NOT RUN: opentelemetry-sdk is not installed")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from batch_manager.extras.opentelemetry import OpenTelemetryStatistics
    from batch_manager.extras.prometheus import PrometheusStatistics
    reader, scraped = InMemoryMetricReader(), PrometheusStatistics("m")
    shown = OpenTelemetryStatistics("m", metrics.MeterProvider([reader]).get_meter("test"))
    assert {point.value for point in collected(reader).values()} == {0}     # sums, before the first record
    busy = []

    def observe(tensors):
        for statistics in (scraped, shown):
            statistics.observe(PerfMetrics.of(tensors), 5)

    def stats(record):
        scraped(record)
        shown(record)
        busy.append(collected(reader))
    run(stats, model_type, observe)
    points, one, seen = collected(reader), {("gen_ai.request.model", "m")}, 0
    for family in scraped.collect():
        if family.name.startswith("sglang:") or family.type == "histogram":
            continue
        name = family.name.replace("vllm:", "batch_manager.").replace("batch_manager_", "batch_manager.")
        for ending in ("_seconds", "_microseconds", "_perc"):
            name = name.removesuffix(ending)
        for sample in family.samples:
            labels = sample.labels.items() - {("model_name", "m")}
            attributes = labels if family.name.startswith("nv_") else one | labels
            point = points.pop((name, frozenset(attributes)))
            wanted = shown.received_at_s if sample.labels.get("general_type") == "timestamp" else sample.value
            assert point.value == wanted, name
            seen += 1
    of_requests = frozenset({*one, ("gen_ai.operation.name", "text_completion"),
                             ("gen_ai.provider.name", "batch_manager")})
    exposition = scraped.exposition().decode()
    for name, family in PER_REQUEST.items():
        point = points.pop((name, of_requests))
        assert point.count == 3 and f'{family}_sum{{model_name="m"}} {point.sum}\n' in exposition
    assert points == {} and seen > 30
    active = "nv_trt_llm_request_metrics", frozenset({("model", "m"), ("version", "1"), ("request_type", "active")})
    assert busy[0][active].value > 0 == collected(reader)[active].value     # idle
    assert caplog.records == []              # the SDK logs there what it rejects


def test_engines_share_a_meter_and_leave_it(caplog):
    metrics = pytest.importorskip("opentelemetry.sdk.metrics", reason="NOT RUN: opentelemetry-sdk is not installed")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from batch_manager.extras.opentelemetry import OpenTelemetryStatistics
    reader = InMemoryMetricReader()
    provider = metrics.MeterProvider([reader])
    engines = [OpenTelemetryStatistics(name, provider.get_meter("test")) for name in ("first", "second")]
    run(lambda record: (engines[0](record), engines[1](record), engines[1](record)), TrtGptModelType.V1)
    generated = [("batch_manager.generation_tokens", frozenset({("gen_ai.request.model", name)}))
                 for name in ("first", "second")]
    assert [collected(reader)[key].value for key in generated] == [15, 30]
    del engines[0]
    gc.collect()
    points = collected(reader)
    assert generated[0] not in points and points[generated[1]].value == 30
    assert caplog.records == []


def test_a_request_is_a_span_within_the_one_of_its_caller():
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter",
                                 reason="NOT RUN: opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from batch_manager.extras.opentelemetry import OpenTelemetryStatistics
    exporter, provider, timings = export.InMemorySpanExporter(), TracerProvider(), []
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    statistics = OpenTelemetryStatistics("m", operation_name="chat", tracer=tracer)
    before = time.time_ns()
    run(statistics, on_final=lambda tensors: timings.append(PerfMetrics.of(tensors)))
    after = time.time_ns()
    with tracer.start_as_current_span("call"):
        for metrics in timings:
            statistics.observe(metrics, 5)
    statistics.observe(PerfMetrics(arrival_time_ns=1), 0)        # cancelled before its first token
    *spans, call = exporter.get_finished_spans()
    assert len(spans) == 3 and call.name == "call"
    clocks_differ = 50_000_000                                   # nanoseconds; the wall clock may be adjusted
    for span, metrics in zip(spans, timings):
        assert span.name == "chat m" and span.parent.span_id == call.context.span_id
        assert before - clocks_differ < span.start_time < span.end_time < after + clocks_differ
        assert span.end_time - span.start_time == metrics.last_token_time_ns - metrics.arrival_time_ns
        assert [(event.name, event.timestamp - span.start_time) for event in span.events] == [
            ("first step", metrics.first_scheduled_time_ns - metrics.arrival_time_ns),
            ("first token", metrics.first_token_time_ns - metrics.arrival_time_ns)]
        assert span.attributes["gen_ai.usage.output_tokens"] == 5


def test_a_global_provider_may_come_later():
    """Hooks that were made before the global provider was set report to it too.

    The test runs a process, because the global provider can be set only once.
    """
    pytest.importorskip("opentelemetry.sdk.metrics", reason="NOT RUN: opentelemetry-sdk is not installed")
    code = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from batch_manager.extras.opentelemetry import OpenTelemetryStatistics
early = [OpenTelemetryStatistics("a"), OpenTelemetryStatistics("b")]
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
late = OpenTelemetryStatistics("c")
for number, statistics in enumerate([*early, late]):
    statistics('{"Generated Tokens": %d, "Used KV cache blocks": 1, "Max KV cache blocks": 2}' % (number + 1))
for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics:
    for metric in scope.metrics:
        if metric.name == "batch_manager.generation_tokens":
            print(scope.scope.name, sorted(point.value for point in metric.data.data_points))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "batch_manager [1, 2, 3]\n", result.stderr


def test_a_model_that_is_no_text_is_refused_before_anybody_scrapes():
    from batch_manager.extras.prometheus import PrometheusStatistics
    with pytest.raises(ConfigError, match="model is of type PosixPath; expected a str, for the label; "):
        PrometheusStatistics(Path("austen-4m"))


def test_lines_are_the_records_and_files_are_bounded(tmp_path):
    records, path = [], tmp_path / "s.jsonl"
    with JsonlStatistics(path, max_bytes=4000, num_kept=2) as statistics:
        run(lambda record: (records.append(record), statistics(record), statistics.flush()))
        while len(list(tmp_path.iterdir())) < 3:
            statistics(records[-1])
            statistics.flush()
    lines = path.read_text().splitlines()
    assert lines and set(lines) <= set(records)
    for _ in range(20):
        with JsonlStatistics(path, max_bytes=4000, num_kept=2) as statistics:
            statistics(records[0])
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["s.jsonl", "s.jsonl.1", "s.jsonl.2"]
    assert all(file.stat().st_size <= 4000 for file in tmp_path.iterdir())
    assert all(json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines())


def test_pending_lines_do_not_exceed_the_limit_either(tmp_path):
    records = [json.dumps({"Active Request Count": 1, "number": number}) for number in range(200)]
    with JsonlStatistics(tmp_path / "s.jsonl", max_bytes=1000, num_kept=20) as statistics:
        for record in records:
            statistics(record)
        statistics("9" * 2000)
    files = sorted(tmp_path.iterdir(), key=lambda file: -int(file.suffix.removeprefix(".").replace("jsonl", "0")))
    assert [file.stat().st_size for file in files if file.stat().st_size > 1000] == [2001]
    assert [line for file in files for line in file.read_text().splitlines()] == [*records, "9" * 2000]


def test_a_full_disk_costs_records_and_nothing_else(tmp_path, monkeypatch):
    path, records = tmp_path / "s.jsonl", []
    statistics = JsonlStatistics(path)
    statistics("{}")
    real = os.write

    def full(descriptor, data):
        real(descriptor, data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    statistics._lines = [b"{1}\n"]
    with pytest.raises(OSError, match="No space"):
        statistics.flush()
    monkeypatch.setattr(os, "write", real)
    run(lambda record: (records.append(record), statistics(record)))
    statistics.close()
    statistics.close()
    assert path.read_text().splitlines() == ["{}", *records]
    with pytest.raises(ValueError, match="is closed"):
        statistics("{}")
