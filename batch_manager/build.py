"""The composition root, which builds the loop from the constructor's arguments.

Only this file imports every concrete class.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ._version import __version__
from .arguments import Callbacks, EngineArguments
from .clock import reliable
from .config import ParallelConfig, Parts, TrtGptModelOptionalParams
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
from .loading_thread import check_interruption, current_loading
from .loop.batch_scheme import InFlight, StaticBatches
from .loop.callbacks import GuardedCallbacks
from .loop.fetched_items import RefusedItem
from .loop.followed_callbacks import FollowedCallbacks
from .loop.follower import Follower
from .loop.generation_loop import GenerationLoop
from .loop.intake import Intake, QueueBounds
from .loop.preparing import Preparing
from .names import SchedulerPolicy, TrtGptModelType
from .options import Plan, make_admission, plan_engine, settle
from .parallel.channel import MOST_PAYLOAD
from .parallel.control import WakeUpPipe, join, lead, own_address
from .parallel.leading import LeadingBackend
from .parallel.mapping import Place, place_of
from .parallel.ranks import Leader, Link
from .parallel.same_inputs import SameInputs
from .requests.adapter_content import checked_adapter, read_adapter
from .requests.adapter_store import AdapterStore
from .requests.admission import Admission
from .requests.item_digest import item_digest
from .responses.deliveries import Deliveries
from .scheduling.policies import make_scheduler
from .seams import Clock, ModelBackend

if TYPE_CHECKING:
    import torch

    from .runtime.ranks.part import RankPart


@dataclass(frozen=True, slots=True)
class Meeting:
    """This process among the ranks that have met.

    ranks   the channels to the others
    store   torch's store, for the groups of the ranks
    wake    what wakes the thread of another rank than 0; None on rank 0
    undo    what to call, besides closing the backend, if the start fails
    """

    place: Place
    ranks: Leader | Link
    store: Any
    wake: WakeUpPipe | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shared:
    """What other ranks than 0 have callbacks for: requests and their responses, statistics."""

    requests: bool
    stats: bool


def build_rank(arguments: EngineArguments, callbacks: Callbacks, parts: Parts,
               heartbeat: Heartbeat | None = None) -> GenerationLoop | Follower:
    """Build the loop of this process, which is the only rank or one of several. Arguments as for `build_loop`.

    Several ranks start together. If one fails, each raises ConfigError, and no connection is left.
    """
    config = arguments.optional_params.parallel_config
    if config is None or config.num_ranks == 1:
        return build_loop(arguments, callbacks, parts, heartbeat)
    arguments = settle(arguments, parts)
    meeting = meet(place_of(config), config)
    ranks, loading = meeting.ranks, current_loading()
    if loading is not None:
        ranks.on_failure = loading.stop_with
    backend = None
    try:
        with ranks.starting():
            shared = _compare(ranks, arguments, callbacks)
            if ranks.rank > 0:
                backend = _make_backend(arguments, parts, meeting)
                loop: GenerationLoop | Follower = _build_follower(
                    arguments, callbacks, parts, backend, meeting, heartbeat)
            else:
                loop = build_loop(arguments, _shared(callbacks, shared, ranks), parts, heartbeat, meeting)
                backend = loop.backend
            ranks.exchange("ready")
        return loop
    except BaseException:
        if backend is not None:
            close_unused(backend)
        for undo in meeting.undo:
            undo()
        if meeting.wake is not None:
            meeting.wake.close()
        raise


def meet(place: Place, config: ParallelConfig) -> Meeting:
    """Find the other ranks. Raises ConfigError."""
    store, timeouts = open_rendezvous(place, config), {"rank_timeout_s": config.rank_timeout_s,
                                                       "connect_timeout_s": config.connect_timeout_s}
    if place.rank == 0:
        leader = lead(store, place.num_ranks, host=place.host, check=check_interruption, **timeouts)
        return Meeting(place, leader, store)
    link, wake = join(store, place.rank, place.num_ranks, host=place.host, check=check_interruption, **timeouts)
    return Meeting(place, link, store, wake)


def open_rendezvous(place: Place, config: ParallelConfig) -> Any:
    """Return torch's store, as a parallel.control.Rendezvous. Raises ConfigError."""
    from .runtime.ranks.exchange import open_store

    return open_store(place.host, place.port, is_server=place.rank == 0 and not place.has_agent_store,
                      timeout_s=config.connect_timeout_s)


