"""Finds the features that the engine has, by building an engine with each of them."""

from functools import cache

from batch_manager.config import KvCacheConfig, PeftCacheConfig
from batch_manager.errors import ConfigError
from tests.harness.client import Client
from tests.harness.world import make_loop

# feature -> its options: of KvCacheConfig, and of the scripted backend
PROBES: dict[str, tuple[dict, dict]] = {
    "reuse": ({"enable_block_reuse": True}, {}),
    "window": ({"max_attention_window": 32}, {"window": 32}),
    "sinks": ({"max_attention_window": 32, "sink_token_length": 4}, {"window": 32, "sink": 4}),
    "host blocks": ({"enable_block_reuse": True, "host_cache_size": 1}, {"host_blocks": 4}),
    "adapters": ({}, {"adapter_pages": 4}),
    "drafts": ({}, {"verify": True}),
}


def builds(kv_cache_config: dict, backend: dict) -> bool:
    """Whether an engine can be built with these options."""
    try:
        make_loop(Client(), backend=backend, kv_cache_config=KvCacheConfig(**kv_cache_config),
                  peft_cache_config=PeftCacheConfig() if "adapter_pages" in backend else None)
    except (ConfigError, TypeError):    # refused by the engine, or unknown to the scripted backend
        return False
    return True


@cache
def available() -> frozenset[str]:
    """Return the features of PROBES that the engine has."""
    return frozenset(name for name, options in PROBES.items() if builds(*options))
