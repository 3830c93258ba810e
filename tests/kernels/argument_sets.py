"""Records the arguments of kernel calls, tensors without their values, so that another process can compile the calls.

    BATCH_MANAGER_ARGUMENT_SETS=FILE pytest tests/kernels          writes every call of a kernel to FILE
    python tests/kernels/compile_argument_sets.py FILE sm_90       compiles the calls in FILE

A line of the file is one call, as a JSON object with the keys module, function, args and kwargs. A tensor is recorded
by its shape, strides, dtype and the address of its first element modulo 16 bytes. Other arguments are recorded with
their values.
"""

import inspect
import json
import math

import numpy as np
import torch

ALIGNMENT = 16      # bytes; triton checks the address for it

# Arguments in the model's compute dtype, which is bfloat16 in an engine. Others are always float32 or integers.
OF_THE_MODEL = {
    "activation": ("hidden", "out"),
    "beam_topk": ("logits",),
    "deterministic_linear": ("x", "weight", "bias", "out"),
    "fused_linear": ("x", "weight", "bias", "norm_weight", "norm_bias", "residual", "out"),
    "gated_activation": ("gate_up", "out"),
    "layer_norm": ("hidden", "weight", "bias", "residual", "out"),
    "lora_expand_add": ("y", "pages"),
    "lora_shrink": ("x", "pages"),
    "moe_grouped_gemm": ("x", "weight"),
    "paged_attention_context": ("query", "kv_pool", "out"),
    "paged_attention_decode": ("query", "key", "value", "kv_pool", "out", "query_norm", "key_norm"),
    "paged_attention_merge": ("out",),
    "prepare_step": ("embedding", "out"),
    "quantised_linear": ("x", "bias", "residual", "out"),
    "rms_norm": ("hidden", "weight", "residual", "out"),
    "rope_kv_append": ("query", "key", "value", "kv_pool", "query_out", "query_norm", "key_norm"),
    "sample_token": ("logits",),
    "token_bitmask": ("logits",),
}


def described(module, function, args, kwargs):
    """Return a line of the file: the call of `function`, in `module`, with these arguments."""
    call = {"module": module, "function": function, "args": [_described(value) for value in args],
            "kwargs": {name: _described(value) for name, value in sorted(kwargs.items())}}
    return json.dumps(call)


def _described(value):
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "stride": list(value.stride()),
                "dtype": str(value.dtype).removeprefix("torch."), "past": value.data_ptr() % ALIGNMENT}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    assert value is None or isinstance(value, bool | int | float | str), f"no way to write down a {type(value)}"
    return value


def read(lines):
    """Yield (line number, call) for each call in the lines, and for its form with the model's tensors in bfloat16.

    A call that occurred before is left out.
    """
    seen = set()
    for number, line in enumerate(lines):
        call = json.loads(line)
        for form in (call, in_bfloat16(call)):
            key = json.dumps(form)
            if key not in seen:
                seen.add(key)
                yield number, form


def in_bfloat16(call):
    """Return the call with the tensors of the model's dtype, listed in OF_THE_MODEL, in bfloat16."""
    names = OF_THE_MODEL.get(call["module"], ())
    parameters = list(inspect.signature(launcher(call)).parameters)

    def twin(name, value):
        if name in names and isinstance(value, dict) and value["dtype"] in ("float32", "float16"):
            size = torch.finfo(getattr(torch, value["dtype"])).bits // 8
            return {**value, "dtype": "bfloat16", "past": 2 * (value["past"] // size) % ALIGNMENT}
        return value

    return {**call, "args": [twin(*pair) for pair in zip(parameters, call["args"])],
            "kwargs": {name: twin(name, value) for name, value in call["kwargs"].items()}}


def launcher(call):
    """Return the function of batch_manager.triton_kernels that the recorded call names."""
    import importlib

    return getattr(importlib.import_module(f"batch_manager.triton_kernels.{call['module']}"), call["function"])


def arguments(call):
    """Return (args, kwargs) of the call, with uninitialized tensors."""
    return [_made(value) for value in call["args"]], {name: _made(value) for name, value in call["kwargs"].items()}


def _made(value):
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.array(value["array"], value["dtype"])
    dtype = getattr(torch, value["dtype"])
    first = value["past"] // dtype.itemsize
    last = sum((size - 1) * stride for size, stride in zip(value["shape"], value["stride"]))
    if math.prod(value["shape"]) == 0:
        last = 0
    return torch.empty(first + last + 1, dtype=dtype).as_strided(value["shape"], value["stride"], first)
