"""Compares `batch-manager simulate` with real runs:

    python -m tests.campaigns.simulation_fidelity --model FOLDER --vocab SIZE

The program serves five workloads with a model on this machine, fits a cost model to the trace of the first, and
predicts all five. The other workloads have other lengths, rates and settings. Nothing else should run at the same time,
because a disturbance counts as an error. The program prints the relative errors of the simulated figures.

    --rate-factor X   factor of the request rates; the default rates suit a model with steps of 20 ms
    --out FOLDER      keep workloads, traces, results and the cost model; `keep` copies them for the suite
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIGURES = ("output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p99")
FITTED = "fitted"
# Name -> (arguments of `batch-manager workload`, requests per second, arguments of bench and simulate).
WORKLOADS: dict[str, tuple[list[str], float, list[str]]] = {
    FITTED: (["log-normal", "--num-requests", "150", "--input-median", "180", "--input-sigma", "1.0", "--input-max",
              "1500", "--output-median", "64", "--output-sigma", "0.8", "--random-seed", "21"], 4.0, []),
    "poisson": (["log-normal", "--num-requests", "80", "--random-seed", "12"], 2.0, []),
    "long": (["log-normal", "--num-requests", "60", "--input-median", "500", "--input-sigma", "0.5", "--input-max",
              "1400", "--output-median", "40", "--output-sigma", "0.5", "--random-seed", "13"], 1.0, []),
    "offline": (["log-normal", "--num-requests", "80", "--random-seed", "15"], 0.0, []),
    "chunks": (["log-normal", "--num-requests", "80", "--input-median", "300", "--random-seed", "16"], 2.0,
               ["--max-batch-size", "8", "--max-num-tokens", "128"]),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--rate-factor", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (lengths, rate, settings) in WORKLOADS.items():
            run("workload", *lengths, "--request-rate", str(rate * options.rate_factor), "--vocab", str(options.vocab),
                "--out", str(folder / f"{name}.json"))
            run("bench", "--model", options.model, "--workload", str(folder / f"{name}.json"), "--num-threads", "1",
                "--trace", str(folder / f"{name}.trace"), "--out", str(folder / f"{name}.result.json"), "--quiet",
                "--report", "none", *settings)
        run("simulate", "--fit", str(folder / f"{FITTED}.trace"), "--result", str(folder / f"{FITTED}.result.json"),
            "--out", str(folder / "cost.json"))
        for name, (*_, settings) in WORKLOADS.items():
            run("simulate", "--cost", str(folder / "cost.json"), "--workload", str(folder / f"{name}.json"), "--out",
                str(folder / f"{name}.simulated.json"), "--quiet", "--report", "none", *settings)
            result, simulated = (json.loads((folder / f"{name}.{kind}.json").read_text())
                                 for kind in ("result", "simulated"))
            print(f"{name:10} " + "  ".join(f"{figure} {simulated[figure] / result[figure] - 1:+.1%} of "
                                            f"{result[figure]:,.5g}" for figure in FIGURES), flush=True)
    return 0


def keep(source: Path, target: Path) -> None:
    """Copy what the test suite needs from `source` to `target`.

    It copies the fitted trace, and the arrivals, lengths, settings and measured results of the workloads.
    """
    target.mkdir(parents=True, exist_ok=True)
    with gzip.open(target / "fitted.trace.gz", "wb") as file:
        file.write((source / f"{FITTED}.trace").read_bytes())
    kept: dict[str, Any] = {}
    for name in WORKLOADS:
        workload, result = (json.loads((source / f"{name}{suffix}").read_text())
                            for suffix in (".json", ".result.json"))
        kept[name] = {
            "requests": [[request["arrival_s"], len(request["prompt"]), request["max_tokens"]]
                         for request in workload["requests"]],
            "measured": {figure: result[figure] for figure in (*FIGURES, "requests_s")},
            "settings": WORKLOADS[name][2],
            "of": {field: result[field] for field in ("machine", "version", "commit")}}
    (target / "runs.json").write_text(json.dumps(kept))


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "batch_manager.tools", *arguments], check=True,
                   stdout=None if arguments[:2] == ("simulate", "--fit") else subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
