"""The composition root, which builds the loop from the constructor's arguments.

Only this file imports every concrete class.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import Callbacks, EngineArguments
from .clock import reliable
from .config import KvCacheConfig, Limits, Parts, TrtGptModelOptionalParams, resolve_limits
from .contained_log import log
from .custom_parts import checked_attention, checked_stages, chosen_scheduler, close_unused, custom_backend
from .errors import ConfigError, counted, type_name
from .guard import Guard, Heartbeat
from .interpreter_exit import is_a_worker
from .kv.kv_cache_manager import KvCacheManager
from .loop.batch_scheme import InFlight, StaticBatches
from .loop.callbacks import GuardedCallbacks
from .loop.generation_loop import GenerationLoop
from .loop.intake import Intake, QueueBounds
from .names import SchedulerPolicy, TrtGptModelType
from .requests.admission import Admission
from .responses.deliveries import Deliveries
from .scheduling.lockstep import make_static_batch_scheduler
from .seams import BackendInfo, Clock, ModelBackend

if TYPE_CHECKING:
    import torch


def build_loop(arguments: EngineArguments, callbacks: Callbacks, parts: Parts,
               heartbeat: Heartbeat | None = None) -> GenerationLoop:
    """Load the model, size the pool and build the loop. Starts no thread.

    parts       as `checked_parts` returns it
    heartbeat   written at each entry to and exit from foreign code

    Raises ConfigError and its subclasses, after closing the backend.
    """
    model_type, max_beam_width = arguments.model_type, arguments.max_beam_width
    optional_params, scheduler_policy = arguments.optional_params, arguments.scheduler_policy
    static_batch = model_type is TrtGptModelType.V1
    if static_batch:
        check_static_batching_options(optional_params, parts)
        optional_params = replace(optional_params, kv_cache_config=without_block_reuse(
            optional_params.kv_cache_config, "TrtGptModelType.V1 computes every prompt in full"))
        scheduler_policy = SchedulerPolicy.GUARANTEED_NO_EVICT    # members of a static batch are never paused
    clock = reliable(parts.clock)
    guard = Guard(clock.monotonic, heartbeat, optional_params.log_callback_errors)
    backend = _make_backend(arguments.model_path, model_type, max_beam_width, optional_params, parts)
    try:
        info = backend.info
        if not isinstance(info, BackendInfo):
            raise ConfigError(f"the info of Parts.backend is of type {type_name(info)}",
                              "expected a batch_manager.BackendInfo")
        limits = resolve_limits(optional_params, info, max_beam_width, scheduler_policy)
        if static_batch:    # max_batch_size alone bounds a padded step
            limits = replace(limits, max_num_tokens=limits.max_batch_size * limits.max_seq_len)
        limits = replace(limits, runs_ahead=runs_ahead(optional_params, info, parts, static_batch))
        kv_cache_manager = make_kv_cache_manager(optional_params.kv_cache_config, limits, backend, clock)
        if limits.runs_ahead and not pool_fits_running_ahead(kv_cache_manager, limits):
            limits = replace(limits, runs_ahead=False)
            kv_cache_manager = make_kv_cache_manager(optional_params.kv_cache_config, limits, backend, clock)
        guarded = GuardedCallbacks(callbacks.get_inference_requests_cb, callbacks.send_response_cb,
                                   callbacks.poll_stop_signal_cb, callbacks.return_batch_manager_stats_cb, guard,
                                   optional_params.max_admissions_per_iteration, parts.after_responses, parts.at_end)
        admission = Admission(
            limits,
            max_request_bytes=optional_params.max_request_bytes,
            gather_context_logits=optional_params.gather_context_logits,
            gather_generation_logits=optional_params.gather_generation_logits,
            exclude_input_in_output=arguments.exclude_input_in_output,
            static_batching=static_batch,
            logits_post_processor_batched=parts.logits_post_processor_batched,
            blocks_of=partial(kv_cache_manager.reservations.most_blocks,
                              with_pauses=scheduler_policy is SchedulerPolicy.MAX_UTILIZATION),
            guard=guard)
        loop = GenerationLoop(
            limits=limits,
            callbacks=guarded,
            intake=Intake(guarded, admission, QueueBounds.of(optional_params), clock,
                          optional_params.max_admissions_per_iteration,
                          arguments.terminate_req_id),
            scheduler=(make_static_batch_scheduler(limits, kv_cache_manager) if static_batch
                       else chosen_scheduler(parts.scheduler, limits, kv_cache_manager)),
            kv_cache_manager=kv_cache_manager,
            backend=backend,
            deliveries=Deliveries(numpy_to_tensor, limits.vocab_size),
            clock=clock,
            flush_stats_when_idle=optional_params.flush_stats_when_idle,
            trace=parts.trace,
            scheme=StaticBatches(limits.max_seq_len) if static_batch else InFlight())
    except BaseException:
        close_unused(backend)
        raise
    log.info("%s on %s in %s, computed by %s; %d KV cache blocks of %d tokens; %d requests of up to %d tokens at a "
             "time, %d tokens a step", model_type.name, info.device, info.dtype, info.dispatch, info.num_blocks,
             info.tokens_per_block, limits.max_batch_size, limits.max_seq_len, limits.max_num_tokens)
    return loop


def runs_ahead(params: TrtGptModelOptionalParams, info: BackendInfo, parts: Parts, static_batch: bool) -> bool:
    """Whether to launch a step before the previous step is read.

    Raises ConfigError if run_ahead is True and the model type or the custom scheduler rules it out.
    """
    reason = way_out = None
    if static_batch:
        reason, way_out = "TrtGptModelType.V1 runs one static batch in lockstep", "use InflightFusedBatching"
    elif parts.scheduler is not None and not plans_by_lengths(parts.scheduler):
        reason = "a custom scheduler would see tokens that are one step old"
        way_out = "set plans_by_lengths = True on a scheduler that does not look at tokens"
    if params.run_ahead is None:
        return reason is None and info.is_asynchronous and not params.enable_trt_overlap
    if params.run_ahead and reason is not None:
        raise ConfigError("run_ahead is True", reason, f"leave run_ahead out, or {way_out}")
    return params.run_ahead


def plans_by_lengths(scheduler: object) -> bool:
    """Whether a custom scheduler looks at lengths only: its attribute `plans_by_lengths`, False if it is missing.

    Raises ConfigError if the attribute is not a bool.
    """
    try:
        value = getattr(scheduler, "plans_by_lengths", False)
    except Exception as error:
        raise ConfigError(f"reading plans_by_lengths of the scheduler of type {type_name(scheduler)} raised "
                          f"{type_name(error)}", "expected True or False",
                          "make plans_by_lengths a plain attribute") from error
    if type(value) is not bool:
        raise ConfigError(f"plans_by_lengths of the scheduler of type {type_name(scheduler)} is of type "
                          f"{type_name(value)}", "expected True or False",
                          "set plans_by_lengths to True if the scheduler does not look at tokens")
    return value


def pool_fits_running_ahead(kv_cache_manager: KvCacheManager, limits: Limits) -> bool:
    """Whether every request that fits the pool without run-ahead also fits with run-ahead.

    With run-ahead, a step is launched before the last one is read. A block that has left the attention window is
    released some steps later, so that a sequence can hold more blocks at a time. Logs a warning if some request would
    not fit.
    """
    window, num_blocks = kv_cache_manager.window, limits.num_blocks
    ahead, lockstep = window.most_held, replace(window, unread_steps=0).most_held
    refused = [width for width in range(1, limits.max_beam_width + 1) if lockstep * width <= num_blocks < ahead * width]
    if refused and window.slides:
        log.warning("run_ahead is switched off: with this attention window a request of beam width %d needs up "
                    "to %d KV cache blocks with run_ahead and %d without it; the pool has %d; to keep "
                    "run_ahead on, raise KvCacheConfig.max_tokens",
                    refused[0], ahead * refused[0], lockstep * refused[0], num_blocks)
        return False
    return True


def check_static_batching_options(params: TrtGptModelOptionalParams, parts: Parts) -> None:
    """Raise ConfigError for an option that contradicts static batching."""
    contradictions = {
        "enable_trt_overlap": (params.enable_trt_overlap, "static batching runs one batch at a time"),
        "enable_chunked_context": (params.enable_chunked_context, "all prompts of a batch are computed in one step"),
        "Parts.scheduler": (parts.scheduler is not None, "static batching has its own scheduler"),
    }
    for name, (is_set, reason) in contradictions.items():
        if is_set:
            raise ConfigError(f"{name} is set with TrtGptModelType.V1", reason,
                              "leave it out, or use InflightFusedBatching")


def without_block_reuse(kv: KvCacheConfig, reason: str) -> KvCacheConfig:
    if not kv.enable_block_reuse:
        return kv
    log.warning("KvCacheConfig.enable_block_reuse is switched off: %s", reason)
    return replace(kv, enable_block_reuse=False, host_cache_size=0)


def make_kv_cache_manager(kv: KvCacheConfig, limits: Limits, backend: ModelBackend, clock: Clock) -> KvCacheManager:
    """Make the accounting of the backend's pool.

    The accounting uses the backend's attention window, which may be narrower than the configured window, or exist
    without a configured window.

    Raises ConfigError if the backend's window is wider than the configured window, if the backend's number of sink
    tokens differs from the configured number, or if the backend cannot copy blocks or lacks host blocks that the
    configuration needs.
    """
    info, asked = backend.info, kv.max_attention_window
    window = info.attention_window
    if asked is not None and asked < limits.max_seq_len and (window is None or window > asked
                                                             or info.sink_tokens != kv.sink_token_length):
        stated = ("no attention window" if window is None else
                  f"a window of {counted(window, 'token')} and {counted(info.sink_tokens, 'sink token')}")
        raise ConfigError(f"max_attention_window is {asked} and sink_token_length is {kv.sink_token_length}",
                          f"the backend has {stated}",
                          "construct the backend with the same window and sink tokens, and state both in its "
                          "BackendInfo")
    sinks = info.sink_tokens
    if window is None or window >= limits.max_seq_len:
        window, sinks = None, 0
    if sinks:
        kv = without_block_reuse(kv, "with sink tokens every prompt is computed in full")
    if not info.copies_blocks:
        for needs_copies, fact, alternative in (
                (kv.enable_block_reuse, "enable_block_reuse is set", "leave enable_block_reuse out"),
                (limits.max_beam_width > 1, f"max_beam_width is {limits.max_beam_width}", "set max_beam_width to 1")):
            if needs_copies:
                raise ConfigError(fact, f"the backend of type {type(backend).__name__} does not copy blocks: its "
                                        "BackendInfo has copies_blocks=False",
                                  f"implement BlockCopy and set copies_blocks=True, or {alternative}")
    if kv.host_cache_size and not info.host_blocks:
        raise ConfigError(f"host_cache_size is {kv.host_cache_size:,}", "the backend has no blocks in host memory",
                          "give the backend host blocks and set BackendInfo.host_blocks to their number, or leave "
                          "host_cache_size out")
    return KvCacheManager(
        limits.num_blocks, limits.tokens_per_block, limits.max_seq_len, max_beam_width=limits.max_beam_width,
        window=window, sink_token_length=sinks, unread_steps=limits.window_depth - limits.num_micro_batches,
        max_draft_len=limits.max_draft_tokens,
        enable_block_reuse=kv.enable_block_reuse, enable_partial_reuse=kv.enable_partial_reuse,
        host_blocks=info.host_blocks if kv.host_cache_size else 0, now=clock.monotonic)


def _make_backend(model_path: Any, model_type: TrtGptModelType, max_beam_width: int,
                  params: TrtGptModelOptionalParams, parts: Parts) -> ModelBackend:
    if parts.backend is not None:
        if parts.stages is not None:
            raise ConfigError("Parts.stages and Parts.backend are both set", "a custom backend does its own sampling",
                              "leave one of them out")
        return custom_backend(parts.backend, params)
    if model_path is None:
        raise ConfigError("model_path is None", "expected a path, because Parts.backend is not set",
                          "pass the folder of a Hugging Face checkpoint or a .gguf file, or parts=Parts(backend=...)")
    from .runtime import layouts
    from .runtime.native_backend import build_native_backend

    layout = {TrtGptModelType.V1: layouts.padded, TrtGptModelType.InflightBatching: layouts.split,
              TrtGptModelType.InflightFusedBatching: layouts.fused}[model_type]
    num_slots = params.max_num_sequences
    if num_slots is None or num_slots <= 0:
        num_slots = params.max_batch_size
    return build_native_backend(
        model_path, params, layout=layout, num_slots=num_slots, max_beam_width=max_beam_width,
        attention_factory=checked_attention(parts.attention), own_stages=checked_stages(parts.stages),
        is_engine_thread=is_a_worker)


def numpy_to_tensor(array: np.ndarray) -> "torch.Tensor":
    """Convert an array of a response to a tensor. Imports torch at the first call, so that backends can run without it.
    """
    from torch import from_numpy

    return from_numpy(array)