def _compare(ranks: Leader | Link, arguments: EngineArguments, callbacks: Callbacks) -> "Shared":
    """Return what other ranks than 0 have callbacks for. Raises ConfigError on every rank if they do not run the same
    engine."""
    from .weights.digest import checkpoint_digest

    ranks.compare("the version of batch_manager", __version__, "install the same version on every machine")
    ranks.compare("the digest of the arguments", arguments.digest(), "pass the same arguments on every rank")
    if arguments.model_path is not None:
        ranks.compare("the digest of the checkpoint", checkpoint_digest(arguments.model_path),
                      "copy the same files to every machine")
    given = ranks.exchange("callbacks", (callbacks.get_inference_requests_cb is not None,
                                         callbacks.return_batch_manager_stats_cb is not None))
    if not given[0][0]:
        raise ConfigError("rank 0 has no get_inference_requests_cb", "rank 0 serves the requests",
                          "pass the callbacks on rank 0; only the other ranks may pass None for get and send")
    with_get = [rank for rank, (has_get, _) in enumerate(given) if has_get and rank]
    if with_get and len(with_get) < len(given) - 1:
        without = [rank for rank in range(1, len(given)) if rank not in with_get]
        raise ConfigError(f"get_inference_requests_cb is given on ranks {', '.join(map(str, [0, *with_get]))} and None "
                          f"on ranks {', '.join(map(str, without))}", "expected callbacks on every rank, or on rank 0 "
                          "alone", "pass the callbacks, or None for get and send, on every rank but 0")
    return Shared(bool(with_get), any(has_stats for _, has_stats in given[1:]))


