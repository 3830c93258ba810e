"""What a host wants to know of an engine that it has constructed."""

from dataclasses import dataclass

from .config import Limits
from .seams import BackendInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts of an engine, which do not change while it lives.

    architecture      of the model, as config.json names it; "" where a backend does not say
    model_implementation   whose class computes the model: "native" or "transformers"; "" where a backend does not say
    vocab_size        token ids are 0 <= id < vocab_size, of the model (a tokenizer may have fewer)
    end_ids           tokens that end a text, as the checkpoint says: `eos_token_id` of generation_config.json, else of
                      config.json. The engine ends a text at the tensor `end_id` of its request alone
    max_seq_len       prompt plus generated tokens of one request
    max_batch_size    sequences in one step
    max_num_tokens    tokens in one step
    max_beam_width    beams a request may ask for
    num_blocks        KV cache blocks
    tokens_per_block  tokens that a block holds
    device, dtype     in words: "cpu", "cuda:0"; "float32", "bfloat16"
    dispatch          what runs the kernels: "triton", "torch", or what a backend of one's own says
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

    @classmethod
    def of(cls, limits: Limits, backend: BackendInfo) -> "EngineInfo":
        return cls(
            architecture=backend.architecture, model_implementation=backend.model_implementation,
            vocab_size=limits.vocab_size, end_ids=backend.end_ids,
            max_seq_len=limits.max_seq_len, max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens, max_beam_width=limits.max_beam_width, num_blocks=limits.num_blocks,
            tokens_per_block=limits.tokens_per_block, device=backend.device, dtype=backend.dtype,
            dispatch=backend.dispatch)
