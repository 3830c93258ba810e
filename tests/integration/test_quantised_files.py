"""A GGUF file runs from its own blocks, and a folder from blocks that are made while it is loaded, with the greedy
tokens of transformers on the decoded weights."""

import copy
from dataclasses import replace
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from batch_manager import ConfigError, KvCacheConfig, ModelLoadError, TrtGptModelOptionalParams
from batch_manager.layers import weight_form
from batch_manager.layers.weight_form import QUANTIZATIONS, quantised_bytes
from batch_manager.models import load_model
from batch_manager.runtime.build_backend import refuse_without_quantised_products
from batch_manager.runtime.forms.table import Asked
from batch_manager.runtime.packing import packed
from batch_manager.tools.model_facts import described, inspect_model
from batch_manager.triton_kernels.cpu.native import library as library_module
from batch_manager.triton_kernels.cpu.native.build import CannotBuildError
from batch_manager.triton_kernels.cpu.native.library import load_library
from batch_manager.triton_kernels.cpu.native.matrix import quantised_rows
from batch_manager.weights.matrices import Dense
from tests.harness.compiled import library_or_skip
from tests.integration.greedy_model import GreedyModel
from tests.integration.test_same_tokens_as_transformers import FUSED, MAX, SPLIT, V1, prompts_of, run
from tests.models.conftest import make_reference
from tests.models.gguf_writing import write_gguf
from tests.weights.test_quantised_folders import FORMATS, write_folder

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 203}
ROUNDED = {"quantization": None, "quantized_activations": "int8"}


def like_q4_k_m(name):
    """Stacks of queries, keys and values have two types, and so have layers."""
    if name == "token_embd.weight" or "attn_v" in name or "blk.1.ffn_down" in name:
        return "Q6_K"
    return "Q5_K" if "ffn_up" in name else "Q4_K"


def quantised(model, quantization):
    """Return a copy of a model whose layers have the weights that the engine writes and decodes."""
    model, kind = copy.deepcopy(model), QUANTIZATIONS[quantization]
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D") and name != "lm_head":
            weight = module.weight.data if type(module).__name__ == "Linear" else module.weight.data.T
            rows = dequantize(quantised_rows(weight, kind), gguf.GGMLQuantizationType[kind])
            weight.copy_(torch.from_numpy(rows)[:, : weight.shape[1]])
    return model


def of_the_smallest(name):
    return "IQ4_XS" if name == "token_embd.weight" or "ffn_up" in name else "Q2_K" if "attn_v" in name else "Q3_K"


class Reference(GreedyModel):
    vocab_size = WIDE["vocab_size"]

    def __init__(self, folder, family, kind, **options):
        super().__init__()
        model = None if kind in FORMATS else make_reference(family, **WIDE | options)
        if kind in FORMATS:
            self.folder = folder / "quantised"
            self.model = write_folder(self.folder, kind, family)
        elif kind in tuple(QUANTIZATIONS):
            self.folder, self.model = folder / "plain", quantised(model, kind)
            model.save_pretrained(self.folder)
        else:
            self.folder = folder / "model.gguf"
            self.model = write_gguf(model, self.folder, family, kind)

    def likeliest(self, tokens):
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


@pytest.fixture(autouse=True)
def library():
    library_or_skip()


@pytest.mark.parametrize(("family", "kind", "options"), [
    ("Llama", "Q4_0", {"tie_word_embeddings": True}), ("Qwen2", like_q4_k_m, {"tie_word_embeddings": True}),
    ("Gemma2", "Q8_0", {"head_dim": 32}), ("Llama", of_the_smallest, {"tie_word_embeddings": True}),
    ("Qwen2", "AWQ", {}), ("Llama", "int8 with zero points", {}),
    ("Qwen2", "int4", {"intermediate_size": 500}), ("GPT2", "int8", {"n_embd": 96, "n_layer": 2, "vocab_size": 203})],
    ids=["Q4_0", "Q4_K_M", "Q8_0", "Q3_K", "AWQ", "compressed-tensors", "int4", "int8"])
def test_tokens_are_those_of_transformers_alone_and_in_batches(make_manager, new_client, new_request, tmp_path, family,
                                                               kind, options):
    reference = Reference(tmp_path, family, kind, **options)
    prompts = prompts_of(reference.vocab_size, [1, 2, 15, 16, 33, 70, 5, 9, 64, 31])
    scarce = {"model_type": FUSED, "enable_chunked_context": True, "max_num_tokens": 48, "policy": MAX,
              "kv_cache_config": KvCacheConfig(tokens_per_block=16, max_tokens=16 * 16, enable_block_reuse=True)}
    for engine in ({"max_batch_size": 1}, {"max_batch_size": 8, "model_type": SPLIT}, {"model_type": V1}, scarce,
                   {**scarce, "deterministic": True}):
        options = {"kv_cache_config": KvCacheConfig(tokens_per_block=16, max_tokens=2048), **engine,
                   "quantization": kind if kind in tuple(QUANTIZATIONS) else None}
        records = run(make_manager, new_client, new_request, reference, prompts, lambda i: 6 + i % 5, **options)
        if engine.get("model_type") != V1:
            assert records[-1]["Compiled Steps"] > 0 and not records[-1].get("Packed Steps")


