"""The whole engine on interpreted Triton kernels gives the tokens and log-probs of the engine in torch, in every mode.

So CI runs the GPU code of decoding, attention and models without a GPU. The test fails if a kernel gets wrong
arguments, if a column is packed in one way and read in another, or if a padded row is sampled. The kernels run in a
separate process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from . import engine_modes

REPOSITORY = Path(__file__).parents[2]
LOG_PROB_TOLERANCE = 1e-4
# Mode -> the statistic that shows that the mode took effect.
SHOWS = {"overlap": "MicroBatch ID", "reuse": "Reused KV cache blocks", "run_ahead": "Iterations In Flight"}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Run engine_modes.py with interpreted kernels. Return (folder of the checkpoints, {mode: results})."""
    pytest.importorskip("triton", reason="triton is not installed")
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; with one the kernels run compiled")
    folder = tmp_path_factory.mktemp("engine")
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "tests.integration.engine_modes", folder], cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, {found["mode"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("mode", engine_modes.MODES)
def test_the_engine_on_kernels_is_the_engine_in_torch(interpreted, mode):
    folder, answers = interpreted
    found, expected = answers[mode], json.loads(json.dumps(engine_modes.run(folder, mode)))
    assert (found["dispatch"], expected["dispatch"]) == ("triton", "torch")
    assert found["requests"].keys() == expected["requests"].keys()
    for number, answer in expected["requests"].items():
        assert (answer["finals"], answer["error"]) == (1, "")
        log_probs = found["requests"][number].pop("log_probs")
        np.testing.assert_allclose(log_probs, answer.pop("log_probs"), atol=LOG_PROB_TOLERANCE, rtol=0)
        assert found["requests"][number] == answer
    assert (found["split contexts"] > 0) == (mode != "deterministic")
    if mode in SHOWS:
        assert answers["plain"][SHOWS[mode]] == 0 < found[SHOWS[mode]]
