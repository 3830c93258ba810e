"""Build the engine of a benchmark from the command-line options."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...config import KvCacheConfig, Parts, PeftCacheConfig, TrtGptModelOptionalParams
from ...extras.launch import follow, parallel_config
from ...gpt_manager import GptManager
from ...names import TrtGptModelType
from ..shared_options import POLICIES

PRECISIONS = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def model_limits(options: argparse.Namespace, parts: Parts) -> tuple[int | None, int | None, int | None]:
    """Return (vocabulary size, longest sequence in tokens, tokens of the KV cache pool). None: the backend decides.

    Raises the errors of `read_spec` if the model cannot be read.
    """
    if parts.backend is not None:
        return None, None, options.max_tokens_in_paged_kvcache
    from ...models import read_spec
    from ...models.loading import resolve_dtype
    from ...runtime.device.devices import resolve_device

    spec = read_spec(options.model, options.model_implementation)
    kv_tokens = options.max_tokens_in_paged_kvcache
    if options.kv_gib is not None:
        dtype = resolve_dtype(options.dtype, spec, resolve_device(options.device))
        bytes_per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * dtype.itemsize
        kv_tokens = int(options.kv_gib * 2**30) // bytes_per_token
    return spec.vocab_size, spec.max_position_embeddings, kv_tokens


def precision_of(options: argparse.Namespace, backend_dtype: str) -> str:
    """Return the name of the engine's precision in result files, such as bf16.

    backend_dtype   data type of the backend, used for --dtype auto
    """
    name = backend_dtype if options.dtype == "auto" else options.dtype
    return PRECISIONS.get(name.removeprefix("torch."), name)


def vocabulary_of(options: argparse.Namespace) -> int:
    """Return the vocabulary size of the model. Raises the errors of `read_spec`."""
    from ...models import read_spec

    return read_spec(options.model, options.model_implementation).vocab_size


def make_manager(options: argparse.Namespace, parts: Parts, kv_tokens: int | None, *, get: Callable[[int], Any],
                 send: Callable[..., None], stats: Callable[[str], None] | None) -> GptManager:
    """Load the model and start the engine. Raises the errors of the constructor of GptManager."""
    return GptManager(**_arguments(options, kv_tokens), get_inference_requests_cb=get, send_response_cb=send,
                      return_batch_manager_stats_cb=stats, parts=parts)


def load_adapters(options: argparse.Namespace, manager: GptManager) -> list[int]:
    """Load the adapters of the requests, and return their task ids. Raises the errors of GptManager.load_adapter."""
    from ...adapters import dummy_adapter

    for number, folder in enumerate(options.lora_modules):
        manager.load_adapter(number, folder)
    for number in range(0 if options.lora_modules else options.max_loras or 0):
        made = dummy_adapter(options.model, options.max_lora_rank, number)
        manager.load_adapter(number, {"lora_weights": made.lora_weights, "lora_config": made.lora_config})
    return list(range(len(options.lora_modules) or options.max_loras or 0))


def _adapter_cache(options: argparse.Namespace) -> PeftCacheConfig | None:
    if not (options.lora_modules or options.max_loras):
        return None
    from ...adapters import cache_for

    on_host = len(options.lora_modules) or options.max_loras
    return cache_for(options.model, options.max_lora_rank, options.max_loras or on_host, on_host)


def follow_rank_0(options: argparse.Namespace) -> int:
    """Take part as another rank, and return the exit status. Raises the errors of the constructor of GptManager."""
    return follow(**_arguments(options, model_limits(options, Parts())[2]))


def _arguments(options: argparse.Namespace, kv_tokens: int | None) -> dict[str, Any]:
    kv_cache = {"max_tokens": kv_tokens, "tokens_per_block": options.tokens_per_block,
                "enable_block_reuse": options.block_reuse, "max_attention_window": options.max_attention_window,
                "sink_token_length": options.sink_token_length, "host_cache_size": options.kv_host_cache_bytes,
                "disk_cache_path": options.disk_cache_path, "disk_cache_size": options.disk_cache_size,
                "kv_cache_dtype": options.kv_cache_dtype}
    if options.kv_cache_free_gpu_mem_fraction is not None:
        kv_cache["free_gpu_memory_fraction"] = options.kv_cache_free_gpu_mem_fraction
    return dict(
        model_path=options.model if options.model is None else Path(options.model),
        model_type=TrtGptModelType[options.type],
        max_beam_width=options.beam_width,
        scheduler_policy=POLICIES[options.policy],
        optional_params=TrtGptModelOptionalParams(
            kv_cache_config=KvCacheConfig(**kv_cache),
            enable_trt_overlap=options.enable_trt_overlap, enable_chunked_context=options.chunked_context,
            max_batch_size=options.max_batch_size, max_num_tokens=options.max_num_tokens,
            max_num_sequences=options.max_num_sequences,
            device=options.device, dtype=options.dtype, load_format=options.load_format,
            peft_cache_config=_adapter_cache(options),
            num_threads=options.num_threads, cuda_graphs=options.cuda_graphs, cpu_compile=options.cpu_compile,
            model_implementation=options.model_implementation,
            quantization=options.quantization, quantized_activations=options.quantized_activations,
            speculative_config=options.speculative_config,
            parallel_config=parallel_config(options.tensor_parallel_size, options.pipeline_parallel_size)),
        exclude_input_in_output=options.exclude_input_in_output_seq)
