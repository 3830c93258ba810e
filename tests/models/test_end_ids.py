import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from batch_manager.errors import ModelLoadError
from batch_manager.models.end_ids import read_end_ids
from batch_manager.models.loading import load_model
from batch_manager.weights.checkpoint import open_checkpoint

MODEL = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
VOCAB = 100


def read(folder, config, generation_config=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return read_end_ids(open_checkpoint(folder), VOCAB)


@pytest.mark.parametrize("config, generation_config, expected", [
    ({}, None, ()), ({"eos_token_id": None}, None, ()), ({"eos_token_id": 2}, None, (2,)),
    ({"eos_token_id": [5, 2, 5]}, None, (5, 2)), ({"eos_token_id": 2}, {}, (2,)),
    ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)), ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, (7, 8)),
    ({"eos_token_id": [-1, 99, 100]}, None, (99,)), ({}, {"eos_token_id": 3, "temperature": 0.7}, (3,))])
def test_end_ids_are_those_of_the_generation_config_else_of_the_config(tmp_path, config, generation_config, expected):
    assert read(tmp_path, config, generation_config) == expected


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], [[2]], {"a": 1}, 2**50, list(range(1001))])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_are_no_ids_is_refused_with_file_and_field(tmp_path, name, value):
    given = {"eos_token_id": value}
    with pytest.raises(ModelLoadError, match=rf"{name}: eos_token_id is .*an integer, or a list of at most 1,000"):
        read(tmp_path, *(({}, given) if name.startswith("gen") else (given, None)))


@pytest.mark.parametrize("ids, warnings", [
    ([5, 2], 0), ([5, 4096, -1], 1), (4096, 1), (4095, 0), (list(range(4000, 5000)), 1)])
def test_ids_outside_the_vocabulary_are_left_out_with_one_warning(tmp_path, caplog, ids, warnings):
    shutil.copy(MODEL / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    loaded = load_model(tmp_path, device="cpu", load_format="dummy")
    assert loaded.end_ids == tuple(token for token in np.atleast_1d(ids) if 0 <= token < 4096)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert all("eos_token_id has [4096" in record.message and "0..4,095" in record.message
               and len(record.message) < 300 + len(str(tmp_path)) for record in caplog.records)


def test_a_file_that_is_broken_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not valid JSON"):
        read(tmp_path, {})