def build_loop(arguments: EngineArguments, callbacks: Callbacks, parts: Parts, heartbeat: Heartbeat | None = None,
               meeting: Meeting | None = None) -> GenerationLoop:
    """Load the model, size the pool and build the loop. Starts no thread.

    parts       as `checked_parts` returns it
    heartbeat   written at each entry to and exit from foreign code
    meeting     rank 0 among several ranks; None: there is one rank

    Raises ConfigError and its subclasses, after closing the backend.
    """
    arguments = settle(arguments, parts)
    params, clock = arguments.optional_params, reliable(parts.clock)
    guard = Guard(clock.monotonic, heartbeat, params.log_callback_errors)
    check_scheduler(parts.scheduler)
    backend = _make_backend(arguments, parts, meeting)
    try:
        plan = plan_engine(arguments, parts, backend)
        info, limits = backend.info, plan.limits
        kv_cache_manager = make_kv_cache_manager(plan, clock)
        assert callbacks.get_inference_requests_cb is not None and callbacks.send_response_cb is not None
        guarded = GuardedCallbacks(callbacks.get_inference_requests_cb, callbacks.send_response_cb,
                                   callbacks.poll_stop_signal_cb, callbacks.return_batch_manager_stats_cb, guard,
                                   params.max_admissions_per_iteration, parts.after_responses, parts.at_end,
                                   parts.kv_events)
        kv_events, kv = None, params.kv_cache_config
        if plan.has_kv_events:
            kv_events = EventLog(kv_cache_manager, key=kv.event_hash_key, with_tokens=kv.event_tokens,
                                 most_kept=kv.event_buffer_max_size, log=RateLimitedLog(clock.monotonic))
        peft_cache_manager = preparing = None
        if plan.adapters is not None:
            # A step lists the loads of all steps in flight.
            store = AdapterStore(plan.adapters.host_bytes, plan.adapters.device_pages,
                                 None if meeting is None else MOST_PAYLOAD // (limits.window_depth + 1))
            peft_cache_manager = PeftCacheManager(plan.adapters.device_pages, store)
            modules, most = plan.adapters.modules, plan.adapters.max_adapter_size
            preparing = Preparing(partial(checked_adapter, modules=modules, max_adapter_size=most), store,
                                  (modules.num_module_layers, most * modules.largest_row))
            _prefetch(arguments, preparing)
        loop = GenerationLoop(
            limits=limits,
            callbacks=guarded,
            intake=Intake(guarded, _admission(arguments, parts, plan, kv_cache_manager, guard), QueueBounds.of(params),
                          clock, params.max_admissions_per_iteration, arguments.terminate_req_id, preparing),
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
            kv_events=kv_events)
    except BaseException:
        close_unused(backend)
        raise
    log.info("%s on %s in %s, computed by %s; %d KV cache blocks of %d tokens; %d requests of up to %d tokens at a "
             "time, %d tokens a step", arguments.model_type.name, info.device, info.dtype, info.dispatch,
             limits.num_blocks, limits.tokens_per_block, limits.max_batch_size, limits.max_seq_len,
             limits.max_num_tokens)
    return loop


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


def _admission(arguments: EngineArguments, parts: Parts, plan: Plan, kv_cache_manager: KvCacheManager,
               guard: Guard) -> Admission:
    return make_admission(arguments, parts, plan.limits, partial(
        kv_cache_manager.reservations.most_blocks,
        with_pauses=arguments.scheduler_policy is SchedulerPolicy.MAX_UTILIZATION), guard)


def _shared(callbacks: Callbacks, shared: Shared, leader: Leader | Link) -> Callbacks:
    """Return the callbacks of rank 0, which call those of the other ranks too."""
    assert isinstance(leader, Leader)
    if not (shared.requests or shared.stats):
        return callbacks
    get, send, stats = (callbacks.get_inference_requests_cb, callbacks.send_response_cb,
                        callbacks.return_batch_manager_stats_cb)
    assert get is not None and send is not None
    same = SameInputs(leader, get, send, callbacks.poll_stop_signal_cb, stats, describe=item_digest,
                      refused=RefusedItem)
    wants_stats = shared.stats or stats is not None
    if not shared.requests:
        return replace(callbacks, return_batch_manager_stats_cb=same.stats)
    return Callbacks(same.get, same.send, same.poll, same.stats if wants_stats else None)


def _build_follower(arguments: EngineArguments, callbacks: Callbacks, parts: Parts, backend: Any, meeting: Meeting,
                    heartbeat: Heartbeat | None) -> Follower:
    link, wake, clock = meeting.ranks, meeting.wake, reliable(parts.clock)
    assert isinstance(link, Link) and wake is not None
    guard = Guard(clock.monotonic, heartbeat, arguments.optional_params.log_callback_errors)
    plan = plan_engine(arguments, parts, backend)
    admission = _admission(arguments, parts, plan, make_kv_cache_manager(plan, clock), guard)
    followed, params = None, arguments.optional_params
    if callbacks.get_inference_requests_cb is not None or callbacks.return_batch_manager_stats_cb is not None:
        followed = FollowedCallbacks(
            GuardedCallbacks(callbacks.get_inference_requests_cb or _nothing, callbacks.send_response_cb or _nothing,
                             callbacks.poll_stop_signal_cb, callbacks.return_batch_manager_stats_cb, guard,
                             params.max_admissions_per_iteration, parts.after_responses, parts.at_end),
            link.answer, numpy_to_tensor, arguments.terminate_req_id)
    return Follower(link, backend, guard, limits=plan.limits, admission=admission.for_other_threads(),
                    callbacks=followed, wake=wake)


def _nothing(*_: Any) -> Any:
    """Stands for a callback that is never called."""


def make_kv_cache_manager(plan: Plan, clock: Clock) -> KvCacheManager:
    """Make the accounting of the backend's pool."""
    limits, window = plan.limits, plan.window
    return KvCacheManager(
        limits.num_blocks, limits.tokens_per_block, limits.max_seq_len, max_beam_width=limits.max_beam_width,
        window=window.size, sink_token_length=window.sinks, unread_steps=window.unread_steps,
        max_draft_len=window.max_draft_len, enable_block_reuse=plan.enable_block_reuse,
        enable_partial_reuse=plan.enable_partial_reuse, host_blocks=plan.host_blocks, now=clock.monotonic)


def _make_backend(arguments: EngineArguments, parts: Parts, meeting: Meeting | None = None) -> ModelBackend:
    if meeting is not None and isinstance(meeting.ranks, Leader):
        place = meeting.place
        return LeadingBackend(_make_local_backend(arguments, parts, meeting), meeting.ranks,
                              range(1, place.tensor_parallel_size) if place.pipeline_parallel_size > 1 else None)
    return _make_local_backend(arguments, parts, meeting)


def _make_local_backend(arguments: EngineArguments, parts: Parts, meeting: Meeting | None) -> ModelBackend:
    """Make the backend of this process's part of the model. With several ranks it has the fewest blocks of all."""
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
        is_engine_thread=is_a_worker, part=None if meeting is None else _part_of(meeting, params))


def _part_of(meeting: Meeting, params: TrtGptModelOptionalParams) -> "RankPart":
    from .runtime.ranks.exchange import Exchange
    from .runtime.ranks.part import RankPart

    place, config = meeting.place, params.parallel_config
    assert config is not None
    exchange = Exchange(place, in_rank_order=params.deterministic, most_sends=2 * place.pipeline_parallel_size)
    meeting.undo.append(exchange.close)                # once the other ranks know why
    return RankPart(place=place, config=config, exchange=exchange, agree=meeting.ranks.exchange, store=meeting.store,
                    address=own_address(place.host, place.port))


def numpy_to_tensor(array: np.ndarray) -> "torch.Tensor":
    """Convert an array of a response to a tensor. Imports torch at the first call, so that backends can run without it.
    """
    from torch import from_numpy

    return from_numpy(array)
