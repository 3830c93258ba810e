"""Which metrics are made of statistics: families, their names and their values, for every kind of exporter."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ..errors import ConfigError, type_name
from ..responses.perf_metrics import PerfMetrics

# The families of TensorRT-LLM's Triton backend. family -> (label, {value of the label: key of the statistics})
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

# Numbers of an iteration that are added up, because records count them one iteration at a time.
SUMMED = ("Generated Tokens", "Paused Requests", "New Requests", "Refused Requests", "Callback Time Microseconds",
          "Iteration Latency Microseconds")
FINALS = {"Finals End ID": "stop", "Finals Stop Words": "stop", "Finals Length": "length",
          "Finals Timed Out": "timeout", "Finals Cancelled": "abort"}
ERRORS = "Errors "                        # and a code: the keys that count errors
MICROSECONDS = 1e-6

# What `latencies` names: text, and the names that dashboards of other engines read.
LATENCIES = {
    "time_to_first_token": ("Arrival to first token",
                            ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")),
    "time_per_token": ("Mean time between two tokens of a request",
                       ("vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds",
                        "sglang:inter_token_latency_seconds")),
    "queue": ("Arrival to the first step", ("vllm:request_queue_time_seconds",)),
    "end_to_end": ("Arrival to the last token",
                   ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds")),
}


def latencies(metrics: PerfMetrics, num_tokens: int) -> Iterator[tuple[str, float]]:
    """(key of LATENCIES, seconds) of a request that generated so many tokens; those that it has."""
    for name, seconds in (("time_to_first_token", metrics.time_to_first_token_s), ("queue", metrics.queue_s),
                          ("time_per_token", metrics.time_per_output_token_s(num_tokens)),
                          ("end_to_end", metrics.end_to_end_s)):
        if seconds is not None:
            yield name, seconds


class LatestStatistics:
    """A statistics callback that keeps the latest record, and adds up the numbers of SUMMED.

    record          the latest; empty before the first
    received_at_s   when it came, in seconds since the epoch
    sums            key of SUMMED -> sum since the first record

    Any thread may read. An iteration costs the parsing of its record and some additions.

    Raises ConfigError for a model that is no text: later only the scraper would be told.
    """

    def __init__(self, model: str) -> None:
        if not isinstance(model, str):
            raise ConfigError(f"model is of type {type_name(model)}", "the text of a label", "pass the model's name")
        self.record: dict[str, Any] = {}
        self.received_at_s = 0.0
        self.sums: dict[str, int] = dict.fromkeys(SUMMED, 0)

    def __call__(self, record: str) -> None:
        """A record of the statistics."""
        values, sums = orjson.loads(record), self.sums
        for key in sums:
            sums[key] += values.get(key, 0)
        self.record, self.received_at_s = values, time.time()


@dataclass(frozen=True, slots=True)
class Family:
    """Numbers of one meaning.

    names        under which they are shown: those that dashboards of several engines read
    text         what they are
    label        that tells them apart; "": there is one number
    values       {value of the label: number} of the statistics now; empty: there are none
    is_counter   they only rise
    """

    names: tuple[str, ...]
    text: str
    label: str
    values: Callable[[LatestStatistics], dict[str, float]]
    is_counter: bool = False

    @property
    def is_of_the_original(self) -> bool:
        """Whether it is one of NV_TRT_LLM, whose labels are those of Triton."""
        return self.names[0] in NV_TRT_LLM


def _original(name: str, label: str, keys: dict[str, str]) -> Family:
    def values(statistics: LatestStatistics) -> dict[str, float]:
        record = statistics.record
        if not record.keys() >= set(keys.values()):      # V1 and the other schemes have keys of their own
            return {}
        return {category: statistics.received_at_s if key == "Timestamp" else record[key]
                for category, key in keys.items()}
    return Family((name,), f"{label} of the batch manager", label, values)


def _of_record(key: str, text: str, *names: str, is_counter: bool = False) -> Family:
    return Family(names, text, "", lambda statistics: {"": statistics.record.get(key, 0)} if statistics.record else {},
                  is_counter)


def _summed(key: str, *names: str) -> Family:
    text = f"{key}, since the start"
    if key.endswith("Microseconds"):
        return Family(names, f"{text}, in seconds", "",
                      lambda statistics: {"": statistics.sums[key] * MICROSECONDS}, is_counter=True)
    return Family(names, text, "", lambda statistics: {"": statistics.sums[key]}, is_counter=True)


def _used_share(statistics: LatestStatistics) -> dict[str, float]:
    record = statistics.record
    return {"": record["Used KV cache blocks"] / max(record["Max KV cache blocks"], 1)} if record else {}


def _ended(statistics: LatestStatistics) -> dict[str, float]:
    ended: dict[str, float] = {}
    for key, reason in FINALS.items() if statistics.record else ():
        ended[reason] = ended.get(reason, 0) + statistics.record.get(key, 0)
    return ended


def _errors(statistics: LatestStatistics) -> dict[str, float]:
    return {key.removeprefix(ERRORS): count for key, count in statistics.record.items() if key.startswith(ERRORS)}


FAMILIES: tuple[Family, ...] = (
    *(_original(name, label, keys) for name, (label, keys) in NV_TRT_LLM.items()),
    _of_record("Scheduled Requests", "Requests in the last step",
               "vllm:num_requests_running", "sglang:num_running_reqs"),
    _of_record("Queued Requests", "Requests that wait for a place among the active ones",
               "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    _of_record("Oldest Wait Microseconds", "Wait of the oldest request that was in no step yet",
               "batch_manager_oldest_wait_microseconds"),
    _of_record("Queued Tokens", "Prompt tokens of waiting requests", "batch_manager_queued_tokens"),
    _of_record("Cached KV cache blocks", "Free blocks whose content prompts may still find",
               "batch_manager_cached_kv_blocks"),
    Family(("vllm:kv_cache_usage_perc", "sglang:token_usage"), "Used share of the KV cache, 0 to 1", "", _used_share),
    _of_record("Accepted Prompt Tokens", "Prompt tokens of accepted requests",
               "vllm:prompt_tokens", "sglang:prompt_tokens", is_counter=True),
    _of_record("Cache Lookup Tokens", "Prompt tokens that were looked up in the KV cache",
               "vllm:prefix_cache_queries", is_counter=True),
    _of_record("Cache Hit Tokens", "Of those, the ones that were found", "vllm:prefix_cache_hits", is_counter=True),
    _of_record("Recomputed Tokens", "Computed tokens that pauses threw away", "batch_manager_recomputed_tokens",
               is_counter=True),
    _of_record("Failed Steps", "Steps that raised", "batch_manager_failed_steps", is_counter=True),
    Family(("vllm:request_success",), "Requests that ended without an error", "finished_reason", _ended,
           is_counter=True),
    Family(("batch_manager_errors",), "Final responses with an error", "code", _errors, is_counter=True),
    _summed("Generated Tokens", "vllm:generation_tokens", "sglang:generation_tokens"),
    _summed("Paused Requests", "vllm:num_preemptions"),
    _summed("New Requests", "batch_manager_new_requests"),
    _summed("Refused Requests", "batch_manager_refused_requests"),
    _summed("Callback Time Microseconds", "batch_manager_callback_seconds"),
    _summed("Iteration Latency Microseconds", "batch_manager_iteration_seconds"),
)
