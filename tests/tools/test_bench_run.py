import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from batch_manager import Parts
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.bench import __main__ as program
from batch_manager.tools.bench import client, neighbours, session
from batch_manager.tools.bench.engine import POLICIES, model_limits, precision_of
from batch_manager.tools.bench.errors import InputError
from batch_manager.tools.bench.files import write_stats
from batch_manager.tools.bench.measurement import Measurement
from batch_manager.tools.bench.options import parse_options
from batch_manager.tools.bench.process_meter import ProcessMeter
from batch_manager.tools.bench.request_options import RequestOptions
from batch_manager.tools.bench.warm_up import warm_up_requests
from batch_manager.tools.workload import Lengths, make_workload

SMALL_MODEL = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"

RESULT_KEYS = {
    "peer", "variant", "version", "precision", "workload", "mode", "n", "threads", "max_batch", "max_tokens_per_step",
    "wall_s", "output_tokens", "prompt_tokens", "output_tok_s", "total_tok_s", "ttft_ms_p50", "ttft_ms_p99",
    "itl_ms_p50", "itl_ms_p99", "itl_ms_mean", "e2e_ms_p50", "e2e_ms_p99", "peak_rss_mb", "load_s", "steps", "cpu",
    "wrong_length", "python", "first_tokens", "kv_precision", "kv_tokens", "tokens_per_block", "engine", "scheduler",
    "chunked_context", "cpu_compile", "busy_neighbours", "model_implementation"}     # other programs write them too
CPU_KEYS = {"own_cores", "foreign_nice", "foreign_cores", "steal_cores", "ncpu"}

FOUR_REQUESTS = make_workload(count=4, vocab_size=1000, prompts=Lengths(20, 0.5, 4, 60), outputs=Lengths(6, 0.5, 2, 12))


def options(*more: str):
    return parse_options(["--model", "none", "--workload", "four.json", "--out", "result.json", "--max-batch-size", "2",
                          "--tokens-per-block", "8", *more])


def scripted(**changes) -> ScriptedBackend:
    return ScriptedBackend(num_blocks=64, tokens_per_block=8, **changes)


def run(*more: str, workload=FOUR_REQUESTS, backend=None) -> dict:
    return Measurement(options(*more), workload, Parts(backend=backend or scripted())).run()


def test_every_request_gets_its_tokens_and_the_result_has_its_keys():
    result = run()
    assert result.keys() > RESULT_KEYS and result["cpu"].keys() == CPU_KEYS
    assert result["wrong_length"] == 0
    assert result["output_tokens"] == FOUR_REQUESTS["output_tokens"]
    assert result["prompt_tokens"] == FOUR_REQUESTS["prompt_tokens"]
    for request in FOUR_REQUESTS["requests"]:
        expected = ScriptedBackend.expected_tokens(request["prompt"], request["max_tokens"])
        assert result["first_tokens"][str(request["id"])] == expected[:8]
    json.dumps(result)


def test_without_streaming_tokens_come_at_once_and_only_the_end_is_known():
    result = run("--no-streaming")
    assert result["wrong_length"] == 0 and result["output_tokens"] == FOUR_REQUESTS["output_tokens"]
    assert result["ttft_ms_p50"] is None and result["itl_ms_p50"] is None and result["e2e_ms_p50"] > 0
    assert result["first_tokens"] == run()["first_tokens"]


def test_static_batches_can_be_measured_too():
    result = run("--type", "V1")
    assert result["wrong_length"] == 0 and result["first_tokens"] == run()["first_tokens"]
    assert result["chunked_context"] is False and result["ttft_ms_p50"] is None


def test_requests_are_handed_over_when_they_arrive():
    arrivals = [0.0, 0.05, 0.05, 0.1]
    late = dict(FOUR_REQUESTS, mode="online", requests=[
        dict(request, arrival_s=arrival) for request, arrival in zip(FOUR_REQUESTS["requests"], arrivals, strict=True)])
    result = run(workload=late)
    assert result["wall_s"] >= 0.1 and result["wrong_length"] == 0 and result["mode"] == "online"


