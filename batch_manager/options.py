"""What an engine does, decided in one place from the user's options and the facts of its backend.

`settle` decides what the backend must know to be made, and `plan_engine` the rest, once the backend is there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .adapter_values import AdapterModules
from .arguments import EngineArguments
from .config import KvCacheConfig, Limits, ParallelConfig, Parts, PeftCacheConfig, TrtGptModelOptionalParams
from .contained_log import log
from .errors import ConfigError, counted, type_name
from .guard import Guard
from .kv.window import AttentionWindow
from .names import SchedulerPolicy
from .requests.admission import Admission
from .requests.llm_request import LlmRequest
from .seams import BackendInfo, ModelBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """The caches for adapters.

    modules            the projections that adapters may change
    max_adapter_size   largest rank of an adapter
    host_bytes         bytes of host memory for adapters
    device_pages       pages of the device for adapters, each for one rank of all modules
    """

    modules: AdapterModules
    max_adapter_size: int
    host_bytes: int
    device_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an engine does.

    limits                 for admission and schedulers; run-ahead is one of them
    window                 the attention window of the KV cache; it does not slide if there is none
    enable_block_reuse, enable_partial_reuse   as in KvCacheConfig
    host_blocks            blocks in host memory for the content of evicted blocks
    adapters               None: requests have no adapters
    has_kv_events          whether to make events of the prefix cache
    has_store              whether blocks go to a store, and come from it
    """

    limits: Limits
    window: AttentionWindow
    enable_block_reuse: bool
    enable_partial_reuse: bool
    host_blocks: int
    adapters: AdapterPlan | None = None
    has_kv_events: bool = False
    has_store: bool = False


def settle(arguments: EngineArguments, parts: Parts, *, drafts: bool = True) -> EngineArguments:
    """Return the arguments as the batching scheme leaves them.

    drafts   whether this process drafts, if any does: rank 0 alone needs Parts.drafter

    Raises ConfigError for options that contradict the scheme or several ranks.
    """
    if (config := arguments.optional_params.parallel_config) is not None and config.num_ranks > 1:
        _check_ranks(arguments, parts, config)
        params, stages = arguments.optional_params, config.pipeline_parallel_size
        if params.max_num_sequences is None and stages > 1:            # so that each stage has a batch
            params = replace(params, max_num_sequences=params.max_batch_size * stages)
            arguments = replace(arguments, optional_params=params)
    if (drafting := arguments.optional_params.speculative_config) is not None:
        if (drafting.method == "custom") is not (parts.drafter is not None) and (drafts or parts.drafter is not None):
            has = "no Parts.drafter" if parts.drafter is None else "Parts.drafter"
            raise ConfigError(f"SpeculativeConfig.method is {drafting.method!r} with {has}",
                              "'custom' is the method of Parts.drafter", "set both or neither")
        if not arguments.max_draft_tokens:
            arguments = replace(arguments, max_draft_tokens=drafting.num_speculative_tokens)
    elif parts.drafter is not None:
        raise ConfigError("Parts.drafter is set without speculative_config", "expected SpeculativeConfig('custom')",
                          "pass it, or leave Parts.drafter out")
    if arguments.max_draft_tokens and parts.stages:
        named = "max_draft_tokens" if drafting is None else "speculative_config"
        raise ConfigError(f"{named} is set with Parts.stages", "steps with drafts do not run custom stages yet",
                          "leave one of them out")
    if not arguments.is_static:
        return arguments
    params = arguments.optional_params
    for name, is_set, reason in (
            ("enable_trt_overlap", params.enable_trt_overlap, "static batching runs one batch at a time"),
            ("enable_chunked_context", params.enable_chunked_context,
             "all prompts of a batch are computed in one step"),
            ("peft_cache_config", params.peft_cache_config is not None, "a padded batch has no adapters"),
            ("kv_transfer_config", params.kv_transfer_config is not None, "a padded batch has no reusable blocks"),
            ("speculative_config", params.speculative_config is not None,
             "a step of a static batch yields one token of each request"),
            ("max_draft_tokens", arguments.max_draft_tokens > 0,
             "a step of a static batch yields one token of each request"),
            ("Parts.scheduler", parts.scheduler is not None, "static batching has its own scheduler")):
        if is_set:
            raise ConfigError(f"{name} is set with TrtGptModelType.V1", reason,
                              "leave it out, or use InflightFusedBatching")
    kv = _without_block_reuse(params.kv_cache_config, "TrtGptModelType.V1 computes every prompt in full")
    return replace(arguments, optional_params=replace(params, kv_cache_config=kv),
                   scheduler_policy=SchedulerPolicy.GUARANTEED_NO_EVICT)    # members of a batch are never paused


