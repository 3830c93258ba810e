"""A simulation that is fitted to one recorded run predicts four other runs, one of which has other settings.

tests/campaigns/simulation_fidelity.py recorded the runs: a Llama of 135M parameters in bf16 on one thread.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from batch_manager.stats.trace import read_trace
from batch_manager.tools.bench.load import Load
from batch_manager.tools.bench.metrics import Bounds
from batch_manager.tools.simulate.cost_fit import fit_cost
from batch_manager.tools.simulate.engine_settings import EngineSettings
from batch_manager.tools.simulate.figures import point_fields
from batch_manager.tools.simulate.fleet import simulate

from .simulated import lengths

DATA = Path(__file__).parent / "data" / "simulated_runs"
RUNS = json.loads((DATA / "runs.json").read_text())
THROUGHPUT, TAIL = 0.05, 0.10
# The fitted run has few steps with four prompts and 28 sequences.
WIDER = {("offline", "itl_ms_p99"): 0.15}


@pytest.fixture(scope="module")
def cost():
    with gzip.open(DATA / "fitted.trace.gz") as file:
        return fit_cost([read_trace(file)])


def test_steps_that_were_not_fitted_are_predicted(cost):
    assert cost.error.median < 0.05 and cost.error.p90 < 0.10 and abs(cost.error.total) < 0.01


@pytest.mark.parametrize("name", [name for name in RUNS if name != "fitted"])
def test_figures_are_near_the_measured_ones(cost, name):
    run = RUNS[name]
    arrival_s, inputs, outputs = (np.array(column) for column in zip(*run["requests"], strict=True))
    options = dict(zip(run["settings"][::2], map(int, run["settings"][1::2]), strict=True))
    settings = EngineSettings(
        num_blocks=cost.about["num_blocks"], max_seq_len=4096, max_batch_size=options.get("--max-batch-size", 32),
        max_num_tokens=options.get("--max-num-tokens", 512))
    errors = {"output_tok_s": [], "ttft_ms_p99": [], "itl_ms_p99": []}
    for seed in range(5):                           # the tails of so few requests vary by seed
        found = point_fields(simulate(lengths(arrival_s, inputs, outputs), settings, cost, seed=seed),
                             Load(), "", Bounds(), 0.0)
        for figure, seen in errors.items():
            seen.append(found[figure] / run["measured"][figure] - 1)
    for figure, seen in errors.items():
        bound = WIDER.get((name, figure), THROUGHPUT if figure == "output_tok_s" else TAIL)
        assert abs(np.mean(seen)) < bound, f"{figure} is off by {np.mean(seen):+.1%}"
