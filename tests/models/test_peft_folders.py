"""Folders that peft wrote for a model of each family: the tensors of a request compute what peft computes."""

import json
import struct
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batch_manager.adapters import read_peft_folder, read_prefetch_folder
from batch_manager.errors import ModelLoadError

from .test_same_logits_as_transformers import FAMILIES

peft = pytest.importorskip("peft")
CASES = {family: options for family, options in reversed(FAMILIES.values())}     # the first case of each family
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
FUSED = ("c_attn", "qkv_proj", "query_key_value")


@pytest.fixture
def adapter(reference, tmp_path):
    """adapter(family, dtype=..., **fields of LoraConfig) -> (peft's model with random B, adapter folder, model)."""
    def make(family, dtype=torch.float32, model_options=None, **options):
        model, model_folder = reference(family, **(model_options or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.get_peft_model(model, peft.LoraConfig(**{
                "target_modules": "all-linear", "r": 4, "lora_alpha": 7, "task_type": "CAUSAL_LM", **options}))
            torch.manual_seed(1)
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    with torch.no_grad():
                        parameter.data = torch.randn(parameter.shape).to(dtype)
            adapted.save_pretrained(tmp_path / "adapter")
        made.append(adapted)
        return adapted, tmp_path / "adapter", model_folder

    made = []
    yield make
    for adapted in made:
        adapted.unload()


def deltas(adapted):
    """Return module path -> peft's own B A with all factors, [out, in]."""
    found = {}
    for name, module in adapted.named_modules():
        if hasattr(module, "get_delta_weight") and "default" in module.lora_A:
            delta = module.get_delta_weight("default").detach().float()
            found[name.removeprefix("base_model.model.")] = delta.t() if module.fan_in_fan_out else delta
    return found


def products(tensors, sizes):
    """Return (module id, layer) -> B A of each row. `sizes` has (outputs, inputs) by the same keys."""
    found = {}
    for row, (module, layer, rank) in zip(tensors.lora_weights.float(), tensors.lora_config.tolist()):
        outputs, inputs = sizes[module, layer]
        a, b, rest = row.split([rank * inputs, outputs * rank, len(row) - rank * (inputs + outputs)])
        assert (module, layer) not in found and not rest.any()
        found[module, layer] = b.view(outputs, rank) @ a.view(rank, inputs)
    return found


def expected(adapted):
    """Return what `products` must be, by peft."""
    found = {}
    for path, delta in deltas(adapted).items():
        words = path.split(".")
        layer = next(int(word) for word in words if word.isdecimal())
        if words[-1] == "gate_up_proj":
            gate, up = delta.chunk(2)
            found[5, layer], found[7, layer] = gate, up
        elif words[-1] in FUSED:
            found[0, layer] = delta
        elif words[-1] in IDS:
            found[IDS[words[-1]], layer] = delta
        else:
            in_attention = "attn" in path or "attention" in path
            is_last = words[-1] in ("dense_4h_to_h", "fc2", "fc_out", "c_proj")
            found[4 if in_attention else 6 if is_last else 5, layer] = delta
    return found


def check(adapted, tensors):
    wanted = expected(adapted)
    found = products(tensors, {key: delta.shape for key, delta in wanted.items()})
    assert found.keys() == wanted.keys()
    for key, delta in wanted.items():
        torch.testing.assert_close(found[key], delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CASES)
def test_a_folder_of_each_family_computes_what_peft_computes(adapter, family):
    adapted, folder, model = adapter(family, model_options=CASES[family])
    tensors = read_peft_folder(folder, model)
    check(adapted, tensors)
    assert tensors.lora_weights.dtype is torch.float32


@pytest.mark.parametrize("options", [
    {"use_rslora": True, "lora_alpha": 3},
    {"rank_pattern": {"q_proj": 1, "^model.layers.1.self_attn.v_proj": 9, "layers.2.mlp.down_proj": 16},
     "alpha_pattern": {"model.layers.0.self_attn.q_proj": 1, "proj": 5, "q_proj": 11, "^layers.1.mlp.up_proj": 3}},
    {"use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 0.5, "o_proj": -2}},
    {"target_modules": ["v_proj"], "layers_to_transform": [1]},
    {"target_modules": ["model.layers.2.self_attn.v_proj", "q_proj"], "layers_to_transform": [0]},
    {"target_modules": r".*\.0\..*(q|down)_proj"},
    {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "exclude_modules": ["o_proj"]},
    {"target_modules": ["proj", "1.self_attn.k_proj", "model.layers.0.mlp.up_proj"]},
    {"target_modules": LINEAR, "layers_to_transform": [0, 2], "layers_pattern": "layers",
     "exclude_modules": ["2.mlp.up_proj"]},
    {"target_modules": r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|v).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.(?:up_proj))"},
    {"target_modules": r"^model\.layers\.([0-1]|x)\..+_proj$", "exclude_modules": r".*\.(k|v|o)_proj"},
    {"init_lora_weights": "orthogonal"}, {"fan_in_fan_out": True, "target_modules": ["gate_proj"]}], ids=str)
def test_options_of_peft(adapter, options):
    adapted, folder, model = adapter("Llama", **options)
    check(adapted, read_peft_folder(folder, model))


@pytest.mark.parametrize("dtype, alpha, kept", [(torch.bfloat16, 8, True), (torch.float16, 2, True),
                                                (torch.bfloat16, 7, False), (torch.float16, 7, False)])
def test_numbers_of_two_bytes_are_kept_if_they_hold_the_scaled_values(adapter, dtype, alpha, kept):
    adapted, folder, model = adapter("Llama", dtype, lora_alpha=alpha)
    tensors = read_peft_folder(folder, model)
    assert tensors.lora_weights.dtype is (dtype if kept else torch.float32)
    stored = load_file(folder / "adapter_model.safetensors")
    row = next(i for i, found in enumerate(tensors.lora_config.tolist()) if found == [3, 2, 4])
    name = "base_model.model.model.layers.2.self_attn.v_proj.lora_%s.weight"
    a, b = stored[name % "A"].float().flatten(), stored[name % "B"].float().flatten() * (alpha / 4)
    assert torch.equal(tensors.lora_weights[row].float()[:len(a) + len(b)], torch.cat([a, b]))


Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED = {                                # fields of adapter_config.json -> words of the error
    "use_dora": True, "lora_bias": True, "bias": "lora_only", "modules_to_save": ["lm_head"],
    "layer_replication": [[0, 1]], "target_parameters": ["experts.w"], "trainable_token_indices": [1],
    "alora_invocation_tokens": [1],
    "use_qalora": True, "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 1}, "monteclora_config": {"a": 1},
    "kasa_config": {"a": 1}, "velora_config": {"a": 1}, "megatron_config": {"a": 1}, "loftq_config": {"bits": 4},
    "corda_config": {"a": 1}, "lora_ga_config": {"a": 1}, "init_lora_weights": "pissa", "peft_type": "IA3",
    "a_key_of_next_year": 1, "r": 0, "lora_alpha": "8", "use_rslora": 1, "rank_pattern": {"q_proj": 0},
    "alpha_pattern": {"q_proj": None}, "target_modules": None, "exclude_modules": {"a": 1}, "layers_to_transform": 5}
BAD_PATTERNS = ("(q|v)_proj", "q_proj$", ".*", "q_proj\n", "a+", "", "^^q_proj", "a|b", "q proj")
LEAVING_OUT = (                            # more values of fields by which peft would ignore some of the tensors
    ("target_modules", []), ("target_modules", 3), ("target_modules", ["q_proj", "oj"]), ("target_modules", ["q_proj"]),
    ("target_modules", [".*"]), ("target_modules", ""), ("target_modules", r".*q_proj"), ("target_modules", "(.*)*$"),
    ("target_modules", "(?i)Q"), ("target_modules", "(" * 900), ("target_modules", r"(a|a)" * 390),
    ("target_modules", r".*.*.*.*.*.*.*.*.*x"), ("target_modules", "[z-a]"), ("target_modules", "a)b"),
    ("exclude_modules", ["q_proj"]), ("exclude_modules", [3]), ("exclude_modules", r".*\.1\..*"),
    ("exclude_modules", "(?=a)"), ("layers_to_transform", [0]), ("layers_to_transform", 1),
    ("layers_to_transform", ["0"]), ("layers_to_transform", True), ("layers_pattern", ["(a*)*"]))
BAD_INITIAL = ("olora", "pissa_niter_16", "corda", "loftq", "lora_ga", "mica", 1, [], "PISSA")


def refused(folder, model, *words):
    with pytest.raises(ModelLoadError) as error:
        read_peft_folder(folder, model)
    for word in (str(folder), *words):
        assert word in str(error.value), error.value


def test_what_is_not_supported_is_refused_with_file_and_field(adapter):
    _, folder, model = adapter("Llama", target_modules=LINEAR)
    file = folder / "adapter_config.json"
    honest = json.loads(file.read_text())
    cases = [*REFUSED.items(), *LEAVING_OUT, *(("init_lora_weights", value) for value in BAD_INITIAL),
             *((name, {key: 8}) for name in ("rank_pattern", "alpha_pattern") for key in BAD_PATTERNS)]
    for name, value in cases:
        file.write_text(json.dumps({**honest, name: value}))
        refused(folder, model, "adapter_config.json", name)
    for name in ("peft_type", "r", "lora_alpha"):
        file.write_text(json.dumps({key: value for key, value in honest.items() if key != name}))
        refused(folder, model, "adapter_config.json", name)
    file.write_text(json.dumps({**honest, "target_modules": "all-linear", "layers_to_transform": [0, 1, 2]}))
    refused(folder, model, "layers_to_transform")
    file.write_text(json.dumps({**honest, "exclude_modules": ["0.self_attn.q_proj"]}))
    refused(folder, model, "exclude_modules leaves out", Q)
    for value in ("All-Linear", r"model.layers.\d+.(self_attn|mlp).[a-z]+_proj"):
        file.write_text(json.dumps({**honest, "target_modules": value}))
        assert len(read_peft_folder(folder, model).lora_config) == 21
    file.write_text(json.dumps({**honest, "r": 8}))
    refused(folder, model, "lora_A.weight", "has shape [4, ", "expected [8, ")
    file.write_text(json.dumps(honest))
    assert len(read_peft_folder(folder, model).lora_config) == 21


def test_wrong_tensors_are_refused_by_name(adapter):
    _, folder, model = adapter("Llama", target_modules=["q_proj"])
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_modules": LINEAR}))
    file = folder / "adapter_model.safetensors"
    honest = load_file(file)
    one = torch.ones(1)
    for name, tensor, *words in [
            (f"{Q}.lora_magnitude_vector", one, "DoRA"), (f"{Q}.lora_B.bias", one, "lora_bias"),
            ("base_model.model.model.embed_tokens.lora_embedding_A", one, "embeddings"),
            ("base_model.model.lm_head.lora_A.weight", one, "head"), ("lora_A.weight", one, "expected the names"),
            ("base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight", one, "that this model has"),
            ("base_model.model.model.layers.0.mlp.c_fc.lora_A.weight", one, "that this model has"),
            ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", torch.ones(4, 64), "without lora_B"),
            (f"{Q}.lora_A.weight", torch.ones(5, 64), "[5, 64]", "[4, 64]"),
            (f"{Q}.lora_A.weight", torch.ones(4, 63), "[4, 63]"), (f"{Q}.lora_B.weight", torch.ones(64), "[64]"),
            (f"{Q}.lora_A.weight", torch.ones(4, 64, dtype=torch.int8), "I8"),
            (f"{Q}.lora_A.weight", torch.full((4, 64), float("nan")), "not finite"),
            (f"{Q}.lora_B.weight", torch.full((64, 4), 3e38), "not finite after multiplication by 1.75")]:
        save_file({**honest, name: tensor}, file)
        refused(folder, model, "adapter_model.safetensors", name, *words)
    save_file({}, file)
    refused(folder, model, "adapter_model.safetensors", "no tensors")


def test_missing_and_pickled_files_and_folders(adapter, tmp_path):
    _, folder, model = adapter("Llama", target_modules=["q_proj"])
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, model, "adapter_model.safetensors", "adapter_model.bin, which is pickled")
    (folder / "adapter_model.bin").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/etc/passwd")
    refused(folder, model, "adapter_model.safetensors", "leads out of the folder")
    (folder / "adapter_config.json").unlink()
    refused(folder, model, "adapter_config.json")
    for path in (tmp_path / "absent", "", 3, "a\0b", model / "config.json"):
        with pytest.raises(ModelLoadError, match="expected a folder with adapter_config.json"):
            read_peft_folder(path, model)
    with pytest.raises(ModelLoadError, match="absent"):
        read_peft_folder(folder, tmp_path / "absent")


def test_an_adapter_for_a_model_that_transformers_computes_is_refused(adapter, tmp_path):
    _, folder, model = adapter("Llama", target_modules=["q_proj"])
    config = json.loads((model / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["ArceeForCausalLM"],
                                                   "model_type": "arcee", "hidden_act": "relu2"}))
    with pytest.raises(ModelLoadError, match="model class of this package"):
        read_peft_folder(folder, other)