def plan_engine(arguments: EngineArguments, parts: Parts, backend: ModelBackend) -> Plan:
    """Decide what the engine does with this backend.

    arguments   as `settle` returns them

    Raises ConfigError when options contradict each other or the backend.
    """
    info, params = backend.info, arguments.optional_params
    if not isinstance(info, BackendInfo):
        raise ConfigError(f"the info of Parts.backend is of type {type_name(info)}",
                          "expected a batch_manager.BackendInfo")
    limits = resolve_limits(arguments, info)
    limits = replace(limits, runs_ahead=_runs_ahead(arguments, parts, info))
    window = _window_of(params.kv_cache_config, limits, info)
    if limits.runs_ahead and not _fits_running_ahead(window, limits):
        limits = replace(limits, runs_ahead=False)
        window = replace(window, unread_steps=0)
    kv = params.kv_cache_config
    if parts.kv_events is not None and not (kv.enable_block_reuse or arguments.is_static):
        raise ConfigError("Parts.kv_events is set but enable_block_reuse is not set",
                          "events are about reusable blocks", "set enable_block_reuse, or leave Parts.kv_events out")
    if window.sinks:
        kv = _without_block_reuse(kv, "with sink tokens every prompt is computed in full")
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
    if kv.kv_cache_dtype != "auto" and kv.kv_cache_dtype != info.kv_cache_dtype:
        raise ConfigError(f"KvCacheConfig.kv_cache_dtype is {kv.kv_cache_dtype!r}",
                          f"the backend of type {type(backend).__name__} states {info.kv_cache_dtype!r}",
                          "state it as BackendInfo.kv_cache_dtype, or leave kv_cache_dtype out")
    if params.quantized_activations not in (None, info.quantized_activations):
        raise ConfigError(f"quantized_activations is {params.quantized_activations!r}",
                          f"the backend of type {type(backend).__name__} states {info.quantized_activations!r}",
                          "state it as BackendInfo.quantized_activations, or leave quantized_activations out")
    has_store = _has_store(params, kv, parts, backend)
    adapters = None
    if params.peft_cache_config is not None:
        adapters = _plan_adapters(params.peft_cache_config, info, type(backend).__name__)
        limits = replace(limits, max_adapter_size=adapters.max_adapter_size)
    return Plan(limits=limits, window=window, enable_block_reuse=kv.enable_block_reuse,
                enable_partial_reuse=kv.enable_partial_reuse,
                host_blocks=info.host_blocks if kv.host_cache_size or has_store else 0, adapters=adapters,
                has_store=has_store,
                has_kv_events=kv.enable_block_reuse and (parts.kv_events is not None or kv.event_buffer_max_size > 0))


def _has_store(params: TrtGptModelOptionalParams, kv: KvCacheConfig, parts: Parts, backend: ModelBackend) -> bool:
    """Whether blocks go to or come from outside of the engine.

    Raises ConfigError if they do and the engine has no host blocks for this traffic.
    """
    transfer = params.kv_transfer_config
    if parts.block_store is None and kv.disk_cache_path is None and transfer is None or not kv.enable_block_reuse:
        return False
    if parts.block_store is not None and kv.disk_cache_path is not None:
        raise ConfigError("Parts.block_store and disk_cache_path are both set", "an engine has one store",
                          "leave one of them out")
    what = ("kv_transfer_config" if transfer is not None
            else "Parts.block_store" if kv.disk_cache_path is None else "disk_cache_path")
    missing = [name for name in ("host_block", "fingerprint") if not callable(getattr(backend, name, None))]
    if missing:
        raise ConfigError(f"{what} is set", f"the backend of type {type_name(backend)} lacks {' and '.join(missing)}",
                          f"see batch_manager.ModelBackend, or leave {what} out")
    if not backend.info.host_blocks:
        raise ConfigError(f"{what} is set", "the backend has no blocks in host memory",
                          "set KvCacheConfig.host_cache_size")
    return True


