"""T9: the checkpoint fuzzer catches each reintroduced loader bug."""

import pytest

from tests.checkpoints.conftest import make_bench

from .checkpoint_bugs import CHECKPOINT_BUGS

SEEDS, PORTION = 6000, 10


@pytest.fixture(scope="module")
def bench():
    yield from make_bench()


@pytest.mark.parametrize("plant", CHECKPOINT_BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant, bench, monkeypatch):
    with monkeypatch.context() as patch:
        plant(patch)
        for start in range(0, SEEDS, PORTION):
            caught = bench.run([str(seed) for seed in range(start, start + PORTION)]).failed
            if caught:
                break
        else:
            pytest.fail(f"{SEEDS} seeds saw nothing")
    assert bench.run([key for key, _ in caught]).failed == [], "the same checkpoints are right without the bug"