def test_a_request_may_arrive_at_the_latest_time_that_a_file_may_have(monkeypatch):
    def interrupted(seconds):
        time.sleep(0 if 0 <= seconds <= 60 else seconds)        # refuses 1e10 s
        raise KeyboardInterrupt

    late = dict(FOUR_REQUESTS, requests=[dict(request, arrival_s=1e10) for request in FOUR_REQUESTS["requests"]])
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=interrupted, perf_counter=time.perf_counter,
                                                        monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        run("--warm-up", "0", workload=late)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunks", ["--chunked-context", "--no-chunked-context"])
def test_policies_and_chunks(policy, chunks):
    result = run("--policy", policy, chunks, "--max-num-tokens", "64", "--type", "InflightBatching")
    assert result["wrong_length"] == 0
    assert (result["scheduler"], result["chunked_context"]) == (policy, chunks == "--chunked-context")
    assert result["engine"] == "InflightBatching"


def test_statistics_are_written_for_the_timed_iterations_only(tmp_path):
    file = tmp_path / "stats.csv"
    measurement = Measurement(options("--stats-csv", str(file)), FOUR_REQUESTS, Parts(backend=scripted()))
    result = measurement.run()
    with file.open("w") as out:
        write_stats(measurement.served[0].records, out)
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == result["steps"]
    assert sum(int(row["Generated Tokens"]) for row in rows) == FOUR_REQUESTS["output_tokens"]
    assert sum(int(row["Total Context Tokens"]) for row in rows) == FOUR_REQUESTS["prompt_tokens"]


def test_a_warm_up_shrinks_from_a_full_batch_and_fits_the_model():
    requests = warm_up_requests(4, 1000, None, 0)
    assert len({request["max_tokens"] for request in requests}) == len(requests) == 4
    assert warm_up_requests(4, 1000, None, 1)[0]["prompt"] != requests[0]["prompt"]
    assert all(len(request["prompt"]) + request["max_tokens"] <= 32 for request in warm_up_requests(40, 10, 32, 0))


def test_a_mistaken_batch_size_does_not_make_a_mountain_of_warm_up_requests(monkeypatch):
    requests = warm_up_requests(10**9, 1000, None, 0)
    assert len(requests) == 1024 and max(len(request["prompt"]) for request in requests) < 128
    asked = []
    monkeypatch.setattr(session, "warm_up_requests", lambda count, *more: asked.append(count) or requests[:2])
    run("--max-batch-size", "100000")
    assert asked == [FOUR_REQUESTS["n"]]        # no more requests can run at a time


def test_no_warm_up_shares_a_prefix_with_the_default_workload():
    first_blocks = {tuple(request["prompt"][:8]) for request in make_workload()["requests"]}
    assert first_blocks.isdisjoint(tuple(request["prompt"][:8]) for request in warm_up_requests(32, 49152, None, 0))


def test_a_request_that_fails_is_counted_and_named():
    requests = [dict(FOUR_REQUESTS["requests"][0], prompt=[5] * 2000), *FOUR_REQUESTS["requests"][1:]]
    result = run(workload=dict(FOUR_REQUESTS, requests=requests))
    assert (result["failed"], result["wrong_length"], result["n"]) == (1, 1, 4)
    (failure,) = result["failures"]
    assert failure["id"] == requests[0]["id"] and "2,000" in failure["error"]
    assert result["latency_ms"]["e2e"] is not None


def test_a_file_that_is_no_workload_is_refused():
    for wrong in ([], {"requests": []}, dict(FOUR_REQUESTS, requests=[FOUR_REQUESTS["requests"][0]] * 2),
                  dict(FOUR_REQUESTS, requests=[{"id": 1}])):
        with pytest.raises(InputError, match="four.json"):
            run(workload=wrong)


def test_the_program_says_what_is_wrong_with_a_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "four.json").write_text(json.dumps(FOUR_REQUESTS))
    arguments = ["--model", str(tmp_path), "--workload", str(tmp_path / "four.json"), "--out", str(tmp_path / "r.json")]
    assert program.main(arguments) == 2
    assert "config.json" in capsys.readouterr().err and not (tmp_path / "r.json").exists()


def test_the_meter_counts_its_own_processes():
    meter = ProcessMeter()
    meter.start()
    sum(number * number for number in range(1_500_000))
    meter.stop()
    assert meter.cpu.keys() == CPU_KEYS and meter.peak_rss_mb > 10 and meter.cpu["own_cores"] > 0


