"""One seed of the determinism campaign (T3) finds no request whose bits differ from those of the request run alone.

The seed has beams, steps of a single request, chunks, pauses, and prompts with cached blocks.
"""

from tests.campaigns.deterministic import run_seed

SEED = 16


def test_no_circumstance_shows(tmp_path):
    counts, differences = run_seed(SEED, tmp_path)
    assert differences == []
    met = {value for cell in counts if isinstance(cell, tuple) and len(cell) == 6 for value in cell}
    assert {"alone", "batched", "whole", "chunked", "paused", "hit", "miss", "greedy", "sampled", "beams"} <= met
