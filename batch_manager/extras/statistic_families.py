"""The metric families derived from statistics: names, descriptions and values, shared by all exporters."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ..config import MAX_DRAFT_TOKENS
from ..errors import ConfigError, type_name
from ..names import ErrorCode
from ..responses.perf_metrics import PerfMetrics
from ..stats.statistics_table import ACCEPTED_AT, START, STATISTICS, Statistic

# The families of TensorRT-LLM's Triton backend: family -> (label, {value of the label: key of the statistics})
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

# Per-iteration counts, accumulated here into counters.
SUMMED = ("Generated Tokens", "Paused Requests", "New Requests", "Refused Requests", "Callback Time Microseconds",
          "Iteration Latency Microseconds")
FINALS = {"Finals End ID": "stop", "Finals Stop Words": "stop", "Finals Length": "length",
          "Finals Timed Out": "timeout", "Finals Cancelled": "abort"}
PLACES = [f"{ACCEPTED_AT}{place}" for place in range(1, MAX_DRAFT_TOKENS + 1)]
ERRORS = "Errors "                        # prefix of the keys that count errors; the error code follows
MICROSECONDS = 1e-6

# key of `latencies` -> (description, metric names of vLLM and SGLang)
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
    """Yield (name in LATENCIES, seconds) for each known latency of a request with `num_tokens` output tokens."""
    for name, seconds in (("time_to_first_token", metrics.time_to_first_token_s), ("queue", metrics.queue_s),
                          ("time_per_token", metrics.time_per_output_token_s(num_tokens)),
                          ("end_to_end", metrics.end_to_end_s)):
        if seconds is not None:
            yield name, seconds


class LatestStatistics:
    """A statistics callback that keeps the latest record and adds up the values that cover one iteration only.

    record          the latest record; empty before the first
    received_at_s   arrival time of the latest record, in seconds since the epoch
    sums            key in SUMMED -> sum of its values in all records so far

    Any thread may read. A call parses one record and does a few additions.

    Raises ConfigError if `model` is not a str. Without this check, the error would surface only at the first scrape.
    """

    def __init__(self, model: str) -> None:
        if not isinstance(model, str):
            raise ConfigError(f"model is of type {type_name(model)}", "expected a str, for the label",
                              "pass the model's name")
        self.record: dict[str, Any] = {}
        self.received_at_s = 0.0
        self.sums: dict[str, int] = dict.fromkeys(SUMMED, 0)

    def __call__(self, record: str) -> None:
        """Take one statistics record, which is JSON."""
        values, sums = orjson.loads(record), self.sums
        for key in sums:
            sums[key] += values.get(key, 0)
        self.record, self.received_at_s = values, time.time()


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family.

    names         names of the metric; it is published under each of them, for dashboards of different engines
    description   help text
    label         name of the label that distinguishes the values; "": no label, and a single value with the key ""
    values        function (LatestStatistics) -> {value of the label: number}; {}: nothing to publish
    is_counter    whether values only grow
    keys          the keys of the statistics that the values come from
    """

    names: tuple[str, ...]
    description: str
    label: str
    values: Callable[[LatestStatistics], dict[str, float]]
    is_counter: bool = False
    keys: frozenset[str] = frozenset()

    @property
    def is_nv_trt_llm(self) -> bool:
        """Whether TensorRT-LLM's Triton backend exports the family too. The family then has that backend's labels."""
        return self.names[0] in NV_TRT_LLM


def _nv_trt_llm(name: str, label: str, keys: dict[str, str]) -> Family:
    def values(statistics: LatestStatistics) -> dict[str, float]:
        record = statistics.record
        if not record.keys() >= set(keys.values()):      # each batching type has its own set of keys
            return {}
        return {category: statistics.received_at_s if key == "Timestamp" else record[key]
                for category, key in keys.items()}
    return Family((name,), f"{label} of the batch manager", label, values, keys=frozenset(keys.values()))


def _from_record(key: str, description: str, *names: str, is_counter: bool = False) -> Family:
    return Family(names, description, "",
                  lambda statistics: {"": statistics.record.get(key, 0)} if statistics.record else {}, is_counter,
                  frozenset([key]))


def _if_present(key: str, description: str, *names: str, is_counter: bool = False) -> Family:
    return Family(names, description, "",
                  lambda statistics: {"": statistics.record[key]} if key in statistics.record else {}, is_counter,
                  frozenset([key]))


def _summed(key: str, *names: str) -> Family:
    description = f"{key}, since the start"
    if key.endswith("Microseconds"):
        return Family(names, f"{description}, in seconds", "",
                      lambda statistics: {"": statistics.sums[key] * MICROSECONDS}, True, frozenset([key]))
    return Family(names, description, "", lambda statistics: {"": statistics.sums[key]}, True, frozenset([key]))


