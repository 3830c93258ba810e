"""All features of scheduling and the KV cache together keep the rules of planning_run.py in 150 random scenarios.

tests/campaigns/kv_and_scheduling.py runs more scenarios: 5,226 in its longest run.
"""

import pytest

from .runs import run_seed

SEEDS, AT_A_TIME = 150, 50


@pytest.mark.parametrize("first_seed", range(0, SEEDS, AT_A_TIME))
def test_everybody_is_served_rightly(first_seed):
    for seed in range(first_seed, first_seed + AT_A_TIME):
        run_seed(seed)