def _plan_adapters(config: PeftCacheConfig, info: BackendInfo, name: str) -> AdapterPlan:
    """Raises ConfigError if the backend has no adapters, or not those modules.

    name   name of the backend's type
    """
    if info.adapter_modules is None:
        raise ConfigError("peft_cache_config is set", f"the backend of type {name} has no adapters: its BackendInfo "
                          "has max_adapter_size=0", "leave peft_cache_config out")
    modules = info.adapter_modules
    for module in config.lora_modules or ():
        if module not in modules.sizes:
            raise ConfigError(f"PeftCacheConfig.lora_modules has {module}",
                              f"the model has {', '.join(modules.sizes)}", "leave it out")
    modules, host_bytes = modules.only(config.lora_modules), config.host_cache_size
    if config.num_host_module_layer:
        host_bytes = config.num_host_module_layer * modules.largest_row * (4 if info.dtype == "float32" else 2)
    return AdapterPlan(modules=modules, host_bytes=host_bytes, device_pages=info.adapter_pages,
                       max_adapter_size=min(config.max_adapter_size, info.max_adapter_size))


def resolve_limits(arguments: EngineArguments, info: BackendInfo) -> Limits:
    """Resolve the options that are None, within the limits of the backend. Does not decide about run-ahead.

    Raises ConfigError when the options contradict the backend.
    """
    params, policy = arguments.optional_params, arguments.scheduler_policy
    max_seq_len = info.max_seq_len if params.max_seq_len is None else params.max_seq_len
    if max_seq_len > info.max_seq_len:
        raise ConfigError(f"max_seq_len is {max_seq_len:,}",
                          f"the model has positions for {counted(info.max_seq_len, 'token')}",
                          f"set max_seq_len to at most {info.max_seq_len:,}, or leave it unset")
    if params.enable_chunked_context and params.max_num_tokens < info.tokens_per_block:
        raise ConfigError(f"max_num_tokens is {params.max_num_tokens} and a KV cache block holds "
                          f"{counted(info.tokens_per_block, 'token')}",
                          f"expected at least {info.tokens_per_block}, because every context chunk but the last is a "
                          "whole number of blocks",
                          "raise max_num_tokens or lower tokens_per_block")
    if (policy is SchedulerPolicy.MAX_UTILIZATION and not params.enable_chunked_context
            and params.max_num_tokens < min(info.tokens_per_block, max_seq_len)):
        raise ConfigError(f"max_num_tokens is {params.max_num_tokens} and a KV cache block holds "
                          f"{counted(info.tokens_per_block, 'token')}",
                          f"expected at least {min(info.tokens_per_block, max_seq_len)}, because a paused request that "
                          "no longer fits one step is recomputed in whole blocks",
                          "raise max_num_tokens, lower tokens_per_block, or use GUARANTEED_NO_EVICT")
    if arguments.max_draft_tokens > info.max_draft_tokens:
        most = info.max_draft_tokens
        raise ConfigError(f"max_draft_tokens is {arguments.max_draft_tokens}",
                          f"the backend verifies {counted(most, 'draft token') if most else 'no draft tokens'}",
                          f"lower max_draft_tokens to {most}, or verify them and state it as "
                          "BackendInfo.max_draft_tokens")
    if arguments.max_draft_tokens >= params.max_num_tokens:
        drafting = params.speculative_config
        named = "max_draft_tokens" if drafting is None or (
            drafting.num_speculative_tokens != arguments.max_draft_tokens) else "num_speculative_tokens"
        raise ConfigError(f"{named} is {arguments.max_draft_tokens} and max_num_tokens is {params.max_num_tokens:,}",
                          "expected a step that can hold a token of a sequence and all its drafts",
                          f"lower {named} or raise max_num_tokens")
    num_micro_batches = 2 if params.enable_trt_overlap else 1
    if params.parallel_config is not None:
        num_micro_batches *= params.parallel_config.pipeline_parallel_size
    return Limits(
        max_batch_size=params.max_batch_size,
        # max_batch_size alone bounds a padded step
        max_num_tokens=params.max_batch_size * max_seq_len if arguments.is_static else params.max_num_tokens,
        max_seq_len=max_seq_len,
        max_beam_width=arguments.max_beam_width,
        max_num_requests=params.max_batch_size * num_micro_batches,
        num_micro_batches=num_micro_batches,
        max_num_sequences=params.max_batch_size if params.max_num_sequences is None else params.max_num_sequences,
        unbounded_sequences=params.max_num_sequences == -1,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        num_blocks=info.num_blocks,
        tokens_per_block=info.tokens_per_block,
        enable_chunked_context=params.enable_chunked_context,
        context_chunking_policy=params.context_chunking_policy,
        scheduler_policy=policy,
        max_draft_tokens=arguments.max_draft_tokens,
    )