def npy(folder, weights, config):
    folder.mkdir(parents=True)
    np.save(folder / "model.lora_weights.npy", weights)
    np.save(folder / "model.lora_config.npy", config)


def test_a_prefetch_folder_has_adapters_by_task_id(adapter, tmp_path):
    _, folder, model = adapter("Llama", target_modules=["q_proj"])
    prefetch = tmp_path / "prefetch"
    weights, config = np.arange(12, dtype=np.float16).reshape(1, 2, 6), np.array([[[1, 0, 2], [2, 0, 2]]], np.int32)
    npy(prefetch / str(2**64 - 1), weights, config)
    npy(prefetch / "7", torch.arange(6).bfloat16().view(torch.int16).numpy().view("V2").reshape(1, 6), config[0, :1])
    folder.rename(prefetch / "12")
    found = dict(read_prefetch_folder(prefetch, model))
    assert list(found) == [7, 12, 2**64 - 1]
    assert found[7].lora_weights.dtype is torch.bfloat16 and found[7].lora_weights.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert found[12].lora_config.tolist() == [[1, layer, 4] for layer in range(3)]
    assert torch.equal(found[2**64 - 1].lora_weights, torch.from_numpy(weights))
    assert found[2**64 - 1].lora_config.tolist() == config.tolist()


