"""The program that measures the control plane of several ranks prints what it says."""

import json

from tests.benchmarks import rank_control


def test_the_program_prints_a_line_of_json(capsys):
    assert rank_control.main(["--batch", "4", "--iterations", "5", "--idle-ranks", "2", "--idle-seconds", "0.2"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line.keys() == {"alone_us", "ranks_us", "control_us", "frame_bytes", "idle_percent", "idle_alone",
                           "pick_up_ms"}
    assert 100 < line["frame_bytes"] < 1000 and len(line["idle_percent"]) == 2
