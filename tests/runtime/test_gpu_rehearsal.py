"""The bodies of the tests marked `gpu` are executed without a GPU, on interpreted kernels; see harness/gpu.py.

On the day a GPU is there, these tests then measure the product and not themselves.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.first_quarter.steps import BF16_TEST, ROOT, gpu_test_files
from tests.harness import gpu

# tests/integration/test_whole_engine_interpreted.py also runs the other modes on interpreted kernels.
SELECTED = {"tests/integration/test_whole_engine_interpreted.py": "plain_rows"}
NOT_REHEARSED = {"tests/runtime/test_block_copies.py": 1}         # tests of pinned memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the tests themselves run")
@pytest.mark.parametrize("file", [*gpu_test_files(), BF16_TEST])
def test_gpu_tests_pass_in_a_rehearsal(file):
    pytest.importorskip("triton", reason="triton is not installed")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m",
         "gpu", "-k", SELECTED.get(file, ""), file], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "TRITON_INTERPRET": "1", "BATCH_MANAGER_GPU_REHEARSAL": "1", "PYTHONWARNINGS": "ignore"})
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    last = ran.stdout.splitlines()[-1]
    assert int(re.search(r"(\d+) passed", last)[1]) >= 1
    skipped = re.search(r"(\d+) skipped", last)
    assert (int(skipped[1]) if skipped else 0) == NOT_REHEARSED.get(file, 0), ran.stdout[-1000:]


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
