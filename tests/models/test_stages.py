"""The stages of a model, one after the other, compute the bits of the whole model, in every family."""

from types import SimpleNamespace

import pytest
import torch

from batch_manager.attention.torch_paged import TorchPagedAttention
from batch_manager.errors import ConfigError, ModelLoadError
from batch_manager.models import load_model, register_model, registry
from batch_manager.models.decoder import Stage
from tests.models.conftest import Driver
from tests.models.test_same_logits_as_transformers import EXPERTS, FAMILIES
from tests.own_models.gemma2 import Gemma2

# A case of every family, with a tied head if there is one. Three models have three stages, the second without any end.
ALL = FAMILIES | EXPERTS
CASES = {family: case for case, (family, options) in reversed(ALL.items())}
CASES |= {family: case for case, (family, options) in ALL.items() if options.get("tie_word_embeddings")}


def load(folder, **options):
    return load_model(folder, device="cpu", dtype="float32", **options)


class Stages:
    """The stages of a model in place of the model. Each has its own spec, cache and attention."""

    def __init__(self, folder, count, **options):
        self.loaded = [load(folder, stage=Stage(index, count), **options) for index in range(count)]
        self.embed, self.logits = self.loaded[0].model.embed, self.loaded[-1].model.logits

    def make_attention(self, spec, pool):
        ends = torch.tensor([loaded.spec.num_layers for loaded in self.loaded]).cumsum(0).tolist()
        assert ends[-1] == spec.num_layers
        self.attentions = [TorchPagedAttention(loaded.spec, pool[:, end - loaded.spec.num_layers : end].contiguous())
                           for loaded, end in zip(self.loaded, ends)]
        return self

    def plan(self, step):
        for attention in self.attentions:
            attention.plan(step)

    def forward(self, hidden, positions, _):
        for loaded, attention in zip(self.loaded, self.attentions):
            hidden = loaded.model.forward(hidden, positions, attention)
        return hidden


@pytest.mark.parametrize("family, case, count", [
    *((family, case, 2) for family, case in CASES.items()), ("Llama", "llama, yarn", 3), ("Gemma3", "gemma 3", 3),
    ("Olmo3", "olmo 3", 3)])
def test_stages_compute_the_bits_of_the_whole(family, case, count, reference, prompts):
    _, folder = reference(family, **ALL[case][1])
    whole, stages = load(folder), Stages(folder, count)
    as_one = SimpleNamespace(spec=whole.spec, model=stages, dtype=whole.dtype)
    results = [driver.generate(prompts([1, 17, 40]), 4, chunk=16)
               for driver in (Driver(whole), Driver(as_one, attention_class=stages.make_attention))]
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert sum(loaded.weight_bytes for loaded in stages.loaded[:-1]) < whole.weight_bytes


def test_every_family_is_divided():
    assert len(CASES) == len(registry._SHIPPED)


def test_a_stage_of_a_file_with_another_tensor_is_refused(reference, tmp_path):
    from safetensors.torch import load_file, save_file

    _, folder = reference("Llama")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**load_file(folder / "model.safetensors"), "model.more": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="contains tensor 'model.more', which the model does not use"):
        load(tmp_path, stage=Stage(1, 2))


def test_a_class_without_stages_and_more_stages_than_layers_are_refused(reference, monkeypatch):
    _, folder = reference("Gemma2", **FAMILIES["gemma 2"][1])
    with pytest.raises(ConfigError, match="the model is divided into 4 stages; expected at most 3, the number of its"):
        load(folder, stage=Stage(0, 4))
    monkeypatch.setattr(registry, "_models", dict(registry._models))
    register_model("Gemma2ForCausalLM", Gemma2)
    with pytest.raises(ConfigError, match="stage 1 of 2 is wanted, and the model class is Gemma2, which has no stages"):
        load(folder, stage=Stage(1, 2))
    with pytest.raises(ConfigError, match="the model class is TransformersModel, which has no stages"):
        load(folder, stage=Stage(1, 2), model_implementation="transformers")
