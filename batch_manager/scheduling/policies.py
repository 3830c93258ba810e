"""Makes the schedulers of the package: one for each policy, and that of static batches."""

from ..config import Limits
from ..kv.kv_cache_manager import KvCacheManager
from ..kv.peft_cache_manager import PeftCacheManager
from ..names import SchedulerPolicy
from .capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler
from .chunking import DIVISIONS, ContextChunking
from .interfaces import MicroBatchScheduler
from .lockstep import LockstepScheduler
from .micro_batch import EvenMicroBatches, TokenBudgetScheduler
from .simple import SimpleScheduler

CAPACITY_SCHEDULERS = {
    SchedulerPolicy.MAX_UTILIZATION: MaxUtilizationScheduler,
    SchedulerPolicy.GUARANTEED_NO_EVICT: GuaranteedNoEvictScheduler,
}


def make_scheduler(limits: Limits, kv_cache_manager: KvCacheManager,
                   peft_cache_manager: PeftCacheManager | None = None, *, is_static: bool = False) -> SimpleScheduler:
    """Make the scheduler that `limits` describes; for static batches, which max_batch_size alone bounds, their own."""
    if is_static:
        return SimpleScheduler(LockstepScheduler(limits.max_num_requests, kv_cache_manager, limits.max_seq_len),
                               TokenBudgetScheduler(limits.max_batch_size))
    capacity = CAPACITY_SCHEDULERS[limits.scheduler_policy](
        limits.max_num_requests, kv_cache_manager, peft_cache_manager=peft_cache_manager)
    chunking = None
    if limits.enable_chunked_context:
        chunking = ContextChunking(DIVISIONS[limits.context_chunking_policy], limits.tokens_per_block)
    # These cached tokens are certain to be found at the claim, so they cost nothing.
    credit_of = kv_cache_manager.reusable_tokens if kv_cache_manager.enable_block_reuse else None
    micro_batch: MicroBatchScheduler = TokenBudgetScheduler(limits.max_batch_size, limits.max_num_tokens, chunking,
                                                            limits.tokens_per_block, credit_of)
    if limits.num_micro_batches > 1:
        micro_batch = EvenMicroBatches(micro_batch, limits.num_micro_batches)
    return SimpleScheduler(capacity, micro_batch)
