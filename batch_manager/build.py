"""The composition root, which builds the loop from the constructor's arguments.

Only this file and build_rank.py import every concrete class.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import Callbacks, EngineArguments
from .clock import reliable
from .config import Parts, SpeculativeConfig, TrtGptModelOptionalParams
from .contained_log import RateLimitedLog, log
from .custom_parts import (
    check_scheduler,
    checked_attention,
    checked_stages,
    chosen_scheduler,
    close_unused,
    custom_backend,
)
from .errors import ConfigError, InvalidRequestError, ModelLoadError, RequestError
from .guard import Guard, Heartbeat
from .interpreter_exit import is_a_worker
from .kv.event_log import EventLog
from .kv.kv_cache_manager import KvCacheManager
from .kv.peft_cache_manager import PeftCacheManager
from .loop.batch_scheme import InFlight, StaticBatches
from .loop.callbacks import GuardedCallbacks
from .loop.draft_model import DraftModel, room_for_drafts
from .loop.drafting import Drafter, Drafting
from .loop.generation_loop import GenerationLoop
from .loop.intake import Intake, QueueBounds
from .loop.ngrams import NgramDrafter
from .loop.preparing import Preparing, without_adapters
from .loop.suffix_trees import SuffixDrafter
from .loop.waiting_requests import WaitingRequests
from .names import SchedulerPolicy, TrtGptModelType
from .options import Plan, make_admission, plan_engine, settle
from .parallel.block_exchange import BlockServer, fetch
from .parallel.mapping import place_of
from .requests.adapter_content import checked_adapter, read_adapter
from .requests.adapter_store import AdapterStore
from .requests.admission import Admission
from .responses.deliveries import Deliveries
from .scheduling.policies import make_scheduler
from .seams import Clock, ModelBackend
from .stores.directory import DirectoryStore
from .stores.handed_blocks import HandedBlocks
from .stores.interface import BlockStore
from .stores.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    import torch

    from .runtime.ranks.part import RankPart


def build_loop(arguments: EngineArguments, callbacks: Callbacks, parts: Parts, heartbeat: Heartbeat | None = None,
               make_backend: Callable[[EngineArguments, Parts], ModelBackend] | None = None) -> GenerationLoop:
    """Load the model, size the pool and build the loop. Starts no thread.

    parts          as `checked_parts` returns it
    heartbeat      written at each entry to and exit from foreign code
    make_backend   in place of `make_local_backend`, for an engine of several ranks

    Raises ConfigError and its subclasses, after closing the backend.
    """
    arguments = settle(arguments, parts)
    params, clock = arguments.optional_params, reliable(parts.clock)
    guard = Guard(clock.monotonic, heartbeat, params.log_callback_errors)
    check_scheduler(parts.scheduler)
    with ExitStack() as undo:
        drafter = make_drafter(arguments, parts, clock, undo)
        backend = (make_backend or make_local_backend)(arguments, parts)
        undo.callback(close_unused, backend)
        plan = plan_engine(arguments, parts, backend)
        info, limits = backend.info, plan.limits
        if isinstance(drafter, DraftModel):
            drafter.check_vocabulary(limits.vocab_size)
        kv_cache_manager = make_kv_cache_manager(plan, clock)
        assert callbacks.get_inference_requests_cb is not None and callbacks.send_response_cb is not None
        guarded = GuardedCallbacks(callbacks.get_inference_requests_cb, callbacks.send_response_cb,
                                   callbacks.poll_stop_signal_cb, callbacks.return_batch_manager_stats_cb, guard,
                                   params.max_admissions_per_iteration, parts.after_responses, parts.at_end,
                                   parts.kv_events, callbacks.alike)
        stored, kv_events, kv = None, None, params.kv_cache_config
        if plan.has_store:
            stored = _make_stored(params, parts, kv_cache_manager, backend, clock)
            undo.callback(stored.close)
        if plan.has_kv_events:
            kv_events = EventLog(kv_cache_manager, key=kv.event_hash_key, with_tokens=kv.event_tokens,
                                 most_kept=kv.event_buffer_max_size, log=RateLimitedLog(clock.monotonic))
        peft_cache_manager, preparing = None, without_adapters()
        if plan.adapters is not None:
            most_bytes = getattr(backend, "most_bytes_of_a_step", None)    # a step lists the loads of all in flight
            store = AdapterStore(plan.adapters.host_bytes, plan.adapters.device_pages,
                                 None if most_bytes is None else most_bytes // (limits.window_depth + 1))
            peft_cache_manager = PeftCacheManager(plan.adapters.device_pages, store)
            modules, most = plan.adapters.modules, plan.adapters.max_adapter_size
            preparing = Preparing(partial(checked_adapter, modules=modules, max_adapter_size=most), store,
                                  (modules.num_module_layers, most * modules.largest_row))
            _prefetch(arguments, preparing)
        loop = GenerationLoop(
            limits=limits,
            callbacks=guarded,
            intake=Intake(guarded, admission_of(arguments, parts, plan, kv_cache_manager, guard),
                          QueueBounds.of(params), clock, params.max_admissions_per_iteration,
                          arguments.terminate_req_id, WaitingRequests(preparing, stored)),
            scheduler=chosen_scheduler(parts.scheduler, limits, kv_cache_manager,
                                       make_scheduler(limits, kv_cache_manager, peft_cache_manager,
                                                      is_static=arguments.is_static), peft_cache_manager),
            kv_cache_manager=kv_cache_manager,
            backend=backend,
            deliveries=Deliveries(numpy_to_tensor, limits.vocab_size),
            clock=clock,
            flush_stats_when_idle=params.flush_stats_when_idle,
            trace=parts.trace,
            scheme=StaticBatches(limits.max_seq_len) if arguments.is_static else InFlight(),
            adapters=peft_cache_manager,
            kv_events=kv_events,
            resources=[] if not limits.max_draft_tokens else [
                Drafting(params.speculative_config, limits, kv_cache_manager, drafter, guard, info.draft_cost)])
        undo.pop_all()
    log.info("%s on %s in %s, computed by %s; %d KV cache blocks of %d tokens; %d requests of up to %d tokens at a "
             "time, %d tokens a step", arguments.model_type.name, info.device, info.dtype, info.dispatch,
             limits.num_blocks, limits.tokens_per_block, limits.max_batch_size, limits.max_seq_len,
             limits.max_num_tokens)
    return loop


def make_drafter(arguments: EngineArguments, parts: Parts, clock: Clock, undo: ExitStack) -> Drafter | None:
    """Make what drafts tokens in the engine; None: nothing.

    A draft model is loaded before the model, which then shares the memory that is left. `undo` gets what closes it.
    """
    config = arguments.optional_params.speculative_config
    drafter: Drafter | None = parts.drafter
    if config is None:
        return drafter
    if config.method == "suffix":
        return SuffixDrafter(config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor,
                             config.suffix_decoding_min_token_prob)
    if config.method != "draft_model":
        return drafter or NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    try:
        arguments = _arguments_of_draft_model(arguments, config)
        backend = make_local_backend(arguments, Parts())
    except ConfigError as error:
        raise type(error)(f"the draft model: {error.fact}", error.expectation, error.fix) from error
    undo.callback(close_unused, backend)
    plan = plan_engine(arguments, Parts(), backend)
    plan = replace(plan, window=room_for_drafts(plan.window))
    return DraftModel(backend, make_kv_cache_manager(plan, clock), plan.limits.max_num_tokens, clock.monotonic)


def _arguments_of_draft_model(arguments: EngineArguments, config: SpeculativeConfig) -> EngineArguments:
    """Return the arguments of an engine for the draft model, in its own best form. Of several ranks, rank 0 has it.

    Its pool has as many tokens as that of the model. If free memory decides, it has its share of it.
    """
    from .models.loading import read_spec
    from .runtime.device.devices import resolve_device
    from .runtime.ranks.part import device_of_rank

    params, kv = arguments.optional_params, arguments.optional_params.kv_cache_config
    assert config.model is not None
    own, share, ranks, ranks_beside = read_spec(config.model), 1.0, params.parallel_config, 1
    if ranks is not None and ranks.num_ranks > 1:
        device = device_of_rank(place_of(ranks), ranks, resolve_device(params.device))
        params = replace(params, device=str(device))
        ranks_beside = ranks.num_ranks if device.type == "cpu" else 1         # that share its memory
    lengths = [own.max_position_embeddings, params.max_seq_len]
    if arguments.model_path is not None:
        model = read_spec(arguments.model_path, params.model_implementation)
        lengths.append(model.max_position_embeddings)
        if kv.max_tokens is None:
            entries, beside = (spec.num_layers * spec.num_kv_heads * spec.head_size for spec in (own, model))
            share = entries / (entries + beside * ranks_beside / (ranks.num_ranks if ranks else 1))
    return replace(arguments, model_path=config.model, max_beam_width=1, max_draft_tokens=0, optional_params=replace(
        params, quantization=config.quantization, quantized_activations=None,
        max_seq_len=min(filter(None, lengths)), deterministic=False,
        model_implementation="auto", run_ahead=False, enable_trt_overlap=False, speculative_config=None,
        peft_cache_config=None, kv_transfer_config=None, parallel_config=None,
        cuda_graphs=params.cuda_graphs and None, cpu_compile=params.cpu_compile and None,    # True is the model's alone
        kv_cache_config=replace(kv, free_gpu_memory_fraction=kv.free_gpu_memory_fraction * share, host_cache_size=0,
                                disk_cache_path=None, disk_cache_size=None, disk_cache_read_only=False,
                                event_buffer_max_size=0, kv_cache_dtype="auto")))


def _make_stored(params: TrtGptModelOptionalParams, parts: Parts, kv_cache_manager: KvCacheManager, backend: Any,
                 clock: Clock) -> StoredBlocks:
    kv, transfer, cache = params.kv_cache_config, params.kv_transfer_config, kv_cache_manager.cache
    store: BlockStore | None = parts.block_store
    if kv.disk_cache_path is not None:
        store = DirectoryStore(os.fspath(kv.disk_cache_path), kv.disk_cache_size or 0,
                               read_only=kv.disk_cache_read_only)
    assert cache is not None                           # `plan_engine` has a store with block reuse only
    options = {"fingerprint": backend.fingerprint, "host_block": backend.host_block, "min_tokens": kv.disk_min_tokens,
               "num_threads": kv.disk_io_threads, "monotonic": clock.monotonic}
    if transfer is not None:
        server = BlockServer(transfer.host, transfer.port, transfer.timeout_s) if transfer.produces else None
        return HandedBlocks(store, cache, transfer, fetch, server, **options)
    assert store is not None                           # what else would be stored
    return StoredBlocks(store, cache, **options)


def _prefetch(arguments: EngineArguments, preparing: Preparing) -> None:
    """Load the adapters of lora_prefetch_dir. Raises ModelLoadError if one is wrong, ConfigError if they do not fit."""
    config = arguments.optional_params.peft_cache_config
    if config is None or config.lora_prefetch_dir is None:
        return
    if arguments.model_path is None:
        raise ConfigError("PeftCacheConfig.lora_prefetch_dir is set and model_path is None",
                          "the names in a folder are those of the model's files", "leave lora_prefetch_dir out")
    from .adapters import read_prefetch_folder

    for task_id, read in read_prefetch_folder(config.lora_prefetch_dir, arguments.model_path):
        tensors = {"lora_weights": read.lora_weights, "lora_config": read.lora_config}
        try:
            read_in = read_adapter(tensors, config.host_cache_size, preparing.largest)
            preparing.store.put(task_id, preparing.check(read_in), keep=True)
        except RequestError as error:
            kind = ModelLoadError if isinstance(error, InvalidRequestError) else ConfigError
            raise kind(f"{config.lora_prefetch_dir}/{task_id}: {error.fact}", error.expectation,
                       error.fix) from error


def admission_of(arguments: EngineArguments, parts: Parts, plan: Plan, kv_cache_manager: KvCacheManager,
                 guard: Guard) -> Admission:
    """Make the checks of requests for an engine."""
    return make_admission(arguments, parts, plan.limits, partial(
        kv_cache_manager.reservations.most_blocks,
        with_pauses=arguments.scheduler_policy is SchedulerPolicy.MAX_UTILIZATION), guard)


def make_kv_cache_manager(plan: Plan, clock: Clock) -> KvCacheManager:
    """Make the accounting of the backend's pool."""
    limits, window = plan.limits, plan.window
    return KvCacheManager(
        limits.num_blocks, limits.tokens_per_block, limits.max_seq_len, max_beam_width=limits.max_beam_width,
        window=window.size, sink_token_length=window.sinks, unread_steps=window.unread_steps,
        max_draft_len=window.max_draft_len, enable_block_reuse=plan.enable_block_reuse,
        enable_partial_reuse=plan.enable_partial_reuse, host_blocks=plan.host_blocks, now=clock.monotonic)