def make_admission(arguments: EngineArguments, parts: Parts, limits: Limits, blocks_of: Callable[[LlmRequest], int],
                   guard: Guard | None = None) -> Admission:
    """Make the admission of an engine, or of the process that sends requests to it.

    blocks_of, guard   as for Admission
    """
    params = arguments.optional_params
    return Admission(
        limits,
        max_request_bytes=params.max_request_bytes,
        gather_context_logits=params.gather_context_logits,
        gather_generation_logits=params.gather_generation_logits,
        exclude_input_in_output=arguments.exclude_input_in_output,
        static_batching=arguments.is_static,
        logits_post_processor_batched=parts.logits_post_processor_batched,
        transfer=params.kv_transfer_config,
        deterministic=params.deterministic,
        blocks_of=blocks_of,
        guard=guard)


def _check_ranks(arguments: EngineArguments, parts: Parts, config: ParallelConfig) -> None:
    """Raise ConfigError for what an engine of several ranks cannot do. Each rank refuses it alone."""
    params, own_device = arguments.optional_params, "each rank has a device of its own"
    packed, whole = "their steps are compiled or packed", "only model classes of this package are divided"
    for fact, is_so, reason, way_out in (
            ("TrtGptModelType.V1 is set", arguments.is_static, packed, "use InflightFusedBatching"),
            ("disk_cache_path is set", params.kv_cache_config.disk_cache_path is not None,
             "each rank has a part of every block", "leave disk_cache_path out"),
            ("kv_transfer_config is set", params.kv_transfer_config is not None,
             "each rank has a part of every block", "leave kv_transfer_config out"),
            ("Parts.block_store is set", parts.block_store is not None, "each rank has a part of every block",
             "leave Parts.block_store out"),
            ("quantization is set", params.quantization is not None, "each rank reads its part of a matrix as numbers",
             "leave quantization out"),
            ("quantized_activations is set", params.quantized_activations is not None,
             "each rank reads its part of a matrix as numbers", "leave quantized_activations out"),
            ("cuda_graphs is True", params.cuda_graphs, packed, "leave cuda_graphs out"),
            ("model_implementation is 'transformers'", params.model_implementation == "transformers", whole,
             "leave model_implementation out"),
            ("Parts.backend is set", parts.backend is not None, whole, "leave Parts.backend or parallel_config out"),
            ("Parts.attention is set", parts.attention is not None, "only the package's own attention is divided",
             "leave Parts.attention or parallel_config out"),
            ("run_ahead is True", params.run_ahead and config.pipeline_parallel_size > 1,
             "the stages already work at several micro-batches at a time", "leave run_ahead out"),
            (f"device is {params.device!r}", params.device is not None and params.device.startswith("cuda:"),
             own_device, "use device='cuda', and ParallelConfig(device_ids=) for their numbers"),
            ("device is 'cpu' and ParallelConfig.collectives is 'nccl'",
             params.device == "cpu" and config.collectives == "nccl", "NCCL joins GPUs", "leave collectives out")):
        if is_so:
            raise ConfigError(f"{fact}, and parallel_config has {config.num_ranks} ranks", reason, way_out)


