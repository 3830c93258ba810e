"""Families with experts have the logits of transformers; the bits of a row do not depend on the others."""

import copy
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.errors import ConfigError, ModelLoadError
from batch_manager.layers.context import LayerContext
from batch_manager.layers.experts import ExpertParameters, Experts
from batch_manager.models import load_model, read_spec
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.tools.model_facts import described, inspect_model
from batch_manager.triton_kernels.cpu.native.matrix import PackedMatrix, QuantisedMatrix, quantised_rows
from batch_manager.weights.source import DummyWeights
from tests.harness.compiled import library_or_skip
from tests.runtime.bindable_torch import BindableTorchAttention

from .conftest import Driver, expected_logits, make_reference, random_prompts
from .test_ranks import HEADS, Threads
from .test_same_logits_as_transformers import EXPERTS, NO_TOKENS

# A case of each family.
CASES = {family: (family, options) for family, options in reversed(EXPERTS.values())}


def load(folder, **options):
    if options.get("compiled_step"):
        library_or_skip()
    return load_model(folder, device="cpu", **{"dtype": "float32", **options})


@pytest.mark.parametrize("case", EXPERTS)
def test_logits_are_those_of_transformers(case, reference, prompts, check_against):
    family, options = EXPERTS[case]
    model, folder = reference(family, **options)
    for chunk in (None, 16):
        is_compiled = chunk is None
        run = Driver(load(folder, compiled_step=is_compiled), shuffled=not is_compiled, compiled=is_compiled)
        assert run.loaded.implementation == "native"
        check_against(model, run, prompts([1, 5, 17, 40]), steps=8, chunk=chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("family", ["Qwen2Moe", "Olmoe"])
def test_the_bits_of_a_deterministic_row_do_not_depend_on_the_others(family, compiled, dtype, reference, prompts):
    folder = reference(family, **CASES[family][1])[1]
    loaded = load(folder, deterministic=True, compiled_step=compiled, dtype=dtype)
    texts, run = prompts([3, 17, 40, 9]), partial(Driver, loaded, compiled=compiled)
    together = run().generate(texts, 4)
    chunked = run(shuffled=True).generate(texts, 4, chunk=16)
    assert together[0] == chunked[0]
    for number, text in enumerate(texts):
        alone = run().generate([text], 4)
        assert alone[0][0] == together[0][number]
        assert torch.equal(alone[1][1:, 0], together[1][1:, number])       # generation: one row and four rows


def test_among_experts_with_equal_logits_the_first_ones_are_chosen():
    context = LayerContext(device=torch.device("cpu"), dtype=torch.float32)
    layer = Experts(DummyWeights(1, context.device, context.dtype), context, "mlp", 32, ExpertParameters(
        count=9, chosen=3, size=32, renormalises=False), "silu")
    logits = torch.tensor([[1.0, 5, 5, 5, 5, 0, 5, 5, 5], [7.0] * 9])
    layer.router = lambda x: logits
    chosen, weights = layer._routed(torch.zeros(2, 32))
    assert chosen.tolist() == [[1, 2, 3], [0, 1, 2]]
    torch.testing.assert_close(weights, logits.softmax(1).gather(1, chosen), atol=0, rtol=0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", CASES)
def test_ranks_have_the_logits_of_the_whole_model(family, size, reference):
    folder = reference(family, **{**CASES[family][1], **HEADS})[1]
    texts = random_prompts([1, 17, 40])
    sequences, logits = Driver(load(folder)).generate(texts, 3, chunk=16)
    found = Threads(size).run(lambda split: Driver(load(folder, split=split), split=split).generate(texts, 3, chunk=16))
    for own_sequences, own_logits in found:
        assert (own_logits - logits).abs().max() < 1e-4 and own_sequences == sequences


@pytest.mark.parametrize("change, words", [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most the number of experts, 8"),
    ({"num_local_experts": 2**24}, "num_local_experts is 16777216; expected an integer in 1..4,096"),
    ({"num_local_experts": 8, "num_experts": 4}, "num_experts is 4; expected no value, or the value of num_local_exp"),
    ({"num_local_experts": 9}, "has shape .8, 64.; expected .9, 64."),
    ({"intermediate_size": 64}, "block_sparse_moe.experts.0.w1.weight' has shape .112, 64.; expected .64, 64.")])
def test_sizes_of_experts_that_cannot_be_are_refused_by_name(change, words, reference, tmp_path):
    folder = reference("Mixtral", **CASES["Mixtral"][1])[1]
    shutil.copy(folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path)


def test_experts_are_quantised_and_the_router_is_not(reference):
    pytest.importorskip("gguf")
    family, options = CASES["Qwen2Moe"]
    model, folder = reference(family, **options)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_table = name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))
            for matrix in [] if weight.dim() == 1 or is_table else weight.view(-1, *weight.shape[-2:]):
                matrix.copy_(decoded(matrix))
    run = Driver(load(folder, compiled_step=True, quantization="int8"), compiled=True)
    sequences, logits = run.generate(random_prompts([1, 17]), 4)
    assert (logits - expected_logits(model, sequences, 4)).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["AWQ", "GPTQ", "packed", "int8 levels", "fp8 in blocks"])
