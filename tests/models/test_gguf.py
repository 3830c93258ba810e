"""A model loaded from a GGUF file, of every architecture, gives the logits of transformers with the file's weights."""

import gguf
import numpy as np
import pytest
import torch
import transformers.modeling_gguf_pytorch_utils
from gguf.quants import dequantize, quantize

from batch_manager.errors import ModelLoadError
from batch_manager.layers.context import LayerContext
from batch_manager.models import load_model
from batch_manager.models.loading import class_and_spec
from batch_manager.weights import gguf_source
from batch_manager.weights.checkpoint import open_checkpoint
from batch_manager.weights.gguf_header import TENSOR_TYPES

from .conftest import Driver, make_reference
from .gguf_writing import add, write_gguf
from .test_same_logits_as_transformers import LINEAR, LLAMA3, LONGROPE, NO_TOKENS, YARN

SIZES = {"intermediate_size": 96}
MOE = {**NO_TOKENS, "num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 3}
NEOX_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
CASES = {
    "llama": ("Llama", {}),
    "llama, one key head per query head, biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True,
                                                             "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, head size of its own": ("Llama", {"head_dim": 24}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama, frequency factors": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma 2": ("Gemma2", {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 32,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma 3": ("Gemma3", {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 32, "num_hidden_layers": 7,
                           "rope_parameters": {"full_attention": LINEAR,
                                               "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "phi 2": ("Phi", {"intermediate_size": 256}),
    "phi 3": ("Phi3", {**NO_TOKENS, "sliding_window": 9}),
    "phi 3, a part of each head rotated": ("Phi3", {**NO_TOKENS, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi 3, longrope": ("Phi3", {**NO_TOKENS, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "gpt2": ("GPT2", {}),
    "gpt2, untied": ("GPT2", {"tie_word_embeddings": False}),
    "starcoder 2": ("Starcoder2", {}),
    "olmo 2": ("Olmo2", {}),
    "olmo 3": ("Olmo3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
                         "num_hidden_layers": 4}),
    "stablelm": ("StableLm", {}),
    "stablelm, side by side, biases": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": True,
                                                    "partial_rotary_factor": 0.5}),
    "stablelm, norms of heads": ("StableLm", {"qk_layernorm": True}),
    "command-r, norms of heads": ("Cohere", {**NO_TOKENS, "logit_scale": 0.3, "use_qk_norm": True}),
    "falcon, one key head": ("Falcon", {"num_key_value_heads": None, "ffn_hidden_size": 96}),
    "falcon, two norms": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "falcon, one norm, untied": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 4,
                                            "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    "bloom": ("Bloom", {}),
    "command-r": ("Cohere", {**NO_TOKENS, "logit_scale": 0.3}),
    "cohere 2": ("Cohere2", {**NO_TOKENS, "logit_scale": 0.5, "sliding_window": 9, "num_hidden_layers": 5}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": NEOX_ROPE}),
    "gpt-neox, one after the other": ("GPTNeoX", {"use_parallel_residual": False, "rope_parameters": NEOX_ROPE}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4,
                            "logits_scaling": 0.5}),
    "smollm 3": ("SmolLM3", {**NO_TOKENS, "num_hidden_layers": 5}),
    "mixtral": ("Mixtral", {**NO_TOKENS, "num_local_experts": 4}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 32}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 32, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {**NO_TOKENS, "num_experts": 8, "num_experts_per_tok": 3}),
    "granite-moe": ("GraniteMoe", {**NO_TOKENS, "num_local_experts": 8, "embedding_multiplier": 3.0,
                                   "residual_multiplier": 0.3, "attention_multiplier": 0.4, "logits_scaling": 0.5}),
}


# Each case has each kind, and each way to run the layers; families with several cases have all pairs of both.
@pytest.mark.parametrize(("case", "kind", "driver"), [
    (case, kind, ("torch", "compiled")[(number + place) % 2]) for number, case in enumerate(CASES)
    for place, kind in enumerate(["F32", "F16", "Q8_0"])], indirect=["driver"])
def test_logits_are_those_of_transformers(case, kind, tmp_path, prompts, check_against, driver):
    family, options = CASES[case]
    model = make_reference(family, **({**SIZES, **options} if family not in ("GPT2", "Bloom") else options))
    held = write_gguf(model, tmp_path / "model.gguf", family, kind)
    check_against(held, driver(tmp_path / "model.gguf"), prompts([1, 17, 40]), steps=6)


@pytest.mark.parametrize(("case", "changed"), [
    ("granite", {"attention__head_count_kv": [2] * 3, "attention__head_count": [4] * 3, "feed_forward_length": [96] * 3,
                 "rope__scaling__finetuned": True, "expert_count": 0, "expert_used_count": 0,
                 "expert_shared_feed_forward_length": 96}),                # as llama.cpp converts a dense Granite 4
    ("llama, yarn", {"rope__scaling__yarn_attn_factor": 1.0, "rope__scaling__yarn_ext_factor": 1.0}),
    ("llama, frequency factors", {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}),
    ("gemma 2", {"attention__head_count_kv": [2] * 3, "attention__sliding_window_pattern": [True, False, True]}),
])
def test_metadata_that_says_the_same_in_another_way(case, changed, tmp_path, prompts, check_against, driver):
    family, options = CASES[case]
    held = write_gguf(make_reference(family, **SIZES, **options), tmp_path / "model.gguf", family, **changed)
    check_against(held, driver(tmp_path / "model.gguf"), prompts([1, 17]), steps=3)


@pytest.mark.parametrize("case, sizes", [("bloom", {}), ("command-r", SIZES)])
def test_rows_of_blocks_are_ordered_for_another_device(case, sizes, tmp_path):
    """The order of rows is on the CPU, which reads the file, also if the model is elsewhere."""
    family, options = CASES[case]
    write_gguf(make_reference(family, **options, **sizes), tmp_path / "model.gguf", family, "Q8_0")
    checkpoint, device = open_checkpoint(tmp_path / "model.gguf"), torch.device("meta")
    model_class, spec, _ = class_and_spec(checkpoint)
    weights = checkpoint.weights(device, torch.float32, {"Q8_0"})
    model_class(spec, weights, LayerContext(device=device, dtype=torch.float32))
    weights.finish()


WRITABLE = ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


def can_be_written(kind):
    try:
        quantize(np.zeros((1, 256), np.float32), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def test_the_list_of_quantisations_that_can_be_written_is_whole():
    kinds = [name for name, *_ in TENSOR_TYPES.values() if name not in ("F32", "F16") and can_be_written(name)]
    assert sorted(kinds) == sorted(WRITABLE)


@pytest.mark.parametrize("kind", WRITABLE)
def test_every_quantisation_that_can_be_written(kind, tmp_path, prompts, check_against, driver):
    held = write_gguf(make_reference("Llama", **WIDE), tmp_path / "model.gguf", "Llama", kind)
    check_against(held, driver(tmp_path / "model.gguf"), prompts([1, 17]), steps=4)


def blocks(kind, rows, columns, seed):
    """Return random bytes that are valid blocks of a GGUF type."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return np.random.default_rng(seed).integers(0, 256, (rows, columns // block * size), np.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [name for name, *_ in TENSOR_TYPES.values()])
def test_every_type_is_decoded_in_pieces_as_it_is_whole(kind, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_source, "BLOCK_NUMBERS", 3 * 512)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 1, "context_length": 64, "embedding_length": 512, "feed_forward_length": 512,
                       "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}.items():
        add(writer, f"llama.{key}", value)
    number = gguf.GGMLQuantizationType[kind]
    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32,
             "I64": np.int64}.get(kind)
    stored = {}
    for seed, (name, rows) in enumerate({"token_embd.weight": 7, "blk.0.attn_q.weight": 512,
                                         "blk.0.attn_v.weight": 100}.items()):
        data = blocks(kind, rows, 512, seed)
        if plain is not None:
            data = np.random.default_rng(seed).normal(0, 100, (rows, 512)).astype(plain)
        writer.add_tensor(name, data, raw_dtype=number)
        stored[name] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    if kind in ("Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"):
        with pytest.raises(ModelLoadError, match=f"model.gguf has tensors of type {kind}; expected a type that"):
            open_checkpoint(path).weights(torch.device("cpu"), dtype)
        return
    weights = open_checkpoint(path).weights(torch.device("cpu"), dtype)
    with np.errstate(all="ignore"):
        whole = {name: torch.from_numpy(dequantize(data, number).astype(np.float32)).to(dtype)
                 for name, data in stored.items()}
    same_bits(weights.tensor("model.embed_tokens.weight", (7, 512)), whole["token_embd.weight"])
    apart = whole["blk.0.attn_q.weight"].view(4, 64, 2, 512).transpose(1, 2).reshape(512, 512)
    both = weights.stacked([("model.layers.0.self_attn.v_proj.weight", (100, 512)),
                            ("model.layers.0.self_attn.q_proj.weight", (512, 512))])
    same_bits(both, torch.cat([whole["blk.0.attn_v.weight"], apart]))
    assert weights.num_bytes == (7 + 100 + 512) * 512 * dtype.itemsize
    assert weights.num_weights == (7 + 100 + 512) * 512
    weights.finish()


def same_bits(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.nan_to_num(1e9, 1e10, -1e10), expected.nan_to_num(1e9, 1e10, -1e10))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2", "StableLm", "GPT2", "Starcoder2"])
def test_logits_are_those_of_transformers_own_reader(family, tmp_path, prompts, check_against, driver):
    # It ignores some metadata: the head size of Qwen 3, the positions of GPT-2 and the scale of Gemma 2 are its
    # defaults.
    options = {"Llama": {"tie_word_embeddings": True}, "Gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
               "Qwen3": {"head_dim": 128}, "GPT2": {"n_positions": 1024}}.get(family, {})
    options = options if family == "GPT2" else {**SIZES, **options}
    write_gguf(make_reference(family, **options), tmp_path / "model.gguf", family, "F16",
               tokenizer__ggml__tokens=[f"t{i}" for i in range(97)], **(
                   {} if family in ("GPT2",) else {"vocab_size": 97}))
    check_against(read_by_transformers(tmp_path / "model.gguf"), driver(tmp_path / "model.gguf"), prompts([1, 17]),
                  steps=4)


def read_by_transformers(path):
    """Return the model that transformers' own GGUF reader makes.

    The function does not call from_pretrained, which needs the accelerate library for a GGUF file.
    """
    read = transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint
    config = transformers.AutoConfig.for_model(**read(path)["config"], attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    missing, strange = model.load_state_dict(read(path, return_tensors=True, model_to_load=model)["tensors"],
                                             strict=False)
    assert not strange and set(missing) <= {"lm_head.weight"} and (not missing or config.tie_word_embeddings)
    model.tie_weights()
    return model


@pytest.mark.parametrize("case", ["llama, frequency factors", "gemma 3", "phi 3, longrope", "gpt2", "gpt-neox"])
def test_layers_of_transformers_run_the_same_file(case, tmp_path, prompts, check_against):
    family, options = CASES[case]
    held = write_gguf(make_reference(family, **({**SIZES, **options} if family != "GPT2" else options)),
                      tmp_path / "model.gguf", family)
    loaded = load_model(tmp_path / "model.gguf", device="cpu", dtype="float32", model_implementation="transformers")
    check_against(held, Driver(loaded), prompts([1, 17]), steps=4)


@pytest.mark.parametrize("family", ["Llama", "Phi"])
def test_fused_projections_of_older_files(family, tmp_path, prompts, check_against, driver):
    """A fused tensor of queries, keys and values is read for Phi-2 and refused for Llama.

    Early files of Phi-2 have this tensor.
    """
    options = {"num_key_value_heads": 4, **({"intermediate_size": 256} if family == "Phi" else SIZES)}
    held = write_gguf(make_reference(family, **options), tmp_path / "model.gguf", family, fused=True)
    if family == "Phi":
        check_against(held, driver(tmp_path / "model.gguf"), prompts([1, 17]), steps=4)
    else:
        with pytest.raises(ModelLoadError, match=r"model\.gguf contains tensor 'blk\.0\.attn_qkv\.weight'; "
                                                 "expected only"):
            driver(tmp_path / "model.gguf")
