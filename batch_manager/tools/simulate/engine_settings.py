"""The settings of a simulated engine, and how to build it."""

from collections.abc import Callable
from dataclasses import dataclass

from ...arguments import Callbacks, EngineArguments
from ...build import build_loop
from ...config import KvCacheConfig, Parts, TrtGptModelOptionalParams
from ...loop.generation_loop import GenerationLoop
from ...names import SchedulerPolicy
from ...seams import BackendInfo
from ...stats.trace import IterationTrace
from .backend import SimulatedBackend
from .cost_model import CostModel
from .log_book import LogBook
from .traffic import MOST_VOCABULARY
from .virtual_time import VirtualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings with the names of TrtGptModelOptionalParams and KvCacheConfig.

    num_blocks    blocks of the KV cache pool
    max_seq_len   longest sequence of the model, in tokens
    """

    num_blocks: int
    max_seq_len: int
    tokens_per_block: int = 64
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    max_batch_size: int = 32
    max_num_tokens: int = 512
    max_num_sequences: int | None = None
    enable_chunked_context: bool = True
    enable_block_reuse: bool = False
    enable_trt_overlap: bool = False


def make_loop(settings: EngineSettings, cost: CostModel, clock: VirtualClock, log_book: LogBook, *,
              get: Callable[[int], list], send: Callable[..., None], seed: tuple[int, ...] = (0,),
              trace: Callable[[IterationTrace], None] | None = None) -> tuple[GenerationLoop, SimulatedBackend]:
    """Return the production loop and a backend whose steps take the time that `cost` predicts.

    Raises ConfigError for settings that a manager would refuse.
    """
    num_slots = settings.max_num_sequences or settings.max_batch_size
    info = BackendInfo(
        vocab_size=MOST_VOCABULARY, max_seq_len=settings.max_seq_len, num_blocks=settings.num_blocks,
        tokens_per_block=settings.tokens_per_block, num_slots=max(num_slots, settings.max_batch_size),
        dispatch="simulated", device="none", dtype="none", is_asynchronous=cost.is_asynchronous, copies_blocks=True)
    backend = SimulatedBackend(info, cost, clock, log_book, seed)
    params = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=settings.num_blocks * settings.tokens_per_block,
                                      tokens_per_block=settings.tokens_per_block,
                                      enable_block_reuse=settings.enable_block_reuse),
        max_batch_size=settings.max_batch_size, max_num_tokens=settings.max_num_tokens,
        max_num_sequences=settings.max_num_sequences, enable_trt_overlap=settings.enable_trt_overlap,
        enable_chunked_context=settings.enable_chunked_context)
    loop = build_loop(
        EngineArguments(scheduler_policy=settings.policy, optional_params=params, exclude_input_in_output=True),
        Callbacks(get, send), Parts(backend=backend, clock=clock, trace=trace))
    return loop, backend
