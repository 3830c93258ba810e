"""Checks the user's parts of the engine before they run, and completes a scheduler.

Parts are recognized by their methods and need not inherit from any class.
"""

from collections.abc import Callable
from typing import Any

from .arguments import can_be_called_with
from .config import Limits, TrtGptModelOptionalParams
from .contained_log import log
from .errors import ConfigError, text_of, type_name, where_raised
from .kv.kv_cache_manager import KvCacheManager
from .kv.peft_cache_manager import PeftCacheManager
from .sampling_config import PARAMETERS
from .scheduling import capacity, micro_batch, simple
from .scheduling.interfaces import CapacityScheduler, MicroBatchScheduler, RequestScheduler
from .scheduling.simple import SimpleScheduler
from .seams import ModelBackend

MOST_OWN_STAGES = 16
SCHEDULERS = "a RequestScheduler, a CapacityScheduler or a MicroBatchScheduler"
_CONSTRUCTORS_IN = {module.__name__ for module in (capacity, micro_batch, simple)}


def _made(name: str, factory: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call the factory in the field `name` of Parts, and return its result.

    If the factory raises, raises ConfigError with the factory's exception as its cause. A ConfigError of the factory
    propagates unchanged.
    """
    try:
        return factory(*given, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the factory in Parts.{name} raised {type_name(error)}: {text_of(error)}",
                          "expected it to return the part", "correct the factory") from error


def _a_class(name: str, part: type, expected: str, instead: str, verb: str = "is") -> ConfigError:
    """Return the error for the class `part`, which cannot be used as a factory, in the field `name` of Parts.

    expected, instead   the words after "expected" and after "pass" in the message
    verb                "is", or "contains" if the class is an element of the field
    """
    return ConfigError(f"Parts.{name} {verb} the class {part.__name__}", f"expected {expected}", f"pass {instead}")


def custom_backend(part: Any, params: TrtGptModelOptionalParams) -> ModelBackend:
    """Return the backend in `Parts.backend`, or the backend that the factory there makes.

    Raises ConfigError if the part or the result is not a backend, or if an option requires the package's backend.
    """
    for name in ("deterministic", "cuda_graphs"):
        if getattr(params, name):
            raise ConfigError(f"{name} and Parts.backend are both set",
                              "a custom backend decides how it computes", "leave one of them out")
    if isinstance(part, type) or not hasattr(part, "start"):
        part = _made("backend", part)
        if not hasattr(part, "start"):
            raise ConfigError(f"the factory in Parts.backend returned a value of type {type_name(part)}",
                              "expected a ModelBackend",
                              "return an object with the methods of batch_manager.ModelBackend")
    _check_backend_methods(part)
    backend: ModelBackend = part
    return backend


def _check_backend_methods(backend: Any) -> None:
    """Raise ConfigError if the backend lacks a method that the engine needs. Closes the backend first, if possible."""
    missing = [name for name in ("start", "memory_usage", "close")
               if not callable(getattr(backend, name, None))]
    if not hasattr(backend, "info"):
        missing.append("info")
    if not missing:
        return
    if "close" not in missing:
        close_unused(backend)
    raise ConfigError(f"the backend of type {type_name(backend)} in Parts.backend lacks {', '.join(missing)}",
                      "expected a ModelBackend with all of its methods and its `info`",
                      "see batch_manager.ModelBackend")


def close_unused(backend: ModelBackend) -> None:
    """Close the backend of an engine that cannot be built or started.

    An exception of a custom backend is logged, so that the caller gets the exception that prevented the start.
    """
    try:
        backend.close()
    except Exception as error:
        log.error("the close method of the backend raised %s; the engine was not started\n%s", type_name(error),
                  where_raised(error))


def checked_attention(factory: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a factory that calls `factory` and checks the result. Returns None if `factory` is None."""
    if factory is None:
        return None

    def make(*given: Any, **options: Any) -> Any:
        attention = _made("attention", factory, *given, **options)
        missing = [name for name in ("plan", "run") if not callable(getattr(attention, name, None))]
        if not isinstance(getattr(attention, "dispatch", None), str):
            missing.append("dispatch")
        if missing:
            raise ConfigError(f"the factory in Parts.attention returned a value of type {type_name(attention)}, "
                              f"which lacks {', '.join(missing)}", "expected an attention implementation",
                              "see attention.interface.Attention")
        return attention

    return make


def checked_stages(part: Any) -> Callable[..., tuple[Any, ...]] | None:
    """Return a factory (num_slots, device) that makes and checks the user's stages.

    Returns None if `part` is None.

    part   the field `Parts.stages`: the stages, or the user's factory of them
    """
    if part is None:
        return None

    def make(num_slots: int, device: Any) -> tuple[Any, ...]:
        if isinstance(part, type) and not can_be_called_with(part, 2):
            raise _a_class("stages", part, "a list of LogitsStages", f"[{part.__name__}(...)]")
        made = _made("stages", part, num_slots, device) if callable(part) else part
        if not isinstance(made, list | tuple):
            raise ConfigError(f"the factory in Parts.stages returned a value of type {type_name(made)}",
                              "expected a list or tuple of LogitsStages", "return the stages in a list")
        if len(made) > MOST_OWN_STAGES:
            raise ConfigError(f"Parts.stages has {len(made)} stages", f"expected at most {MOST_OWN_STAGES}",
                              "combine several stages into one")
        for stage in made:
            _check_stage(stage)
        return tuple(made)

    return make


def _check_stage(stage: Any) -> None:
    missing = [name for name in ("is_active", "needs_history", "set_up", "apply")
               if not callable(getattr(stage, name, None))]
    reads: Any = getattr(stage, "reads", None)
    if not isinstance(reads, list | tuple):
        missing.append("reads")
    if isinstance(stage, type):
        raise _a_class("stages", stage, "LogitsStages: objects, not classes", f"{stage.__name__}(...)", "contains")
    if missing:
        raise ConfigError(f"Parts.stages holds a stage of type {type_name(stage)}, which lacks {', '.join(missing)}",
                          "expected LogitsStages: objects with reads, is_active, needs_history, set_up and apply",
                          "inherit from LogitsStage")
    unknown = [name for name in reads if name not in PARAMETERS and name not in ("end_id", "prompt_length")]
    if unknown:
        raise ConfigError(f"`reads` of the stage of type {type_name(stage)} in Parts.stages holds {unknown[0]!r}",
                          f"expected end_id, prompt_length or a field of SamplingConfig: {', '.join(PARAMETERS)}",
                          "correct `reads`, or read the value from the setup that the engine passes to set_up")


def check_scheduler(part: Any) -> None:
    """Raise ConfigError if `Parts.scheduler` is neither a scheduler nor a factory of one, before a model is loaded."""
    if part is not None and not callable(part) and not _is_scheduler(part):
        raise ConfigError(f"Parts.scheduler is of type {type_name(part)}",
                          f"expected {SCHEDULERS}, or a function (limits, kv_cache_manager) that returns one",
                          "inherit from one of these classes, or leave it None")


def chosen_scheduler(part: Any, limits: Limits, kv_cache_manager: KvCacheManager, default: SimpleScheduler,
                     peft_cache_manager: PeftCacheManager | None = None) -> RequestScheduler:
    """Return the scheduler in `Parts.scheduler`, as a complete scheduler (`_with_defaults`); `default` if it is None.

    part   checked by `check_scheduler`
    Raises ConfigError if a factory fails or returns something else, or if there is a cache for adapters and the
    scheduler does not plan their pages.
    """
    if part is None:
        return default
    scheduler = _custom_scheduler(part, limits, kv_cache_manager, default, peft_cache_manager)
    if peft_cache_manager is None or (isinstance(scheduler, SimpleScheduler)
                                      and scheduler.capacity_scheduler is default.capacity_scheduler):
        return scheduler
    planner = scheduler.capacity_scheduler if isinstance(scheduler, SimpleScheduler) else scheduler
    if (getattr(planner, "plans_adapters", False) is not True
            and getattr(planner, "peft_cache_manager", None) is not peft_cache_manager):
        raise ConfigError(f"peft_cache_config is set and Parts.scheduler has a scheduler of type {type_name(planner)}",
                          "expected a scheduler that plans the pages of adapters, with plans_adapters = True",
                          "pass a function (limits, kv_cache_manager, peft_cache_manager) that returns one, or a "
                          "MicroBatchScheduler, or leave peft_cache_config out")
    return scheduler


def _custom_scheduler(part: Any, limits: Limits, kv_cache_manager: KvCacheManager, default: SimpleScheduler,
                      peft_cache_manager: PeftCacheManager | None) -> RequestScheduler:
    scheduler = _with_defaults(part, default)
    if scheduler is not None:
        return scheduler
    if isinstance(part, type) and (_has_our_constructor(part) or not can_be_called_with(part, 2)):
        if not can_be_called_with(part, 0):
            raise _a_class("scheduler", part,
                           "a class whose constructor takes (limits, kv_cache_manager) or no arguments",
                           f"{part.__name__}(...), or a function (limits, kv_cache_manager) that returns one")
        made = _made("scheduler", part)
    elif can_be_called_with(part, 3) and (peft_cache_manager is not None or not can_be_called_with(part, 2)):
        made = _made("scheduler", part, limits, kv_cache_manager, peft_cache_manager)
    else:
        made = _made("scheduler", part, limits, kv_cache_manager)
    scheduler = _with_defaults(made, default)
    if scheduler is None:
        raise ConfigError(f"the factory in Parts.scheduler returned a value of type {type_name(made)}",
                          f"expected {SCHEDULERS}", "inherit from one of these classes")
    return scheduler


def _has_our_constructor(part: Any) -> bool:
    """Whether a scheduler class has the constructor of one of this package's schedulers.

    None of these constructors takes (limits, kv_cache_manager), although some take two arguments.
    """
    return getattr(part.__init__, "__module__", "") in _CONSTRUCTORS_IN


def _is_scheduler(part: Any) -> bool:
    """Whether the part is an object, not a class, that inherits from a scheduler class or has the method of one."""
    return not isinstance(part, type) and (
        isinstance(part, RequestScheduler | CapacityScheduler | MicroBatchScheduler)
        or any(callable(getattr(part, name, None)) for name in ("schedule_request", "schedule")))


def _with_defaults(part: Any, default: SimpleScheduler) -> RequestScheduler | None:
    """Return the part as a complete scheduler.

    A capacity scheduler is combined with the micro-batch scheduler of `default`, and a micro-batch scheduler with the
    capacity scheduler of `default`. Returns None if the part is no scheduler. An object that inherits from no scheduler
    class is recognized by its methods and by the number of arguments of `schedule_request`.
    """
    if not _is_scheduler(part):
        return None
    if isinstance(part, RequestScheduler):
        return part
    decides = getattr(part, "schedule_request", None)
    takes_requests_alone = (callable(decides) and not can_be_called_with(decides, 2)
                            and can_be_called_with(decides, 1))
    if isinstance(part, CapacityScheduler) or takes_requests_alone:
        return SimpleScheduler(part, default.micro_batch_scheduler)
    if callable(decides):
        scheduler: RequestScheduler = part
        return scheduler
    return SimpleScheduler(default.capacity_scheduler, part)
