"""The user's configuration, and the limits of the engine, which options.py computes from it.

The dataclasses are frozen. Their field names are TensorRT-LLM's names in snake_case. `None` means that the engine
chooses the value.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike, fspath
from typing import Any

from .adapter_values import LARGEST_ADAPTER_SIZE, MODULE_NAMES
from .errors import ConfigError
from .kv_events import KvEvent, check_hash_key
from .names import ContextChunkingPolicy, SchedulerPolicy
from .option_values import (
    check_flag,
    exact_integer,
    exact_number,
    is_text,
    object_of_option,
    put_count,
    put_seconds,
    shown_option,
)
from .seams import Clock, ModelBackend

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")
QUANTIZATIONS = ("int8", "int4")
QUANTIZED_ACTIVATIONS = ("int8",)
FP8_CACHE = "fp8_e4m3"
KV_CACHE_DTYPES = ("auto", FP8_CACHE, "fp8")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
COLLECTIVES = ("nccl", "gloo")
TRANSFER_ROLES = ("producer", "consumer", "both")
LOAD_FAILURE_POLICIES = ("recompute", "fail")
MAX_POSITION = 2**31 - 1      # steps compute positions as int32
MAX_THREADS = 1024            # with several thousand threads, OpenMP ends the process when it cannot start a thread
MAX_RANKS = 1024              # of each kind of parallelism
MAX_DRAFT_TOKENS = 64         # of a sequence in one step
DRAFT_METHODS = ("ngram", "suffix", "custom", "draft_model")
_LIKE_THIS = """{"method": "ngram", "num_speculative_tokens": 7}"""
MAX_LOOKUP = 16               # tokens of an n-gram
MAX_TREE_DEPTH = 256          # tokens of a path of a suffix tree


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
class ParallelConfig:
    """One model over several processes, its ranks, each with an engine of its own. Every rank constructs its engine
    with equal arguments; only `rank`, `local_rank` and `device_ids` may differ.

    tensor_parallel_size     ranks that share each layer
    pipeline_parallel_size   stages, each with a part of the layers. The product of both sizes is the number of ranks
    rank, local_rank         number of this process among all ranks and among those of its machine, from 0; None: from
                             the variables of the launcher (torchrun, mpirun, srun). With a rank, these variables are
                             not read, and a local_rank of None is the rank
    leader                   "host:port" at which the ranks meet, on the machine of rank 0; None:
                             $MASTER_ADDR:$MASTER_PORT
    device_ids               number of the GPU of each local rank; None: the local rank is that number. With one rank,
                             `device` names the GPU
    collectives              "nccl" or "gloo"; None: "nccl" on GPUs, "gloo" on CPUs
    rank_timeout_s           a rank that is silent for this many seconds counts as lost, and the engine ends
    connect_timeout_s        seconds within which all ranks must have come up
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int | None = None
    local_rank: int | None = None
    leader: str | None = None
    device_ids: tuple[int, ...] | None = None
    collectives: str | None = None
    rank_timeout_s: float = 60
    connect_timeout_s: float = 300

    def __post_init__(self) -> None:
        owner = "ParallelConfig."
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            put_count(self, name, maximum=MAX_RANKS, owner=owner)
        for name in ("rank", "local_rank"):
            put_count(self, name, minimum=0, maximum=MAX_RANKS**2, optional=True, owner=owner)
        if self.rank is not None and self.rank >= self.num_ranks:
            raise ConfigError(f"{owner}rank is {self.rank}", f"expected a rank in 0..{self.num_ranks - 1}, because "
                              f"{self.sizes}", "correct the rank or the sizes")
        if self.leader is not None:
            address_of(self.leader, f"{owner}leader")
        if self.device_ids is not None:
            numbers = ([exact_integer(number) for number in self.device_ids]
                       if isinstance(self.device_ids, list | tuple) else [])
            if not numbers or any(number is None or number < 0 for number in numbers):
                raise ConfigError(f"{owner}device_ids is {self.device_ids!r}",
                                  "expected the number of a GPU, from 0, for each rank of a machine, or None",
                                  "pass a list like [0, 1]")
            object.__setattr__(self, "device_ids", tuple(numbers))
        if self.collectives is not None and self.collectives not in COLLECTIVES:
            raise ConfigError(f"{owner}collectives is {self.collectives!r}",
                              f"expected one of {', '.join(COLLECTIVES)}, or None", "leave it out")
        for name in ("rank_timeout_s", "connect_timeout_s"):
            put_seconds(self, name, positive=True, owner=owner)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sizes(self) -> str:
        """Both sizes in words, for errors."""
        return (f"tensor_parallel_size is {self.tensor_parallel_size} and pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}")


