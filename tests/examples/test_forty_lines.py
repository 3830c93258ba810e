"""examples/forty_lines.py has at most forty lines, runs and ends by itself."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import forked

pytest.importorskip("tokenizers")

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "forty_lines.py"


def test_it_has_at_most_forty_lines():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("is_copy", [False, True])
def test_it_runs_from_anywhere_continues_each_prompt_and_ends_by_itself(is_copy, tmp_path):
    """In the repository it finds the model that ships; a copy gets the model's folder as an argument."""
    command = [EXAMPLE]
    if is_copy:
        command = [shutil.copy(EXAMPLE, tmp_path), REPOSITORY / "examples" / "models" / "austen-4m"]
    start = forked if is_copy else subprocess
    result = start.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
                       timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    prompts = ["It is a truth universally acknowledged", "Emma smiled, and", "The ball"]
    for request_id, prompt in enumerate(prompts):
        assert re.search(rf"^\[{request_id}\] {prompt}.+", result.stdout, re.M), result.stdout
    assert re.search(r"^\d+ iterations$", result.stdout, re.M)


def test_a_model_without_end_ids_generates_up_to_the_length(tmp_path):
    model = shutil.copytree(REPOSITORY / "examples" / "models" / "austen-4m", tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((model / name).read_text())
        del fields["eos_token_id"]
        (model / name).write_text(json.dumps(fields))
    result = forked.run([sys.executable, EXAMPLE, model], capture_output=True, text=True, encoding="utf-8",
                            timeout=120)
    assert (result.returncode, result.stderr) == (0, "") and "[2] The ball" in result.stdout