@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
def test_experts_of_quantised_folders(form, compiled, tmp_path):
    """The logits are those of a plain folder with the decoded weights."""
    folders = pytest.importorskip("tests.weights.test_quantised_folders")
    write, config, kept_as = folders.FORMATS[form]
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 3}
    make_reference("Mixtral", **NO_TOKENS, **sizes).save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    quantised = dict(plain)
    for name in [name for name in plain if ".experts." in name]:
        stored, plain[name] = write(name.removesuffix(".weight"), quantised.pop(name))
        quantised |= {key: tensor.contiguous() for key, tensor in stored.items()}
    shutil.copytree(tmp_path / "plain", tmp_path / "quantised")
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, tmp_path / "plain" / "model.safetensors")
    save_file(quantised, tmp_path / "quantised" / "model.safetensors")
    folders.change_config(tmp_path / "quantised", lambda fields: fields.update(quantization_config=config))
    loaded = load(tmp_path / "quantised", compiled_step=compiled)
    kinds = {type(expert.project.matrix) for layer in loaded.model.layers for expert in layer.mlp.experts}
    assert kinds == {QuantisedMatrix if kept_as and compiled else PackedMatrix if compiled else type(None)}
    sequences, logits = Driver(load(tmp_path / "plain")).generate(random_prompts([1, 17]), 4)
    found = Driver(loaded, compiled=compiled).generate(random_prompts([1, 17]), 4)
    assert found[0] == sequences and (found[1] - logits).abs().max() < 1e-4


def decoded(matrix):
    import gguf

    rows = gguf.quants.dequantize(quantised_rows(matrix.contiguous(), "Q8_0"), gguf.GGMLQuantizationType.Q8_0)
    return torch.from_numpy(rows)[:, : matrix.shape[1]]


def test_what_an_expert_cannot_do_is_refused_by_name(reference):
    family, options = CASES["Mixtral"]
    folder = reference(family, **options)[1]
    spec = read_spec(folder)
    params = TrtGptModelOptionalParams(device="cpu", max_seq_len=64, kv_cache_config=KvCacheConfig(max_tokens=256))
    backend = build_native_backend(folder, replace(params, cpu_compile=False), layout=packing.packed, num_slots=2,
                                   attention_factory=BindableTorchAttention)
    assert backend.info.absent["fixed"] == "the layers of Mixtral have experts"
    with pytest.raises(ConfigError, match="split over 5 processes, and the intermediate size of an expert of Mixtral"):
        spec.share(Threads(5).ranks[0])


def test_inspect_says_what_the_experts_are(reference):
    facts = inspect_model(str(reference("Qwen3Moe", **CASES["Qwen3Moe"][1])[1]), device="cpu", free_bytes=2**30)
    assert "experts in 1 layer(s): 8, 3 for each token" in described(facts)
    assert not facts["not_compiled"]
