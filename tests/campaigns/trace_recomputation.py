"""The times of bench, trace, draw, Perfetto and simulate beside a recomputation from the callbacks and the raw trace.

    python tests/campaigns/trace_recomputation.py [--seed 0]

50 random requests in each of six settings, with the real clock and a scripted model of 4 ms a step: a GptManager whose
callbacks note their times; `batch-manager bench`; `batch-manager simulate`. The program prints a line per figure: how
many sums there are, and the largest difference. A sum is right within 1 ms or 1 % of it. The exit status is 1 if one
is wrong. The program needs quiet cores: a thread that is preempted between its own reading of the clock and the
engine's makes a difference.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from batch_manager import Trace, read_trace  # noqa: E402
from batch_manager.stats.trace import IterationTrace  # noqa: E402
from batch_manager.tools.workload import Lengths, make_workload  # noqa: E402
from tests.harness.world import make_manager  # noqa: E402
from tests.tools.recomputation import (  # noqa: E402
    REQUESTS,
    SETTINGS,
    STEP_S,
    Comparison,
    MeasuringClient,
    Setting,
    backend_options,
    comparisons,
    engine_options,
)

# `batch-manager bench` with a scripted model; argv[1]: seconds of each send callback.
BENCH = f"""
import sys, time
from batch_manager import Parts
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.bench import __main__ as program, client, measurement, run

seconds, send = float(sys.argv[1]), client.Client.send

def slow(*given):
    send(*given)
    time.sleep(seconds)

def scripted(options, workload, parts, **more):
    backend = ScriptedBackend(num_blocks=int(sys.argv[2]), tokens_per_block=8, max_seq_len=96, step_seconds={STEP_S})
    return Session(options, workload, Parts(backend=backend), **more)

if seconds:
    client.Client.send = slow
run.vocabulary_of = lambda options: 1000
Session, measurement.Session = measurement.Session, scripted
sys.exit(program.main(sys.argv[3:]))
"""


def of_manager(setting: Setting, seed: int) -> Iterable[Comparison]:
    """Run the requests on a GptManager, and compare the trace and the pictures with the callbacks."""
    trace, client = Trace(), MeasuringClient(setting, seed, time.monotonic, time.sleep)
    backend = backend_options(setting) | {"step_seconds": STEP_S}
    manager = make_manager(client, backend=backend, parts={"trace": trace.append}, as_arrays=True,
                           **engine_options(setting))
    while not client.is_done:
        time.sleep(0.01)
    manager.shutdown()
    yield from comparisons(trace.iterations, client)


def engine_arguments(setting: Setting) -> list[str]:
    chunks = "" if setting.options.get("enable_chunked_context") else "no-"
    return ["--policy", "max_utilization", "--tokens-per-block", "8", f"--{chunks}chunked-context", "--quiet",
            "--max-num-sequences", str(setting.options.get("max_num_sequences", 8)), "--max-batch-size", "8"]


def of_bench(setting: Setting, workload: Path, folder: Path) -> Iterable[Comparison]:
    """Compare the result of `bench` with the raw trace of its run."""
    arguments = ["--model", "none", "--workload", str(workload), "--trace", "b.trace", "--out", "b.json",
                 "--max-num-tokens", str(setting.max_num_tokens), "--first-batch-delay", str(1e3 * setting.hold_s)]
    subprocess.run([sys.executable, "-c", BENCH, str(setting.callback_s), str(setting.num_blocks), *arguments,
                    *engine_arguments(setting)], check=True, cwd=folder, stdout=subprocess.DEVNULL,
                   env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"})
    yield from of_result(folder / "b.json", folder / "b.trace")


def of_simulate(setting: Setting, workload: Path, folder: Path) -> Iterable[Comparison]:
    """Fit a cost model on the run of `bench`, and compare the result of `simulate` with the raw trace of its run."""
    simulate = [sys.executable, "-m", "batch_manager.tools", "simulate"]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    subprocess.run([*simulate, "--fit", "b.trace", "--out", "cost.json", "--report", "none",
                    "--max-fit-error", "1000"], check=True, cwd=folder,
                   env=environment)
    subprocess.run([*simulate, "--cost", "cost.json", "--workload", str(workload), "--trace", "s.trace", "--out",
                    "s.json", "--report", "none", "--max-num-tokens", str(setting.max_num_tokens), "--max-seq-len",
                    "96", "--max-tokens-in-paged-kvcache", str(8 * setting.num_blocks), "--max-fit-error", "1000",
                    *engine_arguments(setting)], check=True, cwd=folder, env=environment)
    yield from of_result(folder / "s.json", folder / "s.trace")


def of_result(result: Path, trace: Path) -> Iterable[Comparison]:
    with trace.open("rb") as file:
        seconds = end_to_end(read_trace(file))
    assert len(seconds) == REQUESTS
    told = json.loads(result.read_text())["latency_ms"]["e2e"]
    for name, expected in (("avg", sum(seconds) / len(seconds)), ("min", min(seconds)), ("max", max(seconds))):
        yield Comparison(f"{name} of end to end", 1e-3 * told[name], expected)


def end_to_end(iterations: Iterable[IterationTrace]) -> list[float]:
    """Return the seconds from the arrival to the final response of each request."""
    arrived: dict[int, float] = {}
    seconds = []
    for each in iterations:
        arrived |= dict(zip(each.arrived, each.arrived_at_s, strict=True))
        seconds += [at - arrived.pop(i) for i, at in zip(each.finished, each.finished_at_s, strict=True)]
    return seconds


def report(name: str, found: Iterable[Comparison]) -> int:
    """Print a line per figure. Returns the number of wrong ones."""
    figures: dict[str, list[Comparison]] = defaultdict(list)
    for each in found:
        figures["".join(letter for letter in each.what if not letter.isdigit()).strip()].append(each)
    for what, all_of_it in figures.items():
        worst = max(all_of_it, key=lambda each: abs(each.told_s - each.expected_s))
        wrong = sum(not each.is_right for each in all_of_it)
        print(f"{name:18} {what:46} {len(all_of_it):5} sums, largest difference "
              f"{1e3 * abs(worst.told_s - worst.expected_s):7.3f} ms of {1e3 * worst.expected_s:10.3f} ms, "
              f"{wrong} wrong", flush=True)
        for each in [each for each in all_of_it if not each.is_right][:3]:
            print(f"    {each}")
    return sum(not each.is_right for all_of_it in figures.values() for each in all_of_it)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed, wrong = parser.parse_args().seed, 0
    for number, (name, setting) in enumerate(SETTINGS.items()):
        rate = 1 / setting.seconds_between if setting.seconds_between else None
        workload = make_workload(count=REQUESTS, vocab_size=1000, prompts=Lengths(30, 0.5, 1, 60),
                                 outputs=Lengths(15, 0.5, 2, 30), rate=rate, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "workload.json"
            path.write_text(json.dumps(workload))
            wrong += report(name, of_manager(setting, 100 * seed + number))
            wrong += report(f"{name}, bench", of_bench(setting, path, Path(folder)))
            wrong += report(f"{name}, simulate", of_simulate(setting, path, Path(folder)))
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
