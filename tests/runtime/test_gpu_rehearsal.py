"""The bodies of the tests marked `gpu` are executed without a GPU, on interpreted kernels; see harness/gpu.py.

On the day a GPU is there, these tests then measure the product and not themselves.
"""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tests.first_quarter.steps import BF16_TEST, ROOT, gpu_test_files
from tests.harness import gpu

FILES = (*gpu_test_files(), BF16_TEST)
# On interpreted kernels, test_whole_engine_interpreted.py runs every mode, and test_recorded_steps.py graphs.
SELECTED = "not whole_engine or reuse"
NOT_REHEARSED = {"tests/runtime/test_block_copies.py": 1}         # tests of pinned memory


@pytest.fixture(scope="module")
def rehearsal():
    """Run the tests of all files in one process. Return pytest's output, with a line for each test."""
    pytest.importorskip("triton", reason="triton is not installed")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "-m",
         "gpu", "-k", SELECTED, *FILES], cwd=ROOT, capture_output=True, text=True, timeout=1200,
        env={**os.environ, "TRITON_INTERPRET": "1", "BATCH_MANAGER_GPU_REHEARSAL": "1", "PYTHONWARNINGS": "ignore"})
    assert ran.returncode in (0, 1), ran.stdout[-4000:] + ran.stderr[-1000:]
    return ran.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the tests themselves run")
@pytest.mark.parametrize("file", FILES)
def test_gpu_tests_pass_in_a_rehearsal(rehearsal, file):
    outcomes = Counter(re.findall(rf"^{re.escape(file)}::.* (PASSED|FAILED|ERROR|SKIPPED)\b", rehearsal, re.MULTILINE))
    assert outcomes["PASSED"] >= 1 and not outcomes["FAILED"] + outcomes["ERROR"], rehearsal[-4000:]
    assert outcomes["SKIPPED"] == NOT_REHEARSED.get(file, 0), rehearsal[-4000:]


def test_cuda_is_used_once_before_the_first_test(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch, "ones", lambda *size, device: calls.append(device) or torch.zeros(*size))
    gpu.start_cuda()
    assert calls == ["init", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.start_cuda()
    assert calls == ["init", "cuda"]
