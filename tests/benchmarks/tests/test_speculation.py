"""The benchmarks of drafts answer the same prompts with and without them."""

import json
from pathlib import Path

from tests.benchmarks.speculation import PROMPTS, main
from tests.benchmarks.speculation_peers import KINDS, table

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "austen-4m"


def test_each_prompt_is_answered_with_and_without_drafts(capsys):
    main(["--model", str(SHIPPED), "--plain", "--threads", "1", "--tokens", "4", "--rounds", "1", "--batch", "5",
          "--dtype", "float32", "--kinds", "open", "batch"])
    *lines, record = capsys.readouterr().out.splitlines()
    results = json.loads(record)["results"]
    assert len(lines) == len(results) == 2
    for kind, count in (("open", len(PROMPTS["open"])), ("batch", 5)):
        assert results[kind]["outputs"] == results[kind]["equal"] == count
        assert results[kind]["tokens"] == 4 * count and results[kind]["speed"] > 0


def test_the_table_of_several_engines_compares_their_tokens_per_second():
    own = {kind: [[10, 1.0], [30, 1.0]] for kind in KINDS}
    other = {kind: [[10, 2.0], [30, 2.5]] for kind in KINDS}
    *_, first, second = table({"batch_manager": [own] * 2, "llama.cpp": [other] * 2})
    assert first == "| open | batch_manager | 10 (10-10) | 30 (30-30) | 3 (3-3) |  |"
    assert second == "| open | llama.cpp | 5 (5-5) | 12 (12-12) | 2.4 (2.4-2.4) | 2.5 (2.5-2.5) |"
