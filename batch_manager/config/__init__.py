"""The user's configuration, and the limits of the engine, which options.py computes from it.

Owns     the dataclasses of options, and what each alone refuses
Not      what depends on the model, the device or a custom part: options.py and runtime/build_backend.py refuse that
Yours    a new option is a field with its line of docstring and its check; a new kind of option is a module

The dataclasses are frozen. Their field names are TensorRT-LLM's names in snake_case. `None` means that the engine
chooses the value.
"""

from .adapters import PeftCacheConfig
from .engine import (
    DTYPES,
    LOAD_FORMATS,
    MODEL_IMPLEMENTATIONS,
    QUANTIZED_ACTIVATIONS,
    TrtGptModelOptionalParams,
    unknown_option,
)
from .kv_cache import BLOCK_SIZES, FP8_CACHE, KV_CACHE_DTYPES, KvCacheConfig, KvTransferConfig, is_host
from .limits import Limits
from .parallel import MAX_RANKS, ParallelConfig, address_of
from .parts import Parts
from .speculative import MAX_DRAFT_TOKENS, MAX_LOOKUP, MAX_TREE_DEPTH, SpeculativeConfig
from .values import MAX_POSITION, MAX_THREADS, QUANTIZATIONS

__all__ = [
    "BLOCK_SIZES",
    "DTYPES",
    "FP8_CACHE",
    "KV_CACHE_DTYPES",
    "LOAD_FORMATS",
    "MAX_DRAFT_TOKENS",
    "MAX_LOOKUP",
    "MAX_POSITION",
    "MAX_RANKS",
    "MAX_THREADS",
    "MAX_TREE_DEPTH",
    "MODEL_IMPLEMENTATIONS",
    "QUANTIZATIONS",
    "QUANTIZED_ACTIVATIONS",
    "KvCacheConfig",
    "KvTransferConfig",
    "Limits",
    "ParallelConfig",
    "Parts",
    "PeftCacheConfig",
    "SpeculativeConfig",
    "TrtGptModelOptionalParams",
    "address_of",
    "is_host",
    "unknown_option",
]