def address_of(text: Any, name: str) -> tuple[str, int]:
    """Return host and port of "host:port"; an IPv6 address is in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else "" if ":" in host else host
    if not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port[:9]) <= 65535:
        raise ConfigError(f"{name} is {text!r}", "expected host:port with a port in 1..65535",
                          'pass for instance "10.0.0.1:29500", or "127.0.0.1:29500" on one machine')
    return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftCacheConfig:
    """The memory for LoRA adapters, on the host and on the device.

    host_cache_size          bytes of host memory for the adapters that the engine knows
    device_cache_percent     share of the free device memory, 0 < x < 1, for adapters of running requests. Free memory
                             is what the weights leave
    num_host_module_layer    size of the host memory as a number of projections of rank 1, counted in every layer; 0:
                             host_cache_size decides
    num_device_module_layer  likewise for the device; 0: device_cache_percent decides
    max_adapter_size         largest rank of an adapter
    lora_modules             names of the modules that adapters may change, from batch_manager.MODULE_NAMES; None: all
                             that the model has
    lora_prefetch_dir        folder of adapters that are loaded at the start, in subfolders named by their task ids
    """

    host_cache_size: int = 1 << 30
    device_cache_percent: float = 0.02
    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    max_adapter_size: int = 64
    lora_modules: tuple[str, ...] | None = None
    lora_prefetch_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        put_count(self, "host_cache_size", owner="PeftCacheConfig.")
        put_count(self, "max_adapter_size", maximum=LARGEST_ADAPTER_SIZE, owner="PeftCacheConfig.")
        for name in ("num_host_module_layer", "num_device_module_layer"):
            put_count(self, name, minimum=0, owner="PeftCacheConfig.")
        share = exact_number(self.device_cache_percent)
        if share is None or not 0 < share < 1:
            raise ConfigError(f"PeftCacheConfig.device_cache_percent is {shown_option(self.device_cache_percent)}",
                              "it must be in (0, 1): the KV cache has the rest", "0.02 is the default")
        object.__setattr__(self, "device_cache_percent", share)
        names = self.lora_modules
        if names is not None:
            if not isinstance(names, list | tuple) or not names or not set(map(str, names)) <= set(MODULE_NAMES):
                raise ConfigError(f"PeftCacheConfig.lora_modules is {names!r}"[:200],
                                  f"expected a list of names from {', '.join(MODULE_NAMES)}", "leave it None for all")
            object.__setattr__(self, "lora_modules", tuple(names))
        folder = self.lora_prefetch_dir
        if folder is not None and not isinstance(folder, str | PathLike):
            raise ConfigError(f"PeftCacheConfig.lora_prefetch_dir is of type {type(folder).__name__}",
                              "expected a path, or None", "leave it None to load no adapters at the start")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How the engine drafts tokens, which the model verifies in one step. The tokens of a request do not change.

    method                   "ngram": the tokens after the earlier occurrence of the request's last tokens, in its own
                             prompt and output, that agrees with the most of them. "suffix": those that most often
                             followed the longest such occurrence, by the library arctic-inference. "custom":
                             Parts.drafter drafts. "draft_model": a second model drafts, and samples as the request
    num_speculative_tokens   most drafts of a sequence in a step
    prompt_lookup_max, prompt_lookup_min   how many of the last tokens must have occurred: the most, else fewer
    suffix_decoding_max_tree_depth    of "suffix": most tokens of an occurrence with its drafts
    suffix_decoding_max_spec_factor   of "suffix": most drafts for each token of the occurrence, above 0
    suffix_decoding_min_token_prob    of "suffix": drafts end before a token that followed more rarely, 0 to 1
    model                    of "draft_model": path like `model_path`, with the same vocabulary
    quantization             of `model`, as in TrtGptModelOptionalParams
    """

    method: str = "ngram"
    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str | PathLike[str] | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.method not in DRAFT_METHODS:
            raise ConfigError(f"SpeculativeConfig.method is {self.method!r}"[:200],
                              f"expected one of {', '.join(map(repr, DRAFT_METHODS))}",
                              "heads of other engines are not supported")
        self._check_model()
        put_count(self, "num_speculative_tokens", maximum=MAX_DRAFT_TOKENS, owner="SpeculativeConfig.")
        put_count(self, "prompt_lookup_max", maximum=MAX_LOOKUP, owner="SpeculativeConfig.")
        put_count(self, "prompt_lookup_min", maximum=self.prompt_lookup_max, owner="SpeculativeConfig.")
        put_count(self, "suffix_decoding_max_tree_depth", minimum=2, maximum=MAX_TREE_DEPTH, owner="SpeculativeConfig.")
        for name, least, most, expectation in (
                ("suffix_decoding_max_spec_factor", 1 / MAX_TREE_DEPTH, MAX_TREE_DEPTH, "1/256 to 256"),
                ("suffix_decoding_min_token_prob", 0, 1, "0 to 1")):
            number = exact_number(getattr(self, name))
            if number is None or not least <= number <= most:
                raise ConfigError(f"SpeculativeConfig.{name} is {shown_option(getattr(self, name))}",
                                  f"expected a number from {expectation}")
            object.__setattr__(self, name, float(number))

    def _check_model(self) -> None:
        path, has_model = self.model, self.method == "draft_model"
        if (path is not None) is not has_model:
            raise ConfigError(f"SpeculativeConfig.method is {self.method!r} with {'a' if path else 'no'} model"[:200],
                              "'draft_model' is the method of a model", "set both or neither")
        if has_model and not (isinstance(path, str | PathLike) and isinstance(fspath(path), str) and fspath(path)):
            raise ConfigError(f"SpeculativeConfig.model is {path!r}"[:200], "expected the path of a model",
                              "pass the folder of a Hugging Face checkpoint or a .gguf file")
        if path is not None:
            object.__setattr__(self, "model", fspath(path))
        if self.quantization is not None and not (isinstance(self.quantization, str) and has_model
                                                  and self.quantization in QUANTIZATIONS):
            raise ConfigError(f"SpeculativeConfig.quantization is {self.quantization!r} with method {self.method!r}",
                              f"expected one of {', '.join(QUANTIZATIONS)}, with 'draft_model'", "leave it out")

    @classmethod
    def of(cls, given: Mapping[str, Any] | str) -> "SpeculativeConfig":
        """Return the config of a mapping with vLLM's keys, or of its JSON, with a `method`. Raises ConfigError."""
        if isinstance(given, str):
            given = object_of_option("speculative_config", given, _LIKE_THIS)
        known = list(cls.__dataclass_fields__)
        if unknown := [str(name)[:64] for name in given if name not in known]:
            raise ConfigError(f"speculative_config has {unknown[0]!r}", f"its keys are {', '.join(known)}",
                              "leave it out: heads of other engines are not supported")
        if "method" not in given:
            raise ConfigError("speculative_config has no method",
                              f"expected one of {', '.join(map(repr, DRAFT_METHODS))}",
                              f"pass for instance {_LIKE_THIS}")
        return cls(**given)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtGptModelOptionalParams:
    """The engine's optional settings.

    enable_trt_overlap          run two micro-batches of disjoint requests: one computes while the other is planned
    run_ahead                   launch the next step before the tokens of the previous step are read, so that the device
                                does not wait for the host. None: on, if the backend's `start` returns before its step
                                is done and no other option or part rules it out. Requests get the same tokens with and
                                without run_ahead. With it, requests with beams or a logits post-processor run in every
                                second step. Refused with enable_trt_overlap, with TrtGptModelType.V1, and with a
                                Parts.scheduler, unless it looks at lengths only and has `plans_by_lengths = True`
    enable_chunked_context      allow a prompt to be computed in chunks over several iterations
    context_chunking_policy     how to divide the token budget when it is too small for all waiting prompts
    normalize_log_probs         has no effect. Log-probabilities are over the whole vocabulary and taken after penalties
                                and temperature, as in TensorRT-LLM with False. Requests with raw_log_probs get them
                                from the model's unchanged logits. In TensorRT-LLM, True normalizes over the tokens of
                                top-k, and every log-probability of a greedy request is 0
    max_batch_size              requests in one step
    max_num_tokens              tokens in one step, over all its requests
    max_seq_len                 prompt plus generated tokens of one request; None: the model's max_position_embeddings
    max_num_sequences           requests active at a time; None: max_batch_size, times the number of pipeline stages;
                                -1: unbounded
    device                      "cuda", "cuda:1", "cpu"; None: "cuda" if there is a GPU, else "cpu"
    dtype                       "auto": the checkpoint's dtype on a GPU, float32 on a CPU; or a dtype by name
    load_format                 "auto": safetensors; "dummy": seeded random weights, config.json is enough
    gather_context_logits, gather_generation_logits   whether requests may ask for logits
    num_threads                 threads of a CPU backend, at most 1,024; None: torch's current setting. The number
                                applies only to the worker's thread, callbacks included. If steps are compiled
                                (cpu_compile), torch has one thread inside a step, also in stages and post-processors.
                                Compiled steps use fewer threads while other programs keep the cores busy
    cuda_graphs                 replay captured graphs for steps whose requests have no beams, context logits or
                                embeddings and use no sampling options except temperature, top-k, top-p and min-p. Other
                                steps, and large steps with prompts, launch each kernel separately. None: on a GPU with
                                Triton, unless a capture fails or a replayed step has other results than its kernels
                                launched one by one; a warning then gives the reason. True makes that an error, and is
                                refused on a CPU, and with a custom attention or TrtGptModelType.V1
    deterministic               produce bitwise the same tokens, log-probabilities and logits for a request alone or
                                batched, whole or chunked, paused or not, cached or not, in any layout. Holds for one
                                machine, build of torch and number of threads. Where steps are compiled (cpu_compile), a
                                step takes as long as without it; elsewhere it is slower, see docs/devices.md. Refused
                                with a custom attention or backend, with a model class that does not promise it, on a
                                GPU without Triton, and on a CPU whose matrix products depend on the row index. Does not
                                cover a batched logits post-processor that mixes rows
    flush_stats_when_idle       send one more statistics record after the last request has ended
    log_callback_errors         for development: log the text of a callback's exception, which may quote a prompt.
                                False: log only the type and traceback lines of the exception
    max_queued_requests         requests waiting inside the manager; further requests are refused with QUEUE_FULL
    max_queued_tokens           prompt tokens waiting inside the manager
    max_request_bytes           bytes of one request's tensors
    max_bytes_in_flight         bytes of all live requests: their tensors and the logits that they ask for
    max_admissions_per_iteration   requests decided in one iteration; bounds the delay of running requests
    idle_poll_interval_s        seconds between two calls of the get callback when there is nothing to do
    hang_warning_s              seconds without a heartbeat of the worker before the engine logs an error; 0: never
    cpu_compile                 on a CPU, run a step as one call of C code, which is compiled once for this processor
                                and kept in $XDG_CACHE_HOME or ~/.cache. None: compile if there is a C compiler ($CC,
                                cc, gcc or clang) and the model and the options allow it. True: compile, or raise
                                ConfigError if this is impossible. False: use torch
    model_implementation        "native": a model class of this package, or of register_model; "transformers": the
                                class of transformers (extra hf), for model types that are proven to run in the engine;
                                "auto": native if there is one, else transformers
    quantization                "int8" or "int4": quantise the matrices of the layers, but not embedding and head, while
                                they are loaded, with a scale for each 32 inputs. For compiled steps, or a GPU without
                                deterministic; refused elsewhere, without a C compiler, and for a checkpoint that is
                                quantised already. None: as they are stored
    quantized_activations       "int8": round what quantised weights are multiplied with to 8 bits, with a scale for
                                each 32 numbers, as llama.cpp does. Products take about half the time in batches, and
                                have an error of about 0.6 %, so tokens can differ from those of the decoded weights.
                                Refused without compiled steps, and where no weights are quantised. None: exact products
    parallel_config             a ParallelConfig: this process is one of several that run the model together; None: the
                                process runs it alone
    peft_cache_config           memory for LoRA adapters; None: requests with an adapter are refused. Needs a backend
                                whose BackendInfo has max_adapter_size. Refused with TrtGptModelType.V1
    speculative_config          a SpeculativeConfig, or a mapping with its fields: the engine drafts tokens for requests
                                without beams and post-processors, except with InferenceRequest(speculation=False);
                                a draft model rules run_ahead out. None: no drafts. Refused with TrtGptModelType.V1
                                and Parts.stages, and a draft model with several ranks
    kv_transfer_config          a KvTransferConfig: prompts of some requests are computed here for other engines, or by
                                other engines for this one. None: requests of these types are refused. Needs
                                enable_block_reuse. Refused with TrtGptModelType.V1, sink tokens and several ranks
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_trt_overlap: bool = False
    run_ahead: bool | None = None
    enable_chunked_context: bool = False
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    normalize_log_probs: bool = True
    max_batch_size: int = 256
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_num_sequences: int | None = None
    device: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    gather_context_logits: bool = True
    gather_generation_logits: bool = True
    num_threads: int | None = None
    cuda_graphs: bool | None = None
    deterministic: bool = False
    flush_stats_when_idle: bool = False
    log_callback_errors: bool = False
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 * 1024 * 1024
    max_request_bytes: int = 64 * 1024 * 1024
    max_bytes_in_flight: int = 4 * 1024 * 1024 * 1024
    max_admissions_per_iteration: int = 4096
    idle_poll_interval_s: float = 0.0048
    hang_warning_s: float = 30.0
    cpu_compile: bool | None = None
    model_implementation: str = "auto"
    quantization: str | None = None
    quantized_activations: str | None = None
    parallel_config: ParallelConfig | None = None
    peft_cache_config: PeftCacheConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    kv_transfer_config: KvTransferConfig | None = None

    def __new__(cls, *args: Any, **options: Any) -> "TrtGptModelOptionalParams":
        for name in options:                            # __init__ would only report an unknown name
            if name not in cls.__dataclass_fields__:
                raise TypeError(unknown_option(name))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        for name, kind in (("kv_cache_config", KvCacheConfig), ("peft_cache_config", PeftCacheConfig),
                           ("speculative_config", SpeculativeConfig), ("kv_transfer_config", KvTransferConfig),
                           ("parallel_config", ParallelConfig)):
            value, is_needed = getattr(self, name), name == "kv_cache_config"
            if not isinstance(value, kind) and (is_needed or value is not None):
                raise ConfigError(f"{name} is of type {type(value).__name__}",
                                  f"expected a {kind.__name__}{'' if is_needed else ', or None'}",
                                  f"pass {kind.__name__}(...)")
        if self.kv_transfer_config is not None and (not self.kv_cache_config.enable_block_reuse
                                                    or self.kv_cache_config.sink_token_length):
            raise ConfigError("kv_transfer_config is set, and KvCacheConfig has "
                              + (f"sink_token_length={self.kv_cache_config.sink_token_length}"
                                 if self.kv_cache_config.sink_token_length else "enable_block_reuse=False"),
                              "only reusable blocks are handed over", "set enable_block_reuse, without sink tokens")
        for name in ("enable_trt_overlap", "enable_chunked_context", "normalize_log_probs", "gather_context_logits",
                     "gather_generation_logits", "deterministic", "flush_stats_when_idle", "log_callback_errors"):
            check_flag(name, getattr(self, name))
        for name in ("cpu_compile", "cuda_graphs", "run_ahead"):
            check_flag(name, getattr(self, name), optional=True)
        if self.run_ahead and self.enable_trt_overlap:
            raise ConfigError("run_ahead and enable_trt_overlap are both set",
                              "overlapped micro-batches have disjoint requests, so no request can run ahead",
                              "leave one of them out")
        if not isinstance(self.context_chunking_policy, ContextChunkingPolicy):
            raise ConfigError(f"context_chunking_policy is {self.context_chunking_policy!r}",
                              "expected a member of ContextChunkingPolicy", "FIRST_COME_FIRST_SERVED is the default")
        for name in ("max_batch_size", "max_num_tokens", "max_request_bytes", "max_bytes_in_flight",
                     "max_admissions_per_iteration"):
            put_count(self, name)
        for name in ("max_queued_requests", "max_queued_tokens"):
            put_count(self, name, minimum=0)
        put_count(self, "max_seq_len", minimum=2, optional=True)
        put_count(self, "num_threads", optional=True, maximum=MAX_THREADS)
        put_count(self, "max_num_sequences", optional=True, other=(-1, "no limit"))
        if self.device is not None and not isinstance(self.device, str):
            raise ConfigError(f"device is {self.device!r}", 'expected one of "cpu", "cuda", "cuda:1", ..., or None',
                              "leave it None for a GPU if there is one")
        for name, allowed, default in (("dtype", DTYPES, '"auto"'), ("load_format", LOAD_FORMATS, '"auto"'),
                                       ("model_implementation", MODEL_IMPLEMENTATIONS, '"auto"'),
                                       ("quantization", (None, *QUANTIZATIONS), "None"),
                                       ("quantized_activations", (None, *QUANTIZED_ACTIVATIONS), "None")):
            value = getattr(self, name)
            if not isinstance(value, str | None) or value not in allowed:
                raise ConfigError(f"{name} is {value!r}", f"expected one of {', '.join(map(str, allowed))}",
                                  f"{default} is the default")
        put_seconds(self, "idle_poll_interval_s", positive=True)
        put_seconds(self, "hang_warning_s", positive=False)


# An option of vLLM, transformers, llama.cpp or TensorRT-LLM -> what to pass here.
_OPTIONS_OF_OTHER_ENGINES = {
    "gpu_memory_utilization": "kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=...)",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=...)",
    "kv_cache_memory_bytes": "kv_cache_config=KvCacheConfig(max_tokens=...)",
    "num_gpu_blocks_override": "kv_cache_config=KvCacheConfig(max_tokens=...)",
    "block_size": "kv_cache_config=KvCacheConfig(tokens_per_block=...)",
    "enable_prefix_caching": "kv_cache_config=KvCacheConfig(enable_block_reuse=...)",
    "swap_space": "kv_cache_config=KvCacheConfig(host_cache_size=...)",
    "max_model_len": "max_seq_len=...",
    "context_length": "max_seq_len=...",
    "num_ctx": "max_seq_len=...",
    "mem_fraction_static": "kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=...)",
    "n_ctx": "max_seq_len=...",
    "max_num_seqs": "max_batch_size=...",
    "max_num_batched_tokens": "max_num_tokens=...",
    "enable_chunked_prefill": "enable_chunked_context=...",
    "enforce_eager": "cuda_graphs=False, cpu_compile=False",
    "torch_dtype": "dtype=...",
    "device_map": "device=...",
    "n_threads": "num_threads=...",
    "model_impl": "model_implementation=...",
    "load_in_8bit": 'quantization="int8"',
    "load_in_4bit": 'quantization="int4"',
    **dict.fromkeys(("speculative_model", "draft_model"),
                    'speculative_config=SpeculativeConfig("draft_model", model=...)'),
    "tp_size": "parallel_config=ParallelConfig(tensor_parallel_size=...)",
    "pp_size": "parallel_config=ParallelConfig(pipeline_parallel_size=...)",
}
# An option of other engines without a counterpart -> what happens here.
_ONE_DEVICE = "a process has one device, device=...; parallel_config=ParallelConfig(...) runs a model on several"
_IN_THE_CALL = "it is an option of each call, for example LLM.generate(prompts, {}=...)"
_NOT_HERE = {
    **dict.fromkeys(("tensor_split", "main_gpu", "n_gpu_layers", "world_size"), _ONE_DEVICE),
    **dict.fromkeys(("data_parallel_size", "dp_size"), "start an engine for each replica"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "repetition_penalty"),
                    _IN_THE_CALL),
    "quantization_config": 'it is read from the checkpoint; quantization="int8" or "int4" quantises a plain one',
    **dict.fromkeys(("trust_remote_code", "attn_implementation", "tokenizer_mode"),
                    "code of a checkpoint never runs, and the engine has its own attention and tokenizers"),
    **dict.fromkeys(("revision", "download_dir", "tokenizer_revision"),
                    "models are not downloaded; `hf download NAME --revision REVISION` prints the path to pass"),
    **dict.fromkeys(("enable_thinking", "chat_template_kwargs"),
                    "a variable of the chat template: LLM.chat(messages, template_options={'enable_thinking': ...})"),
    "served_model_name": "`batch-manager serve` has --served-model-name",
}


def unknown_option(name: str, inside: str = "") -> str:
    """The text of the error for an option that does not exist, with the option that was meant.

    inside   "optional_params" if the name was given next to this argument; "": to TrtGptModelOptionalParams
    """
    known = TrtGptModelOptionalParams.__dataclass_fields__
    way = f"{inside}=TrtGptModelOptionalParams({{}})" if inside else "{}"
    if inside and name in known:
        return f"{name} is a field of TrtGptModelOptionalParams: pass " + way.format(f"{name}=...")
    for field_name, owner in (("kv_cache_config", KvCacheConfig), ("parallel_config", ParallelConfig)):
        if name in owner.__dataclass_fields__:
            return (f"{name} is a field of {owner.__name__}: pass "
                    + way.format(f"{field_name}={owner.__name__}({name}=...)"))
    if name in _OPTIONS_OF_OTHER_ENGINES:
        return f"{name} is an option of another engine: pass " + way.format(_OPTIONS_OF_OTHER_ENGINES[name])
    if name in _NOT_HERE:
        return f"{name} is no option of the engine: {_NOT_HERE[name].replace('{}', name)}"
    meant = get_close_matches(name[:64], known, 1)
    return f"unknown option {name[:64]!r}; " + (f"did you mean {way.format(meant[0])}?" if meant else
                                               f"the options are {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Parts:
    """Replacements for parts of the engine. A replacement is an object or a factory, never a name.

    scheduler   a RequestScheduler, a CapacityScheduler or a MicroBatchScheduler; or its class if the class takes no
                arguments; or a factory (limits: Limits, kv_cache_manager) of a scheduler. Any object with the methods
                of one of these classes works. A CapacityScheduler is completed with the policy's micro-batch
                scheduler, and a MicroBatchScheduler with the policy's capacity scheduler
    attention   a factory (spec, kv_pool) -> attention implementation. `spec.attention` describes the attention of each
                layer, with the effective windows. With sink tokens, the factory also gets their number, as `sink=`
    backend     a ModelBackend, or a factory () -> ModelBackend; model_path is then not read
    clock       a Clock; while it raises or returns an invalid time, the system's clock continues from the last valid
                reading
    trace       called with an IterationTrace on the worker thread, after each iteration that had an active request or
                refused a request. Exceptions of `trace` are logged and dropped, like those of a callback
    after_responses   () -> None, called on the worker thread once after the last response of an iteration that sent
                responses. Responses of every kind count: new tokens, final responses (also of stopped
                requests), refusals, and the errors SHUTDOWN and ENGINE_FAILED. A host can wake its clients here
                once, instead of once per token. Exceptions are logged and dropped
    at_end      (health) -> None, called on the worker thread once, after the last response and before `shutdown`
                returns, however the worker ends. `health` is the result of `GptManager.health`, with the state
                "STOPPED", or "FAILED" if the process of an AsyncEngine died. Exceptions are logged and dropped
    block_store a stores.BlockStore, which keeps reusable blocks for later runs and other engines, in place of
                KvCacheConfig.disk_cache_path. Needs enable_block_reuse and host_cache_size. Called on threads of the
                engine; its exceptions are logged and counted, and what it lacks is computed
    drafter     a Drafter, with SpeculativeConfig("custom")
    kv_events   (events: Sequence[KvEvent]) -> None, called on the worker thread after an iteration that changed what
                the prefix cache can find. Events are made when they are read first, so another thread should read them.
                Needs enable_block_reuse. Exceptions are logged and dropped
    logits_post_processor_batched   called once per step with the logits of all requests whose logits_post_processor is
                "batched": (request_ids, logits [n, 1, beams, vocab], token_ids) -> None. Changes the logits in place;
                see decoding/logits_post_processors.py
    stages      custom changes of logits: a sequence of LogitsStages, or a factory (num_slots, device) of a sequence.
                They run after the package's biases, penalties and bans; see decoding/stages.py. After an exception, the
                engine bisects the step, and the requests that fail alone end with an error
    """

    scheduler: Any = None
    attention: Callable[..., Any] | None = None
    backend: ModelBackend | Callable[[], ModelBackend] | None = None
    clock: Clock | None = None
    trace: Callable[..., None] | None = None
    after_responses: Callable[[], None] | None = None
    at_end: Callable[[dict[str, Any]], None] | None = None
    kv_events: Callable[[Sequence[KvEvent]], None] | None = None
    block_store: Any = None
    drafter: Any = None
    logits_post_processor_batched: Callable[..., None] | None = None
    stages: Sequence[Any] | Callable[..., Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        if self.stages is not None and not callable(self.stages) and not isinstance(self.stages, list | tuple):
            raise ConfigError(f"Parts.stages is of type {type(self.stages).__name__}",
                              "expected a list or tuple of LogitsStages, a function (num_slots, device) that returns "
                              "one, or None",
                              "put the stages into a list, or leave it None")
        for name, takes in (("attention", "spec, kv_pool"), ("trace", "iteration_trace"), ("after_responses", ""),
                            ("at_end", "health"), ("kv_events", "events"),
                            ("logits_post_processor_batched", "request_ids, logits, token_ids")):
            part = getattr(self, name)
            if part is not None and not callable(part):
                raise ConfigError(f"Parts.{name} is of type {type(part).__name__}",
                                  f"expected a callable with {f'the arguments ({takes})' if takes else 'no arguments'}"
                                  ", or None",
                                  "pass a function, or leave it None")
        for name, protocol, methods in (("block_store", "BlockStore", ("count", "load", "save", "figures", "close")),
                                        ("drafter", "Drafter", ("propose",)),
                                        ("clock", "Clock", ("monotonic", "timestamp"))):
            part = getattr(self, name)
            if part is not None and (isinstance(part, type)
                                     or not all(callable(getattr(part, method, None)) for method in methods)):
                raise ConfigError(f"Parts.{name} is of type {type(part).__name__}",
                                  f"expected an object with the methods of batch_manager.{protocol} "
                                  f"({', '.join(methods)}), or None", "give it these methods, or leave it None")
        if self.backend is not None and not callable(self.backend) and not hasattr(self.backend, "start"):
            raise ConfigError(f"Parts.backend is of type {type(self.backend).__name__}",
                              "expected a ModelBackend, a function without arguments that returns one, or None",
                              "give it the methods of batch_manager.ModelBackend, or leave it None")


@dataclass(frozen=True, slots=True)
class Limits:
    """The resolved limits, for admission and schedulers. No field is None.

    max_batch_size        requests in one step
    max_num_tokens        tokens in one step
    max_seq_len           prompt plus generated tokens of one request
    max_beam_width        largest beam width of a request
    max_num_requests      requests that the capacity scheduler may take in one iteration
    num_micro_batches     steps of disjoint requests that may be in flight at a time
    runs_ahead            a request may be in two successive steps in flight; num_micro_batches is then 1
    max_draft_tokens      most draft tokens of a sequence that a step verifies
    max_adapter_size      largest rank of a LoRA adapter; 0: requests have no adapters
    max_num_sequences     requests active at a time; ignored if unbounded_sequences
    unbounded_sequences   as many active requests as the get callback returns
    vocab_size            vocabulary size of the model
    hidden_size           entries of a token's embedding in the model; 0: the backend takes no embeddings
    num_blocks, tokens_per_block   blocks of the KV cache pool, and tokens per block
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    max_num_requests: int
    max_num_sequences: int
    unbounded_sequences: bool
    vocab_size: int
    num_blocks: int
    tokens_per_block: int
    enable_chunked_context: bool
    context_chunking_policy: ContextChunkingPolicy
    scheduler_policy: SchedulerPolicy
    num_micro_batches: int = 1
    hidden_size: int = 0
    runs_ahead: bool = False
    max_draft_tokens: int = 0
    max_adapter_size: int = 0

    @property
    def window_depth(self) -> int:
        """The maximum number of steps in flight at a time."""
        return 2 if self.runs_ahead else self.num_micro_batches
