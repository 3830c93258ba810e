"""Users' model classes, written with public names, give the logits and greedy tokens of transformers."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import batch_manager
from batch_manager import KvCacheConfig, ModelLoadError, SchedulerPolicy, TrtGptModelType, register_model
from batch_manager.models import load_model, registry

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent
VOCAB = 211
COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
          "pad_token_id": None}
MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1

# name -> (file, class, transformers' family, configuration). Caps and scale are chosen so that they change the logits.
FAMILIES = {
    "gemma2": ("gemma2", "Gemma2", "Gemma2", {
        **COMMON, "num_hidden_layers": 4, "head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 7}),
    "gemma2, other caps, untied, biases": ("gemma2", "Gemma2", "Gemma2", {
        **COMMON, "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 33, "query_pre_attn_scalar": 2,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "tie_word_embeddings": False,
        "attention_bias": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "gemma2, no caps": ("gemma2", "Gemma2", "Gemma2", {
        **COMMON, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 33, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "stablelm": ("stablelm", "StableLm", "StableLm", {**COMMON, "num_hidden_layers": 2, "use_qkv_bias": True}),
    "stablelm, half of a head": ("stablelm", "StableLm", "StableLm", {
        **COMMON, "num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                              "partial_rotary_factor": 0.5}}),
}


def class_of(file, name):
    """Load a class from its file, because the folder is not a package."""
    spec = importlib.util.spec_from_file_location(f"own_{file}", HERE / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class Reference:
    """A transformers model with random weights, saved as a checkpoint. Every part of the model affects the logits."""

    def __init__(self, family, fields, folder):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**fields)
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.dim() == 1:
                    around = 0.0 if family == "Gemma2" or name.endswith("bias") else 1.0
                    parameter.normal_(around, 0.2)
                else:
                    parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5)
        self.model.save_pretrained(folder)
        self.folder = folder

    def logits(self, tokens):
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].numpy()


@pytest.fixture(scope="module")
def registered():
    """Register the families' classes, and restore the registry at the end."""
    before = dict(registry._models)
    for file, name, family, _ in FAMILIES.values():
        register_model(f"{family}ForCausalLM", class_of(file, name))
    yield
    registry._models.clear()
    registry._models.update(before)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, registered, tmp_path_factory):
    _, _, family, fields = FAMILIES[request.param]
    return Reference(family, fields, tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("file", ["gemma2", "stablelm"])
def test_a_family_is_one_file_that_takes_public_names_only(file):
    modules = {node.module: {alias.name for alias in node.names}
               for node in ast.walk(ast.parse((HERE / f"{file}.py").read_text())) if isinstance(node, ast.ImportFrom)}
    assert modules.pop("batch_manager") <= set(batch_manager.__all__)
    assert set(modules) <= {"dataclasses"}


@pytest.mark.parametrize(("policy", "model_type", "chunked", "blocks"), [
    (MAX, FUSED, False, 400), (GUARANTEED, FUSED, True, 400), (MAX, SPLIT, True, 11), (GUARANTEED, V1, False, 400)])
def test_tokens_and_logits_equal_those_of_transformers(
        make_manager, new_client, new_request, reference, policy, model_type, chunked, blocks):
    """Logits and greedy tokens are right for prompt lengths near the sizes of blocks and windows.

    With 11 blocks, requests are paused and resumed.
    """
    draw = np.random.default_rng(3)
    prompts = {i: draw.integers(0, VOCAB, length).tolist()
               for i, length in enumerate([1, 15, 16, 17, 20, 21, 33, 64, 70, 130])}
    client = new_client()
    client.pending = [new_request(i, prompt, 18, return_context_logits=True, return_generation_logits=True)
                      for i, prompt in prompts.items()]
    make_manager(client, model_path=reference.folder, num_threads=1, policy=policy, model_type=model_type,
                 enable_chunked_context=chunked, max_num_tokens=48 if chunked else 512,
                 kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=blocks * 16))
    client.wait_for_finals(*prompts)
    for i, prompt in prompts.items():
        final = client.final(i)
        assert final.error == ""
        everything = final.tokens()
        expected = reference.logits(everything)
        assert np.abs(expected).max() > 1.0                               # small logits would prove nothing
        np.testing.assert_allclose(final.tensors["context_logits"][0], expected[:len(prompt)], atol=1e-4, rtol=0)
        np.testing.assert_allclose(final.tensors["generation_logits"][0, 0], expected[len(prompt) - 1:-1], atol=1e-4,
                                   rtol=0)
        assert everything[len(prompt):] == expected[len(prompt) - 1:-1].argmax(-1).tolist()
    if blocks == 11:
        assert sum(json.loads(record)["Paused Requests"] for record in client.stats) > 0


