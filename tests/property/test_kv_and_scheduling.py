"""Every feature of scheduling and KV cache at once, on random scenarios; see world.py for what is looked at."""

import pytest

from .runs import run_seed


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_everybody_is_served_rightly(first_seed):
    for seed in range(first_seed, first_seed + 50):
        run_seed(seed)
