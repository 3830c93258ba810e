"""`check_tensors` reads no tensor's data, and refuses what loading refuses, with the same message."""

import json
import shutil

import pytest
import torch

from batch_manager.errors import ModelLoadError
from batch_manager.models.loading import check_tensors, class_and_spec, load_model
from batch_manager.weights import safetensors_source
from batch_manager.weights.checkpoint import open_checkpoint
from tests.models.test_same_logits_as_transformers import EXPERTS, FAMILIES

ONE_OF_EACH = {family: (family, options) for family, options in reversed([*FAMILIES.values(), *EXPERTS.values()])}
LAYERS = ("num_hidden_layers", "n_layer")


def check(path):
    checkpoint = open_checkpoint(path)
    model_class, spec, _ = class_and_spec(checkpoint, "native")
    check_tensors(checkpoint, model_class, spec, torch.float32)


@pytest.fixture
def unreadable(monkeypatch):
    class Unreadable:
        def __init__(self, *_, **__):
            pass

        def get_tensor(self, name):
            raise AssertionError(f"{name} was read")

    monkeypatch.setattr(safetensors_source, "safe_open", Unreadable)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_every_family_is_checked_without_its_numbers(family, reference, unreadable):
    _, options = ONE_OF_EACH[family]
    check(reference(family, **options)[1])


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Falcon"])
@pytest.mark.parametrize("change", [1, -1, "size"])
def test_what_loading_refuses_is_refused_with_the_same_text(family, change, reference, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(reference(family, **ONE_OF_EACH[family][1])[1], folder)
    config = json.loads((folder / "config.json").read_text())
    if change == "size":
        config["vocab_size"] += 1
    else:
        layers = next(name for name in LAYERS if name in config)
        config[layers] += change
        config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError) as loaded:
        load_model(folder, device="cpu", dtype="float32")
    with pytest.raises(ModelLoadError) as checked:
        check(folder)
    assert str(checked.value) == str(loaded.value)
