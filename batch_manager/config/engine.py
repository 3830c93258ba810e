"""The optional settings of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigError
from ..names import ContextChunkingPolicy
from ..option_values import check_flag, put_count, put_seconds
from .adapters import PeftCacheConfig
from .kv_cache import KvCacheConfig, KvTransferConfig
from .other_engines import NOT_HERE, OPTIONS_OF_OTHER_ENGINES
from .parallel import ParallelConfig
from .speculative import SpeculativeConfig
from .values import MAX_THREADS, QUANTIZATIONS

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")
QUANTIZED_ACTIVATIONS = ("int8",)


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
                                GPU without Triton, and on a CPU whose matrix products depend on the row index; so
                                are requests with draft_logits. Does not cover a batched logits post-processor that
                                mixes rows
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
                                without beams, and without a post-processor that has no `allowed_drafts`; except with
                                InferenceRequest(speculation=False). A draft model rules run_ahead out. None: no drafts.
                                Refused with TrtGptModelType.V1 and Parts.stages
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
                mapping = ", a mapping with its fields" if kind is SpeculativeConfig else ""
                raise ConfigError(f"{name} is of type {type(value).__name__}",
                                  f"expected a {kind.__name__}{mapping}{'' if is_needed else ', or None'}",
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
    if name in OPTIONS_OF_OTHER_ENGINES:
        return f"{name} is an option of another engine: pass " + way.format(OPTIONS_OF_OTHER_ENGINES[name])
    if name in NOT_HERE:
        return f"{name} is no option of the engine: {NOT_HERE[name].replace('{}', name)}"
    meant = get_close_matches(name[:64], known, 1)
    return f"unknown option {name[:64]!r}; " + (f"did you mean {way.format(meant[0])}?" if meant else
                                               f"the options are {', '.join(known)}")