def test_a_bad_prefetch_folder_is_refused_with_the_file(reference, tmp_path):
    model = reference("Llama")[1]
    good = np.zeros((1, 4), np.float32), np.ones((1, 3), np.int32)

    def refused(number, *words):
        with pytest.raises(ModelLoadError) as error:
            list(read_prefetch_folder(tmp_path / str(number), model))
        for word in words:
            assert word in str(error.value), error.value

    for number, name in enumerate(("one", "-1", "01", str(2**64), "\u0665", "1.npy")):
        npy(tmp_path / str(number) / name, *good)
        refused(number, "subfolders named by task ids")
    for number, (weights, config, file) in enumerate((
            (np.array([[object()]]), good[1], "lora_weights"), (good[0], np.array([[object()]]), "lora_config"),
            (good[0].astype(complex), good[1], "lora_weights"), (good[0], good[0], "lora_config"),
            (np.zeros((1, 4), "V3"), good[1], "lora_weights"), (good[1], good[1], "lora_weights")), 10):
        npy(tmp_path / str(number) / "1", weights, config)
        refused(number, f"model.{file}.npy")
    npy(tmp_path / "20" / "1", *good)
    file = tmp_path / "20" / "1" / "model.lora_weights.npy"
    whole = file.read_bytes()
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1073741824, 1024), }"
    magic = b"\x93NUMPY\x01\x00"
    for data in (b"", whole[:50], whole[:-1], b"\x80\x04N.", magic + struct.pack("<H", len(header)) + header,
                 magic + b"\xff\xff" + b"(" * 65535):
        file.write_bytes(data)
        refused(20, "model.lora_weights.npy")
    file.unlink()
    refused(20, "model.lora_weights.npy")
    file.write_bytes(whole)
    (tmp_path / "20" / "2").write_bytes(b"")
    refused(20, "is not a folder")
    with pytest.raises(ModelLoadError, match="one subfolder for each task id"):
        list(read_prefetch_folder(tmp_path / "absent", model))
