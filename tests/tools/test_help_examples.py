"""Every example of every help text of batch-manager runs, with the shipped model and small numbers."""

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from batch_manager.stats.trace import TraceFile
from batch_manager.tools.__main__ import COMMANDS, main
from batch_manager.tools.simulate.fleet import simulate
from batch_manager.tools.workload import Lengths, make_workload
from tests.tools.simulated import COST, lengths
from tests.tools.test_shared_options import SUBCOMMANDS, parser_of
from tests.tools.test_simulate import ENGINE

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

from tests.tools.test_watch import Metrics, served, server  # noqa: E402, F401

MODEL = str(Path(__file__).parents[2] / "examples" / "models" / "austen-4m")
TOKENIZER = ("--tokenizer", MODEL)
FEW = ("--num-requests", "2")
BENCH = (*FEW, "--max-output-tokens", "2", "--warm-up", "0", "--max-tokens-in-paged-kvcache", "4096", "--quiet")
FASTER = ("--request-rate", "200")

# Example -> arguments that make it short. The last of two equal options counts.
EXAMPLES = {
    "watch --url http://127.0.0.1:8000/metrics": ("--count", "2", "--interval", "0.1", "--plain"),
    "watch statistics.jsonl": ("--count", "2", "--interval", "0.1", "--plain"),
    "inspect FOLDER_OR_GGUF_FILE": (),
    "inspect FOLDER --device cuda --free-memory-bytes 80000000000": (),
    "workload --tokenizer FOLDER --out offline.json": (),
    "workload --request-rate 2 --out online.json": (),
    "workload --input-min 600 --input-max 600 --shared-prefix 512 --out prefix.json": (),
    "workload dataset prompts.jsonl --tokenizer FOLDER --output-tokens 64 --out w.json": (),
    "workload trace sample:mooncake --num-requests 20 --max-input-tokens 2000 --time-scale 0.5 --out w.json": (),
    "workload sample-trace --as mooncake --num-requests 200 --out trace.jsonl": (),
    "bench --model FOLDER --workload offline.json --out result.json": BENCH,
    "bench --model FOLDER --workload offline.json --request-rate 2 --slo-ttft-ms 500 --slo-itl-ms 50": (
        *BENCH, *FASTER),
    "bench --model FOLDER --workload offline.json --sweep concurrency=1,2,4,8,16 --plot plots": BENCH,
    "bench --model FOLDER --workload offline.json --find-saturation --slo-ttft-ms 500": (
        *BENCH, "--num-requests", "10", "--max-batch-size", "1", "--max-probes", "2"),
    "bench --model FOLDER --workload sharegpt.json --turns 5 --request-rate 1 --max-input-tokens 4000": (
        *BENCH, *FASTER),
    "bench --model FOLDER --workload w.json --trace run.trace": BENCH,
    "compare before.json after.json": (),
    "compare a1.json a2.json a3.json -- b1.json b2.json b3.json": (),
    "compare --first a1.json a2.json --second b1.json b2.json": (),
    "simulate --fit run.trace --out cost.json": (),
    "simulate --cost cost.json --workload w.json": (),
    "simulate --cost cost.json --workload sample:azure --request-rate 3 --sweep max_batch_size=8,16,32 "
    "--sweep policy=guaranteed_no_evict,max_utilization --slo-ttft-ms 500 --plot plots": (
        *FEW, "--max-input-tokens", "1000"),
    "simulate --cost cost.json --workload sample:mooncake --replicas 8 --routing longest-prefix --block-reuse": FEW,
    "host-bench --batch 1 64 256 --iterations 300": ("--batch", "1", "8", "--iterations", "20"),
    "trace why 17 trace.jsonl": (),
    "trace slowest trace.jsonl": (),
    "trace perfetto trace.jsonl out.json": (),
    "trace csv trace.jsonl out.csv": (),
    "draw trace.jsonl": (),
    "draw trace.jsonl --html run.html": (),
    "draw --demo --policy guaranteed_no_evict --num-blocks 20 --svg schedule.svg": (),
}


def examples():
    """Return the examples of all help texts, without the words and comments after them."""
    found = set()
    for command in COMMANDS:
        for subcommand in ("", *SUBCOMMANDS.get(command, ())):
            text = re.sub(r" \\\n\s+", " ", parser_of(command, subcommand).format_help())
            for line in re.findall(r"^    (?:batch-manager|python -m batch_manager\.tools[. ]) ?(.+)$", text, re.M):
                found.add(re.split(r"\s{3,}|\s+#", line.strip())[0])
    return found


def test_every_example_is_in_the_table():
    assert examples() == set(EXAMPLES)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, served):  # noqa: F811
    """Return a folder with the files that the examples read."""
    folder = tmp_path_factory.mktemp("inputs")
    workload = make_workload(count=12, vocab_size=1000, prompts=Lengths(8, 0.5, 4, 16), outputs=Lengths(3, 0.5, 2, 4))
    for name in ("offline.json", "w.json"):
        (folder / name).write_text(json.dumps(workload))
    turns = [{"from": who, "value": "It is a truth"} for who in ("human", "gpt", "human", "gpt")]
    (folder / "sharegpt.json").write_text(json.dumps([{"id": "a", "conversations": turns}]))
    (folder / "prompts.jsonl").write_text('{"prompt": "It is a truth"}\n{"prompt": "universally"}\n')
    (folder / "statistics.jsonl").write_text("".join(f"{record}\n" for record in served[0]))
    with TraceFile(folder / "run.trace") as trace:
        simulate(lengths([n * 0.05 for n in range(40)], [50] * 40, [20] * 40), ENGINE, COST, trace=trace)
    shutil.copy(folder / "run.trace", folder / "trace.jsonl")
    with contextlib.chdir(folder):
        assert main(["simulate", "--fit", "run.trace", "--out", "cost.json", "--report", "none"]) == 0
        assert main(["bench", "--model", MODEL, "--workload", "w.json", *BENCH, "--out", "before.json"]) == 0
    for name in ("after", "a1", "a2", "a3", "b1", "b2", "b3"):
        shutil.copy(folder / "before.json", folder / f"{name}.json")
    return folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, inputs, server, served, tmp_path, monkeypatch, capsys):  # noqa: F811
    folder = tmp_path / "work"
    shutil.copytree(inputs, folder)
    monkeypatch.chdir(folder)
    server.answers = [served[1]]
    words = example.replace("FOLDER_OR_GGUF_FILE", MODEL).replace("FOLDER", MODEL).replace(
        "127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main([*shlex.split(words), *EXAMPLES[example]]) == 0
    after = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    printed = capsys.readouterr().out
    assert "state=ok" in printed if example.startswith("watch") else printed or after != before
