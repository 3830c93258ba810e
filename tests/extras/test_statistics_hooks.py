"""Statistics for Prometheus and as JSON lines, of an engine that runs."""

import errno
import json
import os

import pytest

from batch_manager import (
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
    with pytest.raises(ValueError, match="was closed"):
        statistics("{}")
