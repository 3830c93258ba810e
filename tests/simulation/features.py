"""What the engine can do so far, found out by asking it: the swarm widens by itself when a refusal goes."""

from functools import cache

from batch_manager.config import KvCacheConfig
from batch_manager.errors import ConfigError
from tests.harness.client import Client
from tests.harness.world import make_loop

# feature -> what asks for it: options of KvCacheConfig, and of a scripted backend that can do it
PROBES: dict[str, tuple[dict, dict]] = {
    "reuse": ({"enable_block_reuse": True}, {}),
    "window": ({"max_attention_window": 32}, {"window": 32}),
    "sinks": ({"max_attention_window": 32, "sink_token_length": 4}, {"window": 32, "sink": 4}),
    "host blocks": ({"enable_block_reuse": True, "host_cache_size": 1}, {"host_blocks": 4}),
}


def builds(kv_cache_config: dict, backend: dict) -> bool:
    """Whether an engine with these options can be had."""
    try:
        make_loop(Client(), backend=backend, kv_cache_config=KvCacheConfig(**kv_cache_config))
    except (ConfigError, TypeError):    # the engine refuses it, or the scripted backend has never heard of it
        return False
    return True


@cache
def available() -> frozenset[str]:
    """The features of PROBES that the engine builds."""
    return frozenset(name for name, options in PROBES.items() if builds(*options))
