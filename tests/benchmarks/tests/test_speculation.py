"""The benchmark of drafts compares two engines by the same prompts."""

import json
from pathlib import Path

from tests.benchmarks.speculation import PROMPTS, main

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "austen-4m"


def test_both_engines_answer_each_prompt(capsys):
    main(["--model", str(SHIPPED), "--plain", "--threads", "1", "--tokens", "4", "--rounds", "1", "--batch", "5",
          "--dtype", "float32", "--kinds", "open", "batch"])
    *lines, record = capsys.readouterr().out.splitlines()
    results = json.loads(record)["results"]
    assert len(lines) == len(results) == 2
    for kind, count in (("open", len(PROMPTS["open"])), ("batch", 5)):
        assert results[kind]["outputs"] == results[kind]["equal"] == count
        assert results[kind]["tokens"] == 4 * count and results[kind]["speed"] > 0
