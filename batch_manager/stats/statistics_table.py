"""Every key of a statistics record: what it counts, in which unit, and over which time."""

from dataclasses import dataclass

from ..names import ErrorCode

ITERATION, NOW, START = "of this iteration", "now", "since the start"


@dataclass(frozen=True, slots=True)
class Statistic:
    """One key of the JSON.

    unit      of its number; "text": it is no number
    time      "of this iteration" (since the last record, for what happens between iterations), "now", or "since the
              start" of the engine: such a number never falls
    meaning   what it is
    schemes   "all", "in flight" (not in records of TrtGptModelType.V1) or "V1" (in those alone)
    always    False: the key is there once it is not zero, or where the backend has it
    """

    name: str
    unit: str
    time: str
    meaning: str
    schemes: str = "all"
    always: bool = True


STATISTICS: tuple[Statistic, ...] = (
    Statistic("Timestamp", "text", NOW, "local time, month-day-year hour:minute:second"),
    Statistic("Monotonic Microseconds", "microseconds", NOW, "the engine's clock: time.monotonic, or that of Parts"),
    Statistic("Iteration Counter", "records", START, "rises by one with each record"),
    Statistic("Active Request Count", "requests", ITERATION, "active when the step was planned"),
    Statistic("Max Request Count", "requests", NOW, "most requests that may be active; -1: unbounded"),
    Statistic("Runtime GPU Memory Usage", "bytes", NOW, "weights, KV cache and buffers on the GPU"),
    Statistic("Runtime CPU Memory Usage", "bytes", NOW, "likewise in host memory"),
    Statistic("Runtime Pinned Memory Usage", "bytes", NOW, "likewise in pinned host memory"),
    Statistic("Max KV cache blocks", "blocks", NOW, "in the pool"),
    Statistic("Free KV cache blocks", "blocks", ITERATION, "that no running request holds, cached ones included"),
    Statistic("Used KV cache blocks", "blocks", ITERATION, "that running requests hold"),
    Statistic("Cached KV cache blocks", "blocks", ITERATION, "free ones whose content prompts may still find"),
    Statistic("Tokens per KV cache block", "tokens", NOW, "room of one block"),
    Statistic("Reused KV cache blocks", "blocks", START, "that prompts found and did not compute"),
    Statistic("Host KV cache blocks", "blocks", NOW, "of the pool in host memory"),
    Statistic("Used Host KV cache blocks", "blocks", ITERATION, "of those, the ones that hold something"),
    Statistic("Scheduled Requests", "requests", ITERATION, "in its step; V1: members of the batch"),
    Statistic("Context Requests", "requests", ITERATION, "whose prompt it computed; V1: members of the batch"),
    Statistic("Generation Requests", "requests", ITERATION, "that generated", "in flight"),
    Statistic("Total Context Tokens", "tokens", ITERATION, "of prompts it computed; V1: of all prompts of the batch"),
    Statistic("Paused Requests", "requests", ITERATION, "paused to make room", "in flight"),
    Statistic("MicroBatch ID", "number", ITERATION, "which micro-batch it launched", "in flight"),
    Statistic("Total Generation Tokens", "tokens", ITERATION, "that the members of the batch may generate", "V1"),
    Statistic("Empty Generation Slots", "tokens", ITERATION, "places of the padded batch for no token", "V1"),
    Statistic("New Requests", "requests", ITERATION, "accepted"),
    Statistic("Refused Requests", "requests", ITERATION, "refused"),
    Statistic("Accepted Prompt Tokens", "tokens", START, "of the prompts of accepted requests"),
    Statistic("Cache Lookup Tokens", "tokens", START, "of prompts that were looked up in the cache"),
    Statistic("Cache Hit Tokens", "tokens", START, "of those, the ones that were found"),
    Statistic("Queued Requests", "requests", NOW, "accepted, waiting for a place among the active ones"),
    Statistic("Queued Tokens", "tokens", NOW, "of their prompts"),
    Statistic("Oldest Wait Microseconds", "microseconds", NOW,
              "since the arrival of the first request, in the order of acceptance, that never was in a step"),
    Statistic("Started Requests", "requests", ITERATION, "in a step for the first time"),
    Statistic("Queue Time Microseconds", "microseconds", ITERATION, "from arrival to the first step, their sum"),
    Statistic("Longest Queue Time Microseconds", "microseconds", ITERATION, "the longest of these times"),
    Statistic("Generated Tokens", "tokens", ITERATION, "appended to requests"),
    Statistic("Recomputed Tokens", "tokens", START, "that pauses threw away"),
    Statistic("Discarded Tokens", "tokens", START, "computed for requests that had ended"),
    Statistic("Iterations In Flight", "steps", NOW, "launched and not read"),
    Statistic("Final Responses", "responses", START, "final ones, of all kinds"),
    Statistic("Finals End ID", "responses", START, "of requests that drew an end id"),
    Statistic("Finals Stop Words", "responses", START, "of requests that ended with a stop word"),
    Statistic("Finals Length", "responses", START, "of requests that have all tokens they asked for"),
    Statistic("Finals Timed Out", "responses", START, "of requests whose deadline passed after a token"),
    Statistic("Finals Cancelled", "responses", START, "of requests that were stopped"),
    Statistic("Failed Steps", "steps", START, "that raised"),
    Statistic("Clamped Requests", "requests", START, "whose output length was cut to what fits"),
    Statistic("Unaddressable Items", "items", START, "of get, without a usable id"),
    Statistic("Callback Time Microseconds", "microseconds", ITERATION, "inside the callbacks"),
    Statistic("Iteration Latency Microseconds", "microseconds", ITERATION, "from the end of get to the record"),
    Statistic("Kernel Dispatch", "text", NOW, "which kernels run: triton, torch, compiled or scripted"),
    Statistic("Compute Threads", "threads", NOW, "of compiled steps", always=False),
    *(Statistic(f"Errors {code.value}", "responses", START, "final ones with this code", always=False)
      for code in ErrorCode),
    *(Statistic(f"Failed {name} Callbacks", "calls", START, "that raised, or returned what cannot be used",
                always=name in ("get", "send", "poll", "stats"))
      for name in ("get", "send", "poll", "stats", "after_responses", "at_end", "trace", "memory_usage", "figures")),
)
