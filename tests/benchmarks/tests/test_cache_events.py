"""The program that measures what events of the prefix cache cost prints what it says."""

import json

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from tests.benchmarks import cache_events  # noqa: E402


def test_the_program_prints_a_line_of_json_for_each_way(capsys):
    cache_events.main(["--batch", "4", "--iterations", "40", "--output-tokens", "8", "--tokens-per-block", "8"])
    dropped, published = map(json.loads, capsys.readouterr().out.splitlines())
    assert (dropped["events are"], published["events are"]) == ("dropped", "published")
    assert dropped.keys() == published.keys() and dropped["events"] == published["events"] > 0
    assert dropped["iteration_us"] > 0 and published["reader_us"] > 0