def test_a_row_has_the_same_bits_in_any_batch_when_deterministic(make_manager, new_client, new_request, reference):
    draw = np.random.default_rng(5)
    prompts = {i: draw.integers(0, VOCAB, length).tolist() for i, length in enumerate([3, 40, 17, 70])}

    def bits(**options):
        client = new_client()
        client.pending = [new_request(i, prompt, 5, return_context_logits=True, return_generation_logits=True)
                          for i, prompt in prompts.items()]
        manager = make_manager(client, model_path=reference.folder, num_threads=1, deterministic=True,
                               kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=64 * 16), **options)
        client.wait_for_finals(*prompts)
        assert manager.shutdown()
        return [(client.final(i).tokens(), *(client.final(i).tensors[name].tobytes() for name in (
            "context_logits", "generation_logits"))) for i in prompts]

    assert bits(max_batch_size=1) == bits(max_batch_size=8, enable_chunked_context=True, max_num_tokens=16)


def test_what_a_class_does_not_read_is_refused_by_name(registered, tmp_path):
    fields = {"architectures": ["Gemma2ForCausalLM"], **FAMILIES["gemma2"][3]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_model(tmp_path, device="cpu", load_format="dummy").spec.attention[0].scale == 7**-0.5
    (tmp_path / "config.json").write_text(json.dumps({**fields, "clip_qkv": 8}))
    with pytest.raises(ModelLoadError, match="clip_qkv is 8; expected no value, .*`ignores`"):
        load_model(tmp_path, device="cpu", load_format="dummy")


@pytest.mark.parametrize("fields, message", [
    ({"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1 and the head size is 16; .*an even number"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5 and the head size is 16; .*from 2 to 16"),
    ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'; .*a number"),
])
def test_a_part_of_a_head_that_cannot_be_rotated(registered, fields, message, tmp_path):
    config = {"architectures": ["StableLmForCausalLM"], **FAMILIES["stablelm"][3], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, device="cpu", load_format="dummy")


def test_a_family_that_rotates_whole_heads_refuses_a_part(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = {"architectures": ["LlamaForCausalLM"], **COMMON, "num_hidden_layers": 2, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="partial_rotary_factor"):
        load_model(tmp_path, device="cpu", load_format="dummy")


def test_a_spec_that_is_none_or_does_not_fit_is_refused(registered, tmp_path):
    import dataclasses

    model_class = class_of("stablelm", "StableLm")
    config = {"architectures": ["StableLmForCausalLM"], **FAMILIES["stablelm"][3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = model_class.read_spec

    def refusal(read_spec):
        model_class.read_spec = staticmethod(read_spec)
        register_model("StableLmForCausalLM", model_class)
        with pytest.raises(batch_manager.ConfigError) as caught:
            load_model(tmp_path, device="cpu", load_format="dummy")
        return str(caught.value)

    try:
        assert "StableLm.read_spec returned None" in refusal(lambda *given: None)
        assert "2 layers and 1 entry in attention" in refusal(
            lambda *given: dataclasses.replace(read(*given), attention=read(*given).attention[:1]))
    finally:
        register_model("StableLmForCausalLM", class_of("stablelm", "StableLm"))


@pytest.mark.parametrize("field, value", [("scale", 0), ("scale", float("nan")), ("scale", True), ("window", 0),
                                          ("window", 2.5), ("window", True), ("softcap", True), ("softcap", 0.0),
                                          ("softcap", float("inf"))])
def test_a_layers_attention_out_of_range_is_refused(field, value):
    with pytest.raises(batch_manager.ConfigError, match=f"LayerAttention.{field} is {value!r}"):
        batch_manager.LayerAttention(**{"scale": 1.0, field: value})


SCRIPT = """
import importlib.util, json, sys

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

from batch_manager import register_model
from batch_manager.attention.registry import make_attention

helpers, sequence = load("helpers", sys.argv[1]), json.loads(sys.argv[2])
register_model("Gemma2ForCausalLM", load("gemma2", sys.argv[3]).Gemma2)
run = helpers.Driver(helpers.load_model(sys.argv[4], device="cpu", dtype="float32"), shuffled=True,
                     attention_class=make_attention)
assert run.attention.dispatch == "triton"
logits = [run.run([(0, sequence[:16], True)]), run.run([(0, sequence[16:], True)]), run.run([], [(0, 5)])]
print(json.dumps([row.tolist() for rows in logits for row in rows]))
"""


def test_the_kernels_give_the_logits_of_transformers(registered, tmp_path):
    """The Gemma 2 class gives transformers' logits on Triton kernels, which a new process interprets.

    The model has soft caps, windows and a configured scale.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    _, _, family, fields = FAMILIES["gemma2"]
    made = Reference(family, {**fields, "num_hidden_layers": 2, "head_dim": 16, "hidden_size": 32}, tmp_path)
    sequence = np.random.default_rng(7).integers(0, VOCAB, 37).tolist()
    helpers = HERE.parent / "models" / "conftest.py"
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "-c", SCRIPT, helpers, json.dumps(sequence),
         HERE / "gemma2.py", tmp_path],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        timeout=300, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    expected = made.logits([*sequence, 5])[[15, 36, 37]]
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), expected, atol=1e-4, rtol=0)
