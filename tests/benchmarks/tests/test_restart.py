"""The program that measures a restart on a prompt cache on disk prints what it says."""

import json

from tests.benchmarks import restart


def test_the_program_prints_times_and_ratio_and_the_prompt_comes_from_the_directory(capsys):
    restart.main(["--shape", "tiny", "--tokens", "600", "--rounds", "1", "--dtype", "float32"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["seconds"].keys() == set(restart.KINDS) and min(line["seconds"].values()) > 0
    assert line["ratio"] == line["seconds"]["no directory"] / line["seconds"]["after a restart"]
