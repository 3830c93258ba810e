"""The manager agrees with a model of dicts and sets when calls come in random order.

Suite T2 of tests.campaigns runs more calls.
"""

import pytest

from tests.campaigns.blocks import run_seed


@pytest.mark.parametrize("number", range(4))
def test_the_manager_does_as_the_model(number):
    counts, wrong = run_seed(number)
    assert wrong is None, f"python -m tests.campaigns.blocks {number}\n{wrong}"
    assert counts["allocate"] and counts["look-ups"]