def _runs_ahead(arguments: EngineArguments, parts: Parts, info: BackendInfo) -> bool:
    """Whether to launch a step before the previous step is read.

    Raises ConfigError if run_ahead is True and the model type or the custom scheduler rules it out.
    """
    params, reason, way_out = arguments.optional_params, None, None
    if arguments.is_static:
        reason, way_out = "TrtGptModelType.V1 runs one static batch in lockstep", "use InflightFusedBatching"
    elif (drafting := params.speculative_config) is not None and drafting.method == "draft_model":
        reason, way_out = "a draft model drafts from the newest tokens", "use another method of speculative_config"
    elif parts.scheduler is not None and not _plans_by_lengths(parts.scheduler):
        reason = "a custom scheduler would see tokens that are one step old"
        way_out = "set plans_by_lengths = True on a scheduler that does not look at tokens"
    if params.run_ahead is None:
        return reason is None and info.is_asynchronous and not params.enable_trt_overlap
    if params.run_ahead and reason is not None:
        raise ConfigError("run_ahead is True", reason, f"leave run_ahead out, or {way_out}")
    return params.run_ahead


def _plans_by_lengths(scheduler: object) -> bool:
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


def _window_of(kv: KvCacheConfig, limits: Limits, info: BackendInfo) -> AttentionWindow:
    """Return the backend's attention window, which may be narrower than the configured one, or exist without one.

    Raises ConfigError if the backend's window is wider than the configured one, or if its number of sink tokens
    differs from the configured number.
    """
    asked, window, sinks = kv.max_attention_window, info.attention_window, info.sink_tokens
    if asked is not None and asked < limits.max_seq_len and (window is None or window > asked
                                                             or sinks != kv.sink_token_length):
        stated = ("no attention window" if window is None else
                  f"a window of {counted(window, 'token')} and {counted(sinks, 'sink token')}")
        raise ConfigError(f"max_attention_window is {asked} and sink_token_length is {kv.sink_token_length}",
                          f"the backend has {stated}",
                          "construct the backend with the same window and sink tokens, and state both in its "
                          "BackendInfo")
    if window is None or window >= limits.max_seq_len:
        window, sinks = limits.max_seq_len, 0
    return AttentionWindow(window, limits.max_seq_len, limits.tokens_per_block, sinks,
                           unread_steps=int(limits.runs_ahead), max_draft_len=limits.max_draft_tokens)


def _fits_running_ahead(window: AttentionWindow, limits: Limits) -> bool:
    """Whether every request that fits the pool without run-ahead also fits with run-ahead.

    With run-ahead, a step is launched before the last one is read. A block that has left the attention window is
    released some steps later, so that a sequence can hold more blocks at a time. Logs a warning if some request would
    not fit.
    """
    num_blocks, ahead, lockstep = limits.num_blocks, window.most_held, replace(window, unread_steps=0).most_held
    refused = [width for width in range(1, limits.max_beam_width + 1) if lockstep * width <= num_blocks < ahead * width]
    if refused and window.slides:
        log.warning("run_ahead is switched off: with this attention window a request of beam width %d needs up "
                    "to %d KV cache blocks with run_ahead and %d without it; the pool has %d; to keep "
                    "run_ahead on, raise KvCacheConfig.max_tokens",
                    refused[0], ahead * refused[0], lockstep * refused[0], num_blocks)
        return False
    return True


def _without_block_reuse(kv: KvCacheConfig, reason: str) -> KvCacheConfig:
    if not kv.enable_block_reuse:
        return kv
    log.warning("KvCacheConfig.enable_block_reuse is switched off: %s", reason)
    return replace(kv, enable_block_reuse=False, host_cache_size=0, event_buffer_max_size=0, disk_cache_path=None,
                   disk_cache_size=None, disk_cache_read_only=False)
