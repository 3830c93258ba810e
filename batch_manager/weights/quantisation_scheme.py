"""How the matrices of a folder are quantised: `quantization_config` of AWQ, GPTQ, compressed-tensors and FP8.

What is not read is refused by the name of its field.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .json_file import Fields

CONFIG = "quantization_config"
WHOLE_ROW = 2**40                    # inputs of a group
BLOCK = 32                           # inputs that products read together: a group has a multiple of them
UNSUPPORTED = "use weights in F32, F16 or BF16, a GGUF file, or AWQ, GPTQ, compressed-tensors or FP8"

# Fields of quantization_config that change nothing about what is stored.
_GPTQ_NOTES = {"quant_method", "damp_percent", "static_groups", "true_sequential", "model_name_or_path",
               "model_file_base_name", "lm_head", "batch_size", "block_name_to_quantize", "cache_block_outputs",
               "dataset", "exllama_config", "max_input_length", "model_seqlen", "module_name_preceding_first_block",
               "modules_in_block_to_quantize", "pad_token_id", "tokenizer", "use_cuda_fp16", "use_exllama", "meta",
               "disable_exllama", "backend"}
_AWQ_NOTES = {"quant_method", "backend", "modules_to_not_convert", "do_fuse", "exllama_config", "fuse_max_seq_len",
              "modules_to_fuse"}
_TENSORS_NOTES = {"quant_method", "ignore", "quantization_status", "global_compression_ratio", "version"}
_FP8_NOTES = {"quant_method", "modules_to_not_convert", "ignored_layers"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the tensors of a quantised matrix are stored.

    method      "gptq", "awq", "packed", "int8" or "fp8"
    bits        4 or 8
    group       inputs that share a scale; WHOLE_ROW: all. Of fp8, inputs of a square block
    has_zeros   whether zero points are stored; otherwise levels are symmetric
    adds_one    of GPTQ: stored zero points are less by one; None: levels are symmetric, and the stored value decides
    has_order   of GPTQ and "packed": each input names its group, in an order of its own
    block       of fp8: (outputs, inputs) that share a scale; None: a scale for each output, or one for all
    has_cache_scales   whether each attention has scales of keys and values in FP8
    """

    method: str
    bits: int
    group: int = WHOLE_ROW
    has_zeros: bool = False
    adds_one: bool | None = False
    has_order: bool = False
    block: tuple[int, int] | None = None
    has_cache_scales: bool = False

    @property
    def name(self) -> str:
        return "F8_E4M3" if self.method == "fp8" else f"INT{self.bits}"


