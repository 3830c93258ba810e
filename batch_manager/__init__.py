"""A callback-driven in-flight batch manager for GPT-style language models.

Public are the names below, the programs in `batch_manager.tools`, the adapters in `batch_manager.extras`, and
`batch_manager.testing` for tests of your own parts; other modules may change at any time. The names are served lazily,
so that importing one folder of the package does not import the others (torch in particular). Inside the package nobody
imports from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__

_PUBLIC = {
    # a server
    "GptManager": "gpt_manager",
    "InferenceRequest": "requests.inference_request",
    "NamedTensor": "responses.named_tensor",
    "PerfMetrics": "responses.perf_metrics",
    "resume": "requests.resume",
    "KvCacheRetentionConfig": "requests.retention",
    "TokenRangeRetentionConfig": "requests.retention",
    "EngineInfo": "engine_info",
    "Parts": "config",
    "TrtGptModelOptionalParams": "config",
    "KvCacheConfig": "config",
    "TrtGptModelType": "names",
    "SchedulerPolicy": "names",
    "ContextChunkingPolicy": "names",
    "LlmRequestState": "names",
    "FinishReason": "names",

    # errors
    "ErrorCode": "names",
    "BatchManagerError": "errors",
    "ConfigError": "errors",
    "ModelLoadError": "errors",
    "UnsupportedModelError": "errors",
    "InsufficientMemoryError": "errors",
    "InvalidRequestError": "errors",
    "ManagerClosedError": "errors",
    "SchedulerContractError": "errors",
    "DeviceLostError": "errors",

    # a scheduler
    "RequestScheduler": "scheduling.interfaces",
    "CapacityScheduler": "scheduling.interfaces",
    "MicroBatchScheduler": "scheduling.interfaces",
    "SchedulerOutput": "scheduling.interfaces",
    "SimpleScheduler": "scheduling.simple",
    "GuaranteedNoEvictScheduler": "scheduling.capacity",
    "MaxUtilizationScheduler": "scheduling.capacity",
    "Limits": "config",
    "LlmRequest": "requests.llm_request",
    "KvCacheManager": "kv.kv_cache_manager",

    # a backend, a clock
    "ModelBackend": "seams",
    "BackendInfo": "seams",
    "MemoryUsage": "seams",
    "PendingStep": "seams",
    "Clock": "seams",
    "ScheduledBatch": "handover",
    "ContextWork": "handover",
    "GenerationWork": "handover",
    "SlotSetup": "handover",
    "SamplingConfig": "sampling_config",
    "BlockTableUpdates": "handover",
    "BlockCopy": "handover",
    "BlockClear": "handover",
    "AdapterLoad": "handover",
    "Hypothesis": "handover",
    "StepOutput": "handover",
    "RowFailure": "handover",

    # a stage
    "LogitsStage": "decoding.logits_stage",
    "LogitsRows": "decoding.logits_rows",

    # a model
    "register_model": "models.registry",
    "ModelSpec": "models.model_spec",
    "read_decoder_spec": "models.model_spec",
    "Fields": "weights.json_file",
    "Weights": "weights.source",
    "LayerContext": "layers.context",
    "Linear": "layers.linear",
    "Embedding": "layers.embedding",
    "Head": "layers.embedding",
    "RmsNorm": "layers.norm",
    "LayerNorm": "layers.norm",
    "GatedMlp": "layers.mlp",
    "Mlp": "layers.mlp",
    "Rotary": "layers.rotary",
    "RotaryParameters": "layers.rotary",
    "Attention": "attention.interface",
    "LayerAttention": "attention.interface",

    # a trace
    "STATISTICS": "stats.statistics_table",
    "Statistic": "stats.statistics_table",
    "Trace": "stats.trace",
    "TraceFile": "stats.trace",
    "IterationTrace": "stats.trace",
    "read_trace": "stats.trace",
    "write_trace": "stats.trace",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from .attention.interface import Attention, LayerAttention
    from .config import KvCacheConfig, Limits, Parts, TrtGptModelOptionalParams
    from .decoding.logits_rows import LogitsRows
    from .decoding.logits_stage import LogitsStage
    from .engine_info import EngineInfo
    from .errors import (
        BatchManagerError,
        ConfigError,
        DeviceLostError,
        InsufficientMemoryError,
        InvalidRequestError,
        ManagerClosedError,
        ModelLoadError,
        SchedulerContractError,
        UnsupportedModelError,
    )
    from .gpt_manager import GptManager
    from .handover import (
        AdapterLoad,
        BlockClear,
        BlockCopy,
        BlockTableUpdates,
        ContextWork,
        GenerationWork,
        Hypothesis,
        RowFailure,
        ScheduledBatch,
        SlotSetup,
        StepOutput,
    )
    from .kv.kv_cache_manager import KvCacheManager
    from .layers.context import LayerContext
    from .layers.embedding import Embedding, Head
    from .layers.linear import Linear
    from .layers.mlp import GatedMlp, Mlp
    from .layers.norm import LayerNorm, RmsNorm
    from .layers.rotary import Rotary, RotaryParameters
    from .models.model_spec import ModelSpec, read_decoder_spec
    from .models.registry import register_model
    from .names import ContextChunkingPolicy, ErrorCode, FinishReason, LlmRequestState, SchedulerPolicy, TrtGptModelType
    from .requests.inference_request import InferenceRequest
    from .requests.llm_request import LlmRequest
    from .requests.resume import resume
    from .requests.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
    from .responses.named_tensor import NamedTensor
    from .responses.perf_metrics import PerfMetrics
    from .sampling_config import SamplingConfig
    from .scheduling.capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler
    from .scheduling.interfaces import CapacityScheduler, MicroBatchScheduler, RequestScheduler, SchedulerOutput
    from .scheduling.simple import SimpleScheduler
    from .seams import BackendInfo, Clock, MemoryUsage, ModelBackend, PendingStep
    from .stats.statistics_table import STATISTICS, Statistic
    from .stats.trace import IterationTrace, Trace, TraceFile, read_trace, write_trace
    from .weights.json_file import Fields
    from .weights.source import Weights


if not TYPE_CHECKING:    # a type checker knows the names, and takes no other one
    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
