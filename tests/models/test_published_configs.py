"""The config.json files of published checkpoints are read as transformers reads them.

They include the first and later published forms of a family's config.json.
"""

import json
from pathlib import Path

import pytest

from batch_manager.errors import ModelLoadError
from batch_manager.models import read_spec, register_model, registry

pytest.importorskip("transformers")

from .random_configs import FAMILIES, numbers_of_transformers  # noqa: E402
from .test_config_differential import numbers_of  # noqa: E402

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_as_transformers_reads_it(name, tmp_path):
    config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = numbers_of(read_spec(tmp_path))
    if config["architectures"][0] in FAMILIES:
        config = {field: value for field, value in config.items() if field != "auto_map"}
        expected = numbers_of_transformers({**config, "architectures": list(config["architectures"])})
        assert {field: found[field] for field in expected if field in found} == {
            field: value for field, value in expected.items() if field in found}
        assert len(expected.keys() & found.keys()) > 15


# Fields of published files that the class of the family does not read, apart from the fields of any model.
_BLOOM = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
          "skip_bias_add_qkv")
UNREAD = {
    "qwen2.5-1m": ("dual_chunk_attention_config",), "gemma-2-2b": ("hidden_act",), "gpt2": ("n_ctx",),
    "gemma-3-270m": ("_sliding_window_pattern",), "phi-3.5-mini": ("attention_bias",), "phi-4": ("attention_bias",),
    "gpt-j-6b": ("rotary", "scale_attn_weights"), "stablelm-3b": ("rotary_scaling_factor",),
    "command-r7b": ("_sliding_window_pattern", "layer_switch", "order_of_interleaved_layers", "use_embedding_sharing",
                    "position_embedding_type", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"),
    "starcoder2-3b": ("attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type", "norm_type",
                      "scale_attention_softmax_in_fp32", "scale_attn_weights"),
    "smollm3-3b": ("max_window_layers",), "qwen3-30b-a3b": ("max_window_layers",),
    "smollm2-135m": ("is_llama_config", "transformers.js_config"),
    "bloom-560m": _BLOOM, "bloom": _BLOOM, "bloom-7b1": _BLOOM, "falcon-11b": ("ff_factor",),
}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name]["architectures"][0] in FAMILIES
                                  and "auto_map" not in PUBLISHED[name]])
def test_a_registered_class_reads_it_or_names_the_fields_that_it_ignores(name, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_models", dict(registry._models))
    shipped = registry.find_model(PUBLISHED[name]["architectures"][0])
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], "architectures": ["MyForCausalLM"]}))
    unread = UNREAD.get(name, ())
    for number, field in enumerate(unread):    # a field is refused unless it is named
        others = unread[:number] + unread[number + 1:]
        register_model("MyForCausalLM", type("Mine", (shipped,), {"ignores": others}))
        with pytest.raises(ModelLoadError, match=f"config.json: {field} is .*`ignores`"):
            read_spec(tmp_path)
    register_model("MyForCausalLM", type("Mine", (shipped,), {"ignores": unread}))
    assert read_spec(tmp_path).architecture == "MyForCausalLM"