def read_scheme(config: Fields) -> Scheme | None:
    """Return how a checkpoint is quantised, from its config.json; None: it is not.

    Raises ModelLoadError, which names the field, for what this module does not read.
    """
    if CONFIG not in config:
        return None
    fields = config.fields(CONFIG)
    method = fields.text("quant_method")
    readers = {"gptq": _gptq, "auto_gptq": _gptq, "awq": _awq, "auto_awq": _awq,
               "compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if method not in readers:
        raise fields.fault("quant_method", f"one of {', '.join(readers)}", UNSUPPORTED)
    return readers[method](fields)


def _only(fields: Fields, known: Collection[str], neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raise ModelLoadError for a field that is not known, or whose value is not neutral."""
    for name, value in fields.values.items():
        if name in fields.asked_for or name in known or value is None:
            continue
        if name not in neutral:
            raise fields.fault(name, "no such field, because its meaning is not known", UNSUPPORTED)
        if not any(value == each and type(value) is type(each) for each in neutral[name]):
            raise fields.fault(name, f"one of {', '.join(map(repr, neutral[name]))}", UNSUPPORTED)


def _group(fields: Fields, name: str) -> int:
    size = fields.count(name, minimum=-1)
    if size == -1:
        return WHOLE_ROW
    if size % BLOCK or not size:
        raise fields.fault(name, f"a multiple of {BLOCK}, or -1", UNSUPPORTED)
    return size


def _one_of(fields: Fields, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
    fields.asked_for.add(name)
    value = fields.values.get(name, default)
    value = default if value is None else value
    if not any(value == each and type(value) is type(each) for each in allowed):
        raise fields.fault(name, f"one of {', '.join(map(repr, allowed))}", UNSUPPORTED)
    return value


def _gptq(fields: Fields) -> Scheme:
    bits, group = _one_of(fields, "bits", (4, 8)), _group(fields, "group_size")
    symmetric = fields.flag("sym", True)
    has_order = fields.flag("desc_act", False)
    form = _one_of(fields, "checkpoint_format", ("gptq", "gptq_v2"), fields.values.get("format") or "gptq")
    _one_of(fields, "format", (form,), form)           # an older and a newer name
    _only(fields, _GPTQ_NOTES, {"is_marlin_format": (False,), "pack_dtype": ("int32",), "dynamic": ({},),
                                "hyb_act": (False,), "mse": (0, 0.0), "adapter": ()})
    return Scheme("gptq", bits, group, True, None if symmetric else form == "gptq", has_order)


def _awq(fields: Fields) -> Scheme:
    if "w_bit" in fields:                # AutoAWQ's own names
        _one_of(fields, "w_bit", (4,))
        group = _group(fields, "q_group_size")
    else:
        _one_of(fields, "bits", (4,))
        group = _group(fields, "group_size")
    _one_of(fields, "zero_point", (True,))
    _one_of(fields, "version", ("gemm", "GEMM"), "gemm")
    _only(fields, _AWQ_NOTES, {})
    return Scheme("awq", 4, group, True)


def _compressed_tensors(fields: Fields) -> Scheme:
    form = _one_of(fields, "format", ("pack-quantized", "int-quantized", "float-quantized"))
    _one_of(fields, "quantization_status", ("compressed", "frozen"), "compressed")
    groups = fields.fields("config_groups")
    schemes = {_weights_of(form, groups.fields(name)) for name in groups.values}
    if len(schemes) != 1:
        raise fields.fault("config_groups", "groups with the same weights", UNSUPPORTED)
    has_cache_scales = fields.values.get("kv_cache_scheme") is not None
    if has_cache_scales:
        _check_cache(fields.fields("kv_cache_scheme"))
    _only(fields, _TENSORS_NOTES, {"sparsity_config": ({}, {"format": "dense"}), "transform_config": ({},),
                                   "kv_cache_scheme": ()})
    return replace(schemes.pop(), has_cache_scales=has_cache_scales)


def _check_cache(cache: Fields) -> None:
    """Refuse keys and values that are not in FP8 with one scale for those of a layer."""
    for name, value in (("type", "float"), ("num_bits", 8), ("strategy", "tensor"), ("symmetric", True),
                        ("dynamic", False)):
        _one_of(cache, name, (value,), value if name in ("symmetric", "dynamic") else None)
    _only(cache, {"observer", "observer_kwargs"}, {name: () for name in (
        "group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype")})


def _weights_of(form: str, group: Fields) -> Scheme:
    """Return the scheme of one of the config_groups. What it says about dynamic activations is not read: products take
    them as they are."""
    weights = group.fields("weights")
    is_float = form == "float-quantized"
    _one_of(weights, "type", ("float",) if is_float else ("int",), "int")
    bits = _one_of(weights, "num_bits", (4, 8) if form == "pack-quantized" else (8,))
    symmetric = _one_of(weights, "symmetric", (True,) if is_float else (True, False), True)
    size = weights.count("group_size", None, minimum=-1)
    strategy = _one_of(weights, "strategy", ("tensor", "channel", "block") if is_float else
                       ("tensor", "channel", "group"),
                       "tensor" if size is None else "channel" if size == -1 else "group")
    _one_of(weights, "dynamic", (False,), False)
    order = _one_of(weights, "actorder", (None, False, "static", "weight", "group"), None)
    block = None
    if strategy == "block":
        block = tuple(weights.counts("block_structure", range(2, 3)))
        if 0 in block:
            raise weights.fault("block_structure", "two sizes of at least 1", UNSUPPORTED)
    _only(weights, {"observer", "observer_kwargs"}, {"block_structure": (), "scale_dtype": (), "zp_dtype": (
        "torch.int8",), "group_size": (-1,)})
    if "input_activations" in group:
        inputs = group.fields("input_activations")
        if inputs.values.get("dynamic") is not True:
            raise inputs.fault("dynamic", "true, because scales of activations are not read", UNSUPPORTED)
        _only(inputs, set(inputs.values), {})
    _only(group, {"targets", "format"}, {"output_activations": ()})
    if is_float:
        return Scheme("fp8", 8, block=block)
    return Scheme("packed" if form == "pack-quantized" else "int8", bits,
                  _group(weights, "group_size") if strategy == "group" else WHOLE_ROW, not symmetric,
                  has_order=order == "group")


def _fp8(fields: Fields) -> Scheme:
    _one_of(fields, "activation_scheme", ("dynamic",), "dynamic")
    _one_of(fields, "fmt", ("e4m3",), "e4m3")
    block = None
    if "weight_block_size" in fields:
        block = tuple(fields.counts("weight_block_size", range(2, 3)))
        if 0 in block:
            raise fields.fault("weight_block_size", "two sizes of at least 1", UNSUPPORTED)
    _only(fields, _FP8_NOTES, {"scale_fmt": ()})
    return Scheme("fp8", 8, block=block)
