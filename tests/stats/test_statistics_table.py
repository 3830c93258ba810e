"""The public table of statistics has the keys of the record, and the values that TensorRT-LLM lacks are right."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batch_manager import STATISTICS, KvCacheConfig, TrtGptModelType

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMES = [TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1]


def records_of(world):
    return [json.loads(record) for record in world.client.stats]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_table_and_the_record_have_the_same_keys(scheme, make_world, new_request):
    world = make_world(model_type=scheme)
    world.client.pending = [new_request(1, [1], 3), new_request(2, [10**9], 3)]
    world.run()
    wanted = ("all", "V1" if scheme == TrtGptModelType.V1 else "in flight")
    always = {row.name for row in STATISTICS if row.always and row.schemes in wanted}
    known = {row.name for row in STATISTICS if row.schemes in wanted}
    for record in records_of(world):
        assert always <= set(record) <= known
        assert all((row.unit == "text") == isinstance(record[row.name], str)
                   for row in STATISTICS if row.name in record)


def test_the_table_names_each_key_once_and_a_time():
    assert len({row.name for row in STATISTICS}) == len(STATISTICS)
    assert {row.time for row in STATISTICS} == {"of this iteration", "now", "since the start"}


def test_what_is_counted_since_the_start_never_falls_and_finals_add_up(make_world, new_request):
    world = make_world(max_batch_size=2)
    world.client.pending = [new_request(i, [i + 1] * 3, 2 + i) for i in range(5)]
    world.step(2)
    world.client.stops = {4, 1}
    world.run()
    records = records_of(world)
    for row in STATISTICS:
        values = [record[row.name] for record in records if row.name in record]
        assert row.time != "since the start" or values == sorted(values), row.name
    last = records[-1]
    assert sum(value for name, value in last.items() if name.startswith("Finals ")) == last["Final Responses"]
    assert last["Finals Cancelled"] >= 1 and last["Finals Length"] >= 1
    assert sum(record["New Requests"] for record in records) == last["Final Responses"]
    assert last["Accepted Prompt Tokens"] == 3 * last["Final Responses"]


def test_queue_times_and_the_oldest_wait(make_world, new_request):
    world = make_world(max_batch_size=1)
    items = [new_request(1, [1], 2), new_request(2, [1] * 4, 1)]
    world.loop.callbacks.fetched._get = lambda n: [items.pop(0) for _ in list(items)]
    for _ in range(4):
        world.step()
        world.clock.now += 1.5
    records = records_of(world)
    assert [record["Oldest Wait Microseconds"] for record in records] == [0, 1_500_000, 0]
    assert [record["Queued Tokens"] for record in records] == [4, 4, 0]
    assert [record["Started Requests"] for record in records] == [1, 0, 1]
    assert [record["Queue Time Microseconds"] for record in records] == [0, 0, 3_000_000]
    assert records[-1]["Longest Queue Time Microseconds"] == 3_000_000
    assert records[1]["Monotonic Microseconds"] - records[0]["Monotonic Microseconds"] == 1_500_000


def test_tokens_looked_up_and_found(make_world, new_request):
    world = make_world(backend={"num_blocks": 20, "tokens_per_block": 4},
                       kv_cache_config=KvCacheConfig(enable_block_reuse=True))
    for request_id in (1, 2):
        world.client.pending = [new_request(request_id, list(range(1, 11)), 2)]
        world.run()
    last = records_of(world)[-1]
    assert (last["Cache Lookup Tokens"], last["Cache Hit Tokens"]) == (20, 9)


@pytest.mark.parametrize("flush", [False, True])
def test_an_iteration_that_only_refused_has_a_record_and_an_idle_engine_none(flush, make_world, new_request):
    world = make_world(flush_stats_when_idle=flush)
    world.client.pending = [new_request(1, [10**9], 2), new_request(2, [], 2)]
    world.run()
    world.step(3)
    (record,) = records_of(world)
    assert (record["Refused Requests"], record["New Requests"], record["Active Request Count"]) == (2, 0, 0)
    assert record["Errors INVALID_REQUEST"] == 2 and record["Final Responses"] == 2


SHOW_PETS = """
import json, sys
sys.path.insert(0, "docs")
import site_hooks
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from batch_manager import InferenceRequest
from batch_manager.extras.opentelemetry import OpenTelemetryStatistics
from batch_manager.extras.prometheus import PrometheusStatistics
from batch_manager.testing import EngineHarness
reader, records = InMemoryMetricReader(), []
pending = [InferenceRequest(1, {"input_ids": [1], "request_output_len": 1})]
with EngineHarness(lambda count: [pending.pop()] if pending else [], lambda *response: None,
                   stats=records.append) as engine:
    engine.step()
hooks = PrometheusStatistics("m"), OpenTelemetryStatistics("m", MeterProvider([reader]).get_meter("test"))
for hook in hooks:
    hook(records[0])
(scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
print(json.dumps([
    json.loads(records[0])["Pet Requests"],
    [line for line in hooks[0].exposition().decode().splitlines() if "pet_requests" in line],
    [[metric.description, point.value] for metric in scope.metrics if metric.name == "batch_manager.pet_requests"
     for point in metric.data.data_points],
    [line for line in site_hooks.reference().splitlines() if "Pet" in line]]))
"""


def test_a_new_statistic_is_a_line_of_its_owner_and_a_row_of_the_table(tmp_path):
    """Two files of a copy of the package get a line each. The record, the metrics and the site's table then have it."""
    for module in ("prometheus_client", "opentelemetry.sdk.metrics", "mkdocs"):
        pytest.importorskip(module, reason=f"NOT RUN: {module} is not installed")
    shutil.copytree(REPOSITORY / "batch_manager", tmp_path / "batch_manager",
                    ignore=shutil.ignore_patterns("__pycache__", "tools", "*.so"))
    (tmp_path / "docs").mkdir()
    shutil.copy(REPOSITORY / "docs" / "site_hooks.py", tmp_path / "docs")
    for file, line, more in (
            ("loop/intake.py", '            "Clamped Requests": self.num_warnings,\n',
             '            "Pet Requests": 7,\n'),
            ("stats/statistics_table.py", "STATISTICS: tuple[Statistic, ...] = (\n",
             '    Statistic("Pet Requests", "requests", START, "of pets"),\n')):
        path = tmp_path / "batch_manager" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(line) == 1
        path.write_text(text.replace(line, line + more), encoding="utf-8")
    shown = subprocess.run([sys.executable, "-c", SHOW_PETS], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                           env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert shown.returncode == 0, shown.stderr
    about = "Pet Requests: of pets (since the start)"
    assert json.loads(shown.stdout) == [
        7, [f"# HELP batch_manager_pet_requests_total {about}", "# TYPE batch_manager_pet_requests_total counter",
            'batch_manager_pet_requests_total{model_name="m"} 7.0'],
        [[about, 7]], ["| Pet Requests | requests | since the start | all | of pets |"]]


def test_each_number_of_the_table_is_published_once():
    families = pytest.importorskip("batch_manager.extras.statistic_families").FAMILIES
    names = [name for family in families for name in family.names]
    assert len(set(names)) == len(names)
    assert set().union(*(family.keys for family in families)) | {
        "Kernel Dispatch", "Running LoRA Tasks", "Waiting LoRA Tasks"} == {row.name for row in STATISTICS}
