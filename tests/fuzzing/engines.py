"""The engines that run fuzzed requests, described by the numbers that the oracle needs."""

from dataclasses import dataclass, replace

from batch_manager import KvCacheConfig, SchedulerPolicy, TrtGptModelType


@dataclass(frozen=True, slots=True)
class Engine:
    """The settings of an engine with the scripted backend. Fields are named like the options; None means no limit."""

    name: str
    vocab_size: int = 96
    hidden_size: int = 4
    max_seq_len: int = 40
    tokens_per_block: int = 8
    num_blocks: int = 256
    max_beam_width: int = 3
    max_batch_size: int = 256
    max_num_tokens: int = 2048
    max_num_sequences: int = -1
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 22
    max_request_bytes: int = 1 << 16
    model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching
    policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION
    enable_chunked_context: bool = False
    enable_trt_overlap: bool = False
    enable_block_reuse: bool = False
    gathers_logits: bool = True
    has_batched_processor: bool = False
    exclude_input: bool = False
    window: int | None = None
    measures_memory: bool = False

    @property
    def is_static(self) -> bool:
        return self.model_type is TrtGptModelType.V1

    def options(self) -> dict:
        """Return the arguments of TrtGptModelOptionalParams for this engine."""
        names = ("max_batch_size", "max_num_tokens", "max_num_sequences", "max_queued_requests", "max_queued_tokens",
                 "max_request_bytes", "enable_chunked_context", "enable_trt_overlap")
        return {name: getattr(self, name) for name in names} | {
            "gather_context_logits": self.gathers_logits, "gather_generation_logits": self.gathers_logits,
            "kv_cache_config": KvCacheConfig(enable_block_reuse=self.enable_block_reuse)}


PLAIN = Engine("plain")
NO_EVICT = SchedulerPolicy.GUARANTEED_NO_EVICT
ENGINES = [
    PLAIN,
    replace(PLAIN, name="chunked and reusing", policy=NO_EVICT, enable_chunked_context=True, enable_block_reuse=True,
            max_num_tokens=64),
    replace(PLAIN, name="short steps", max_num_tokens=16, max_beam_width=20, gathers_logits=False, exclude_input=True),
    replace(PLAIN, name="short of blocks", max_beam_width=1, num_blocks=16, tokens_per_block=2),
    replace(PLAIN, name="short of blocks, nobody paused", max_beam_width=1, num_blocks=16, tokens_per_block=2,
            policy=NO_EVICT),
    replace(PLAIN, name="short queue", max_num_sequences=80, max_queued_requests=40),
    replace(PLAIN, name="few waiting tokens", max_num_sequences=50, max_queued_tokens=200, policy=NO_EVICT),
    replace(PLAIN, name="overlapped", model_type=TrtGptModelType.InflightBatching, enable_trt_overlap=True,
            has_batched_processor=True),
    replace(PLAIN, name="no embeddings, a window", hidden_size=0, window=12, max_beam_width=1),
    replace(PLAIN, name="no embeddings", hidden_size=0, max_beam_width=1, enable_block_reuse=True, vocab_size=1500),
]
STATIC = replace(PLAIN, name="static batches", model_type=TrtGptModelType.V1, max_num_tokens=256 * 40)
ROOMY = replace(PLAIN, name="large tensors", max_request_bytes=1 << 19, measures_memory=True)
CYCLE = [*ENGINES, *ENGINES, STATIC, *ENGINES, *ENGINES, STATIC, *ENGINES, ROOMY]


def engine_of(block: int) -> Engine:
    """Return the engine that runs the block `block`. Consecutive blocks use the engines of CYCLE in turn."""
    return CYCLE[block % len(CYCLE)]
