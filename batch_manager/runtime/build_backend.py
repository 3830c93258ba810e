"""Builds the native backend: loads a checkpoint, plans the memory, and makes the parts and the forms of an engine."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..attention.block_sizes import refuse_large_blocks, refuse_small_blocks
from ..attention.interface import Attention
from ..attention.registry import make_attention
from ..attention.windows import effective_windows
from ..config import FP8_CACHE, MAX_DRAFT_TOKENS, TrtGptModelOptionalParams
from ..contained_log import log
from ..decoding.decoder import GptDecoder
from ..decoding.logits_stage import LogitsStage
from ..decoding.slots import SlotState
from ..errors import ConfigError, DeviceLostError, InsufficientMemoryError, counted, type_name
from ..handover import AdapterLoad
from ..layers.context import LayerContext
from ..layers.weight_form import types_kept
from ..models.loading import QUANTISED_PRODUCTS, LoadedModel, load_model, read_spec, refuse_to_quantise
from ..models.spec import ModelSpec
from ..seams import BackendInfo, MemoryUsage
from ..triton_kernels.cpu.native.library import Library, hold_helpers, loaded_library, release_helpers
from ..triton_kernels.dispatch import use_triton
from ..weights.checkpoint import Checkpoint
from ..weights.digest import identities
from . import packing
from .adapters.pool import LoraPool
from .adapters.port import LoraPort
from .block_tables import BlockTables
from .cache_fingerprint import cache_fingerprint
from .device.devices import device_name, resolve_device
from .device.memory import free_memory, release_memory
from .device.running import (
    CapturedGraph,
    Readbacks,
    Uploads,
    finish_stream,
    first_line,
    is_out_of_memory,
    make_stream,
    on_device,
    on_stream,
)
from .forms.fixed.inputs import can_bind
from .forms.fixed.shapes import NO_SIZES, mixed_sizes
from .forms.table import Asked, make_forms, wanted_forms
from .kv_pool import block_operations, kv_cache_dtype_of, make_host_pool, make_kv_pool, pool_dtype
from .memory_plan import EngineSizes, divide_memory, refuse_too_many_slots
from .native_backend import NativeBackend
from .operations import Operations
from .packing import Divide
from .parts import DeviceParts
from .ranks.part import RankPart, device_of_rank
from .thread_count import has_openmp, require_openmp, step_threads
from .warm_up import measured_draft_cost


def build_native_backend(model_path: str | os.PathLike, params: TrtGptModelOptionalParams, *, layout: Divide,
                         num_slots: int, max_beam_width: int = 1,
                         attention_factory: Callable[..., Attention] | None = None,
                         is_engine_thread: Callable[..., bool] = lambda thread: False,
                         own_stages: Callable[[int, torch.device], Sequence[LogitsStage]] | None = None,
                         graph: Callable[..., Any] = CapturedGraph, part: RankPart | None = None,
                         max_draft_tokens: int = 0) -> NativeBackend:
    """Load a checkpoint, allocate the KV cache pool, and run a warm-up.

    layout              a function of packing.py, which divides a step into calls of the model
    num_slots           number of sequences to allocate state for; the state grows if more arrive
    max_beam_width      largest number of beams of a sequence
    attention_factory   (spec, kv_pool) -> Attention. spec.attention has the effective windows: in each layer, the
                        smaller of the model's and the configured window. With sink tokens, the factory also gets
                        `sink=`; a factory without this parameter fails here. None: make_attention
    own_stages          (num_slots, device) -> custom stages, see decoding/stages.py; None: no custom stages
    is_engine_thread    (threading.Thread) -> whether the thread runs only the engine. The OpenMP and MKL thread counts
                        of such a thread stay at num_threads between steps
    graph               CapturedGraph, or a class with its methods and its device type
    part                the part of the model that this rank has, if several run it together. Every rank calls this
                        function, with equal arguments. None: this process has the whole model
    max_draft_tokens    most draft tokens of a sequence in a step
    Raises              ConfigError and its subclasses, after freeing all memory
    """
    device = resolve_device(params.device)
    if part is not None:
        device = device_of_rank(part.place, part.config, device)
    asked = Asked(params, device, layout, use_triton(device), attention_factory is not None, graph,
                  1 if part is None else part.place.num_ranks)
    refuse_fp8_cache(asked)
    absent = wanted_forms(asked)
    refuse_without_quantised_products(asked, absent)
    peft = params.peft_cache_config
    port = None if peft is None else LoraPort(peft.lora_modules, peft.max_adapter_size, params.deterministic, device)
    kv = params.kv_cache_config
    may_store = kv.host_cache_size > 0 or kv.disk_cache_path is not None or params.kv_transfer_config is not None
    files = identities(model_path) if may_store else {}   # those that are read next, unless they are replaced meanwhile
    loaded = _load(model_path, params, device, attention_factory, compiled="compiled" not in absent, adapters=port,
                   part=part)
    files = files if may_store and identities(model_path) == files else {}
    sizes = _sizes(params, loaded, layout, num_slots, max_beam_width, max_draft_tokens, "graph" not in absent)
    windows, sink, spec = _windows(model_path, params, loaded.spec, sizes.max_seq_len, part)
    memory = divide_memory(params, loaded, sizes, sink, port, part)
    log.info("%s model %s, weights of %s bytes on %s%s; %s", loaded.implementation, spec.architecture,
             f"{loaded.weight_bytes:,}", device_name(device), "" if params.quantized_activations is None else
             f", multiplied with activations in {params.quantized_activations}", memory.reason)
    refuse_too_many_slots(num_slots, free_memory(torch.device("cpu")))

    stream = make_stream(device)
    with _described_errors(device, stream, sizes) as made:
        with on_stream(stream), torch.inference_mode():
            block = params.kv_cache_config.tokens_per_block
            cached = pool_dtype(params.kv_cache_config.kv_cache_dtype, loaded.dtype)
            pool = make_kv_pool(spec, memory.num_blocks, block, cached, device)
            host_pool = make_host_pool(spec, memory.host_blocks, block, cached, device)
            attention = (attention_factory or make_attention)(
                spec, pool, **({"sink": sink} if sink else {}),
                **({"deterministic": True} if params.deterministic else {}),
                **({"dtype": loaded.dtype} if cached != loaded.dtype else {}))
            stages = tuple(own_stages(num_slots, device)) if own_stages else ()
            num_threads = params.num_threads
            if num_threads is None and part is not None and has_openmp():
                num_threads = max(torch.get_num_threads() // part.place.local_size, 1)
            elif num_threads is None and params.deterministic:
                num_threads = torch.get_num_threads()               # fixed: the bits may depend on it
            parts = make_parts(loaded, attention, pool, host_pool, stream, stages, num_slots=num_slots,
                               max_beam_width=max_beam_width, max_seq_len=sizes.max_seq_len, num_threads=num_threads,
                               is_engine_thread=is_engine_thread, adapters=port, max_draft_tokens=max_draft_tokens,
                               native=loaded_library() if "compiled" not in absent else None)
            made.append(parts)
            handlers = block_operations(pool, host_pool)
            if port is not None:
                port.bind(LoraPool(port.projections, memory.adapter_entries, memory.adapter_pages, loaded.dtype, device,
                                   port.max_adapter_size), parts.slots)
                handlers[AdapterLoad] = port.pool.load
        if "compiled" not in absent:
            hold_helpers(parts)                           # helper threads for products, from the warm-up on
        info = partial(make_info, windows=windows, sink_tokens=sink)
        operations, held = Operations(handlers), held_bytes(parts, loaded)
        if part is not None:
            most_rows = max(sizes.step_tokens, params.max_batch_size * max_beam_width)
            return part.make_backend(asked, absent, parts, loaded, spec, sink, operations, info, held, stages,
                                     most_rows)
        # The number of threads is set once for all steps, on the loading thread.
        with on_device(device, stream), torch.inference_mode(), parts.threads(None)():
            forms = make_forms(asked, absent, parts, loaded, spec, graph_sizes=sizes.graphs, sink=sink,
                               most_rows=min(num_slots, params.max_batch_size, sizes.step_tokens), own_stages=stages)
        facts = info(parts, loaded, forms.dispatch, forms.absent)
        most_drafts = min(max_draft_tokens, parts.max_seq_len - 2)
        if "compiled" in forms.steps and most_drafts > 0:
            facts = dataclasses.replace(facts, draft_cost=measured_draft_cost(parts, forms, most_drafts))
        return NativeBackend(parts, operations, forms, facts, held,
                             cache_fingerprint(files, params, loaded, windows, num_threads, forms.dispatch))


def make_parts(loaded: LoadedModel, attention: Attention, pool: torch.Tensor, host_pool: Sequence[torch.Tensor] = (),
               stream: torch.Stream | None = None, own_stages: Sequence[LogitsStage] = (), *, num_slots: int,
               max_beam_width: int = 1, max_seq_len: int, num_threads: int | None = None,
               is_engine_thread: Callable[..., bool] = lambda thread: False, adapters: LoraPort | None = None,
               max_draft_tokens: int = 0, native: Library | None = None) -> DeviceParts:
    """Return the parts of an engine, which see DeviceParts for the arguments. Uses the current stream.

    native   see GptDecoder
    """
    device, max_blocks, uploads = loaded.device, -(-max_seq_len // pool.shape[4]), Uploads(loaded.device)
    binds = can_bind(attention)                           # steps are padded with one extra slot
    slots = SlotState(num_slots + binds, device, uploads.send, max_draft_tokens)
    return DeviceParts(
        device=device, stream=stream, uploads=uploads, readbacks=Readbacks(device), pool=pool, host_pool=host_pool,
        tables=BlockTables(num_slots, max_blocks, (num_slots * max_beam_width, max_blocks) if binds else None),
        slots=slots, attention=attention,
        decoder=GptDecoder(slots, own_stages, deterministic=loaded.deterministic, native=native),
        threads=step_threads(device, num_threads, is_engine_thread), num_threads=num_threads, num_slots=num_slots,
        max_beam_width=max_beam_width, max_seq_len=max_seq_len, vocab_size=loaded.spec.vocab_size,
        tokens_per_block=pool.shape[4], adapters=adapters)


def make_info(parts: DeviceParts, loaded: LoadedModel, dispatch: str, absent: Mapping[str, str],
              windows: Sequence[int | None] = (None,), sink_tokens: int = 0) -> BackendInfo:
    """Return the facts about an engine.

    absent    name -> reason for each form that the engine lacks
    windows   window of each layer in the attention; None: no window
    """
    device, port = parts.device, parts.adapters
    return BackendInfo(
        vocab_size=parts.vocab_size, max_seq_len=parts.max_seq_len, num_blocks=len(parts.pool),
        tokens_per_block=parts.tokens_per_block, num_slots=parts.num_slots, dispatch=dispatch,
        hidden_size=loaded.spec.hidden_size, device=device_name(device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_cache_dtype=kv_cache_dtype_of(parts.pool.dtype), quantized_activations=loaded.quantized_activations or "",
        attention_window=None if None in windows else max(windows), sink_tokens=sink_tokens,
        host_blocks=len(parts.host_pool), is_asynchronous=device.type != "cpu", copies_blocks=True,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        architecture=loaded.spec.architecture, end_ids=loaded.end_ids, model_implementation=loaded.implementation,
        not_compiled=absent.get("compiled", "") if device.type == "cpu" else "", not_captured=absent.get("graph", ""),
        absent=dict(absent), **({} if port is None else {
            "max_adapter_size": port.max_adapter_size, "adapter_pages": len(port.pool.pages),
            "adapter_modules": port.modules}))


def held_bytes(parts: DeviceParts, loaded: LoadedModel) -> MemoryUsage:
    """Return the bytes that weights, KV cache pool and host blocks take on the host."""
    host_bytes = sum(block.nbytes for block in parts.host_pool)
    if parts.device.type != "cpu":
        return MemoryUsage(pinned=host_bytes)
    adapter_bytes = 0 if parts.adapters is None else parts.adapters.pool.num_bytes
    return MemoryUsage(cpu=loaded.weight_bytes + parts.pool.nbytes + adapter_bytes + host_bytes)


def _load(model_path: str | os.PathLike, params: TrtGptModelOptionalParams, device: torch.device,
          attention_factory: Callable[..., Attention] | None, *, compiled: bool, adapters: LoraPort | None,
          part: RankPart | None) -> LoadedModel:
    """Load the checkpoint, and refuse sizes and parts that the device rules out."""
    tokens_per_block = params.kv_cache_config.tokens_per_block
    compiles_attention = device.type == "cuda" and use_triton(device) and attention_factory is None
    if compiles_attention:
        refuse_small_blocks(tokens_per_block, device_name(device))
    if params.num_threads is not None and device.type == "cpu":
        require_openmp()
    if params.deterministic:
        refuse_nondeterministic_parts(device, attention_factory)
    try:
        loaded = load_model(model_path, device=device, dtype=params.dtype, load_format=params.load_format,
                            deterministic=params.deterministic, compiled_step=compiled,
                            free_bytes=free_memory(device), model_implementation=params.model_implementation,
                            adapters=adapters, quantization=params.quantization,
                            quantized_activations=params.quantized_activations,
                            **({} if part is None else {"split": part.exchange, "stage": part.stage}))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(f"the weights do not fit {device_name(device)}: {first_line(error)}",
                                      f"{free_memory(device):,} bytes are free now",
                                      "use a smaller model or dtype, or free memory") from error
    if compiles_attention and not params.deterministic:           # with `deterministic`, decode attention is not used
        with on_device(device):
            refuse_large_blocks(loaded.spec, tokens_per_block, loaded.dtype, device_name(device))
    if adapters is not None:
        for sizes in () if part is None else part.agree("adapter modules", adapters.sizes()):
            adapters.add_sizes(sizes)
        if not adapters.modules.sizes:
            raise ConfigError(f"peft_cache_config is set, and the model class is {type_name(loaded.model)}",
                              "none of its layers is a projection of lora_modules", "leave peft_cache_config out")
    return loaded


def _sizes(params: TrtGptModelOptionalParams, loaded: LoadedModel, layout: Divide, num_slots: int,
           max_beam_width: int, max_draft_tokens: int, has_graphs: bool) -> EngineSizes:
    most = loaded.spec.max_position_embeddings
    max_seq_len = most if params.max_seq_len is None else params.max_seq_len
    if max_seq_len > most:
        raise ConfigError(f"max_seq_len is {max_seq_len:,}", f"the model has positions for {counted(most, 'token')}",
                          f"set max_seq_len to at most {most:,} or leave it unset")
    step_tokens = params.max_batch_size * max_seq_len if layout is packing.padded else params.max_num_tokens
    graphs = NO_SIZES
    if has_graphs and layout is packing.packed:
        graphs = mixed_sizes(num_slots, step_tokens, loaded.weight_bytes // loaded.dtype.itemsize)
    return EngineSizes(num_slots, max_beam_width, max_seq_len, max_draft_tokens, step_tokens, graphs, has_graphs)


def _windows(model_path: str | os.PathLike, params: TrtGptModelOptionalParams, spec: ModelSpec, max_seq_len: int,
             part: RankPart | None) -> tuple[Sequence[int | None], int, ModelSpec]:
    """Return the window of each layer of the whole model, the number of sink tokens, and `spec` with the windows.

    Blocks are freed by the windows of all layers, also those of other stages. Scales of keys and values are 1 in a
    cache that is not in FP8.
    """
    whole, kv = spec if part is None else read_spec(model_path, params.model_implementation), params.kv_cache_config
    windows, sink = effective_windows([layer.window for layer in whole.attention], kv.max_attention_window,
                                      kv.sink_token_length, max_seq_len)
    layers = range(spec.num_layers) if part is None else part.stage.layers_of(whole.num_layers)
    scales: dict[str, Any] = {} if kv.kv_cache_dtype == FP8_CACHE else {"key_scale": 1.0, "value_scale": 1.0}
    return windows, sink, dataclasses.replace(spec, attention=tuple(
        dataclasses.replace(layer, window=windows[number], **scales) for layer, number in zip(spec.attention, layers)))


@contextlib.contextmanager
def _described_errors(device: torch.device, stream: torch.Stream | None, sizes: EngineSizes
                      ) -> Iterator[list[DeviceParts]]:
    """Context manager: frees all memory after an error, and raises a ConfigError that says what did not fit or failed.

    The yielded list takes the parts of which helper threads are released.
    """
    made: list[DeviceParts] = []
    try:
        yield made
    except Exception as error:
        finish_stream(stream)                             # freed memory may be reused at once
        for parts in made:
            release_helpers(parts)
        release_memory(device)
        if isinstance(error, DeviceLostError):            # another rank failed, and says why
            raise
        # A factory in Parts that ran out of memory comes as a ConfigError.
        if isinstance(error, ConfigError) and (type(error) is not ConfigError or not is_out_of_memory(error.__cause__)):
            raise
        state = f"{counted(sizes.num_slots, 'sequence')} of {counted(sizes.max_seq_len, 'token')} and " \
                f"{counted(sizes.max_beam_width, 'beam')}"
        if isinstance(error, ConfigError) or is_out_of_memory(error):
            raise InsufficientMemoryError(
                f"no memory is left for a step and the state of {state}: "
                + (error.fact if isinstance(error, ConfigError) else first_line(error)),
                "a step of the largest batch must fit in addition to the weights and the KV cache",
                "lower max_num_sequences, max_batch_size, max_beam_width, KvCacheConfig.free_gpu_memory_fraction or "
                "KvCacheConfig.max_tokens") from error
        raise ConfigError(f"the warm-up of the loaded model, for up to {state}, raised {first_line(error)}",
                          "the model must run a step before it serves requests", "see the exception above") from error


def refuse_fp8_cache(asked: Asked) -> None:
    """Raise ConfigError if an attention of the user's own would read a KV cache in FP8."""
    kind = asked.params.kv_cache_config.kv_cache_dtype
    if kind != "auto" and asked.has_attention:
        raise ConfigError(f"KvCacheConfig.kv_cache_dtype is {kind!r}, but Parts.attention is set",
                          "expected an attention of this package, which alone reads FP8", "leave kv_cache_dtype out")


