"""Checks the constructor arguments of GptManager before anything is loaded."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from .config import Parts, TrtGptModelOptionalParams
from .errors import ConfigError, counted
from .names import SchedulerPolicy, TrtGptModelType
from .option_values import integer_in_words, plain_integer, shown_option
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


def check_arguments(model_type: Any, max_beam_width: Any, scheduler_policy: Any, get_cb: Any, send_cb: Any,
                    poll_cb: Any, stats_cb: Any, params: Any, parts: Any, exclude_input_in_output: Any = False,
                    terminate_req_id: Any = None, max_draft_tokens: Any = None) -> tuple[int, int | None]:
    """Check the arguments of GptManager's constructor. Return max_beam_width and terminate_req_id as plain ints.

    Raises ConfigError, also in a process whose threads are greenlets.
    """
    check_threads_are_real()
    if not isinstance(model_type, TrtGptModelType):
        raise ConfigError(f"model_type is {model_type!r}", "expected a member of TrtGptModelType",
                          "for instance TrtGptModelType.InflightFusedBatching")
    if not isinstance(scheduler_policy, SchedulerPolicy):
        raise ConfigError(f"scheduler_policy is {scheduler_policy!r}", "expected a member of SchedulerPolicy",
                          "for instance SchedulerPolicy.GUARANTEED_NO_EVICT")
    beam_width = plain_integer(max_beam_width)
    if beam_width is None or not 1 <= beam_width <= MAX_BEAM_WIDTH:
        raise ConfigError(f"max_beam_width is {shown_option(max_beam_width)}",
                          f"expected {integer_in_words(1, MAX_BEAM_WIDTH)}", "use 1 without beam search")
    for name, callback in (("get_inference_requests_cb", get_cb), ("send_response_cb", send_cb)):
        if not callable(callback):
            raise ConfigError(f"{name} is of type {type(callback).__name__}", "expected a callable", "pass a function")
    for name, callback in (("poll_stop_signal_cb", poll_cb), ("return_batch_manager_stats_cb", stats_cb)):
        if callback is not None and not callable(callback):
            raise ConfigError(f"{name} is of type {type(callback).__name__}", "expected a callable or None",
                              "pass a function, or leave it out")
    if not isinstance(params, TrtGptModelOptionalParams):
        raise ConfigError(f"optional_params is of type {type(params).__name__}", "expected a TrtGptModelOptionalParams",
                          "leave it out, or construct one")
    if not isinstance(parts, Parts):
        raise ConfigError(f"parts is of type {type(parts).__name__}", "expected a Parts",
                          "leave it out, or construct one")
    hooks = [(f"Parts.{name}", getattr(parts, name), takes) for name, takes in (
        ("trace", ("iteration_trace",)), ("after_responses", ()), ("at_end", ("health",)),
        ("logits_post_processor_batched", ("request_ids", "logits", "token_ids")))]
    for name, callback, takes in (
            ("get_inference_requests_cb", get_cb, ("max_num_requests",)),
            ("send_response_cb", send_cb, ("request_id", "tensors", "final_response", "error")),
            ("poll_stop_signal_cb", poll_cb, ()), ("return_batch_manager_stats_cb", stats_cb, ("json",)), *hooks):
        if returns_before_it_runs(callback, may_yield=name in ("get_inference_requests_cb", "poll_stop_signal_cb")):
            raise ConfigError(f"{name} is an async or a generator function",
                              "expected a plain function, because the worker does not run a returned coroutine or "
                              "generator",
                              "pass a function, for instance one that uses loop.call_soon_threadsafe")
        if callback is not None and not can_be_called_with(callback, len(takes)):
            raise ConfigError(f"{name} cannot be called with {counted(len(takes), 'argument')}",
                              f"it is called as {name.rpartition('.')[2]}({', '.join(takes)})",
                              "accept these parameters, or *args" if takes else "make every parameter optional")
    last_id = plain_integer(terminate_req_id)
    if terminate_req_id is not None and (last_id is None or not 0 <= last_id <= UINT64_MAX):
        raise ConfigError(f"terminate_req_id is {shown_option(terminate_req_id)}",
                          "expected an id in 0..2^64-1, or None",
                          "leave it out if no request is to end the worker")
    if max_draft_tokens is not None and plain_integer(max_draft_tokens) != 0:
        raise ConfigError(f"max_draft_tokens is {shown_option(max_draft_tokens)}",
                          "expected None or 0, because draft tokens are not supported",
                          "leave it out")
    if not isinstance(exclude_input_in_output, bool):
        raise ConfigError(f"exclude_input_in_output is {exclude_input_in_output!r}", "expected True or False",
                          "leave it out for False")
    return beam_width, last_id


def can_be_called_with(function: Callable[..., Any], count: int) -> bool:
    """Whether the function accepts `count` positional arguments. True if its signature cannot be read."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except Exception:                                  # no signature, or its class raises
        return True
    return True


def returns_before_it_runs(callback: Callable[..., Any] | None, *, may_yield: bool) -> bool:
    """Whether a call of `callback` only creates a coroutine or a generator, which other code has to run.

    may_yield   whether the engine iterates over the result of a call. If it does, the engine runs a generator
                itself, and this function returns False for a generator function
    """
    kinds: list[Callable[[Any], bool]] = [inspect.iscoroutinefunction, inspect.isasyncgenfunction]
    if not may_yield:
        kinds.append(inspect.isgeneratorfunction)
    forms = (callback, getattr(type(callback), "__call__", None))    # noqa: B004  an object may have an async one
    return any(is_of_kind(form) for is_of_kind in kinds for form in forms)
