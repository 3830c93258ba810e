"""The start of a rank: the ranks of an engine meet, compare what they were given, and build their loops together."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ._version import __version__
from .arguments import Callbacks, EngineArguments
from .build import admission_of, build_loop, make_kv_cache_manager, make_local_backend, numpy_to_tensor
from .clock import reliable
from .config import ParallelConfig, Parts
from .custom_parts import close_unused
from .errors import ConfigError
from .guard import Guard, Heartbeat
from .loading_thread import check_interruption, current_loading
from .loop.callbacks import GuardedCallbacks
from .loop.fetched_items import RefusedItem
from .loop.followed_callbacks import FollowedCallbacks
from .loop.follower import Follower
from .loop.generation_loop import GenerationLoop
from .options import plan_engine, settle
from .parallel.control import WakeUpPipe, join, lead, own_address
from .parallel.leader import Leader
from .parallel.leading import LeadingBackend
from .parallel.link import Link
from .parallel.mapping import Place, place_of
from .parallel.ranks import in_words
from .parallel.same_inputs import SameInputs
from .requests.item_digest import item_digest, item_fields
from .seams import ModelBackend


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
    arguments = settle(arguments, parts, drafts=False)       # build_loop asks for the drafter on rank 0
    meeting = meet(place_of(config), config)
    ranks, loading = meeting.ranks, current_loading()
    if loading is not None:
        ranks.on_failure = loading.stop_with
    loop: GenerationLoop | Follower | None = None
    try:
        with ranks.starting():
            shared = compare(ranks, arguments, callbacks)
            if isinstance(ranks, Leader):
                loop = build_loop(arguments, shared_callbacks(callbacks, shared, ranks), parts, heartbeat,
                                  lambda settled, checked: _leading_backend(settled, checked, meeting))
            else:
                loop = _build_follower(arguments, callbacks, parts, meeting, heartbeat)
            ranks.exchange("ready")
        return loop
    except BaseException:
        if loop is not None:
            close_unused(loop.backend)
        for undo in meeting.undo:
            undo()
        raise


def meet(place: Place, config: ParallelConfig) -> Meeting:
    """Find the other ranks. Raises ConfigError."""
    store, timeouts = open_rendezvous(place, config), {"rank_timeout_s": config.rank_timeout_s,
                                                       "connect_timeout_s": config.connect_timeout_s}
    undo = [store.close]                               # the traceback of the failure may have the store
    try:
        if place.rank == 0:
            leader = lead(store, place.num_ranks, host=place.host, check=check_interruption, **timeouts)
            return Meeting(place, leader, store, None, undo)
        link, wake = join(store, place.rank, place.num_ranks, host=place.host, check=check_interruption, **timeouts)
        return Meeting(place, link, store, wake, [*undo, wake.close])
    except BaseException:
        store.close()
        raise


def open_rendezvous(place: Place, config: ParallelConfig) -> Any:
    """Return torch's store, as a parallel.control.Rendezvous. Raises ConfigError."""
    from .runtime.ranks.exchange import open_store

    return open_store(place.host, place.port, is_server=place.rank == 0 and not place.has_agent_store,
                      timeout_s=config.connect_timeout_s, check=check_interruption)


def compare(ranks: Leader | Link, arguments: EngineArguments, callbacks: Callbacks) -> Shared:
    """Return what other ranks than 0 have callbacks for. Raises ConfigError on every rank if they do not run the same
    engine."""
    from .weights.digest import checkpoint_digest

    ranks.compare("the version of batch_manager", __version__, "install the same version on every machine")
    ranks.compare_named("arguments", arguments.described(), "pass the same arguments on every rank")
    if arguments.model_path is not None:
        digests = ranks.exchange("checkpoints", checkpoint_digest(arguments.model_path))
        without = [rank for rank, digest in enumerate(digests) if not digest]
        if 0 < len(without) < len(digests):
            raise ConfigError(f"{in_words(without)} found no checkpoint at {arguments.model_path}",
                              "every rank reads the model from its own machine", "copy the files to every machine")
        ranks.compare("the digest of the checkpoint", digests[ranks.rank], "copy the same files to every machine")
    given = ranks.exchange("callbacks", (callbacks.get_inference_requests_cb is not None,
                                         callbacks.return_batch_manager_stats_cb is not None))
    if not given[0][0]:
        raise ConfigError("rank 0 has no get_inference_requests_cb", "rank 0 serves the requests",
                          "pass the callbacks on rank 0; only the other ranks may pass None for get and send")
    with_get = [rank for rank, (has_get, _) in enumerate(given) if has_get and rank]
    if with_get and len(with_get) < len(given) - 1:
        without = [rank for rank in range(1, len(given)) if rank not in with_get]
        raise ConfigError(f"get_inference_requests_cb is given on {in_words([0, *with_get])} and None on "
                          f"{in_words(without)}", "expected callbacks on every rank, or on rank 0 "
                          "alone", "pass the callbacks, or None for get and send, on every rank but 0")
    return Shared(bool(with_get), any(has_stats for _, has_stats in given[1:]))


