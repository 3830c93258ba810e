"""examples/many_adapters.py writes three texts in the same steps; the training of its adapters runs."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(script, *arguments) -> (status, output): runs a script of examples/ in this process, on one thread."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        torch.set_num_threads(1)
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


def test_three_different_texts_come_from_the_same_steps(run):
    status, output = run("many_adapters.py", "--max-tokens", "24")
    title, rule, *rows, _, steps = output.splitlines()
    assert not status
    assert title.split() == ["no", "adapter", "plays", "definitions"] and set(rule) == {" ", "-"}
    # Each request begins when its adapter was found, so that a busy machine needs a few steps more.
    all_steps, together = map(int, re.fullmatch(r"(\d+) steps, (\d+) of them with all three requests", steps).groups())
    assert 24 <= all_steps < 48 and together > 0
    places = [0, title.index("plays"), title.index("definitions")]
    texts = [" ".join(row[start:end] for row in rows) for start, end in zip(places, [*places[1:], None])]
    assert len(set(texts)) == 3 and all(text.startswith("MARRIAGE") for text in texts)


def test_the_adapters_are_small_and_what_peft_wrote():
    files = sorted((EXAMPLES / "adapters").glob("*/adapter_*"))
    assert len(files) == 4 and sum(file.stat().st_size for file in files) < 300_000
    for file in files:
        if file.suffix == ".json":
            config = json.loads(file.read_text())
            assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == "austen-4m"


def test_the_training_script_writes_folders_that_are_read(run, tmp_path):
    pytest.importorskip("peft")
    from batch_manager.adapters import read_peft_folder

    status, output = run("train_adapters.py", "--output", tmp_path, "--max-steps", "1", "--only", "definitions")
    assert not status and "held-out bits per byte" in output
    tensors = read_peft_folder(tmp_path / "definitions", EXAMPLES / "models" / "austen-4m")
    assert len(tensors.lora_config) == 4 * 6 and str(tensors.lora_weights.dtype) == "torch.bfloat16"
