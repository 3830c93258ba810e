"""docs/devices.md lists all configurations whose steps are not compiled, and the heads that run in torch."""

import json
import re
from pathlib import Path

import pytest
import torch

from batch_manager import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.config import BLOCK_SIZES
from batch_manager.layers.recording import NotRecordableError, RecordedAttention, record, record_head
from batch_manager.models import load_model
from batch_manager.models.registry import _MODEL_TYPES
from batch_manager.runtime import packing
from batch_manager.runtime.forms.compiled.forward import LARGEST_HEAD, make_compiled
from batch_manager.runtime.forms.table import Asked, wanted_forms

from ..models.test_model_spec import BASE, OTHERS

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
CPU = torch.device("cpu")
# Sizes of a decoder: (hidden size, heads, head size or None for hidden size / heads).
SIZES = ((64, 4, None), (72, 6, None), (48, 4, None), (64, 6, 12), (80, 2, 48))
RENAMED = {"GPT2LMHeadModel": {"hidden_size": "n_embd", "num_attention_heads": "n_head"},
           "GPTJForCausalLM": {"hidden_size": "n_embd", "num_attention_heads": "n_head"},
           "BloomForCausalLM": {"num_attention_heads": "n_head"}}
HEADS = {"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM",
         "MistralForCausalLM", "Starcoder2ForCausalLM"}       # a head size of their own is read


def listed(start):
    """Return the items of the list that follows the paragraph of docs/devices.md that begins with `start`."""
    after = PAGE.read_text().partition(f"\n{start}")[2].partition("\n\n")[2].partition("\n\n")[0]
    return [re.sub(r"\s+", " ", item) for item in re.findall(r"^- (.*(?:\n  .*)*)", after, re.M)]


def loaded(folder, architecture, hidden=64, heads=4, head_size=None, **fields):
    names = RENAMED.get(architecture, {})
    config = {"architectures": [architecture], **(BASE | OTHERS)[architecture], "rotary_pct": 0.5, "rotary_dim": 6,
              "partial_rotary_factor": 0.5,
              names.get("hidden_size", "hidden_size"): hidden,
              names.get("num_attention_heads", "num_attention_heads"): heads, "num_key_value_heads": 2, **fields}
    if architecture != "GPTJForCausalLM":
        config.pop("rotary_dim")
    if architecture != "GPTNeoXForCausalLM":
        config.pop("rotary_pct")
    if architecture not in ("PhiForCausalLM", "StableLmForCausalLM", "Phi3ForCausalLM"):
        config.pop("partial_rotary_factor")
    if head_size:
        config["head_dim"] = head_size
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder, device="cpu", load_format="dummy", dtype="float32", compiled_step=True)


def reason(model):
    """Return why the forward of a model is not recorded; "" if it is."""
    spec = model.spec
    attention = RecordedAttention((spec.num_heads, spec.num_kv_heads, spec.head_size), spec.attention, sink=0)
    try:
        with torch.inference_mode():
            record(model.model.forward, spec.hidden_size, model.dtype, attention)
    except NotRecordableError as error:
        return str(error)
    return ""


def has_head(model):
    with torch.inference_mode():
        return record_head(model.model.logits, model.spec.hidden_size, model.dtype) is not None


def test_the_families_that_are_not_compiled_in_some_sizes(tmp_path):
    found = set()
    for architecture in _MODEL_TYPES:
        for hidden, heads, head_size in SIZES:
            if head_size is None or architecture in HEADS:
                model = loaded(tmp_path, architecture, hidden, heads, head_size)
                if reason(model):
                    assert hidden % 32 and "a multiple of 32" in reason(model)
                    found.add(architecture)
    assert found == {"Olmo2ForCausalLM", "Olmo3ForCausalLM"}
    assert "OLMo 2 and OLMo 3 with a hidden size (heads x head size) that is not a multiple of 32" in listed("These")


def is_compiled(*, has_triton=False, has_attention=False, **options):
    params = TrtGptModelOptionalParams(device="cpu", **options)
    return "compiled" not in wanted_forms(Asked(params, CPU, packing.packed, has_triton, has_attention))


def blocks(tokens):
    return {"kv_cache_config": KvCacheConfig(tokens_per_block=tokens)}


def test_every_other_item_of_the_list(tmp_path):
    assert is_compiled()
    left = [item for item in listed("These") if not item.startswith("OLMo")]
    refused = {"blocks of 8 tokens": blocks(8),
               "an attention part of your own (`Parts.attention`)": {"has_attention": True},
               "`TRITON_INTERPRET` in the environment": {"has_triton": True}}
    for item, options in refused.items():
        assert not is_compiled(**options)
        left.remove(item)
    assert all(is_compiled(**blocks(size)) for size in BLOCK_SIZES if size != 8)

    wide = loaded(tmp_path, "LlamaForCausalLM", head_size=LARGEST_HEAD + 2)
    with pytest.raises(NotRecordableError, match="head_size is 258"):
        make_compiled(None, wide, wide.spec, 0)
    left.remove(f"heads of more than {LARGEST_HEAD} entries")
    half = load_model(tmp_path, device="cpu", load_format="dummy", dtype="float16", compiled_step=True)
    with pytest.raises(NotRecordableError, match="computes in torch.float16"):
        make_compiled(None, half, half.spec, 0)
    left.remove("`float16`")
    # Computed by transformers, or by code of the user's: test_through_transformers.py and tests/own_models.
    assert left == ["models that run through `transformers`",
                    "model classes of your own that compute more than the layers of `batch_manager.layers`"]


def test_the_heads_that_run_in_torch(tmp_path):
    """Heads that do more than multiply by a matrix: by family, with the sizes and options of their defaults."""
    plain = {architecture for architecture in _MODEL_TYPES if has_head(loaded(tmp_path, architecture))}
    assert set(_MODEL_TYPES) - plain == {"Gemma2ForCausalLM"}
    assert not has_head(loaded(tmp_path, "Gemma3ForCausalLM", final_logit_softcapping=30.0))
    assert not has_head(loaded(tmp_path, "CohereForCausalLM", logit_scale=0.3))
    assert not has_head(loaded(tmp_path, "GraniteForCausalLM", logits_scaling=3.0))
    assert has_head(loaded(tmp_path, "GraniteForCausalLM", logits_scaling=8.0))
    assert not has_head(loaded(tmp_path, "OPTForCausalLM", word_embed_proj_dim=32))
    assert listed("The rest of a step is compiled") == [
        "a softcap on logits (Gemma 2, Gemma 3 with `final_logit_softcapping`)",
        "a factor on logits that is not a power of two (Command-R, Granite)",
        "OPT with embeddings narrower than the hidden size"]
