"""Convert the parameters of TensorRT-LLM's Triton backend to arguments of GptManager."""

from dataclasses import fields
from difflib import get_close_matches
from types import UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from batch_manager import KvCacheConfig, SchedulerPolicy, TrtGptModelOptionalParams, TrtGptModelType

# Name of the parameter in TensorRT-LLM's backend -> name of the field in KvCacheConfig or TrtGptModelOptionalParams.
KV_CACHE_NAMES = {"max_tokens_in_paged_kv_cache": "max_tokens", "max_attention_window_size": "max_attention_window",
                   "kv_cache_free_gpu_mem_fraction": "free_gpu_memory_fraction",
                   "enable_kv_cache_reuse": "enable_block_reuse"}
MODEL_NAMES = {"max_queue_size": "max_queued_requests"}
MODEL_TYPES = {"v1": TrtGptModelType.V1, "inflight_batching": TrtGptModelType.InflightBatching,
               "inflight_fused_batching": TrtGptModelType.InflightFusedBatching}
POLICIES = {"guaranteed_no_evict": SchedulerPolicy.GUARANTEED_NO_EVICT,
            "max_utilization": SchedulerPolicy.MAX_UTILIZATION}
# name -> (type, default)
OWN = {"gpt_model_path": (str, ""), "gpt_model_type": (str, "inflight_fused_batching"),
       "batch_scheduler_policy": (str, "guaranteed_no_evict"), "max_beam_width": (int, 1),
       "exclude_input_in_output": (bool, False), "cancellation_check_period_ms": (int, 100),
       "stats_check_period_ms": (int, 100)}
RANGES = {"max_beam_width": range(1, 1025), "cancellation_check_period_ms": range(1, 3_600_001),
          "stats_check_period_ms": range(1, 3_600_001)}
ALIASES = {"batching_strategy": "gpt_model_type", "tensorrt_llm_model_path": "gpt_model_path"}


class SettingError(ValueError):
    """An unknown parameter, or a parameter with an invalid value."""


class Settings(NamedTuple):
    """Settings of the GptManager and its host in Triton.

    positional        first four arguments of GptManager
    optional_params, exclude_input_in_output   arguments of GptManager
    cancel_period_s   seconds between checks for disconnected clients
    stats_period_s    seconds between updates of the metrics
    """

    positional: tuple[str, TrtGptModelType, int, SchedulerPolicy]
    optional_params: TrtGptModelOptionalParams
    exclude_input_in_output: bool
    cancel_period_s: float
    stats_period_s: float


def read(parameters: dict[str, str]) -> Settings:
    """Parse the parameters of a model repository. An empty value or a ${placeholder} means the default.

    Raises SettingError for an unknown name or an invalid value, and ConfigError if the engine refuses a value.
    """
    kv_types, model_types = _types(KvCacheConfig), _types(TrtGptModelOptionalParams)
    own = {name: default for name, (_, default) in OWN.items()}
    kv_cache: dict[str, Any] = {}
    model: dict[str, Any] = {"flush_stats_when_idle": True}      # gauges fall to zero when the engine is idle
    for given, text in parameters.items():
        name = ALIASES.get(given, given)
        if not text.strip() or text.startswith("${"):
            continue
        if name in OWN:
            own[name] = _value(given, text, (OWN[name][0],))
            if name in RANGES and own[name] not in RANGES[name]:
                raise SettingError(f"{given} is {own[name]}; expected {RANGES[name][0]} to {RANGES[name][-1]}")
        elif (field := KV_CACHE_NAMES.get(name, name)) in kv_types:
            kv_cache[field] = _value(given, text, kv_types[field])
        elif (field := MODEL_NAMES.get(name, name)) in model_types:
            model[field] = _value(given, text, model_types[field])
        else:
            known = [*OWN, *ALIASES, *KV_CACHE_NAMES, *kv_types, *MODEL_NAMES, *model_types]
            near = get_close_matches(given, known, n=1)
            raise SettingError(f"unknown parameter {given!r}; " + (f"did you mean {near[0]!r}?" if near else
                                                                 f"the parameters are {', '.join(sorted(set(known)))}"))
    return Settings(
        (own["gpt_model_path"], _choice("gpt_model_type", own["gpt_model_type"], MODEL_TYPES), own["max_beam_width"],
         _choice("batch_scheduler_policy", own["batch_scheduler_policy"], POLICIES)),
        TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(**kv_cache), **model), own["exclude_input_in_output"],
        own["cancellation_check_period_ms"] / 1000, own["stats_check_period_ms"] / 1000)


def _types(options: type) -> dict[str, tuple[type, ...]]:
    """Return name -> type for the fields of a dataclass whose values can be parsed from a string."""
    hints = get_type_hints(options)
    found = {field.name: get_args(hints[field.name]) if isinstance(hints[field.name], UnionType)
             else (hints[field.name],) for field in fields(options)}
    return {name: kinds for name, kinds in found.items() if {int, float, bool, str} & set(kinds)}


def _value(name: str, text: str, types: tuple[type, ...]) -> Any:
    text = text.strip()
    if bool in types and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    for kind in (int, float, str):
        if kind in types and bool not in types:
            try:
                return kind(text)
            except ValueError:
                continue
    expected = " or ".join(kind.__name__ for kind in types if kind is not type(None))
    raise SettingError(f"{name} is {text!r}; expected {expected}")


def _choice(name: str, text: str, choices: dict[str, Any]) -> Any:
    if text.lower() not in choices:
        raise SettingError(f"{name} is {text!r}; expected one of {', '.join(choices)}")
    return choices[text.lower()]