@pytest.mark.parametrize("name", ["bench.__main__", "host_bench", "workload"])
def test_help_does_not_import_torch(name):
    code = (f"import sys\nfrom importlib import import_module\ntry:\n"
            f"    import_module('batch_manager.tools.{name}').main(['--help'])\n"
            "except SystemExit as end:\n    assert end.code == 0\nassert not {'torch', 'rich'} & set(sys.modules)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "usage" in result.stdout, result.stderr


def test_the_program_serves_the_small_model(tmp_path):
    pytest.importorskip("batch_manager.runtime.native_backend")
    result_file = tmp_path / "result.json"
    (tmp_path / "four.json").write_text(json.dumps(FOUR_REQUESTS))
    result = subprocess.run(
        [sys.executable, "-m", "batch_manager.tools.bench", "--report", "json", "--model", str(SMALL_MODEL),
         "--workload", str(tmp_path / "four.json"), "--num-threads", "1", "--max-batch-size", "2", "--dtype", "float32",
         "--kv-gib", "0.01", "--device", "cpu", "--variant", "a label", "--out", str(result_file)],
        capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    written = json.loads(result_file.read_text())
    (line,) = result.stdout.splitlines()
    printed = json.loads(line)
    assert written.keys() > RESULT_KEYS and printed.keys() == written.keys() - {"first_tokens"}
    assert written["wrong_length"] == 0 and written["output_tokens"] == FOUR_REQUESTS["output_tokens"]
    assert (written["precision"], written["variant"], written["threads"]) == ("fp32", "a label", 1)
    assert written["kv_tokens"] == int(0.01 * 2**30) // (2 * 4 * 2 * 64 * 4)
    assert "torch" in written["version"] and written["peak_rss_mb"] > 50


def test_neighbours_are_busy_while_a_workload_is_served_and_gone_afterwards(monkeypatch):
    started, popen = [], subprocess.Popen

    class Neighbour:
        Popen = staticmethod(lambda *given: started.append(popen(*given)) or started[-1])
    monkeypatch.setattr(neighbours, "subprocess", Neighbour)
    result = run("--busy-neighbours", "2")
    assert result["busy_neighbours"] == len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_whether_steps_are_compiled_is_an_option():
    assert [options(*more).cpu_compile for more in ([], ["--cpu-compile"], ["--no-cpu-compile"])] == [None, True, False]


def test_the_precision_of_auto_is_the_one_that_the_backend_chose():
    assert precision_of(options("--dtype", "auto"), "float32") == "fp32"
    assert precision_of(options(), "float32") == run()["precision"] == "bf16"


def test_auto_is_what_the_engine_chooses():
    given = parse_options(["--model", str(SMALL_MODEL), "--workload", "w", "--dtype", "auto", "--device", "cpu"])
    wide = parse_options(["--model", str(SMALL_MODEL), "--workload", "w", "--dtype", "float32", "--device", "cpu"])
    assert model_limits(given, Parts()) == model_limits(wide, Parts())


@pytest.mark.parametrize("given, number", [
    (["--lora-modules", *(f"{name}={SMALL_MODEL.parents[1] / 'adapters' / name}" for name in ("plays", "definitions")),
      "--max-loras", "1", "--max-lora-rank", "4"], 2), (["--max-loras", "3"], 3)])
def test_requests_have_adapters_in_turn(given, number, monkeypatch):
    """Those of folders, or as many with random numbers as there is room for on the device."""
    made, make = {}, RequestOptions.make

    def noted(asked, request, **more):
        result = make(asked, request, **more)
        made[request["id"]] = int(result.lora_task_id)
        return result

    monkeypatch.setattr(RequestOptions, "make", noted)
    several = options("--model", str(SMALL_MODEL), "--num-threads", "1", "--max-tokens-in-paged-kvcache", "512",
                      "--report", "none", *given)
    result = Measurement(several, FOUR_REQUESTS, Parts()).run()
    assert result["wrong_length"] == 0 and result["output_tokens"] == FOUR_REQUESTS["output_tokens"]
    ids = [request["id"] for request in FOUR_REQUESTS["requests"]]
    assert [made[request_id] for request_id in ids] == [request_id % number for request_id in ids]
    assert set(made.values()) == set(range(number))
