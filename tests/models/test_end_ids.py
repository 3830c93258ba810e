import json

import pytest

from batch_manager.errors import ModelLoadError
from batch_manager.models.end_ids import read_end_ids
from batch_manager.weights.checkpoint import open_checkpoint

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


def test_a_file_that_is_broken_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not valid JSON"):
        read(tmp_path, {})
