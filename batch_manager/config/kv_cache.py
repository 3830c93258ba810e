"""The KV cache: its size, reuse of its blocks, and blocks from other engines."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from ..errors import ConfigError
from ..kv_events import check_hash_key
from ..option_values import (
    check_flag,
    exact_integer,
    exact_number,
    is_text,
    put_count,
    put_seconds,
    shown_option,
)
from .values import MAX_POSITION, MAX_THREADS

FP8_CACHE = "fp8_e4m3"
KV_CACHE_DTYPES = ("auto", FP8_CACHE, "fp8")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
TRANSFER_ROLES = ("producer", "consumer", "both")
LOAD_FAILURE_POLICIES = ("recompute", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """Size of the KV cache, and reuse of its blocks.

    max_tokens                 tokens that the cache can hold for all requests together, rounded up to whole blocks;
                               None: as many as free_gpu_memory_fraction allows
    max_attention_window       tokens that a query attends to; None: all tokens up to the query
    sink_token_length          number of first tokens that stay visible outside the window
    free_gpu_memory_fraction   largest share of the free memory that the cache may take, 0 < x <= 1. Free memory is
                               what the weights and one step's buffers leave. On a CPU this is host memory, and the
                               default pool is at most 2 GiB
    enable_block_reuse         start a prompt after its longest prefix that earlier prompts and outputs left in the
                               cache
    enable_partial_reuse       also reuse a cached block of which only the first tokens match the prompt. The engine
                               copies the block if another request uses it or another cached block follows it
    tokens_per_block           8, 16, 32, 64, 128 or 256; every context chunk but the last is a multiple of it. A GPU
                               with Triton's kernels refuses 8, and blocks too large for its shared memory, such as 256
                               tokens of float32 in heads of 256 entries
    kv_cache_dtype             "auto": the dtype of the activations; "fp8_e4m3", or "fp8": keys and values are rounded
                               to 8 bits, so that a pool of bfloat16's size has twice the blocks. Outputs change a bit
    host_cache_size            bytes of host memory, pinned for a GPU, for reusable blocks evicted from the pool
    disk_cache_path            directory that keeps reusable blocks for later runs of the engine, and for other engines;
                               made if it is missing; None: none. With it, host_cache_size 0 stands for 64 blocks. A
                               relative path becomes an absolute one at once
    disk_cache_size            largest number of bytes of all blocks in the directory; needed unless it is only read
    disk_cache_read_only       use what is in the directory, and change nothing
    disk_io_threads            threads that read and write it
    disk_min_tokens            fewer tokens of a prompt are computed, not loaded
    event_buffer_max_size      events of the cache to keep for `GptManager.take_kv_events`; 0: none
    event_hash_key             1 to 64 bytes: engines with equal keys give equal blocks equal hashes in their events;
                               None: a random key of this engine
    event_tokens               whether the events have the token ids of blocks, which are prompts and outputs
    """

    max_tokens: int | None = None
    max_attention_window: int | None = None
    sink_token_length: int = 0
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = False
    tokens_per_block: int = 64
    host_cache_size: int = 0
    enable_partial_reuse: bool = True
    disk_cache_path: str | PathLike[str] | None = None
    disk_cache_size: int | None = None
    disk_cache_read_only: bool = False
    disk_io_threads: int = 2
    disk_min_tokens: int = 256
    event_buffer_max_size: int = 0
    event_hash_key: bytes | None = field(default=None, repr=False)
    event_tokens: bool = False
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        put_count(self, "max_tokens", optional=True, owner="KvCacheConfig.")
        put_count(self, "max_attention_window", optional=True, owner="KvCacheConfig.")
        put_count(self, "sink_token_length", minimum=0, maximum=MAX_POSITION, owner="KvCacheConfig.")
        put_count(self, "host_cache_size", minimum=0, owner="KvCacheConfig.")
        put_count(self, "event_buffer_max_size", minimum=0, owner="KvCacheConfig.")
        put_count(self, "disk_cache_size", optional=True, owner="KvCacheConfig.")
        put_count(self, "disk_io_threads", maximum=MAX_THREADS, owner="KvCacheConfig.")
        put_count(self, "disk_min_tokens", owner="KvCacheConfig.")
        check_flag("KvCacheConfig.disk_cache_read_only", self.disk_cache_read_only)
        self._check_disk()
        check_flag("KvCacheConfig.event_tokens", self.event_tokens)
        if self.event_hash_key is not None:
            check_hash_key("KvCacheConfig.event_hash_key", self.event_hash_key)
        check_flag("KvCacheConfig.enable_block_reuse", self.enable_block_reuse)
        check_flag("KvCacheConfig.enable_partial_reuse", self.enable_partial_reuse)
        fraction, size = exact_number(self.free_gpu_memory_fraction), exact_integer(self.tokens_per_block)
        if fraction is None or not 0 < fraction <= 1:
            raise ConfigError(
                f"KvCacheConfig.free_gpu_memory_fraction is {shown_option(self.free_gpu_memory_fraction)}",
                "it must be in (0, 1]", "0.9 is the default")
        if size not in BLOCK_SIZES:
            raise ConfigError(f"KvCacheConfig.tokens_per_block is {shown_option(self.tokens_per_block)}",
                              f"it must be one of {', '.join(map(str, BLOCK_SIZES))}", "64 is the default")
        if not isinstance(self.kv_cache_dtype, str) or self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"KvCacheConfig.kv_cache_dtype is {shown_option(self.kv_cache_dtype)}",
                              f"it must be one of {', '.join(KV_CACHE_DTYPES)}", '"auto" is the default')
        if self.kv_cache_dtype == "fp8":                      # vLLM's short name
            object.__setattr__(self, "kv_cache_dtype", FP8_CACHE)
        object.__setattr__(self, "free_gpu_memory_fraction", fraction)
        object.__setattr__(self, "tokens_per_block", size)
        if self.sink_token_length and self.max_attention_window is None:
            raise ConfigError(f"sink_token_length is {self.sink_token_length} but max_attention_window is not set",
                              "sink tokens have an effect with an attention window only", "set both or neither")
        if self.host_cache_size and not self.enable_block_reuse:
            raise ConfigError(f"host_cache_size is {self.host_cache_size:,} but enable_block_reuse is not set",
                              "host memory only keeps reusable blocks", "set both or neither")
        if self.event_buffer_max_size and not self.enable_block_reuse:
            raise ConfigError(f"event_buffer_max_size is {self.event_buffer_max_size:,} but enable_block_reuse is not "
                              "set", "events are about reusable blocks", "set both or neither")

    def _check_disk(self) -> None:
        path = self.disk_cache_path
        if path is None:
            if self.disk_cache_size is not None:
                raise ConfigError(f"disk_cache_size is {self.disk_cache_size:,} but disk_cache_path is not set",
                                  "it is the size of that directory", "set both or neither")
            if self.disk_cache_read_only:
                raise ConfigError("disk_cache_read_only is set but disk_cache_path is not set",
                                  "it is about that directory", "set disk_cache_path, or leave both out")
            return
        text = fspath(path) if isinstance(path, str | PathLike) else None
        if not text or not is_text(text, "surrogateescape") or "\0" in text:
            raise ConfigError(f"KvCacheConfig.disk_cache_path is {path!r:.200}",
                              "expected the path of a directory, or None", "pass a str or a pathlib.Path")
        with suppress(FileNotFoundError):          # the current directory is gone; the store refuses the path
            text = os.path.join(os.getcwd(), text)
        object.__setattr__(self, "disk_cache_path", text)
        if self.disk_cache_size is None and not self.disk_cache_read_only:
            raise ConfigError(f"disk_cache_path is {self.disk_cache_path!r} but disk_cache_size is not set",
                              "expected the largest number of bytes of its blocks",
                              "set disk_cache_size, or disk_cache_read_only")
        if not self.enable_block_reuse:
            raise ConfigError(f"disk_cache_path is {self.disk_cache_path!r} but enable_block_reuse is not set",
                              "the directory keeps reusable blocks", "set both or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """Prompts that one engine computes and another continues, see docs/kv-cache.md. Both have one model, dtype and
    tokens_per_block.

    role                  "producer": computes prompts of `context_only` requests, and hands their blocks over;
                          "consumer": takes them for `generation_only` requests; "both"
    host, port            address of this machine at which the consumers reach a producer; port 0: any free one
    peers                 hosts from which a consumer takes blocks; others are not connected to. None: `host` alone
    load_failure_policy   what a consumer does if blocks do not come: "recompute" computes them, "fail" ends the request
                          with KV_TRANSFER_FAILED
    held_blocks_fraction  largest share of the host blocks that wait for consumers, 0 < x <= 1; then the oldest go
    timeout_s             seconds for which a producer holds the blocks of a request
    load_timeout_s        seconds for which a request of a consumer waits for blocks
    """

    role: str = "both"
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] | None = None
    load_failure_policy: str = "recompute"
    held_blocks_fraction: float = 0.5
    timeout_s: float = 60
    load_timeout_s: float = 5

    def __post_init__(self) -> None:
        owner = "KvTransferConfig."
        for name, allowed in (("role", TRANSFER_ROLES), ("load_failure_policy", LOAD_FAILURE_POLICIES)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ConfigError(f"{owner}{name} is {value!r:.200}", f"expected one of {', '.join(allowed)}")
        host, peers = "a name or an address of 1 to 255 ASCII characters", self.peers
        if not is_host(self.host):
            raise ConfigError(f"{owner}host is {self.host!r:.200}",
                              f"expected {host}, at which consumers reach this one", 'pass for instance "10.0.0.1"')
        if self.host in ("0.0.0.0", "::"):
            raise ConfigError(f"{owner}host is {self.host!r}", "it stands for all addresses of this machine, and no "
                              "consumer can connect to it", 'pass the one that consumers reach, such as "10.0.0.1"')
        if peers is not None and not (isinstance(peers, list | tuple) and all(map(is_host, peers))):
            raise ConfigError(f"{owner}peers is {peers!r:.200}", f"expected None, or a tuple of which each is {host}",
                              'pass for instance ("10.0.0.1",)')
        object.__setattr__(self, "peers", None if peers is None else tuple(peers))
        put_count(self, "port", minimum=0, maximum=65535, owner=owner)
        fraction = exact_number(self.held_blocks_fraction)
        if fraction is None or not 0 < fraction <= 1:
            raise ConfigError(f"{owner}held_blocks_fraction is {shown_option(self.held_blocks_fraction)}",
                              "it must be in (0, 1]", "0.5 is the default")
        object.__setattr__(self, "held_blocks_fraction", fraction)
        for name in ("timeout_s", "load_timeout_s"):
            put_seconds(self, name, positive=True, owner=owner)

    @property
    def produces(self) -> bool:
        return self.role != "consumer"

    @property
    def consumes(self) -> bool:
        return self.role != "producer"


def is_host(value: Any) -> bool:
    """Whether a value can be the name or the address of a machine."""
    return isinstance(value, str) and 1 <= len(value) <= 255 and value.isascii() and value.isprintable()
