"""The whole engine on Triton kernels gives the tokens and log-probs of the engine in torch, in every mode.

The kernels run on a GPU if there is one, and otherwise in Triton's interpreter, in a separate process. So CI runs the
GPU code of decoding, attention and models without a GPU. The test fails if a kernel gets wrong arguments, if a column
is packed in one way and read in another, or if a padded row is sampled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batch_manager.runtime.forms.graph.form import GraphForm
from tests.harness.gpu import GPU, in_torch, needs_gpu

from . import engine_modes

REPOSITORY = Path(__file__).parents[2]
# A replayed step of the other mode, plain_rows, has the tokens of torch in tests/runtime/test_recorded_steps.py.
INTERPRETED = [mode for mode in engine_modes.MODES if mode != "plain_rows"]
LOG_PROB_TOLERANCE, GPU_TOLERANCE = 1e-4, 1e-3
# Mode -> the statistic that shows that the mode took effect.
SHOWS = {"windows": "MicroBatch ID", "reuse": "Reused KV cache blocks", "run_ahead": "Iterations In Flight"}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Run engine_modes.py with interpreted kernels. Return (folder of the checkpoints, {mode: results})."""
    pytest.importorskip("triton", reason="triton is not installed")
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; with one the kernels run compiled")
    folder = tmp_path_factory.mktemp("engine")
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "tests.integration.engine_modes", folder, *INTERPRETED],
        cwd=REPOSITORY, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True,
        text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, {found["mode"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("mode", INTERPRETED)
def test_the_engine_on_kernels_is_the_engine_in_torch(interpreted, mode):
    folder, answers = interpreted
    found, expected = answers[mode], engine_modes.run(folder, mode)
    check(found, expected)
    assert (found["split contexts"] > 0) == (mode != "deterministic")       # two fixed parts are longer than prompts
    if mode in SHOWS:
        assert answers["plain"][SHOWS[mode]] == 0 < found[SHOWS[mode]]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode, options", [
    *((mode, {"cuda_graphs": False}) for mode in engine_modes.MODES), ("plain_rows", {"cuda_graphs": True})],
    ids=[*engine_modes.MODES, "plain_rows with graphs"])
def test_the_engine_on_a_gpu_is_the_engine_in_torch_on_the_cpu(tmp_path, monkeypatch, mode, options):
    start, replays = GraphForm.start, []
    monkeypatch.setattr(GraphForm, "start", lambda *given: replays.append(1) or start(*given))
    with in_torch():
        expected = engine_modes.run(tmp_path, mode)
    check(engine_modes.run(tmp_path, mode, GPU, **options), expected, GPU_TOLERANCE)
    assert len(replays) >= 10 if options["cuda_graphs"] else replays == []


def check(found, expected, tolerance=LOG_PROB_TOLERANCE):
    """Assert that an engine on kernels gave the answers that an engine in torch gave. Log-probs may round."""
    found, expected = json.loads(json.dumps([found, expected]))
    assert (found["dispatch"], expected["dispatch"]) == ("triton", "torch")
    assert found["requests"].keys() == expected["requests"].keys()
    for number, answer in expected["requests"].items():
        assert (answer["finals"], answer["error"]) == (1, "")
        log_probs = found["requests"][number].pop("log_probs")
        np.testing.assert_allclose(log_probs, answer.pop("log_probs"), atol=tolerance, rtol=0)
        assert found["requests"][number] == answer
