"""A seed of suite T3 has no differences, with beams, steps of a single request, and prompts with cached blocks."""

from tests.campaigns.deterministic import run_seed

SEED = 1


def test_no_circumstance_shows(tmp_path):
    counts, differences = run_seed(SEED, tmp_path)
    assert differences == []
    met = {value for cell in counts if isinstance(cell, tuple) and len(cell) == 6 for value in cell}
    assert {"alone", "batched", "whole", "chunked", "paused", "hit", "miss", "greedy", "sampled", "beams"} <= met