def refuse_without_quantised_products(asked: Asked, absent: Mapping[str, str]) -> None:
    """Raise ConfigError if nothing on the device multiplies by quantised weights as `asked.params` says.

    absent   name -> reason for each form that the engine will not have
    """
    params = asked.params
    if "compiled" not in absent:
        return
    has_kernel = asked.has_triton and not params.deterministic
    reason = "deterministic is set, and sums of the kernel have the order of a tile" if asked.has_triton and (
        not has_kernel) else absent["compiled"]
    for name, is_refused in (("quantization", not has_kernel), ("quantized_activations", True)):
        if getattr(params, name) is not None and is_refused:
            raise ConfigError(f"{name} is {getattr(params, name)!r}, but {reason}", QUANTISED_PRODUCTS,
                              f"leave {name} out")


def refuse_quantization(asked: Asked, checkpoint: Checkpoint, dtype: torch.dtype, implementation: str,
                        is_shipped: bool) -> None:
    """Raise the ConfigError of an engine that cannot quantise matrices, or what they multiply, as `asked.params` says.

    is_shipped   whether the model class is one of this package
    """
    absent = wanted_forms(asked)
    refuse_without_quantised_products(asked, absent)
    context = LayerContext(device=asked.device, dtype=dtype, compiled_step="compiled" not in absent,
                           quantization=asked.params.quantization,
                           quantized_activations=asked.params.quantized_activations)
    refuse_to_quantise(context, checkpoint, implementation, types_kept(context) if is_shipped else ())


def refuse_nondeterministic_parts(device: torch.device, attention_factory: Callable[..., Attention] | None) -> None:
    """Raise ConfigError if the device or a custom attention rules out `deterministic`."""
    if device.type != "cpu" and not use_triton(device):
        raise ConfigError(f"deterministic is True and the device is {device_name(device)}, but triton is not installed",
                          "on a GPU the deterministic matrix products are Triton kernels",
                          "install triton, or use the CPU")
    if attention_factory is not None:
        raise ConfigError("deterministic is True and Parts.attention is set",
                          "only the package's own attention is deterministic", "unset one of the two")
