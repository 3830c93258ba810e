"""The benchmark of one engine against two measures each setting, and hands over the blocks of each long prompt."""

import json

import pytest

pytest.importorskip("torch")

from tests.benchmarks.two_engines import PERCENTILES, SETTINGS, main  # noqa: E402


def test_each_setting_is_measured(capsys):
    main(["--tiny", "--dtype", "float32", "--prompt", "130", "--chunk", "64", "--streams", "2", "--output", "20",
          "--arrivals", "2", "--every", "0.01", "--rounds", "1"])
    *lines, record = capsys.readouterr().out.splitlines()
    results = json.loads(record)["results"]
    assert [row["setting"] for row in results] == [*SETTINGS] and len(lines) == 2 + len(SETTINGS)
    for row in results:
        assert row["tokens"] == 2 * 19 and row["prompts"] == 2
        assert row["between_ms"].keys() == row["first_ms"].keys() == PERCENTILES.keys()
        assert list(row["between_ms"].values()) == sorted(row["between_ms"].values())
    blocks_of_a_prompt, bytes_of_a_block = 2, 2 * 2 * 64 * 2 * 16 * 4          # layers, keys and values, heads
    assert results[-1]["bytes_of_a_prompt"] == blocks_of_a_prompt * bytes_of_a_block and not results[-1]["fallbacks"]
