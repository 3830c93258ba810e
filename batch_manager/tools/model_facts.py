"""What `batch-manager inspect` shows of a checkpoint: how it would run and its memory, without loading its weights."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ..config import KvCacheConfig, TrtGptModelOptionalParams
from ..errors import ConfigError, ModelLoadError, counted, printable
from ..layers.context import LayerContext
from ..layers.weight_form import is_copied, types_kept
from ..models.end_ids import read_end_ids
from ..models.implementation import NATIVE
from ..models.loading import check_tensors, class_and_spec, refuse_too_many_weights, resolve_dtype
from ..models.registry import is_shipped
from ..runtime import packing
from ..runtime.build_backend import refuse_fp8_cache, refuse_quantization
from ..runtime.device.devices import device_name, named_device, num_multiprocessors, resolve_device
from ..runtime.device.memory import free_memory
from ..runtime.forms.compiled.forward import obstacle_of_model
from ..runtime.forms.form import by_reason
from ..runtime.forms.table import Asked, wanted_forms
from ..runtime.kv_pool import block_bytes, kv_cache_dtype_of, pool_dtype
from ..runtime.memory_plan import plan_memory, refuse_too_many_slots, step_bytes
from ..triton_kernels.dispatch import use_triton
from ..weights.checkpoint import open_checkpoint

SHORTEST_CONTEXT = 512      # tokens in the last row of the table of sequences, unless the model's context is shorter
STEPS = {"compiled": "C code compiled for this processor", "torch": "torch", "triton": "Triton's kernels"}


def inspect_model(path: str, *, device: str | None = None, dtype: str = "auto", max_seq_len: int | None = None,
                  model_implementation: str = "auto", quantization: str | None = None,
                  quantized_activations: str | None = None, free_bytes: int | None = None,
                  kv: KvCacheConfig | None = None, **sizes: int) -> dict[str, Any]:
    """Return the facts that the program prints, as values for JSON. Sizes are in bytes, lengths in tokens.

    quantization   as in an engine, like the other options; every matrix of a layer counts as quantised
    free_bytes     free device memory in bytes before the weights are loaded; None: the memory that is free now. If it
                   is an integer, a GPU named by `device` need not exist on this machine
    kv             None: the default KvCacheConfig
    sizes          max_batch_size and max_num_tokens, if not the default

    Raises ConfigError and its subclasses where an engine would raise them.
    """
    kv = KvCacheConfig() if kv is None else kv
    params = TrtGptModelOptionalParams(device=device, dtype=dtype, max_seq_len=max_seq_len, kv_cache_config=kv,
                                       model_implementation=model_implementation, quantization=quantization,
                                       quantized_activations=quantized_activations, **sizes)
    if free_bytes is not None and free_bytes < 1:
        raise ConfigError(f"the free memory to plan for is {free_bytes:,} bytes", "expected at least 1 byte",
                          "state the device's free memory, or leave it out to use what is free on this machine")
    is_elsewhere = free_bytes is not None and device is not None and named_device(device).type == "cuda"
    target = torch.device("cuda") if is_elsewhere else resolve_device(device)
    if free_bytes is None:
        free_bytes = free_memory(target)

    checkpoint = open_checkpoint(path)
    model_class, spec, implementation = class_and_spec(checkpoint, model_implementation)
    if max_seq_len is not None and max_seq_len > spec.max_position_embeddings:
        raise ConfigError(f"max_seq_len is {max_seq_len:,}",
                          f"the model has positions for {spec.max_position_embeddings:,} tokens",
                          f"set it to at most {spec.max_position_embeddings:,}, or leave it out")
    resolved_dtype = resolve_dtype(dtype, spec, target)
    with_triton = is_elsewhere or use_triton(target)
    is_native = implementation == NATIVE
    asked = Asked(params, target, packing.packed, with_triton)
    absent = wanted_forms(asked if is_native else asked._replace(params=replace(params, cpu_compile=False)))
    refuse_fp8_cache(asked)
    is_checked = is_native and is_shipped(spec.architecture, model_class)
    refuse_quantization(asked, checkpoint, resolved_dtype, implementation, is_checked)
    context = LayerContext(device=target, dtype=resolved_dtype, compiled_step="compiled" not in absent)
    if not is_native:
        absent["compiled"] = f"{spec.architecture} runs through transformers"
    elif reason := obstacle_of_model(spec, resolved_dtype):
        absent.setdefault("compiled", f"{model_class.__name__} cannot be compiled: {reason}")
    obstacle = "" if with_triton else absent.get("compiled", "")
    steps = "triton" if with_triton else "torch" if obstacle else "compiled"

    kept = types_kept(context)
    weights = checkpoint.weights(torch.device("cpu"), resolved_dtype, kept if is_checked else ())
    stored, stored_types = weights.num_weights, dict(weights.stored_types.most_common())
    # An embedding that is also the head is packed for its products in a copy, unless both are quantised blocks.
    has_copy = is_native and spec.tie_word_embeddings and is_copied(context) and not (
        is_checked and weights.keeps(f"{model_class.names.embedding}.weight"))
    copy_bytes = spec.vocab_size * spec.hidden_size * resolved_dtype.itemsize if has_copy else 0
    weight_bytes = weights.loaded_bytes + copy_bytes
    with suppress(ModelLoadError):      # closes the files; it raises because no tensor was requested
        weights.finish()
    if is_checked:
        num_bytes = check_tensors(checkpoint, model_class, spec, resolved_dtype, quantization=quantization)
        weight_bytes = weight_bytes if quantization is None else num_bytes + copy_bytes
    refuse_too_many_weights(weight_bytes, checkpoint, target, resolved_dtype, free_bytes)
    cached = pool_dtype(kv.kv_cache_dtype, resolved_dtype)
    one_block = block_bytes(spec, kv.tokens_per_block, cached)
    set_aside = step_bytes(spec, resolved_dtype, params.max_num_tokens, params.max_batch_size,
                           num_multiprocessors(target) if with_triton else 0)
    longest = max_seq_len or spec.max_position_embeddings
    plan = plan_memory(kv, block_bytes=one_block, free_bytes=max(free_bytes - weight_bytes, 0), step_bytes=set_aside,
                       on_gpu=target.type != "cpu", max_seq_len=longest, max_num_sequences=params.max_batch_size)
    # On a CPU, memory that is stated is that of the machine to plan for.
    refuse_too_many_slots(params.max_batch_size,
                          free_bytes if target.type == "cpu" else free_memory(torch.device("cpu")))
    lengths = [longest >> halved for halved in range(longest.bit_length())
               if longest >> halved >= min(SHORTEST_CONTEXT, longest)]
    windows = sorted({layer.window for layer in spec.attention if layer.window is not None})
    return {
        "path": str(checkpoint.path), "architecture": spec.architecture, "model_implementation": implementation,
        "tensors_are_checked": is_checked,
        "model_class": f"{model_class.__module__}.{model_class.__qualname__}",
        "device": device if is_elsewhere else device_name(target),
        "dtype": str(resolved_dtype).removeprefix("torch."), "checkpoint_dtype": spec.dtype, "steps": steps,
        "not_compiled": obstacle, "not_captured": absent.get("graph", ""), "absent": absent,
        "num_layers": spec.num_layers, "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size, "attention_windows": windows, "experts": spec.expert_counts,
        "layers_with_a_window": sum(layer.window is not None for layer in spec.attention),
        "vocab_size": spec.vocab_size, "end_ids": list(read_end_ids(checkpoint, spec.vocab_size)),
        "max_position_embeddings": spec.max_position_embeddings, "max_seq_len": longest,
        "quantization": quantization, "quantized_activations": quantized_activations, "num_weights": stored,
        "stored_types": stored_types, "kept_types": [kind for kind in stored_types if is_checked and kind in kept],
        "weight_bytes": weight_bytes, "embedding_copy_bytes": copy_bytes, "free_bytes": free_bytes,
        "step_bytes": set_aside, "set_aside_bytes": plan.set_aside_bytes,
        "kv_cache_dtype": kv_cache_dtype_of(cached), "tokens_per_block": kv.tokens_per_block, "block_bytes": one_block,
        "num_blocks": plan.num_blocks, "pool_bytes": plan.pool_bytes, "pool_reason": plan.reason,
        "sequences_by_context": {str(length): plan.num_blocks // -(-length // kv.tokens_per_block)
                                 for length in lengths}}


def described(facts: dict[str, Any]) -> str:
    """Format the facts of `inspect_model` as text."""
    wide = " and ".join(f"{size:,}" for size in facts["attention_windows"])
    windows = f"windows of {wide} tokens in {counted(facts['layers_with_a_window'], 'layer')}" if wide else "no window"
    windows += "; experts in {} layer(s): {}, {} for each token".format(*facts["experts"]) if facts["experts"] else ""
    ends = ", ".join(map(str, facts["end_ids"])) or "none, outputs end only at their length limit"
    what = "steps run" if facts["model_implementation"] == NATIVE else "layers run in transformers, attention"
    stored_as = ", ".join(f"{count:,} {printable(kind)}" for kind, count in facts["stored_types"].items())
    if facts["kept_types"]:
        stored_as += f"; matrices in {' and '.join(facts['kept_types'])} keep the file's blocks"
    if facts["quantization"]:
        stored_as += f"; matrices of layers are quantised to {facts['quantization']}"
    if kind := facts["quantized_activations"]:
        stored_as += f"; quantised ones are multiplied with activations in {kind}"
    copied = f" and {size(copy)} for a copy of the embedding" if (copy := facts["embedding_copy_bytes"]) else ""
    lines = [
        facts["path"], "",
        f"  architecture   {facts['architecture']}, {facts['model_implementation']}: {facts['model_class']}",
        f"  device         {facts['device']}; {what} in {STEPS[facts['steps']]}",
        *(f"                 without {line}" for line in by_reason(facts["absent"])),
        f"  dtype          {facts['dtype']}; tensors in the checkpoint: {stored_as}",
        f"  attention      {counted(facts['num_layers'], 'layer')}, {counted(facts['num_heads'], 'query head')}, "
        f"{counted(facts['num_kv_heads'], 'key/value head')}, head size {facts['head_size']}; {windows}",
        f"  vocabulary     {facts['vocab_size']:,} tokens; end ids: {ends}",
        f"  context        {facts['max_seq_len']:,} of the model's {facts['max_position_embeddings']:,} positions", "",
        f"  weights        {size(facts['weight_bytes'])}, {facts['num_weights']:,} elements in the checkpoint{copied}; "
        + ("the tensors match the model" if facts["tensors_are_checked"] else
           "the tensors are checked only when the model is loaded"),
        f"  one step       at most {size(facts['step_bytes'])}",
        *([f"                 only {size(facts['set_aside_bytes'])} are set aside, half of the free memory. A step of "
           "this size may not fit: lower --max-num-tokens or --max-batch-size"]
          if facts["set_aside_bytes"] < facts["step_bytes"] else []),
        f"  KV cache       {size(facts['pool_bytes'])}, {counted(facts['num_blocks'], 'block')} of "
        f"{counted(facts['tokens_per_block'], 'token')} "
        f"and {facts['block_bytes']:,} bytes ({facts['block_bytes'] // facts['tokens_per_block']:,} per token), "
        f"keys and values in {facts['kv_cache_dtype']}",
        f"  free memory    {size(facts['free_bytes'])} before the weights are loaded", "",
        "  sequences that fit into the KV cache at once, by length:"]
    lines += [f"  {int(length):>12,} tokens   {count:,}" for length, count in facts["sequences_by_context"].items()]
    return "\n".join(lines)


def size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