def _of_row(row: Statistic) -> Family:
    """A family of a statistic for which no dashboard of another engine has a name."""
    key = row.name
    return Family((f"batch_manager_{key.lower().replace(' ', '_')}",), f"{key}: {row.meaning} ({row.time})", "",
                  lambda statistics: {"": statistics.record[key]} if key in statistics.record else {},
                  row.time == START, frozenset([key]))


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


def _accepted_at(statistics: LatestStatistics) -> dict[str, float]:
    record = statistics.record
    return {str(place): record[key] for place, key in enumerate(PLACES) if key in record}


def _per(key: str, statistics: LatestStatistics, first: float) -> dict[str, float]:
    """Return `first` plus the accepted drafts for each `key`; nothing before the first draft."""
    count = statistics.record.get(key, 0)
    return {"": first + statistics.record["Accepted Draft Tokens"] / count} if count else {}


NAMED: tuple[Family, ...] = (
    *(_nv_trt_llm(name, label, keys) for name, (label, keys) in NV_TRT_LLM.items()),
    _from_record("Scheduled Requests", "Requests in the last step",
                 "vllm:num_requests_running", "sglang:num_running_reqs"),
    _from_record("Queued Requests", "Requests waiting to become active",
                 "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    _from_record("Oldest Wait Microseconds", "Waiting time of the oldest request that has not run yet",
                 "batch_manager_oldest_wait_microseconds"),
    _from_record("Queued Tokens", "Prompt tokens of waiting requests", "batch_manager_queued_tokens"),
    _from_record("Cached KV cache blocks", "Free blocks whose content can still be reused",
                 "batch_manager_cached_kv_blocks"),
    Family(("vllm:kv_cache_usage_perc", "sglang:token_usage"), "Fraction of the KV cache in use, 0 to 1", "",
           _used_share),
    _from_record("Accepted Prompt Tokens", "Prompt tokens of accepted requests",
                 "vllm:prompt_tokens", "sglang:prompt_tokens", is_counter=True),
    _from_record("Cache Lookup Tokens", "Prompt tokens looked up in the KV cache",
                 "vllm:prefix_cache_queries", is_counter=True),
    _from_record("Cache Hit Tokens", "Prompt tokens found in the KV cache", "vllm:prefix_cache_hits", is_counter=True),
    _if_present("External Lookup Tokens", "Prompt tokens looked up in a store of blocks or another engine",
                "vllm:external_prefix_cache_queries", is_counter=True),
    _if_present("External Hit Tokens", "Prompt tokens that came from a store of blocks or another engine",
                "vllm:external_prefix_cache_hits", is_counter=True),
    _from_record("Recomputed Tokens", "Tokens computed again after pauses", "batch_manager_recomputed_tokens",
                 is_counter=True),
    _from_record("Failed Steps", "Steps that raised", "batch_manager_failed_steps", is_counter=True),
    Family(("vllm:request_success",), "Requests that ended without an error", "finished_reason", _ended,
           True, frozenset(FINALS)),
    _if_present("Used LoRA Device Pages", "Pages of the device with adapters of running requests, one page a rank",
                "sglang:lora_pool_slots_used"),
    _if_present("LoRA Device Pages", "Pages of the device for adapters, one page a rank",
                "sglang:lora_pool_slots_total"),
    _if_present("Draft Steps", "Sequences with drafts, summed over steps", "vllm:spec_decode_num_drafts",
                is_counter=True),
    _if_present("Draft Tokens", "Tokens that the engine or a client drafted", "vllm:spec_decode_num_draft_tokens",
                is_counter=True),
    _if_present("Accepted Draft Tokens", "Drafts that the model generated", "vllm:spec_decode_num_accepted_tokens",
                is_counter=True),
    Family(("vllm:spec_decode_num_accepted_tokens_per_pos",), "Accepted drafts by their place in a step, from 0",
           "position", _accepted_at, True, frozenset(PLACES)),
    Family(("sglang:spec_accept_length",), "Mean number of tokens of a sequence in a step with drafts", "",
           lambda statistics: _per("Draft Steps", statistics, 1.0)),
    Family(("sglang:spec_accept_rate",), "Share of the drafts that were accepted", "",
           lambda statistics: _per("Draft Tokens", statistics, 0.0)),
    Family(("batch_manager_errors",), "Final responses with an error", "code", _errors, True,
           frozenset([f"{ERRORS}{code.value}" for code in ErrorCode])),
    _summed("Generated Tokens", "vllm:generation_tokens", "sglang:generation_tokens"),
    _summed("Paused Requests", "vllm:num_preemptions"),
    _summed("New Requests", "batch_manager_new_requests"),
    _summed("Refused Requests", "batch_manager_refused_requests"),
    _summed("Callback Time Microseconds", "batch_manager_callback_seconds"),
    _summed("Iteration Latency Microseconds", "batch_manager_iteration_seconds"),
)

# Those of NAMED, and every other number of STATISTICS.
FAMILIES = (*NAMED, *(_of_row(row) for row in STATISTICS
                      if row.unit != "text" and not any(row.name in family.keys for family in NAMED)))
