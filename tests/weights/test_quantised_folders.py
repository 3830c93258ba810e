"""AWQ, GPTQ, compressed-tensors and FP8 folders: read exactly, kept as they are or decoded, or refused by name.

Folders of AWQ, GPTQ and FP8 are written from the descriptions of the formats, others by the library compressed-tensors.
"""

import copy
import json

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from batch_manager import ModelLoadError
from batch_manager.models import load_model
from batch_manager.models.decoder import Stage
from batch_manager.models.loading import check_tensors, class_and_spec
from batch_manager.tools.model_facts import inspect_model
from batch_manager.triton_kernels.cpu.native.library import QUANTISED_TYPES
from batch_manager.triton_kernels.cpu.native.matrix import QuantisedMatrix, QuantisedPanels
from batch_manager.weights.checkpoint import open_checkpoint
from batch_manager.weights.matrices import Blocks, Share
from tests.models.conftest import make_reference

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 203}
ORDER_OF_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]        # nibble i of a word has output ORDER_OF_AWQ[i]
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False,
         "observer": "minmax", "group_size": None, "actorder": None}
QKV = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
DOWN = "model.layers.0.mlp.down_proj"


def packed(levels, bits):
    """Pack levels [n * 32 / bits, ...] along the first dimension into int32, the lowest bits first."""
    found = np.zeros((levels.shape[0] * bits // 32, *levels.shape[1:]), np.uint32)
    for i in range(32 // bits):
        found |= levels[i :: 32 // bits].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(found.view(np.int32))


def in_groups(weight, bits, group, symmetric, scales=torch.float16):
    """Return levels [out, in] from 0, scales and zero points [out, groups], and the decoded weight."""
    w = weight.reshape(len(weight), -1, group)
    top = 2**bits - 1
    if symmetric:
        scale = (w.abs().amax(-1) * 2 / top).to(scales)
        zero = torch.full_like(scale, 2 ** (bits - 1)).float()
    else:
        scale = ((w.amax(-1) - w.amin(-1)) / top).to(scales)
        zero = (-w.amin(-1) / scale.float()).round().clamp(1, top)
    levels = (w / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    decoded = ((levels - zero[..., None]) * scale.float()[..., None]).reshape(weight.shape)
    return levels.reshape(weight.shape).numpy().astype(np.uint8), scale, zero.numpy().astype(np.uint8), decoded


def gptq(name, weight, bits=4, group=128, symmetric=True, less=1, order=False):
    groups = torch.arange(weight.shape[1]) // group
    places = torch.randperm(weight.shape[1]) if order else torch.arange(weight.shape[1])
    levels, scale, zero, decoded = in_groups(weight[:, places], bits, group, symmetric)
    back = places.argsort()
    return {f"{name}.qweight": packed(levels.T[back.numpy()], bits), f"{name}.scales": scale.t().contiguous(),
            f"{name}.qzeros": packed((zero - less), bits).t().contiguous(),
            f"{name}.g_idx": groups[back].int()}, decoded[:, back]


def awq(name, weight, group=64):
    levels, scale, zero, decoded = in_groups(weight, 4, group, False)

    def in_words(found):                                   # [out, n] -> [n, out / 8]
        return packed(found.reshape(-1, 8, found.shape[1])[:, ORDER_OF_AWQ].reshape(found.shape), 4).t().contiguous()

    return {f"{name}.qweight": in_words(levels), f"{name}.qzeros": in_words(zero),
            f"{name}.scales": scale.t().contiguous()}, decoded


def fp8(name, weight, block=(128, 128)):
    scale = torch.rand(-(-len(weight) // block[0]), -(-weight.shape[1] // block[1])) * 0.01 + 0.01
    of_each = scale.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    stored = (weight / of_each).to(torch.float8_e4m3fn)
    return {f"{name}.weight": stored, f"{name}.weight_scale_inv": scale}, stored.float() * of_each


def library(name, weight, compressor, **options):
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    group = options.get("group_size") or (weight.shape[1] if options["strategy"] == "channel" else weight.numel())
    of_group = weight.reshape(-1, group)
    if args.symmetric:
        scale, zero = of_group.abs().amax(-1) / (448 if args.type == "float" else 2 ** (args.num_bits - 1)), None
    else:
        scale = (of_group.amax(-1) - of_group.amin(-1)) / (2**args.num_bits - 1)
        zero = (-of_group.amin(-1) / scale).round() - 2 ** (args.num_bits - 1)
        zero = zero.to(torch.int8).reshape(len(weight), -1)
    scale = scale.reshape(-1) if options["strategy"] == "tensor" else scale.reshape(len(weight), -1)
    state = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
    stored = compressor.compress(state, scheme)
    return ({f"{name}.{suffix}": tensor for suffix, tensor in stored.items()},
            compressor.decompress(stored, scheme)["weight"].float())


def of_gptq(**fields):
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, **fields}


def of_library(form, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {"dynamic": False, "observer": "minmax", **weights},
                "input_activations": {"dynamic": True, "num_bits": 8, "type": "int"}}}}


def packs(**options):
    return (lambda name, weight: library(name, weight, PackedQuantizationCompressor, type="int", **options),
            of_library("pack-quantized", type="int", **options), f"INT{options['num_bits']}")


def ints(**options):
    return (lambda name, weight: library(name, weight, IntQuantizationCompressor, type="int", num_bits=8, **options),
            of_library("int-quantized", type="int", num_bits=8, **options), "INT8")


FORMATS = {
    "GPTQ": (gptq, of_gptq(), "INT4"),
    "GPTQ of 8 bits, whole rows": (lambda name, weight: gptq(name, weight, 8, weight.shape[1]),
                                   of_gptq(bits=8, group_size=-1), "INT8"),
    "GPTQ with zero points": (lambda name, weight: gptq(name, weight, 4, 32, False),
                              of_gptq(group_size=32, sym=False, checkpoint_format="gptq"), "INT4"),
    "GPTQ v2": (lambda name, weight: gptq(name, weight, 8, 64, False, 0),
                of_gptq(bits=8, group_size=64, sym=False, checkpoint_format="gptq_v2"), "INT8"),
    "symmetric GPTQ with the zero points of v2": (lambda name, weight: gptq(name, weight, less=0), of_gptq(), "INT4"),
    "GPTQ with an order": (lambda name, weight: gptq(name, weight, order=True), of_gptq(desc_act=True), None),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, "INT4"),
    "packed": packs(num_bits=4, symmetric=True, strategy="group", group_size=128),
    "packed with zero points": packs(num_bits=4, symmetric=False, strategy="group", group_size=32),
    "packed, 8 bits, a scale for each output": packs(num_bits=8, symmetric=False, strategy="channel"),
    "int8 levels": ints(symmetric=True, strategy="channel"),
    "int8, one scale": ints(symmetric=True, strategy="tensor"),
    "int8 with zero points": ints(symmetric=False, strategy="channel"),
    "fp8 of compressed-tensors": (
        lambda name, weight: library(name, weight, FloatQuantizationCompressor, type="float", num_bits=8,
                                     symmetric=True, strategy="channel"),
        of_library("float-quantized", type="float", num_bits=8, symmetric=True, strategy="channel"), None),
    "fp8 in blocks": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
                      None),
}


def write_folder(folder, form, family="Llama", **options):
    """Write a quantised folder, and return a model of transformers with the decoded weights."""
    write, config, _ = FORMATS[form]
    model = make_reference(family, **SIZES | options)
    held = copy.deepcopy(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in held.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            stored, decoded = write(name, tensors.pop(f"{name}.weight"))
            tensors |= {key: tensor.contiguous() for key, tensor in stored.items()}
            module.weight.data.copy_(decoded)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, lambda fields: fields.update(quantization_config=copy.deepcopy(config)))
    return held


def change_config(folder, change):
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("form", FORMATS)
def test_matrices_are_read_exactly(form, tmp_path):
    """Kept as they are, decoded, and a rank's share of the rows or the columns."""
    model, kept_as = write_folder(tmp_path, form), FORMATS[form][2]
    state = model.state_dict()
    for names in (QKV, [DOWN]):
        expected = torch.cat([state[f"{name}.weight"] for name in names])
        sizes, inputs = [len(state[f"{name}.weight"]) for name in names], expected.shape[1]
        order = torch.arange(len(expected)).flip(0)
        checkpoint = open_checkpoint(tmp_path)
        decoded = checkpoint.weights(torch.device("cpu"), torch.float32)
        assert torch.equal(decoded.linear(names, inputs, sizes, row_order=order).weight, expected.flip(0))
        part = decoded.linear(names, inputs // 2, sizes, share=Share(1, 2, "inputs"))
        assert torch.equal(part.weight, expected[:, inputs // 2 :])
        part = decoded.linear(names, inputs, [size // 2 for size in sizes], share=Share(1, 2, "outputs"))
        assert torch.equal(part.weight, torch.cat([each[len(each) // 2 :] for each in expected.split(sizes)]))
        source = checkpoint.weights(torch.device("cpu"), torch.float32, QUANTISED_TYPES)
        for row_order, rows in ((None, expected), (order, expected.flip(0))):
            stored = source.linear(names, inputs, sizes, row_order=row_order)
            assert isinstance(stored, Blocks) == (kept_as is not None)
            if kept_as is not None:
                assert {kind.name for kind, _ in stored.types} == {kept_as}
                matrix = QuantisedMatrix(QuantisedPanels(stored.types, inputs, stored.read()), torch.float32)
                assert torch.equal(matrix.rows(torch.arange(len(rows))), rows)


def test_a_folder_takes_the_bytes_of_its_files(tmp_path):
    write_folder(tmp_path, "GPTQ")
    loaded = load_model(tmp_path, device="cpu", compiled_step=True)
    assert loaded.weight_bytes < 1.02 * (tmp_path / "model.safetensors").stat().st_size
    facts = inspect_model(str(tmp_path), device="cpu")
    assert facts["weight_bytes"] == loaded.weight_bytes and facts["kept_types"] == ["INT4"]
    assert facts["num_weights"] == loaded.spec.num_weights + 5 * 256                      # and norms
    checkpoint = open_checkpoint(tmp_path)
    model_class, spec, _ = class_and_spec(checkpoint)
    check_tensors(checkpoint, model_class, spec, torch.float32)


def set_(**fields):
    return lambda config, tensors: config.update(fields)


def of_weights(**fields):
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(fields)


def replace_tensor(suffix, change):
    def changed(config, tensors):
        name = f"{DOWN}.{suffix}"
        tensors[name] = change(tensors[name]).contiguous()
    return changed


def spoil(tensor):
    tensor.view(-1)[3] = float("nan")
    return tensor


def drop(suffix):
    return lambda config, tensors: tensors.pop(f"{DOWN}.{suffix}")


def with_scales(*scales, config=CACHE):
    """Add scales of keys and values, of which layer and kind take turns."""
    def changed(fields, tensors):
        fields.update({} if config is None else {"kv_cache_scheme": config})
        names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
        tensors |= {name: torch.tensor(scales[at % len(scales)]).view(-1) for at, name in enumerate(names)}
    return changed


def test_scales_of_keys_and_values_are_read_exactly(tmp_path):
    write_folder(tmp_path, "packed")
    tensors, scales = load_file(tmp_path / "model.safetensors"), (0.1, 3.0, 1 / 3, 7e-5)
    change_config(tmp_path, lambda fields: with_scales(*scales)(fields["quantization_config"], tensors))
    save_file(tensors, tmp_path / "model.safetensors")
    for options in ({"dtype": "bfloat16"}, {"compiled_step": True}, {"stage": Stage(1, 2)}):
        found = [(layer.key_scale, layer.value_scale)
                 for layer in load_model(tmp_path, device="cpu", **options).spec.attention]
        expected = np.float32(scales).astype(float).reshape(2, 2).tolist()
        assert found == [*map(tuple, expected)]["stage" in options :]
    assert inspect_model(str(tmp_path), device="cpu")["tensors_are_checked"]


@pytest.mark.parametrize(("form", "change", "says"), [
    ("GPTQ", set_(quant_method="bitsandbytes"), "quant_method is 'bitsandbytes'; expected one of gptq"),
    ("GPTQ", set_(bits=8), "qweight' is of type I32 and shape|scales' is of type F16 and shape"),
    ("GPTQ", set_(bits=3), "bits is 3; expected one of 4, 8"),
    ("GPTQ", set_(group_size=64), "scales' is of type F16 and shape .*; expected F16 .* and shape .8, 256."),
    ("GPTQ", set_(group_size=48), "group_size is 48; expected a multiple of 32, or -1"),
    ("GPTQ", set_(surprise=1), "surprise is 1; expected no such field, because its meaning is not known"),
    ("GPTQ", set_(dynamic={"-:x": {}}), "dynamic is .*; expected one of {}"),
    ("GPTQ", lambda config, tensors: (config.update(FORMATS["AWQ"][1]), config.pop("sym"), config.pop("desc_act")),
     "scales' is of type F16 and shape"),
    ("GPTQ with zero points", set_(sym=True), "qzeros' is .*; expected 7 or 8 as every zero point, because sym"),
    ("GPTQ", replace_tensor("g_idx", lambda found: found + 4), "g_idx' is .*; expected groups in 0..3"),
    ("GPTQ with an order", drop("g_idx"), "g_idx' is missing; expected I32 or I64"),
    ("GPTQ", drop("scales"), "scales' is missing"),
    ("AWQ", replace_tensor("scales", spoil), "scales' is .*; expected finite numbers"),
    ("int8 levels", replace_tensor("weight_scale", spoil), "weight_scale' is .*; expected finite numbers"),
    ("fp8 in blocks", replace_tensor("weight_scale_inv", spoil), "weight_scale_inv' is .*; expected finite numbers"),
    ("fp8 in blocks", replace_tensor("weight", lambda found: spoil(found.float()).to(found.dtype)),
     "down_proj.weight' is .*; expected finite numbers"),
    ("packed", lambda config, tensors: tensors.update({f"{DOWN}.weight_g_idx": torch.arange(512).int() // 128}),
     "weight_g_idx' is .*; expected no order of the inputs"),
    ("AWQ", set_(version="gemv"), "version is 'gemv'; expected one of 'gemm'"),
    ("AWQ", set_(zero_point=False), "zero_point is False; expected one of True"),
    ("AWQ", set_(quant_method="gptq", zero_point=None, version=None), "(qweight|scales|g_idx)' is"),
    ("packed", of_weights(num_bits=8), "weight_(packed|shape|scale)' is"),
    ("packed", of_weights(symmetric=False), "weight_zero_point' is missing"),
    ("packed with zero points", of_weights(symmetric=True), "weight_zero_point' is .*; expected no zero points"),
    ("packed", of_weights(group_size=64), "weight_scale' is of type F32 and shape"),
    ("packed", replace_tensor("weight_shape", lambda found: found.flip(0)), "weight_shape' is .*; expected the sizes"),
    ("packed", set_(format="int-quantized"), "num_bits is 4; expected one of 8"),
    ("packed", set_(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'; expected one of"),
    ("packed", set_(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme: type is missing; expected one of 'float'"),
    ("packed", set_(kv_cache_scheme={**CACHE, "strategy": "attn_head"}), "strategy is 'attn_head'; expected one of"),
    ("packed", set_(kv_cache_scheme={**CACHE, "dynamic": True}), "dynamic is True; expected one of False"),
    ("packed", set_(kv_cache_scheme=CACHE), "no tensor 'model.layers.0.self_attn.k_scale'"),
    ("packed", with_scales(2.0, config=None), "self_attn.k_scale' .*does not use"),
    ("packed", with_scales(-2.0), "k_scale' is of type F32 and shape .1., with the value -2.0; expected one positive"),
    ("packed", with_scales([1.0, 2.0]), "k_scale' is of type F32 and shape .2.; expected one positive number"),
    ("packed", set_(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
    ("int8 levels", set_(format="float-quantized"), "type is 'int'; expected one of 'float'"),
    ("int8 levels", of_weights(strategy="group", group_size=32), "weight_scale' is of type F32 and shape"),
    ("int8 levels", replace_tensor("weight", lambda found: found.float()), "down_proj.weight_scale'.*does not use"),
    ("int8 levels",
     lambda config, tensors: config["config_groups"]["group_0"]["input_activations"].update(dynamic=False),
     "input_activations: dynamic is False; expected true, because scales of activations are not read"),
    ("int8 levels", lambda config, tensors: config["config_groups"].update(other={"weights": {
        "num_bits": 8, "symmetric": False}}), "config_groups is .*; expected groups with the same weights"),
    ("fp8 in blocks", set_(activation_scheme="static"), "activation_scheme is 'static'; expected one of 'dynamic'"),
    ("fp8 in blocks", set_(weight_block_size=[64, 128]), "weight_scale_inv' is of type F32 and shape"),
    ("fp8 in blocks", set_(weight_block_size=None), "weight_scale_inv' is of type F32 and shape"),
])
def test_a_configuration_that_does_not_describe_the_weights_is_refused(form, change, says, tmp_path):
    write_folder(tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    change_config(tmp_path, lambda fields: change(fields["quantization_config"], tensors))
    save_file(tensors, tmp_path / "model.safetensors")
    for options in ({}, {"compiled_step": True}):
        with pytest.raises(ModelLoadError, match=says):
            load_model(tmp_path, device="cpu", **options)


def test_a_plain_folder_that_says_it_is_quantised_and_one_that_does_not_say_it(tmp_path):
    write_folder(tmp_path, "int8 levels")
    change_config(tmp_path, lambda fields: fields.pop("quantization_config"))
    with pytest.raises(ModelLoadError, match="the dtype 'I8'; expected 'F32', 'F16' or 'BF16'"):
        load_model(tmp_path, device="cpu")
    make_reference("Llama", **SIZES).save_pretrained(tmp_path)
    change_config(tmp_path, lambda fields: fields.update(quantization_config=of_gptq()))
    with pytest.raises(ModelLoadError, match="has no tensor whose name ends in .qweight; expected quantised weights"):
        load_model(tmp_path, device="cpu")
