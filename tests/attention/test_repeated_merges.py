"""Launches that combine the parts of split sequences give the same bits each time; see repeated_merges.py."""

import pytest
import torch

from tests.harness.gpu import GPU, IS_REHEARSAL, needs_gpu


@pytest.mark.gpu
@needs_gpu
def test_ten_thousand_launches_that_combine_parts_give_the_same_bits():
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.attention.repeated_merges import run

    with torch.no_grad():
        assert run(6 if IS_REHEARSAL else 10_000, torch.device(GPU))
