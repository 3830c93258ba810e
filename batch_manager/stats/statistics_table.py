"""Every key of a statistics record, with its meaning, unit and time span."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import MAX_DRAFT_TOKENS
from ..names import ErrorCode

ACCEPTED_AT = "Accepted Draft Tokens At "    # prefix of the keys that count by place; the place, from 1, follows
ITERATION, NOW, START = "of this iteration", "now", "since the start"


@dataclass(frozen=True, slots=True)
class Statistic:
    """One key of the JSON record.

    name      the key
    unit      unit of the value; "text" for a string
    time      "of this iteration": since the last record; "now": current value; "since the start": a count since the
              engine started, which never falls
    meaning   a short description
    schemes   batching schemes whose records have the key: "all", "in flight" (all but TrtGptModelType.V1) or "V1"
    always    False: the key may be missing if its value is zero or if the backend does not report it
    """

    name: str
    unit: str
    time: str
    meaning: str
    schemes: str = "all"
    always: bool = True


def optional(*rows: tuple[str, str, str, str]) -> Iterator[Statistic]:
    """Yield a statistic that may be missing for each row (name, unit, time, meaning)."""
    return (Statistic(*row, always=False) for row in rows)


STATISTICS: tuple[Statistic, ...] = (
    Statistic("Timestamp", "text", NOW, "local time, month-day-year hour:minute:second"),
    Statistic("Monotonic Microseconds", "microseconds", NOW, "the engine's clock: time.monotonic, or that of Parts"),
    Statistic("Iteration Counter", "records", START, "rises by one with each record"),
    Statistic("Active Request Count", "requests", ITERATION, "active when the step was planned"),
    Statistic("Max Request Count", "requests", NOW, "largest number of active requests; -1: unbounded"),
    Statistic("Runtime GPU Memory Usage", "bytes", NOW, "weights, KV cache and buffers on the GPU"),
    Statistic("Runtime CPU Memory Usage", "bytes", NOW, "likewise in host memory"),
    Statistic("Runtime Pinned Memory Usage", "bytes", NOW, "likewise in pinned host memory"),
    Statistic("Max KV cache blocks", "blocks", NOW, "in the pool"),
    Statistic("Free KV cache blocks", "blocks", ITERATION, "that no running request holds, cached ones included"),
    Statistic("Used KV cache blocks", "blocks", ITERATION, "that running requests hold"),
    Statistic("Cached KV cache blocks", "blocks", ITERATION, "free ones whose content prompts can reuse"),
    Statistic("Tokens per KV cache block", "tokens", NOW, "capacity of one block"),
    Statistic("Reused KV cache blocks", "blocks", START, "that prompts found in the cache"),
    Statistic("Host KV cache blocks", "blocks", NOW, "in the pool in host memory"),
    Statistic("Used Host KV cache blocks", "blocks", ITERATION, "of those, the ones with cached content"),
    Statistic("Scheduled Requests", "requests", ITERATION, "in its step; V1: members of the batch"),
    Statistic("Context Requests", "requests", ITERATION, "whose prompt it computed; V1: members of the batch"),
    Statistic("Generation Requests", "requests", ITERATION, "that generated", "in flight"),
    Statistic("Total Context Tokens", "tokens", ITERATION, "of prompts it computed; V1: of all prompts of the batch"),
    Statistic("Paused Requests", "requests", ITERATION, "paused to make room", "in flight"),
    Statistic("MicroBatch ID", "number", ITERATION, "which micro-batch it launched", "in flight"),
    Statistic("Total Generation Tokens", "tokens", ITERATION, "that the members of the batch may generate", "V1"),
    Statistic("Empty Generation Slots", "tokens", ITERATION, "padding of the batch", "V1"),
    Statistic("New Requests", "requests", ITERATION, "accepted"),
    Statistic("Refused Requests", "requests", ITERATION, "refused"),
    Statistic("Accepted Prompt Tokens", "tokens", START, "of the prompts of accepted requests"),
    Statistic("Cache Lookup Tokens", "tokens", START, "of prompts that were looked up in the cache"),
    Statistic("Cache Hit Tokens", "tokens", START, "of those, the ones that were found"),
    Statistic("Queued Requests", "requests", NOW, "accepted, waiting to become active"),
    Statistic("Queued Tokens", "tokens", NOW, "of the prompts of queued requests"),
    Statistic("Oldest Wait Microseconds", "microseconds", NOW,
              "since the arrival of the first accepted request that was never in a step"),
    Statistic("Started Requests", "requests", ITERATION, "in a step for the first time"),
    Statistic("Queue Time Microseconds", "microseconds", ITERATION,
              "from arrival to the first step, summed over started requests"),
    Statistic("Longest Queue Time Microseconds", "microseconds", ITERATION, "the longest of these times"),
    Statistic("Generated Tokens", "tokens", ITERATION, "appended to requests"),
    Statistic("Recomputed Tokens", "tokens", START, "computed again after pauses, without those in reused blocks"),
    Statistic("Discarded Tokens", "tokens", START, "computed for requests that had ended"),
    Statistic("Iterations In Flight", "steps", NOW, "launched and not read"),
    Statistic("Final Responses", "responses", START, "final ones, of all kinds"),
    Statistic("Finals End ID", "responses", START, "of requests that sampled an end id"),
    Statistic("Finals Stop Words", "responses", START, "of requests that ended with a stop word"),
    Statistic("Finals Length", "responses", START, "of requests that reached their output length"),
    Statistic("Finals Timed Out", "responses", START, "of requests whose deadline passed after a token"),
    Statistic("Finals Cancelled", "responses", START, "of requests that were stopped"),
    Statistic("Failed Steps", "steps", START, "that raised"),
    Statistic("Clamped Requests", "requests", START, "whose output length or draft tokens were cut to what fits"),
    Statistic("Unaddressable Items", "items", START, "from the get callback, without a usable id"),
    Statistic("Callback Time Microseconds", "microseconds", ITERATION, "inside the callbacks"),
    Statistic("Iteration Latency Microseconds", "microseconds", ITERATION, "from the end of get to the record"),
    Statistic("Kernel Dispatch", "text", NOW, "what computes a step: triton, compiled (code on a CPU) or torch"),
    *optional(
        ("Captured Graphs", "graphs", NOW, "of steps on a GPU, to be replayed"),
        ("Compute Threads", "threads", NOW, "that compute a step on a CPU"),
        # With peft_cache_config:
        ("LoRA Device Pages", "pages", NOW, "for adapters on the device"),
        ("Free LoRA Device Pages", "pages", NOW, "that no running request holds, those of idle adapters included"),
        ("Used LoRA Device Pages", "pages", NOW, "that running requests hold"),
        ("LoRA Adapters On Device", "adapters", NOW, "on the device, in use or idle"),
        ("LoRA Loads", "adapters", START, "copied to the device"),
        ("LoRA Evictions", "adapters", START, "overwritten on the device"),
        ("LoRA Adapters On Host", "adapters", NOW, "in the host cache"),
        ("LoRA Host Cache Bytes", "bytes", NOW, "of the host cache"),
        ("Used LoRA Host Cache Bytes", "bytes", NOW, "of those, the ones with adapters"),
        ("Requests With LoRA", "requests", NOW, "waiting or running, that have found their adapter"),
        ("Running LoRA Tasks", "text", NOW, "ids of adapters that requests hold on the device, separated by commas"),
        ("Waiting LoRA Tasks", "text", NOW, "ids of adapters of other requests"),
        # With speculative_config, or with max_draft_tokens for the drafts of clients:
        ("Draft Steps", "sequences", START, "in steps with drafts of this sequence"),
        ("Draft Tokens", "tokens", START, "proposed by the engine or by clients"),
        ("Accepted Draft Tokens", "tokens", START, "of those, the ones that the model generated"),
        ("Requests With Draft Tokens", "requests", ITERATION, "that had drafts in its step"),
        ("Draft Time Microseconds", "microseconds", ITERATION, "inside the drafter"),
        *((f"{ACCEPTED_AT}{place}", "tokens", START, f"accepted drafts at place {place} of a step")
          for place in range(1, MAX_DRAFT_TOKENS + 1)),
        ("KV Events", "events", START, "of the prefix cache"),
        ("Dropped KV Events", "events", START, "of those, the ones lost before take_kv_events"),
        # With a store of blocks; the last three with disk_cache_path:
        ("Store Loads", "loads", START, "of blocks from the store to host blocks"),
        ("Store Loaded Blocks", "blocks", START, "that could be found then"),
        ("Store Failed Loads", "loads", START, "of those, the ones that brought fewer blocks than the store had"),
        ("Store Saved Blocks", "blocks", START, "handed to the store, which may have left some out"),
        ("Store Skipped Saves", "blocks", START, "evicted or failed before they were saved, or without room"),
        ("Requests Loading", "requests", NOW, "accepted, waiting for their blocks from the store"),
        ("Disk Cache Bytes", "bytes", NOW, "of all files in the directory, also of other models"),
        ("Disk Cache Blocks", "blocks", NOW, "likewise"),
        ("Disk Damaged Files", "files", START, "that were not what they should be, and count as missing"),
        # With kv_transfer_config:
        ("Context Only Requests", "requests", START, "that ended with blocks held for another engine"),
        ("Generation Only Requests", "requests", START, "accepted"),
        ("Held Transfer Blocks", "blocks", NOW, "in host memory, for other engines"),
        ("KV Transfer Bytes", "bytes", START, "of blocks, sent to or received from other engines"),
        ("KV Transfer Microseconds", "microseconds", START, "of these exchanges, summed"),
        ("KV Transfer Fallbacks", "requests", START, "whose blocks did not all come"),
        # With a store or kv_transfer_config:
        ("External Lookup Tokens", "tokens", START, "of prompts looked up in the store or another engine, not cached"),
        ("External Hit Tokens", "tokens", START, "of those, the ones that came from there"),
        ("World Size", "ranks", NOW, "that run the model together; absent for one process"),
        ("Tensor Parallel Size", "ranks", NOW, "of those, the ones that share each layer"),
        ("Pipeline Parallel Size", "stages", NOW, "into which the layers are divided"),
        ("Control Time Microseconds", "microseconds", ITERATION,
         "sending steps to the other ranks, and waiting for their ends"),
        ("Collective Wait Microseconds", "microseconds", ITERATION, "that rank 0 waited for others inside steps"),
        ("Slowest Rank", "number", ITERATION, "the last to end the newest step that was read"),
        ("Refused Rank Differences", "requests", START, "refused: ranks handed over different ones"),
        *((f"{form} Steps", "steps", START, f"launched in the form `{form.lower()}`")
          for form in ("Graph", "Fused", "Fixed", "Compiled", "Packed", "Padded")),
        *((f"Errors {code.value}", "responses", START, "final ones with this code") for code in ErrorCode)),
    *(Statistic(f"Failed {name} Callbacks", "calls", START, "that raised or returned an unusable value",
                always=name in ("get", "send", "poll", "stats"))
      for name in ("get", "send", "poll", "stats", "after_responses", "at_end", "kv_events", "trace", "memory_usage",
                   "figures", "propose", "release")),
)
