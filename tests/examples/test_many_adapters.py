"""examples/many_adapters.py writes three texts in the same steps; the training of its adapters runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"})


def test_three_different_texts_come_from_the_same_steps():
    ended = run(EXAMPLES / "many_adapters.py", "--max-tokens", "24")
    assert (ended.returncode, ended.stderr) == (0, "")
    title, rule, *rows, _, steps = ended.stdout.splitlines()
    assert title.split() == ["no", "adapter", "plays", "definitions"] and set(rule) == {" ", "-"}
    assert steps == "24 steps, 24 of them with all three requests"
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


def test_the_training_script_writes_folders_that_are_read(tmp_path):
    pytest.importorskip("peft")
    from batch_manager.adapters import read_peft_folder

    ended = run("-W", "ignore", EXAMPLES / "train_adapters.py", "--output", tmp_path, "--max-steps", "2", "--only",
                "definitions")
    assert ended.returncode == 0, ended.stderr
    assert "held-out bits per byte" in ended.stdout
    tensors = read_peft_folder(tmp_path / "definitions", EXAMPLES / "models" / "austen-4m")
    assert len(tensors.lora_config) == 4 * 6 and str(tensors.lora_weights.dtype) == "torch.bfloat16"
