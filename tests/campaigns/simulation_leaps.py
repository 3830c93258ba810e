"""Compares the records of `batch-manager simulate` with and without leaps, to the last bit:

    python -m tests.campaigns.simulation_leaps --requests 100000

The traffic is that of `batch-manager workload sample-trace`, served by 64 replicas in five settings. The cost model is
fitted on the recorded run of tests/tools/data. Without leaps, 100,000 requests take about ten minutes per setting.

    --setting NAME   only this one of SETTINGS
"""

import argparse
import gzip
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from batch_manager import SchedulerPolicy
from batch_manager.stats.trace import read_trace
from batch_manager.tools.datasets import Selection, read_records
from batch_manager.tools.simulate.cost_fit import fit_cost
from batch_manager.tools.simulate.engine_settings import EngineSettings
from batch_manager.tools.simulate.fleet import simulate
from batch_manager.tools.simulate.traffic import Traffic
from batch_manager.tools.workload import main as workload
from tests.tools.simulated import records

TRACE = Path(__file__).parents[1] / "tools" / "data" / "simulated_runs" / "fitted.trace.gz"
MAX_UTILIZATION = SchedulerPolicy.MAX_UTILIZATION
# Name -> (arguments of `workload sample-trace`, changed fields of EngineSettings, routing). The name "asynchronous" has
# such a device.
SETTINGS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "full": (["--as", "azure", "--request-rate", "40"], {}, "least-loaded"),
    "pauses": (["--as", "azure", "--request-rate", "40", "--input-median", "400"],
               {"policy": MAX_UTILIZATION, "num_blocks": 150, "max_num_sequences": 48}, "round-robin"),
    "reuse": (["--as", "mooncake", "--request-rate", "40"],
              {"enable_block_reuse": True, "policy": MAX_UTILIZATION}, "longest-prefix"),
    "idle": (["--as", "azure", "--request-rate", "2", "--output-median", "20"], {}, "least-loaded"),
    "asynchronous": (["--as", "azure", "--request-rate", "40"], {}, "least-loaded"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--setting", choices=SETTINGS)
    options = parser.parse_args(argv)
    with gzip.open(TRACE) as file:
        cost = fit_cost([read_trace(file)])
    are_equal = True
    for name in [options.setting] if options.setting else SETTINGS:
        arguments, changed, routing = SETTINGS[name]
        traffic = traffic_of(arguments, options.requests)
        longest = int((traffic.input_tokens + traffic.output_tokens).max())
        settings = replace(EngineSettings(num_blocks=cost.about["num_blocks"], max_seq_len=longest), **changed)
        found, seconds = [], []
        for leaps in (True, False):
            began = time.process_time()
            run = simulate(traffic, settings, replace(cost, is_asynchronous=name == "asynchronous"),
                           num_replicas=options.replicas, routing=routing, leaps=leaps)
            seconds.append(time.process_time() - began)
            found.append(records(run))
        is_equal = found[0] == found[1]
        are_equal = are_equal and is_equal
        iterations = sum(replica.iterations for replica in run.replicas)
        print(f"{name}: {len(traffic):,} requests, {iterations:,} iterations, "
              f"{sum(replica.recomputed_tokens for replica in run.replicas):,} tokens computed again, "
              f"{sum(replica.reused_tokens for replica in run.replicas):,} found in the cache; {seconds[0]:.1f} s of "
              f"CPU time with leaps, {seconds[1]:.1f} s without; records {'equal' if is_equal else 'DIFFER'}",
              flush=True)
    return 0 if are_equal else 1


def traffic_of(arguments: list[str], count: int) -> Traffic:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        workload(["sample-trace", *arguments, "--num-requests", str(count), "--out", str(path)])
        return Traffic.of_records(read_records(str(path), Selection()))


if __name__ == "__main__":
    sys.exit(main())
