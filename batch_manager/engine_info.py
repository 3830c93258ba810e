"""Facts about an engine, for the program that constructed the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .config import Limits
from .seams import BackendInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about an engine. They never change while it lives.

    architecture      architecture of the model, as in config.json; "" if the backend does not state it
    model_implementation   origin of the model class: "native" or "transformers"; "" if the backend does not state it
    vocab_size        token ids are 0 <= id < vocab_size. A tokenizer may have fewer ids
    end_ids           the checkpoint's end ids: `eos_token_id` of generation_config.json, else of config.json.
                      Ids outside the vocabulary are left out. The engine does not apply end ids: a sequence ends only
                      at the ids in the tensor `end_id` of its request
    max_seq_len       largest number of prompt plus generated tokens of one request
    max_batch_size    largest number of requests in one step
    max_num_tokens    largest number of tokens in one step
    max_beam_width    largest beam width of a request
    num_blocks        number of KV cache blocks
    tokens_per_block  number of tokens per block
    device, dtype     by name: "cpu", "cuda:0"; "float32", "bfloat16"
    dispatch          what computes a step: "triton", "compiled", "torch", or the name that a custom backend states
    not_compiled      why steps on a CPU do not run as compiled code, and the way out, for example "found no C compiler:
                      ...; apt-get install gcc"; "" if they do, and on other devices
    not_captured      why steps are not captured as CUDA graphs and replayed, for example "the device is cpu" or
                      "cuda_graphs is False"; "" if they are, and if a custom backend does not state it
    absent            name of each form of a step that the engine lacks -> the reason, see docs/steps.md
    kv_cache_dtype    of keys and values in the KV cache, by name: "bfloat16", "fp8_e4m3"
    quantized_activations   "int8" if quantised weights are multiplied with rounded numbers; "" if not
    """

    architecture: str
    model_implementation: str
    vocab_size: int
    end_ids: tuple[int, ...]
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_beam_width: int
    num_blocks: int
    tokens_per_block: int
    device: str
    dtype: str
    dispatch: str
    not_compiled: str = ""
    not_captured: str = ""
    absent: Mapping[str, str] = field(default_factory=dict, hash=False)
    kv_cache_dtype: str = ""
    quantized_activations: str = ""

    @classmethod
    def of(cls, limits: Limits, backend: BackendInfo) -> "EngineInfo":
        return cls(
            architecture=backend.architecture, model_implementation=backend.model_implementation,
            vocab_size=limits.vocab_size, end_ids=backend.end_ids,
            max_seq_len=limits.max_seq_len, max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens, max_beam_width=limits.max_beam_width, num_blocks=limits.num_blocks,
            tokens_per_block=limits.tokens_per_block, device=backend.device, dtype=backend.dtype,
            dispatch=backend.dispatch, not_compiled=backend.not_compiled, not_captured=backend.not_captured,
            absent=dict(backend.absent), quantized_activations=backend.quantized_activations,
            kv_cache_dtype=backend.dtype if backend.kv_cache_dtype == "auto" else backend.kv_cache_dtype)
