"""The metric families of TensorRT-LLM's Triton backend, and which statistics they show."""

# family -> (label, {value of the label: key of the statistics})
NV_TRT_LLM: dict[str, tuple[str, dict[str, str]]] = {
    "nv_trt_llm_request_metrics": ("request_type", {
        "active": "Active Request Count", "max": "Max Request Count", "scheduled": "Scheduled Requests",
        "context": "Context Requests", "waiting": "Queued Requests"}),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", {
        "cpu": "Runtime CPU Memory Usage", "gpu": "Runtime GPU Memory Usage", "pinned": "Runtime Pinned Memory Usage"}),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", {
        "max": "Max KV cache blocks", "free": "Free KV cache blocks", "used": "Used KV cache blocks",
        "tokens_per": "Tokens per KV cache block", "reused": "Reused KV cache blocks"}),
    "nv_trt_llm_inflight_batcher_metrics": ("inflight_batcher_specific_metric", {
        "total_context_tokens": "Total Context Tokens", "generation_requests": "Generation Requests",
        "micro_batch_id": "MicroBatch ID", "paused_requests": "Paused Requests"}),
    "nv_trt_llm_v1_metrics": ("v1_specific_metric", {
        "total_context_tokens": "Total Context Tokens", "total_generation_tokens": "Total Generation Tokens",
        "empty_generation_slots": "Empty Generation Slots"}),
    "nv_trt_llm_general_metrics": ("general_type", {
        "timestamp": "Timestamp", "iteration_counter": "Iteration Counter"}),
}
