"""The program that measures what events of the prefix cache cost prints what it says."""

import json

from tests.benchmarks import cache_events


def test_the_program_prints_a_line_of_json_for_each_hook(capsys):
    cache_events.main(["--batch", "4", "--iterations", "40", "--output-tokens", "8", "--tokens-per-block", "8"])
    dropped, handed = map(json.loads, capsys.readouterr().out.splitlines())
    assert dropped.keys() == handed.keys() and (dropped["hook"], handed["hook"]) == ("Dropping", "Handing")
    assert dropped["events"][0] == handed["events"][0] > 0 and handed["events"][1] > 0
    assert dropped["reader_us"] == 0 < handed["reader_us"] and dropped["iteration_us"] > 0
