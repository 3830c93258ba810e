"""examples/constrained_output.py prints outputs that match its schema and its pattern."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

REPOSITORY = Path(__file__).resolve().parents[2]


def test_it_prints_json_and_sentences_of_the_given_shape(tmp_path):
    result = subprocess.run([sys.executable, REPOSITORY / "examples" / "constrained_output.py"], cwd=tmp_path,
                            capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    *lines, summary = result.stdout.splitlines()
    people = [ast.literal_eval(line) for line in lines if line.startswith("{")]
    sentences = [line for line in lines if re.fullmatch(r'"[A-Z][a-z ]+[.!?]" said (Emma|Mr\. Knightley|Miss Bates)\.',
                                                        line)]
    assert len(people) == len(sentences) == 8 and len(lines) == 16
    assert all(list(person) == ["name", "temper", "age", "friends"] for person in people)
    assert re.fullmatch(r"16 outputs, \d+ tokens; the grammars took \d+ microseconds per token \(median\)", summary)
