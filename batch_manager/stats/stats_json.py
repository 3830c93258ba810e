"""Converts IterationStats to a flat JSON object, like that of TensorRT-LLM's statistics.

In `to_json`, the first group of keys is TensorRT-LLM's, spelled identically; other keys are this project's. Numbers are
integers, times are in microseconds, and keys are sorted. STATISTICS describes each key. Every iteration that runs a
static batch reports the sizes of the batch when it was formed.
"""

import orjson

from .iteration_stats import IterationStats, StaticBatchStats


def _in_flight(stats: IterationStats) -> dict[str, int]:
    return {
        "Scheduled Requests": stats.scheduled_requests,
        "Context Requests": stats.context_requests,
        "Generation Requests": stats.generation_requests,
        "Total Context Tokens": stats.context_tokens,
        "Paused Requests": stats.paused_requests,
        "MicroBatch ID": stats.micro_batch_id,
    }


def _static(batch: StaticBatchStats) -> dict[str, int]:
    return {
        "Scheduled Requests": batch.members,
        "Context Requests": batch.members,
        "Total Context Tokens": batch.context_tokens,
        "Total Generation Tokens": batch.total_generation_tokens,
        "Empty Generation Slots": batch.empty_generation_slots,
    }


def to_json(stats: IterationStats) -> str:
    kv = stats.kv_cache
    record = {
        "Timestamp": stats.timestamp,
        "Iteration Counter": stats.iteration,
        "Active Request Count": stats.active_requests,
        "Max Request Count": stats.max_requests,
        "Runtime GPU Memory Usage": stats.memory.gpu,
        "Runtime CPU Memory Usage": stats.memory.cpu,
        "Runtime Pinned Memory Usage": stats.memory.pinned,
        "Max KV cache blocks": kv.max_blocks,
        # TensorRT-LLM has no cached blocks in this sense; they can be evicted at any time, so they count as free.
        "Free KV cache blocks": kv.free_blocks + kv.cached_blocks,
        "Used KV cache blocks": kv.live_blocks,
        "Tokens per KV cache block": kv.tokens_per_block,
        "Reused KV cache blocks": kv.reused_blocks,
        **(_in_flight(stats) if stats.static_batch is None else _static(stats.static_batch)),

        "Cached KV cache blocks": kv.cached_blocks,
        "Host KV cache blocks": kv.host_blocks,
        "Used Host KV cache blocks": kv.used_host_blocks,
        "Queued Requests": stats.queued_requests,
        "Generated Tokens": stats.generated_tokens,
        "Recomputed Tokens": stats.recomputed_tokens,
        "Discarded Tokens": stats.discarded_tokens,
        "Iterations In Flight": stats.steps_in_flight,
        "Final Responses": stats.finals,
        "Failed Steps": stats.failed_steps,
        "Clamped Requests": stats.clamped_requests,
        "Unaddressable Items": stats.unaddressable_items,
        "Callback Time Microseconds": round(stats.callback_seconds * 1e6),
        "Iteration Latency Microseconds": round(stats.iteration_seconds * 1e6),
        "Kernel Dispatch": stats.dispatch,
        "Monotonic Microseconds": round(stats.monotonic_seconds * 1e6),
        "New Requests": stats.new_requests,
        "Refused Requests": stats.refused_requests,
        "Accepted Prompt Tokens": stats.prompt_tokens,
        "Cache Lookup Tokens": stats.lookup_tokens,
        "Cache Hit Tokens": stats.hit_tokens,
        "Queued Tokens": stats.queued_tokens,
        "Oldest Wait Microseconds": round(stats.oldest_wait_seconds * 1e6),
        "Started Requests": stats.started_requests,
        "Queue Time Microseconds": round(stats.queue_seconds * 1e6),
        "Longest Queue Time Microseconds": round(stats.longest_queue_seconds * 1e6),
        **stats.reasons,
    }
    for code, count in stats.errors.items():
        record[f"Errors {code.value}"] = count
    for name, count in stats.callback_failures.items():
        record[f"Failed {name} Callbacks"] = count
    record |= stats.figures
    return orjson.dumps(record, option=orjson.OPT_SORT_KEYS).decode()
