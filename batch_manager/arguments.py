"""The arguments of GptManager, checked before anything is loaded: EngineArguments and Callbacks, beside Parts."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, fields, is_dataclass, replace
from typing import Any

from .config import MAX_DRAFT_TOKENS, Parts, TrtGptModelOptionalParams
from .errors import ConfigError, counted
from .loop.callbacks import (
    GetInferenceRequestsCallback,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from .loop.fetched_items import AlikeItems
from .names import SchedulerPolicy, TrtGptModelType
from .option_values import exact_integer, integer_in_words, shown_option
from .sampling_config import UINT64_MAX

MAX_BEAM_WIDTH = 1024    # as in TensorRT-LLM


def check_threads_are_real() -> None:
    """Raise ConfigError if gevent or eventlet has replaced the threads of this process by greenlets.

    A step would then hold up all greenlets: streams would arrive in one piece, and other connections would wait.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    way_out = ("run `batch-manager serve MODEL` as its own program and call it over HTTP, or use a host with threads "
               "(gunicorn -k gthread)")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise ConfigError("gevent has patched threading", "the worker must be a thread, and not a greenlet",
                          f"{way_out}, or patch with monkey.patch_all(thread=False) and call the engine in gevent's "
                          "thread pool")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        raise ConfigError("eventlet has patched threading", "the worker must be a thread, and not a greenlet",
                          way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """The values among the arguments of GptManager: what an engine process gets from its host, and what processes that
    run one model together must agree on.

    GptManager documents the fields. Where it has no default, the default is AsyncEngine's. Numbers become plain ints.

    Raises ConfigError.
    """

    model_path: str | os.PathLike[str] | None = None
    model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching
    max_beam_width: int = 1
    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    optional_params: TrtGptModelOptionalParams = field(default_factory=TrtGptModelOptionalParams)
    terminate_req_id: int | None = None
    max_draft_tokens: int = 0
    exclude_input_in_output: bool = False

    def __post_init__(self) -> None:
        model_type, policy = self.model_type, self.scheduler_policy    # of any type, as the user gave them
        if not isinstance(model_type, TrtGptModelType):
            raise ConfigError(f"model_type is {model_type!r}", "expected a member of TrtGptModelType",
                              "for instance TrtGptModelType.InflightFusedBatching")
        if not isinstance(policy, SchedulerPolicy):
            raise ConfigError(f"scheduler_policy is {policy!r}", "expected a member of SchedulerPolicy",
                              "for instance SchedulerPolicy.GUARANTEED_NO_EVICT")
        beam_width = exact_integer(self.max_beam_width)
        if beam_width is None or not 1 <= beam_width <= MAX_BEAM_WIDTH:
            raise ConfigError(f"max_beam_width is {shown_option(self.max_beam_width)}",
                              f"expected {integer_in_words(1, MAX_BEAM_WIDTH)}", "use 1 without beam search")
        if not isinstance(self.optional_params, TrtGptModelOptionalParams):
            raise ConfigError(f"optional_params is of type {type(self.optional_params).__name__}",
                              "expected a TrtGptModelOptionalParams", "leave it out, or construct one")
        last_id = exact_integer(self.terminate_req_id)
        if self.terminate_req_id is not None and (last_id is None or not 0 <= last_id <= UINT64_MAX):
            raise ConfigError(f"terminate_req_id is {shown_option(self.terminate_req_id)}",
                              "expected an id in 0..2^64-1, or None",
                              "leave it out if no request is to end the worker")
        drafts = exact_integer(self.max_draft_tokens)
        if drafts is None or not 0 <= drafts <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"max_draft_tokens is {shown_option(self.max_draft_tokens)}",
                              f"expected {integer_in_words(0, MAX_DRAFT_TOKENS)}, or None",
                              "leave it out if no step is to verify draft tokens")
        if not isinstance(self.exclude_input_in_output, bool):
            raise ConfigError(f"exclude_input_in_output is {self.exclude_input_in_output!r}", "expected True or False",
                              "leave it out for False")
        object.__setattr__(self, "max_beam_width", beam_width)
        object.__setattr__(self, "terminate_req_id", last_id)
        object.__setattr__(self, "max_draft_tokens", drafts)

    @property
    def is_static(self) -> bool:
        """Whether requests run in static batches."""
        return self.model_type is TrtGptModelType.V1

    def described(self) -> dict[str, str]:
        """Return name -> text for each value, equal in all processes for equal values. The fields of options and of
        their parts have names of their own, such as `kv_cache_config.max_tokens`.

        A path counts by its text. With a parallel_config, what tells ranks apart does not count, nor do the limits of
        the queue, which rank 0 alone has and AsyncEngine sets.
        """
        path, params = None if self.model_path is None else os.fspath(self.model_path), self.optional_params
        if params.parallel_config is not None:
            params = replace(params, max_queued_requests=0, max_queued_tokens=0, parallel_config=replace(
                params.parallel_config, rank=None, local_rank=None, leader=None, device_ids=None))
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"model_path": path}
        del values["optional_params"]
        return _described(values | {each.name: getattr(params, each.name) for each in fields(params)})


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if is_dataclass(value):
            found[name] = f"a {type(value).__name__}"
            found |= _described({f"{name}.{each.name}": getattr(value, each.name) for each in fields(value)})
        else:
            found[name] = repr(value)
    return found


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks among the arguments of GptManager, which documents them.

    alike        on rank 0 of an engine whose other ranks have callbacks too: what compares the items of get
    may_follow   whether get and send may both be None, on a rank other than 0

    Raises ConfigError.
    """

    get_inference_requests_cb: GetInferenceRequestsCallback | None
    send_response_cb: SendResponseCallback | None
    poll_stop_signal_cb: PollStopSignalCallback | None = None
    return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None
    alike: AlikeItems | None = None
    may_follow: InitVar[bool] = False

    def __post_init__(self, may_follow: bool) -> None:
        follows = may_follow and self.get_inference_requests_cb is None and self.send_response_cb is None
        for name, takes in _TAKEN_BY_CALLBACKS.items():
            callback, is_optional = getattr(self, name), follows or name in ("poll_stop_signal_cb",
                                                                             "return_batch_manager_stats_cb")
            if not callable(callback) and not (is_optional and callback is None):
                raise ConfigError(f"{name} is of type {type(callback).__name__}",
                                  f"expected a callable{' or None' if is_optional else ''}",
                                  f"pass a function{', or leave it out' if is_optional else ''}")
            _check_call(name, callback, takes)


_TAKEN_BY_CALLBACKS = {
    "get_inference_requests_cb": ("max_num_requests",),
    "send_response_cb": ("request_id", "tensors", "final_response", "error"),
    "poll_stop_signal_cb": (),
    "return_batch_manager_stats_cb": ("json",),
}
_TAKEN_BY_HOOKS = {
    "trace": ("iteration_trace",), "after_responses": (), "at_end": ("health",), "kv_events": ("events",),
    "logits_post_processor_batched": ("request_ids", "logits", "token_ids"),
}


def checked_parts(parts: Any) -> Parts:
    """Return `parts`, or a Parts without replacements for None. Raises ConfigError for anything else, and for a hook
    that cannot be called as the engine calls it.
    """
    if parts is None:
        return Parts()
    if not isinstance(parts, Parts):
        raise ConfigError(f"parts is of type {type(parts).__name__}", "expected a Parts",
                          "leave it out, or construct one")
    for name, takes in _TAKEN_BY_HOOKS.items():
        _check_call(f"Parts.{name}", getattr(parts, name), takes)
    return parts


def by_name(values: "EngineArguments | Callbacks") -> dict[str, Any]:
    """Return the fields, as keyword arguments of GptManager, which makes `alike` itself."""
    return {member.name: getattr(values, member.name) for member in fields(values) if member.name != "alike"}


def _check_call(name: str, callback: Callable[..., Any] | None, takes: tuple[str, ...]) -> None:
    if callback is None:
        return
    if returns_before_it_runs(callback, may_yield=name in ("get_inference_requests_cb", "poll_stop_signal_cb")):
        raise ConfigError(f"{name} is an async or a generator function",
                          "expected a plain function, because the worker does not run a returned coroutine or "
                          "generator",
                          "pass a function, for instance one that uses loop.call_soon_threadsafe")
    if not can_be_called_with(callback, len(takes)):
        raise ConfigError(f"{name} cannot be called with {counted(len(takes), 'argument')}",
                          f"it is called as {name.rpartition('.')[2]}({', '.join(takes)})",
                          "accept these parameters, or *args" if takes else "make every parameter optional")


def can_be_called_with(function: Callable[..., Any], count: int) -> bool:
    """Whether the function accepts `count` positional arguments. True if its signature cannot be read."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except Exception:                                  # no signature, or its class raises
        return True
    return True


def returns_before_it_runs(callback: Callable[..., Any], *, may_yield: bool) -> bool:
    """Whether a call of `callback` only creates a coroutine or a generator, which other code has to run.

    may_yield   whether the engine iterates over the result of a call. If it does, the engine runs a generator
                itself, and this function returns False for a generator function
    """
    kinds: list[Callable[[Any], bool]] = [inspect.iscoroutinefunction, inspect.isasyncgenfunction]
    if not may_yield:
        kinds.append(inspect.isgeneratorfunction)
    forms = (callback, getattr(type(callback), "__call__", None))    # noqa: B004  an object may have an async one
    return any(is_of_kind(form) for is_of_kind in kinds for form in forms)
