"""In deterministic mode, parts and machines that cannot be deterministic are refused by name before any step runs."""

import pytest

from batch_manager import TrtGptModelOptionalParams
from batch_manager.attention.torch_paged import TorchPagedAttention
from batch_manager.errors import ConfigError
from batch_manager.models import registry
from batch_manager.models.llama import Llama
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend


def build(folder, attention_factory=None):
    params = TrtGptModelOptionalParams(deterministic=True, device="cpu")
    return build_native_backend(folder, params, layout=packing.packed, num_slots=4, attention_factory=attention_factory)


def test_an_attention_of_ones_own(differential):
    with pytest.raises(ConfigError, match="deterministic is True and Parts.attention is set"):
        build(differential.SHIPPED, TorchPagedAttention)


def test_a_model_of_ones_own_that_does_not_promise_it(differential, monkeypatch):
    class Mine(Llama):
        deterministic = False

    monkeypatch.setitem(registry._models, "LlamaForCausalLM", Mine)
    with pytest.raises(ConfigError, match="deterministic is True, and the model class is Mine, which"):
        build(differential.SHIPPED)
    Mine.deterministic = True
    build(differential.SHIPPED).close()


def test_a_backend_of_ones_own(make_world):
    with pytest.raises(ConfigError, match="deterministic and Parts.backend are both set"):
        make_world(deterministic=True)


def test_attention_on_a_machine_whose_products_depend_on_a_rows_place(differential, monkeypatch):
    from batch_manager.attention import torch_fixed_tiles

    monkeypatch.setattr(torch_fixed_tiles, "_found", {})
    monkeypatch.setattr(torch_fixed_tiles, "agreeing_sizes", lambda *operands, sizes: ())
    with pytest.raises(ConfigError, match="the bits of a row depend on its index in attention's matrix products of "
                                          "64 rows on .* threads? of this machine"):
        build(differential.SHIPPED)
