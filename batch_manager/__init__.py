"""A callback-driven in-flight batch manager for GPT-style language models.

The public names are served lazily, so that importing one folder of the package does not import the others (torch in
particular). Inside the package nobody imports from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

_PUBLIC = {
    "GptManager": "gpt_manager",
    "InferenceRequest": "requests.inference_request",
    "NamedTensor": "requests.inference_request",
    "Parts": "config",
    "TrtGptModelOptionalParams": "config",
    "KvCacheConfig": "config",
    "TrtGptModelType": "names",
    "SchedulerPolicy": "names",
    "ContextChunkingPolicy": "names",
    "LlmRequestState": "names",
    "FinishReason": "names",
    "ErrorCode": "names",
    "BatchManagerError": "errors",
    "ConfigError": "errors",
    "ModelLoadError": "errors",
    "InvalidRequestError": "errors",
    "ManagerClosedError": "errors",
    "SchedulerContractError": "errors",
    "RequestScheduler": "scheduling.interfaces",
    "CapacityScheduler": "scheduling.interfaces",
    "MicroBatchScheduler": "scheduling.interfaces",
    "SchedulerOutput": "scheduling.interfaces",
    "SimpleScheduler": "scheduling.simple",
    "GuaranteedNoEvictScheduler": "scheduling.capacity",
    "MaxUtilizationScheduler": "scheduling.capacity",
    "register_model": "models.registry",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from .config import KvCacheConfig, Parts, TrtGptModelOptionalParams
    from .errors import (
        BatchManagerError,
        ConfigError,
        InvalidRequestError,
        ManagerClosedError,
        ModelLoadError,
        SchedulerContractError,
    )
    from .gpt_manager import GptManager
    from .models.registry import register_model
    from .names import ContextChunkingPolicy, ErrorCode, FinishReason, LlmRequestState, SchedulerPolicy, TrtGptModelType
    from .requests.inference_request import InferenceRequest, NamedTensor
    from .scheduling.capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler
    from .scheduling.interfaces import CapacityScheduler, MicroBatchScheduler, RequestScheduler, SchedulerOutput
    from .scheduling.simple import SimpleScheduler


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