@pytest.mark.parametrize("ties", [True, False])
def test_weights_take_the_bytes_of_the_file(tmp_path, ties):
    reference = Reference(tmp_path, "Llama", "Q4_0", tie_word_embeddings=ties)
    loaded = load_model(reference.folder, device="cpu", compiled_step=True)
    assert loaded.weight_bytes < 1.02 * reference.folder.stat().st_size
    facts = inspect_model(reference.folder, device="cpu")
    assert facts["weight_bytes"] == loaded.weight_bytes and facts["kept_types"] == ["Q4_0"]
    assert "; matrices in Q4_0 keep the file's blocks" in described(facts)
    assert inspect_model(reference.folder, device="cuda", free_bytes=10**9)["kept_types"] == ["Q4_0"]
    for dtype in ("float32", "float16"):                   # float16 has no compiled steps
        decoded = load_model(reference.folder, device="cpu", dtype=dtype)
        assert decoded.weight_bytes > 3 * loaded.weight_bytes


def test_products_that_cannot_be_compiled_any_more_are_named(tmp_path, make_manager, new_client, new_request,
                                                             monkeypatch):
    """The library of the step is in the cache, that of the file's type is not, and there is no compiler."""
    path = Reference(tmp_path, "Llama", "Q4_0").folder
    load_library()
    monkeypatch.setattr(library_module, "_kernels", {})
    monkeypatch.setattr(library_module, "built_library", mock.Mock(side_effect=CannotBuildError("found no C compiler")))
    with pytest.raises(ModelLoadError, match="quantised weights of .*gguf are not there: found no C compiler; "
                                             "expected a C compiler, .*; install one, or set cpu_compile=False"):
        make_manager(new_client(), model_path=path, device="cpu")
    client = new_client()
    client.pending = [new_request(1, [5, 6, 7], 3)]
    make_manager(client, model_path=path, device="cpu", cpu_compile=False)
    client.wait_for_finals(1)
    assert client.final(1).error == ""


def test_a_plain_folder_is_quantised_while_it_is_loaded(tmp_path, make_manager, new_client):
    """It takes the bytes of blocks in its layers, and is refused where products cannot read them."""
    reference = Reference(tmp_path, "Llama", "int4", tie_word_embeddings=False)
    plain = load_model(reference.folder, device="cpu", dtype="bfloat16", compiled_step=True)
    for quantization in ("int8", "int4"):
        loaded = load_model(reference.folder, device="cpu", dtype="bfloat16", compiled_step=True,
                            quantization=quantization, free_bytes=plain.weight_bytes - 1)
        layers = loaded.spec.num_weights - 2 * 203 * 256
        assert plain.weight_bytes - loaded.weight_bytes == 2 * layers - quantised_bytes(quantization, layers)
        for largest in (9e6, torch.inf, torch.nan):          # no half float is its scale
            dense = Dense(torch.full((2, 64), largest), None)
            assert weight_form.quantised(dense, quantization, None) is dense
    file = Reference(tmp_path, "Llama", "Q4_0").folder
    for path, options, says in (
            (reference.folder, {"cpu_compile": False}, "quantization is 'int8', but cpu_compile is False"),
            (reference.folder, {"dtype": "float16"}, "but steps are not compiled, on cpu in float16"),
            (reference.folder, {"model_implementation": "transformers"}, "but the transformers library computes"),
            (file, {}, "model.gguf has tensors of type 'Q4_0'; expected weights in F32, F16 and BF16; leave"),
            (file, {**ROUNDED, "cpu_compile": False}, "quantized_activations is 'int8', but cpu_compile is False"),
            (file, {**ROUNDED, "dtype": "float16"}, "quantized_activations is 'int8', but steps are not compiled"),
            (reference.folder, ROUNDED, "plain are kept quantised; expected quantised weights, .*set quantization, or"),
            (reference.folder, {**ROUNDED, "load_format": "dummy"}, "no weights of random numbers are kept quantised")):
        with pytest.raises(ConfigError, match=says):
            make_manager(new_client(), model_path=path, **{"quantization": "int8", **options})
    on_gpu = Asked(TrtGptModelOptionalParams(quantization="int4"), torch.device("cuda"), packed, has_triton=True)
    absent = {"compiled": "the device is cuda"}
    refuse_without_quantised_products(on_gpu, absent)
    deterministic = on_gpu._replace(params=replace(on_gpu.params, deterministic=True))
    for asked, says in ((deterministic, "but deterministic is set"), (on_gpu._replace(has_triton=False), "cuda")):
        with pytest.raises(ConfigError, match=f"quantization is 'int4', .*{says}"):
            refuse_without_quantised_products(asked, absent)


def test_rounded_activations_change_logits_by_their_rounding(tmp_path, make_manager, new_client, new_request):
    """Alone and in batches, the same bits; each time near the exact ones, and not these."""
    reference, logits = Reference(tmp_path, "Qwen2", like_q4_k_m, tie_word_embeddings=True), {}
    prompts = prompts_of(reference.vocab_size, [33, 5, 64, 9])
    for activations, most in ((None, 4), ("int8", 4), ("int8", 1)):
        client = new_client()
        manager = make_manager(client, model_path=reference.folder, max_batch_size=most, dtype="float32",
                               quantized_activations=activations, deterministic=True, gather_context_logits=True)
        assert manager.info.quantized_activations == (activations or "") and not manager.info.not_compiled
        client.pending = [new_request(number, prompt, 1, return_context_logits=True)
                          for number, prompt in prompts.items()]
        client.wait_for_finals(*prompts)
        logits[activations, most] = [client.final(number).tensors["context_logits"] for number in prompts]
        manager.shutdown()
    for exact, found, alone in zip(*logits.values(), strict=True):
        assert np.array_equal(found, alone)
        assert 1e-4 < np.abs(found - exact).mean() / np.abs(exact).mean() < 0.05