def make_local_backend(arguments: EngineArguments, parts: Parts, part: "RankPart | None" = None) -> ModelBackend:
    """Make the backend of this process.

    part   the part of the model that this rank has, if there are several. The backend then has the fewest blocks of all
    """
    params = arguments.optional_params
    if parts.backend is not None:
        if parts.stages is not None:
            raise ConfigError("Parts.stages and Parts.backend are both set", "a custom backend does its own sampling",
                              "leave one of them out")
        return custom_backend(parts.backend, params)
    if arguments.model_path is None:
        raise ConfigError("model_path is None", "expected a path, because Parts.backend is not set",
                          "pass the folder of a Hugging Face checkpoint or a .gguf file, or parts=Parts(backend=...)")
    from .runtime import packing
    from .runtime.build_backend import build_native_backend

    layout = {TrtGptModelType.V1: packing.padded, TrtGptModelType.InflightBatching: packing.split,
              TrtGptModelType.InflightFusedBatching: packing.packed}[arguments.model_type]
    num_slots = params.max_num_sequences
    if num_slots is None or num_slots <= 0:
        num_slots = params.max_batch_size
    return build_native_backend(
        arguments.model_path, params, layout=layout, num_slots=num_slots, max_beam_width=arguments.max_beam_width,
        attention_factory=checked_attention(parts.attention), own_stages=checked_stages(parts.stages),
        is_engine_thread=is_a_worker, part=part, max_draft_tokens=arguments.max_draft_tokens)


def numpy_to_tensor(array: np.ndarray) -> "torch.Tensor":
    """Convert an array of a response to a tensor. Imports torch at the first call, so that backends can run without it.
    """
    from torch import from_numpy

    return from_numpy(array)
