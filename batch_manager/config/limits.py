"""The limits of the engine, which options.py computes from the configuration."""

from dataclasses import dataclass

from ..names import ContextChunkingPolicy, SchedulerPolicy


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
