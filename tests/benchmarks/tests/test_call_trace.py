"""The number of calls in one plain generation step stays small."""

import sys
from pathlib import Path

import pytest

from batch_manager import SchedulerPolicy
from batch_manager.tools.host_bench import Setting, Stopwatch, make_loop
from tests.benchmarks.call_trace import main, trace_one_step
from tests.harness.compiled import library_or_skip

MODEL = Path(__file__).resolve().parents[3] / "examples" / "models" / "austen-4m"


def test_a_plain_generation_step_makes_at_most_240_calls_through_42_files():
    calls = trace_one_step(str(MODEL), 4, SchedulerPolicy.GUARANTEED_NO_EVICT)
    assert 100 < len(calls.calls) <= 240
    assert 20 < len(calls.files) <= 42
    names = [function for _, _, function in calls.calls]
    for one_of_each_tower in ("GenerationLoop.step", "NativeBackend.start", "KvCacheManager.claim", "Linear.__call__"):
        assert one_of_each_tower in names


@pytest.mark.parametrize("streaming, of_each", [(False, 0), (True, 1)])
def test_a_request_costs_no_call_in_an_iteration_but_its_callback(streaming, of_each):
    def calls_of(batch):
        watch, counts = Stopwatch(), []
        watch.watch = lambda phase, call: call
        setting = Setting(batch=batch, iterations=5, streaming=streaming, policy="guaranteed_no_evict")
        loop, _clients = make_loop(setting, watch)
        for _ in range(5):
            counts.append(0)
            sys.setprofile(lambda frame, event, argument: counts.append(counts.pop() + (event == "call")))
            loop.step(accept_new=True)
            sys.setprofile(None)
        return min(counts)

    assert 0 <= calls_of(64) - calls_of(32) - 32 * of_each < 32


def test_a_compiled_step_enters_no_layer():
    library_or_skip()
    calls = trace_one_step(str(MODEL), 4, SchedulerPolicy.GUARANTEED_NO_EVICT, cpu_compile=True)
    assert 80 < len(calls.calls) <= 160
    assert not [file for file in calls.files if file.startswith("layers/") and not file.endswith("embedding.py")]


def test_the_program_lists_the_calls_and_counts_them(capsys):
    assert main(["--model", str(MODEL), "--batch", "2", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loop/generation_loop.py: GenerationLoop.step"
    listed = [line for line in lines if ": " in line]
    assert lines[-1].startswith(f"{len(listed)} calls through ")
