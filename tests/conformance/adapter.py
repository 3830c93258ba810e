"""Runs the records of cases/ with the engine's own classes. The module itself computes no schedules and no blocks.

The times of a record are milliseconds.
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from batch_manager.errors import InternalError, InvalidRequestError
from batch_manager.kv.audit import audit
from batch_manager.kv.block_pool import BlockPool, OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.peft_cache_manager import PeftCacheManager
from batch_manager.kv.prefix_index import BlockKey, Domain, PrefixIndex
from batch_manager.kv.retention import priorities_of_blocks
from batch_manager.loop.active_requests import ActiveRequests
from batch_manager.loop.ngrams import NgramDrafter
from batch_manager.names import LlmRequestState, SchedulerPolicy
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.requests.retention import (
    DEFAULT_RETENTION_PRIORITY,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
)
from batch_manager.scheduling.capacity import GuaranteedNoEvictScheduler, MaxUtilizationScheduler, StaticBatchScheduler
from batch_manager.scheduling.chunking import (
    ContextChunking,
    chunk_after_reuse,
    drafts_kept,
    equal_progress,
    first_come_first_served,
    force_chunk,
)
from batch_manager.scheduling.interfaces import CapacityScheduler, MicroBatchScheduler, RequestList, schedulable
from batch_manager.scheduling.micro_batch import TokenBudgetScheduler
from batch_manager.scheduling.simple import SimpleScheduler
from batch_manager.stats.statistics_table import ACCEPTED_AT
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.conformance.estimates import Estimates
from tests.harness.client import Client
from tests.harness.clock import VirtualClock
from tests.harness.requests import request as tensor_request
from tests.harness.scripted_adapters import adapter_of
from tests.harness.world import make_loop

DIVISIONS = {
    "FIRST_COME_FIRST_SERVED": first_come_first_served,
    "EQUAL_PROGRESS": equal_progress,
    "FORCE_CHUNK": force_chunk,
}
# State of a request whose blocks come from or go to another engine -> the state here with the same right to run. In the
# records, such a request is with the schedulers; here it waits in the intake, or has ended.
TRANSFER_STATES = {
    "DISAGG_GENERATION_INIT": "CONTEXT_INIT",                  # for capacity; it computes nothing, see micro_batch_step
    "DISAGG_GENERATION_TRANS_IN_PROGRESS": "UNKNOWN", "DISAGG_TRANS_ERROR": "UNKNOWN",
    "DISAGG_CONTEXT_INIT_AND_TRANS": "CONTEXT_INIT", "DISAGG_GENERATION_TRANS_COMPLETE": "GENERATION_IN_PROGRESS",
    "DISAGG_CONTEXT_TRANS_IN_PROGRESS": "GENERATION_COMPLETE", "DISAGG_CONTEXT_COMPLETE": "GENERATION_COMPLETE",
}
UNBOUNDED = sys.maxsize
MOST_BEAMS = 16
MOST_DRAFTS = 1000
NOBODY = 10**9


# Requests


def make_request(record: dict, pages: int = 1) -> LlmRequest:
    """Make the request of a record. Its adapter, of `pages` pages, is the id in the record."""
    prompt = record.get("prompt_tokens") or record.get("tokens") or [0] * record["prompt_len"]
    request = LlmRequest(record.get("id", 0), list(prompt), record.get("max_new_tokens", 1),
                         beam_width=record.get("beam_width", 1), draft_tokens=range(record.get("draft_len", 0)),
                         priority=record.get("priority", 0.5), lora_task_id=record.get("lora_task"),
                         adapter=adapter_of(record.get("lora_task"), pages),
                         cache_salt=record.get("cache_salt"), token_extra_ids=record.get("token_extra_ids"),
                         retention=make_retention(record.get("retention")))
    request.seq_slot = request.request_id
    state = record.get("state", "CONTEXT_INIT")
    request.state = LlmRequestState[TRANSFER_STATES.get(state, state)]
    request.context_position = request.prompt_len if request.is_generating else record.get("context_position", 0)
    request.context_read = request.context_position
    for beam in request.tokens:
        beam += [0] * record.get("generated", 0)
    return request


def make_retention(record: dict | None) -> KvCacheRetentionConfig | None:
    if record is None:
        return None
    return KvCacheRetentionConfig(
        make_ranges(record["ranges"]), record.get("decode_priority", DEFAULT_RETENTION_PRIORITY),
        milliseconds(record.get("decode_duration", record.get("decode_duration_ms"))))


def make_ranges(ranges: list[list]) -> tuple[TokenRangeRetentionConfig, ...]:
    return tuple(TokenRangeRetentionConfig(start, end, priority, milliseconds(duration[0] if duration else None))
                 for start, end, priority, *duration in ranges)


def seconds(milliseconds: float | None) -> float | None:
    """Return the seconds of the test's clock for a record's milliseconds.

    A millisecond of a record lasts a second here, so that sums of times are exact.
    """
    return milliseconds


def milliseconds(duration: int | None) -> int | None:
    """Return the milliseconds on the test's clock for a record's milliseconds: 1000 times as many. See `seconds`."""
    return None if duration is None else 1000 * duration


def retention_map(ranges: list[list], tokens_per_block: int | None = None, seq_len: int | None = None) -> dict:
    try:
        retention = KvCacheRetentionConfig(make_ranges(ranges))
    except InvalidRequestError:
        return {"error": True}
    if tokens_per_block is None or seq_len is None:
        return {"error": False}
    return {"priorities": priorities_of_blocks(retention, tokens_per_block, seq_len)}


def request_pause(record: dict, steps: list[dict]) -> dict:
    request = make_request(record)
    results = []
    for step in steps:
        for beam in request.tokens:
            beam += [0] * step.get("generated", step.get("generate", 0))
        request.pause(step.get("pause_max_input_len", step.get("max_input_len", UNBOUNDED)))
        results.append({"prompt_len": request.prompt_len, "max_new_tokens": request.max_new_tokens,
                        "generated": request.num_generated_tokens, "context_position": request.context_position,
                        "state": request.state.name})
    return {"after_pause": results}


def request_order(requests: list[dict]) -> dict:
    active = ActiveRequests()
    for record in requests:
        active.add(make_request(record))
    return {"order": [request.request_id for request in active]}


# Schedulers


class EverybodyRuns(MicroBatchScheduler):
    """A micro-batch scheduler that runs all fitting requests, with the chunk sizes of the record."""

    def __init__(self, chunk_of: dict[int, int]) -> None:
        self.chunk_of = chunk_of

    def schedule(self, fitting_requests, inflight_request_ids):
        contexts = [request for request in fitting_requests if request.is_context]
        generation = [request for request in fitting_requests if request.is_generating]
        chunks = [min(self.chunk_of.get(request.request_id, UNBOUNDED), request.remaining_context)
                  for request in contexts]
        return contexts, generation, chunks


class MaxRequestsScheduler(CapacityScheduler):
    """Takes the first requests up to a limit, for models without a KV cache. Never pauses."""

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return schedulable(active_requests)[:self.max_num_requests], []


def make_capacity_scheduler(config: dict, kv):
    policy, most = config["capacity_policy"], config.get("max_num_requests", UNBOUNDED)
    peft = config.get("peft")
    if peft is not None:
        peft = PeftCacheManager(peft["max_device_pages"])
    if policy == "MAX_UTILIZATION":
        return MaxUtilizationScheduler(most, kv, config.get("two_step_lookahead", False), peft)
    if policy == "GUARANTEED_NO_EVICT":
        return GuaranteedNoEvictScheduler(most, kv, peft, in_line=True)
    if policy == "STATIC_BATCH":
        return StaticBatchScheduler(most, kv, peft, in_line=True)
    return MaxRequestsScheduler(most)


def make_chunking(config: dict) -> ContextChunking | None:
    chunking = config.get("chunking")
    if chunking is None:
        return None
    return ContextChunking(DIVISIONS[chunking["policy"]], chunking["unit"], config.get("max_context_length"))


def credit_of(policy: SchedulerPolicy, kv: KvCacheManager, estimates: Estimates):
    """Return a function that estimates, as TensorRT-LLM does, how many tokens of a request's first chunk are reused.

    The function returns the smaller of this estimate and the number of tokens that a claim will reuse. If block reuse
    is off, `credit_of` returns None.
    """
    if not kv.enable_block_reuse:
        return None
    to_completion = policy is SchedulerPolicy.GUARANTEED_NO_EVICT
    return lambda request: min(kv.reusable_tokens(request), estimates.reusable_tokens(request, to_completion))


def make_estimates(config: dict, kv: KvCacheManager) -> Estimates:
    return Estimates(kv, config.get("temporary_attention_window", 0))


def make_micro_batch_scheduler(config: dict, credit_of) -> TokenBudgetScheduler:
    return TokenBudgetScheduler(config["max_batch_size"], config.get("max_num_tokens"), make_chunking(config),
                                credit_of=credit_of)


def make_kv(config: dict, clock: VirtualClock | None = None) -> KvCacheManager:
    return KvCacheManager(
        config["num_blocks"], config["tokens_per_block"], config["max_seq_len"], max_beam_width=MOST_BEAMS,
        window=config.get("window"), sink_token_length=config.get("sink_token_length", 0),
        enable_block_reuse=config.get("enable_block_reuse", False),
        enable_partial_reuse=config.get("enable_partial_reuse", True), max_draft_len=MOST_DRAFTS,
        now=(clock or VirtualClock(0.0)).monotonic)


def capacity_step(config: dict, requests: list[dict]) -> dict:
    made = [make_request(record, (config.get("peft") or {}).get("pages_per_task", 1)) for record in requests]

    @dataclass
    class FixedNeeds:
        """A KV cache and its ledger. Each request needs the same number of blocks, and a pause frees no block."""

        available_blocks: int = config.get("free_blocks", 0)
        need: int = config.get("blocks_per_request", 0)
        enable_block_reuse: bool = False
        inflight_request_ids: tuple = ()

        def start_scheduling(self):
            return self

        def owns(self, request):
            return request.is_started

        def fits(self, blocks):
            return blocks <= self.available_blocks

        def spend(self, blocks, starting=None):
            self.available_blocks -= blocks

        def is_refundable(self, request):
            return True

        def refund(self, request):
            pass

        def blocks_for_next_step(self, request, two_step_lookahead=False):
            return self.need

        def blocks_for_next_step_of_generating(self, requests, two_step_lookahead=False):
            return self.need * len(requests)

        def blocks_to_completion(self, request):
            return self.need

        def blocks_to_completion_of_started(self):
            return self.need * sum(map(self.owns, made))

    scheduler = make_capacity_scheduler(config, FixedNeeds())
    fitting, paused = scheduler.schedule_request(made)
    return {"fitting": [request.request_id for request in fitting],
            "paused": [request.request_id for request in paused]}


def micro_batch_step(config: dict, requests: list[dict], inflight: list[int]) -> dict:
    """Run one step of the micro-batch scheduler, and return its contexts, generation requests and drafts.

    With EQUAL_PROGRESS, the first chunk in a record includes the reused tokens. The first chunk of the engine's
    scheduler does not, so this function adds their number.
    """
    made = [make_request(record) for record in requests if record.get("state") != "DISAGG_GENERATION_INIT"]
    credits = {record["id"]: record.get("estimated_reusable_tokens", 0) for record in requests}
    scheduler = make_micro_batch_scheduler(config, lambda request: credits[request.request_id])
    contexts, generation, *sizes = scheduler.schedule(made, set(inflight))
    chunks = sizes[0] if sizes else [request.remaining_context for request in contexts]
    if sizes and config.get("chunking", {}).get("policy") == "EQUAL_PROGRESS":
        chunks = [size if size == request.remaining_context or not request.is_first_context_chunk
                  else credits[request.request_id] + size for request, size in zip(contexts, chunks, strict=True)]
    drafts = sizes[1] if len(sizes) > 1 else None
    kept = {str(request.request_id): request.draft_len for request in made}
    if drafts is not None:
        kept |= {str(request.request_id): draft for request, draft in zip(contexts, drafts, strict=True)}
    return {"ctx": [[request.request_id, chunk] for request, chunk in zip(contexts, chunks, strict=True)],
            "gen": [request.request_id for request in generation], "draft": kept}


def chunk(config: dict, requests: list[dict], iterations: int) -> dict:
    made = [make_request(record) for record in requests]
    unit, bounds = config["unit"], (config.get("capacity"), config.get("max_context_length"))
    chunking = ContextChunking(DIVISIONS[config["policy"]], unit)
    all_chunks, all_positions = [], []
    for _ in range(iterations):
        left = [request for request in made if request.is_context]
        remaining = [request.remaining_context for request in left]
        first = [record.get("estimated_reusable_tokens", 0) if request.is_first_context_chunk else 0
                 for request, record in zip(made, requests, strict=True) if request.is_context]
        chunks = chunking.divide(remaining, unit, *bounds, first)
        used = sum(chunking.cost(*row) for row in zip(chunks, remaining, first, strict=True))
        kept = drafts_kept(chunks, remaining, [request.draft_len for request in left], unit, *bounds, used=used)
        row = dict.fromkeys(made, 0)
        for request, size, draft in zip(left, chunks, kept, strict=True):
            row[request], request.draft_tokens = size, range(draft)
            if size:
                request.advance_context(size)
                request.read_context(request.context_position)
        all_chunks.append(list(row.values()))
        all_positions.append([request.context_position for request in made])
    return {"chunks": all_chunks, "positions": all_positions,
            "final_draft_lengths": [request.draft_len for request in made]}


# Drafts


def draft_step(requests: list[dict]) -> dict:
    """Verify drafts of clients with their prompts, in an engine with a scripted model, and count them.

    The tokens of the scripted model stand for those that the model of the record generates.
    """
    most, client, texts = max(1, *(len(record["drafts"]) for record in requests)), Client(), []
    loop = make_loop(client, max_draft_tokens=most, as_arrays=True)
    for number, record in enumerate(requests):
        text = ScriptedBackend.expected_tokens([number], len(record["model"]))
        drafts = [token if draft == generated else token - 1 if token else 1
                  for token, draft, generated in zip(text, record["drafts"], record["model"], strict=False)]
        client.pending.append(tensor_request(number, [number], len(text) + 1, streaming=True, draft_input_ids=drafts))
        texts.append(text)
    loop.step(accept_new=True)
    streamed = [client.streamed(number) for number in range(len(requests))]
    assert all(tokens == text[:len(tokens)] for tokens, text in zip(streamed, texts, strict=True))
    loop.step(accept_new=False)                        # drafts are counted when the next step is planned
    counts = json.loads(client.stats[-1])
    return {"yielded": [record["model"][:len(tokens)] for record, tokens in zip(requests, streamed, strict=True)],
            "num_drafts": counts["Draft Steps"], "num_draft_tokens": counts["Draft Tokens"],
            "num_accepted_tokens": counts["Accepted Draft Tokens"],
            "accepted_per_position": [counts[f"{ACCEPTED_AT}{place}"] for place in range(1, most + 1)]}


def ngram_proposal(config: dict, tokens: list[int]) -> dict:
    drafter = NgramDrafter(config["prompt_lookup_min"], config["prompt_lookup_max"])
    (drafts,) = drafter.propose([LlmRequest(0, tokens, 1)], [config["num_speculative_tokens"]])
    return {"drafts": list(drafts)}


# Whole runs


@dataclass
class Engine:
    config: dict
    kv: KvCacheManager | None
    chunk_of: dict[int, int] = field(default_factory=dict)
    drafts_of: dict[int, int] = field(default_factory=dict)
    active: ActiveRequests = field(default_factory=ActiveRequests)
    in_flight: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        micro_batch, policy = self.config.get("micro_batch"), SchedulerPolicy.MAX_UTILIZATION
        if self.config["capacity_policy"] in ("GUARANTEED_NO_EVICT", "STATIC_BATCH"):
            policy = SchedulerPolicy.GUARANTEED_NO_EVICT
        credit = None if self.kv is None else credit_of(policy, self.kv, make_estimates(self.config, self.kv))
        self.scheduler = SimpleScheduler(
            make_capacity_scheduler(self.config, self.kv),
            make_micro_batch_scheduler(micro_batch, credit) if micro_batch else EverybodyRuns(self.chunk_of))


def build(config: dict) -> Engine:
    return Engine(config, make_kv(config["kv"]) if config.get("kv") else None)


def submit(engine: Engine, record: dict) -> None:
    request = make_request(record, (engine.config.get("peft") or {}).get("pages_per_task", 1))
    if "context_chunk" in record:
        engine.chunk_of[request.request_id] = record["context_chunk"]
    if "generation_draft_len" in record:
        engine.drafts_of[request.request_id] = record["generation_draft_len"]
    if engine.config.get("insert_order", "append") == "append":
        request.priority = 0.5
    engine.active.add(request)


def has_work(engine: Engine) -> bool:
    return len(engine.active) > 0


def reused_blocks(engine: Engine) -> int | None:
    return None if engine.kv is None else engine.kv.usage().reused_blocks


def step(engine: Engine) -> dict:
    kv, active = engine.kv, [request.request_id for request in engine.active]
    num_micro_batches = (engine.config.get("micro_batch") or {}).get("num_micro_batches", 1)
    engine.in_flight = engine.in_flight[max(len(engine.in_flight) - num_micro_batches + 1, 0):]
    plan = engine.scheduler.schedule_request(list(engine.active.in_order), frozenset().union(*engine.in_flight))
    engine.in_flight.append({request.request_id for request in plan.context_requests + plan.generation_requests})

    for request in plan.paused_requests:
        kv.release(request)
        request.pause(engine.config.get("max_input_len", UNBOUNDED))
        engine.chunk_of.pop(request.request_id, None)
    chunks = dict(zip(plan.context_requests, plan.sizes, strict=True))
    for request, draft in zip(plan.context_requests, plan.draft_lengths or (), strict=False):
        request.draft_tokens = range(draft)

    # One after the other, in the order of ids: each may reuse the blocks of those before.
    context_rows = []
    for request in sorted(plan.context_requests + plan.generation_requests, key=lambda each: each.request_id):
        size = chunks.get(request)
        if kv is not None and (size is None or request.is_first_context_chunk):
            kv.claim(*(([], [request]) if size is None else ([request], [])))
        if size is not None:
            reused = 0 if kv is None or not request.is_first_context_chunk else kv.reused_tokens(request)
            if reused:
                size = chunk_after_reuse(size, reused, request.prompt_len, kv.tokens_per_block)
                request.skip_context(reused)
            context_rows.append([request.request_id, request.context_position, size])
            request.advance_context(size)
            request.read_context(request.context_position)
            if request.is_context:
                continue
            if kv is not None:
                kv.publish_context(request, request.context_position)
            request.draft_tokens = range(engine.drafts_of.get(request.request_id, request.draft_len))
        request.add_token(0)

    done = [request for request in engine.active if request.is_finished]
    for request in done:
        if kv is not None:
            kv.release(request, computed_tokens=request.num_tokens)
        engine.active.remove(request)
    if kv is not None:
        kv.check_totals()
        if not engine.active:
            audit(kv)
    return {
        "active": active,
        "ctx": context_rows,
        "gen": [request.request_id for request in plan.generation_requests],
        "paused": [request.request_id for request in plan.paused_requests],
        "done": [request.request_id for request in done],
        "free_blocks": None if kv is None else kv.free_blocks,
    }


# The block tables alone


class Tables:
    """One KV cache with the sequences of a `kv_ops` record, and a method for each operation of the record."""

    def __init__(self, config: dict) -> None:
        self.clock = VirtualClock(0.0)
        self.kv = make_kv(config, self.clock)
        self.estimates = make_estimates(config, self.kv)
        self.requests: dict[int, LlmRequest] = {}

    def run(self, op: dict) -> dict:
        evicted = self.kv.usage().evicted_blocks
        result = getattr(self, op["op"])(op)
        audit(self.kv)
        if "error" in result or op["op"] == "advance_time":
            return result
        result |= {"used_blocks": self.kv.used_blocks, "free_blocks": self.kv.free_blocks}
        return result | {"cached_blocks_evicted": self.kv.usage().evicted_blocks - evicted}

    def add_sequence(self, op: dict) -> dict:
        request = self.requests.get(op["req"])
        if request is None or not self.kv.owns(request):
            request = make_request(op | {"id": op["req"]})
        try:
            self.kv.claim([request], [])
        except OutOfBlocksError:
            return {"error": "out_of_blocks"}
        except InternalError:
            return {"error": "duplicate"}
        self.requests[op["req"]] = request
        held = self.kv.sequences.owners_of(request)
        result = {"reused_tokens": self.kv.reused_tokens(request), "num_blocks_per_beam": self.kv.held_blocks(request)}
        if request.beam_width == 1:
            return result | {"block_ids": self.kv.block_ids(request)}
        return result | {"distinct_blocks": len(held),
                         "shared_blocks": sum(beams == request.beam_width for beams in held.values())}

    def append_tokens(self, op: dict) -> dict:
        request = self.requests[op["req"]]
        for token in op.get("tokens") or [0] * op["count"]:
            try:
                self.kv.claim([], [request])
            except OutOfBlocksError:
                return {"error": "out_of_blocks"}
            for beam in request.tokens:
                beam.append(token)
        return {"num_blocks_per_beam": self.kv.held_blocks(request)}

    def store_context(self, op: dict) -> dict:
        request = self.requests[op["req"]]
        self.kv.publish_context(request, op.get("materialized_tokens", request.prompt_len))
        return {}

    def remove_sequence(self, op: dict) -> dict:
        request, computed = self.requests[op["req"]], 0
        if op.get("store_for_reuse"):
            computed = min(request.num_tokens, op.get("tokens_kept", UNBOUNDED),
                           op.get("materialized_tokens", UNBOUNDED))
        self.kv.release(request, computed)
        return {}

    def rewind(self, op: dict) -> dict:
        request = self.requests[op["req"]]
        self.kv.rewind([request], op["count"])
        for beam in request.tokens:
            del beam[-op["count"]:]
        return {}

    def advance_time(self, op: dict) -> dict:
        self.clock.now += seconds(op["ms"])
        return {}

    def refresh(self, op: dict) -> dict:
        self.kv.pool.end_timed_priorities()
        return {}

    def needed_one_step(self, op: dict) -> dict:
        with self.as_asked(op["request"]) as request:
            blocks = self.estimates.get_needed_blocks_one_step(request, op.get("two_step_lookahead", False))
            return {"blocks": blocks,
                    "estimated_reusable_tokens": self.credit(request, to_completion=False)}

    def remaining_to_completion(self, op: dict) -> dict:
        with self.as_asked(op["request"]) as request:
            return {"blocks": self.estimates.get_remaining_blocks_to_completion(request),
                    "estimated_reusable_tokens": self.credit(request, to_completion=True)}

    def credit(self, request: LlmRequest, to_completion: bool) -> int:
        return self.estimates.reusable_tokens(request, to_completion) if request.is_first_context_chunk else 0

    def probe_prefix(self, op: dict) -> dict:
        held, cached = self.estimates.reusable_blocks(make_request(op.get("request", op) | {"id": NOBODY}))
        return {"reusable_blocks_allocated": held, "reusable_blocks_all": cached}

    @contextmanager
    def as_asked(self, record: dict):
        """Yield the request of a query, with the tokens, state and lengths of `record`.

        A request that owns blocks gets these values until the generator is resumed.
        """
        owner, asked = self.requests.get(record["id"]), make_request(record)
        if owner is None or not self.kv.owns(owner):
            yield asked
            return
        names = ("tokens", "max_new_tokens", "draft_tokens", "state", "context_position", "context_read")
        before = {name: getattr(owner, name) for name in names}
        for name in names:
            setattr(owner, name, getattr(asked, name))
        yield owner
        for name, value in before.items():
            setattr(owner, name, value)


def kv_ops(config: dict, ops: list[dict]) -> dict:
    tables = Tables(config)
    return {"results": [tables.run(op) for op in ops]}


def kv_fill(config: dict, prompt_len: int, tokens_to_add: int, mode: str) -> dict:
    kv = make_kv(config)
    ledger = kv.start_scheduling()
    requests: list[LlmRequest] = []
    peak = 0

    def grow(together: list[LlmRequest]) -> None:
        nonlocal peak
        for _ in range(tokens_to_add):
            kv.claim([], together)
            peak = max(peak, kv.used_blocks)

    while True:
        request = make_request({"id": len(requests), "prompt_len": prompt_len, "max_new_tokens": tokens_to_add})
        need = make_estimates(config, kv).get_remaining_blocks_to_completion(request)
        if not ledger.fits(need):
            break
        ledger.spend(need)
        requests.append(request)
    kv.claim(requests, [])
    peak = kv.used_blocks
    if mode == "parallel":
        grow(requests)
    for request in requests:
        if mode == "one_by_one":
            grow([request])
        kv.release(request)
    audit(kv)
    return {"blocks_per_request_estimate": need, "num_requests": len(requests), "peak_used_blocks": peak,
            "free_blocks_end": kv.free_blocks, "error": None}


# The order of free blocks, and the prefix tree, each alone


def eviction_ops(config: dict, ops: list[dict]) -> dict:
    clock = VirtualClock(0.0)
    pool = BlockPool(config["num_blocks"], clock.monotonic)
    named: dict[str, int] = {}
    results = []
    for op in ops:
        match op["op"]:
            case "count":
                result = {"free_blocks": len(pool.free)}
            case "peek":
                named[op["as"]] = pool.first_free()
                result = {"block": named[op["as"]], "offloadable": pool.is_offloadable(named[op["as"]])}
            case "claim":
                block_id = named[op["block"]]
                pool.share(block_id)
                if op.get("priority") is not None:
                    pool.set_priority(block_id, op["priority"], seconds(op.get("duration", op.get("duration_ms"))))
                result = {"free_blocks": len(pool.free)}
            case "claim_next":
                pool.take(op["count"])
                result = {"free_blocks": len(pool.free)}
            case "release":
                pool.give_back([named[op["block"]]], front=op.get("front", op.get("to_front", False)))
                result = {"free_blocks": len(pool.free)}
            case "advance_time":
                clock.now += seconds(op["ms"])
                result = {}
            case "set_time":
                clock.now = seconds(op["ms"])
                result = {}
            case "refresh":
                pool.end_timed_priorities()
                result = {"free_blocks": len(pool.free),
                          "priorities": {name: pool.priority(block_id) for name, block_id in named.items()}}
        results.append(result)
    return {"results": results}


def prefix_tree_ops(config: dict, ops: list[dict]) -> dict:
    index, unit = PrefixIndex(), config["tokens_per_block"]
    named, results, block_ids = {}, [], count()

    def domain_of(op: dict) -> Domain:
        return Domain(op.get("lora_task"), op.get("salt", op.get("cache_salt")))

    def keys_of(op: dict) -> list[BlockKey]:
        keys, parent = [], index.root_digest(domain_of(op))
        for start in range(0, len(op["tokens"]), unit):
            keys.append(index.key(parent, op["tokens"][start:start + unit]))
            parent = keys[-1].digest
        return keys

    for op in ops:
        before = index.num_nodes
        if op["op"] == "insert":
            node = index.grow_root(domain_of(op))
            for key in keys_of(op):
                node = node.child(key) or index.insert(node, key, next(block_ids))
            named[op.get("as")] = node
            result = {"new_nodes": index.num_nodes - before, "nodes": index.num_nodes}
        elif op["op"] == "match":
            found = index.walk(domain_of(op), keys_of(op))
            matched, last = sum(len(node.key.tokens) for node in found), [index.root(domain_of(op)), *found][-1]
            if config.get("enable_partial_reuse") and last is not None and matched < len(op["tokens"]):
                matched += last.most_similar_child(op["tokens"][matched:matched + unit], None)[1]
            result = {"matched_tokens": matched}
        else:
            removed = index.remove(named[op["node"]])
            result = {"removed_nodes": len(removed), "nodes": index.num_nodes}
        results.append(result)
    return {"results": results}