def shared_callbacks(callbacks: Callbacks, shared: Shared, leader: Leader) -> Callbacks:
    """Return the callbacks of rank 0, which call those of the other ranks too."""
    if not (shared.requests or shared.stats):
        return callbacks
    get, send, stats = (callbacks.get_inference_requests_cb, callbacks.send_response_cb,
                        callbacks.return_batch_manager_stats_cb)
    assert get is not None and send is not None
    same = SameInputs(leader, send, callbacks.poll_stop_signal_cb, stats, digest=item_digest, fields=item_fields,
                      refused=RefusedItem)
    wants_stats = shared.stats or stats is not None
    if not shared.requests:
        return replace(callbacks, return_batch_manager_stats_cb=same.stats)
    return Callbacks(get, same.send, same.poll, same.stats if wants_stats else None, same)


def _leading_backend(arguments: EngineArguments, parts: Parts, meeting: Meeting) -> LeadingBackend:
    assert isinstance(meeting.ranks, Leader)
    place = meeting.place
    return LeadingBackend(_local_backend(arguments, parts, meeting), meeting.ranks,
                          range(1, place.tensor_parallel_size) if place.pipeline_parallel_size > 1 else None)


def _local_backend(arguments: EngineArguments, parts: Parts, meeting: Meeting) -> ModelBackend:
    from .runtime.ranks.exchange import Exchange
    from .runtime.ranks.part import RankPart

    place, params = meeting.place, arguments.optional_params
    assert params.parallel_config is not None
    exchange = Exchange(place, in_rank_order=params.deterministic, most_sends=2 * place.pipeline_parallel_size)
    meeting.undo.append(exchange.close)                # once the other ranks know why
    return make_local_backend(arguments, parts, RankPart(
        place=place, config=params.parallel_config, exchange=exchange, agree=meeting.ranks.exchange,
        store=meeting.store, address=own_address(place.host, place.port)))


def _build_follower(arguments: EngineArguments, callbacks: Callbacks, parts: Parts, meeting: Meeting,
                    heartbeat: Heartbeat | None) -> Follower:
    link, wake, clock, params = meeting.ranks, meeting.wake, reliable(parts.clock), arguments.optional_params
    assert isinstance(link, Link) and wake is not None
    guard = Guard(clock.monotonic, heartbeat, params.log_callback_errors)
    backend: Any = _local_backend(arguments, parts, meeting)
    try:
        plan = plan_engine(arguments, parts, backend)
        admission = admission_of(arguments, parts, plan, make_kv_cache_manager(plan, clock), guard)
        followed = None
        if callbacks.get_inference_requests_cb is not None or callbacks.return_batch_manager_stats_cb is not None:
            followed = FollowedCallbacks(
                GuardedCallbacks(callbacks.get_inference_requests_cb or _nothing,
                                 callbacks.send_response_cb or _nothing, callbacks.poll_stop_signal_cb,
                                 callbacks.return_batch_manager_stats_cb, guard, params.max_admissions_per_iteration,
                                 parts.after_responses, parts.at_end),
                link.answer, numpy_to_tensor, arguments.terminate_req_id)
        return Follower(link, backend, guard, limits=plan.limits, admission=admission.for_other_threads(),
                        callbacks=followed, wake=wake)
    except BaseException:
        close_unused(backend)
        raise


def _nothing(*_: Any) -> Any:
    """Stands for a callback that is never called."""
