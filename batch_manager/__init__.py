"""A callback-driven in-flight batch manager for GPT-style language models.

The public API consists of the names below, the programs in `batch_manager.tools`, the adapters in
`batch_manager.extras`, and `batch_manager.testing`, which helps to test custom parts. Other modules may change at any
time. The names are resolved lazily, so that importing one folder of the package does not import the other folders, or
torch. No module of the package imports from here.
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
    "ParallelConfig": "config",
    "PeftCacheConfig": "config",
    "SpeculativeConfig": "config",
    "KvTransferConfig": "config",
    "KvEvent": "kv_events",
    "KvBlock": "kv_events",
    "kv_block_hashes": "kv_events",
    "MODULE_NAMES": "adapter_values",
    "AdapterInfo": "adapter_values",
    "TrtGptModelType": "names",
    "SchedulerPolicy": "names",
    "ContextChunkingPolicy": "names",
    "LlmRequestState": "names",
    "FinishReason": "names",
    "RequestType": "names",
    "ContextPhaseParams": "requests.context_phase",

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
    "BlockStore": "stores.interface",
    "Drafter": "loop.drafting",
    "StoredBlock": "stores.interface",
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
    "AdapterContent": "adapter_values",
    "AdapterModules": "adapter_values",
    "AdapterPart": "adapter_values",
    "Hypothesis": "handover",
    "StepOutput": "handover",
    "RowFailure": "handover",

    # a stage
    "LogitsStage": "decoding.logits_stage",
    "LogitsRows": "decoding.logits_rows",

    # a model
    "register_model": "models.registry",
    "ModelSpec": "models.spec",
    "read_decoder_spec": "models.spec_reading",
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

if TYPE_CHECKING:    # `as` marks the names as exported for type checkers
    from .adapter_values import MODULE_NAMES as MODULE_NAMES
    from .adapter_values import AdapterContent as AdapterContent
    from .adapter_values import AdapterInfo as AdapterInfo
    from .adapter_values import AdapterModules as AdapterModules
    from .adapter_values import AdapterPart as AdapterPart
    from .attention.interface import Attention as Attention
    from .attention.interface import LayerAttention as LayerAttention
    from .config import KvCacheConfig as KvCacheConfig
    from .config import KvTransferConfig as KvTransferConfig
    from .config import Limits as Limits
    from .config import ParallelConfig as ParallelConfig
    from .config import Parts as Parts
    from .config import PeftCacheConfig as PeftCacheConfig
    from .config import SpeculativeConfig as SpeculativeConfig
    from .config import TrtGptModelOptionalParams as TrtGptModelOptionalParams
    from .decoding.logits_rows import LogitsRows as LogitsRows
    from .decoding.logits_stage import LogitsStage as LogitsStage
    from .engine_info import EngineInfo as EngineInfo
    from .errors import BatchManagerError as BatchManagerError
    from .errors import ConfigError as ConfigError
    from .errors import DeviceLostError as DeviceLostError
    from .errors import InsufficientMemoryError as InsufficientMemoryError
    from .errors import InvalidRequestError as InvalidRequestError
    from .errors import ManagerClosedError as ManagerClosedError
    from .errors import ModelLoadError as ModelLoadError
    from .errors import SchedulerContractError as SchedulerContractError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .gpt_manager import GptManager as GptManager
    from .handover import AdapterLoad as AdapterLoad
    from .handover import BlockClear as BlockClear
    from .handover import BlockCopy as BlockCopy
    from .handover import BlockTableUpdates as BlockTableUpdates
    from .handover import ContextWork as ContextWork
    from .handover import GenerationWork as GenerationWork
    from .handover import Hypothesis as Hypothesis
    from .handover import RowFailure as RowFailure
    from .handover import ScheduledBatch as ScheduledBatch
    from .handover import SlotSetup as SlotSetup
    from .handover import StepOutput as StepOutput
    from .kv.kv_cache_manager import KvCacheManager as KvCacheManager
    from .kv_events import KvBlock as KvBlock
    from .kv_events import KvEvent as KvEvent
    from .kv_events import kv_block_hashes as kv_block_hashes
    from .layers.context import LayerContext as LayerContext
    from .layers.embedding import Embedding as Embedding
    from .layers.embedding import Head as Head
    from .layers.linear import Linear as Linear
    from .layers.mlp import GatedMlp as GatedMlp
    from .layers.mlp import Mlp as Mlp
    from .layers.norm import LayerNorm as LayerNorm
    from .layers.norm import RmsNorm as RmsNorm
    from .layers.rotary import Rotary as Rotary
    from .layers.rotary import RotaryParameters as RotaryParameters
    from .loop.drafting import Drafter as Drafter
    from .models.registry import register_model as register_model
    from .models.spec import ModelSpec as ModelSpec
    from .models.spec_reading import read_decoder_spec as read_decoder_spec
    from .names import ContextChunkingPolicy as ContextChunkingPolicy
    from .names import ErrorCode as ErrorCode
    from .names import FinishReason as FinishReason
    from .names import LlmRequestState as LlmRequestState
    from .names import RequestType as RequestType
    from .names import SchedulerPolicy as SchedulerPolicy
    from .names import TrtGptModelType as TrtGptModelType
    from .requests.context_phase import ContextPhaseParams as ContextPhaseParams
    from .requests.inference_request import InferenceRequest as InferenceRequest
    from .requests.llm_request import LlmRequest as LlmRequest
    from .requests.resume import resume as resume
    from .requests.retention import KvCacheRetentionConfig as KvCacheRetentionConfig
    from .requests.retention import TokenRangeRetentionConfig as TokenRangeRetentionConfig
    from .responses.named_tensor import NamedTensor as NamedTensor
    from .responses.perf_metrics import PerfMetrics as PerfMetrics
    from .sampling_config import SamplingConfig as SamplingConfig
    from .scheduling.capacity import GuaranteedNoEvictScheduler as GuaranteedNoEvictScheduler
    from .scheduling.capacity import MaxUtilizationScheduler as MaxUtilizationScheduler
    from .scheduling.interfaces import CapacityScheduler as CapacityScheduler
    from .scheduling.interfaces import MicroBatchScheduler as MicroBatchScheduler
    from .scheduling.interfaces import RequestScheduler as RequestScheduler
    from .scheduling.interfaces import SchedulerOutput as SchedulerOutput
    from .scheduling.simple import SimpleScheduler as SimpleScheduler
    from .seams import BackendInfo as BackendInfo
    from .seams import Clock as Clock
    from .seams import MemoryUsage as MemoryUsage
    from .seams import ModelBackend as ModelBackend
    from .seams import PendingStep as PendingStep
    from .stats.statistics_table import STATISTICS as STATISTICS
    from .stats.statistics_table import Statistic as Statistic
    from .stats.trace import IterationTrace as IterationTrace
    from .stats.trace import Trace as Trace
    from .stats.trace import TraceFile as TraceFile
    from .stats.trace import read_trace as read_trace
    from .stats.trace import write_trace as write_trace
    from .stores.interface import BlockStore as BlockStore
    from .stores.interface import StoredBlock as StoredBlock
    from .weights.json_file import Fields as Fields
    from .weights.source import Weights as Weights


if not TYPE_CHECKING:    # hidden from type checkers, which would accept any name otherwise
    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
