"""Lets the records in cases/ drive the real classes. No scheduling or block arithmetic in here.

A record that needs what the package does not have yet meets NotSupportedError, whose text names what is missing.
"""

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

from batch_manager.errors import InternalError
from batch_manager.kv.audit import audit, check_totals
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.ledger import KvLedger
from batch_manager.loop.active_requests import ActiveRequests
from batch_manager.names import LlmRequestState
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.capacity import (
    GuaranteedNoEvictScheduler,
    MaxRequestsScheduler,
    MaxUtilizationScheduler,
    StaticBatchScheduler,
)
from batch_manager.scheduling.chunking import (
    ContextChunking,
    drafts_kept,
    equal_progress,
    first_come_first_served,
    force_chunk,
)
from batch_manager.scheduling.interfaces import MicroBatchScheduler
from batch_manager.scheduling.micro_batch import TokenBudgetScheduler
from batch_manager.scheduling.simple import SimpleScheduler

DIVISIONS = {
    "FIRST_COME_FIRST_SERVED": first_come_first_served,
    "EQUAL_PROGRESS": equal_progress,
    "FORCE_CHUNK": force_chunk,
}
UNBOUNDED = sys.maxsize


class NotSupportedError(Exception):
    """The record needs a part that is not there yet."""


def missing(what: str) -> None:
    # A runner started as a script counts its own exception as "skipped".
    raise getattr(sys.modules["__main__"], "Skip", NotSupportedError)(what)


# Requests


def make_request(record: dict) -> LlmRequest:
    if record.get("lora_task") is not None:
        missing("adapter pages")
    if record.get("estimated_reusable_tokens"):
        missing("reuse credit")
    request = LlmRequest(record["id"], [0] * record["prompt_len"], record["max_new_tokens"],
                         beam_width=record.get("beam_width", 1), draft_len=record.get("draft_len", 0),
                         priority=record.get("priority", 0.5))
    request.seq_slot = request.request_id
    update_request(request, record)
    return request


def update_request(request: LlmRequest, record: dict) -> None:
    request.state = LlmRequestState[record.get("state", "CONTEXT_INIT")]
    request.context_position = request.prompt_len if request.is_generating else record.get("context_position", 0)
    for beam in request.tokens:
        beam += [0] * record.get("generated", 0)
    request.max_new_tokens, request.draft_len = record["max_new_tokens"], record.get("draft_len", 0)


def request_order(requests: list[dict]) -> dict:
    active = ActiveRequests()
    for record in requests:
        active.add(make_request(record))
    return {"order": [request.request_id for request in active]}


# Schedulers


class EverybodyRuns(MicroBatchScheduler):
    """All fitting requests, with a chunk size the record gives each request."""

    def __init__(self, chunk_of: dict[int, int]) -> None:
        self.chunk_of = chunk_of

    def schedule(self, fitting_requests, inflight_request_ids):
        contexts = [request for request in fitting_requests if request.is_context]
        generation = [request for request in fitting_requests if request.is_generating]
        chunks = [min(self.chunk_of.get(request.request_id, UNBOUNDED), request.remaining_context)
                  for request in contexts]
        return contexts, generation, chunks


def make_capacity_scheduler(config: dict, kv):
    policy, most = config["capacity_policy"], config.get("max_num_requests", UNBOUNDED)
    if policy == "MAX_UTILIZATION":
        return MaxUtilizationScheduler(most, kv, two_step_lookahead=config.get("two_step_lookahead", False))
    if policy == "GUARANTEED_NO_EVICT":
        return GuaranteedNoEvictScheduler(most, kv)
    if policy == "STATIC_BATCH":
        return StaticBatchScheduler(most, kv)
    return MaxRequestsScheduler(most)


def make_chunking(config: dict) -> ContextChunking | None:
    chunking = config.get("chunking")
    if chunking is None:
        return None
    return ContextChunking(DIVISIONS[chunking["policy"]], chunking["unit"], config.get("max_context_length"))


def make_micro_batch_scheduler(config: dict) -> TokenBudgetScheduler:
    return TokenBudgetScheduler(config["max_batch_size"], config.get("max_num_tokens"), make_chunking(config))


def make_kv(config: dict) -> KvCacheManager:
    if config.get("enable_block_reuse"):
        missing("block reuse")
    return KvCacheManager(config["num_blocks"], config["tokens_per_block"], config["max_seq_len"])


def capacity_step(config: dict, requests: list[dict]) -> dict:
    @dataclass
    class FixedNeeds:
        """A KV cache in which every request needs the same and a pause frees nothing."""

        free_blocks: int = config.get("free_blocks", 0)
        need: int = config.get("blocks_per_request", 0)
        inflight_request_ids: tuple = ()

        def start_scheduling(self):
            return KvLedger(self)

        def get_needed_blocks_one_step(self, request, two_step_lookahead=False):
            return self.need

        def get_needed_blocks_one_step_of_generating(self, requests, two_step_lookahead=False):
            return sum(self.need for _ in requests)

        def get_remaining_blocks_to_completion_of_owners(self, requests):
            return sum(self.need for _ in requests)

        def get_remaining_blocks_to_completion(self, request):
            return self.need

        def held_blocks(self, request):
            return 0

    scheduler = make_capacity_scheduler(config, FixedNeeds())
    fitting, paused = scheduler.schedule_request([make_request(record) for record in requests])
    return {"fitting": [request.request_id for request in fitting],
            "paused": [request.request_id for request in paused]}


def micro_batch_step(config: dict, requests: list[dict], inflight: list[int]) -> dict:
    made = [make_request(record) for record in requests]
    contexts, generation, *sizes = make_micro_batch_scheduler(config).schedule(made, set(inflight))
    chunks = sizes[0] if sizes else [request.remaining_context for request in contexts]
    drafts = sizes[1] if len(sizes) > 1 else None
    kept = {str(request.request_id): request.draft_len for request in made}
    if drafts is not None:
        kept |= {str(request.request_id): draft for request, draft in zip(contexts, drafts, strict=True)}
    return {"ctx": [[request.request_id, chunk] for request, chunk in zip(contexts, chunks, strict=True)],
            "gen": [request.request_id for request in generation], "draft": kept}


def chunk(config: dict, requests: list[dict], iterations: int) -> dict:
    made = [make_request(record) for record in requests]
    unit, bounds = config["unit"], (config.get("capacity"), config.get("max_context_length"))
    all_chunks, all_positions = [], []
    for _ in range(iterations):
        left = [request for request in made if request.is_context]
        remaining = [request.remaining_context for request in left]
        chunks = DIVISIONS[config["policy"]](remaining, unit, *bounds)
        kept = drafts_kept(chunks, remaining, [request.draft_len for request in left], unit, *bounds)
        row = dict.fromkeys(made, 0)
        for request, size, draft in zip(left, chunks, kept, strict=True):
            row[request], request.draft_len = size, draft
            if size:
                request.advance_context(size)
        all_chunks.append(list(row.values()))
        all_positions.append([request.context_position for request in made])
    return {"chunks": all_chunks, "positions": all_positions,
            "final_draft_lengths": [request.draft_len for request in made]}


# Whole runs


@dataclass
class Engine:
    config: dict
    kv: KvCacheManager | None
    chunk_of: dict[int, int] = field(default_factory=dict)
    active: ActiveRequests = field(default_factory=ActiveRequests)

    def __post_init__(self) -> None:
        micro_batch = self.config.get("micro_batch")
        self.scheduler = SimpleScheduler(
            make_capacity_scheduler(self.config, self.kv),
            make_micro_batch_scheduler(micro_batch) if micro_batch else EverybodyRuns(self.chunk_of))


def build(config: dict) -> Engine:
    if config.get("peft"):
        missing("adapter pages")
    return Engine(config, make_kv(config["kv"]) if config.get("kv") else None)


def submit(engine: Engine, record: dict) -> None:
    request = make_request(record)
    if request.beam_width > 1:
        missing("beams in the block tables")
    if "context_chunk" in record:
        engine.chunk_of[request.request_id] = record["context_chunk"]
    if engine.config.get("insert_order", "append") == "append":
        request.priority = 0.5
    engine.active.add(request)


def has_work(engine: Engine) -> bool:
    return len(engine.active) > 0


def step(engine: Engine) -> dict:
    kv, active = engine.kv, [request.request_id for request in engine.active]
    plan = engine.scheduler.schedule_request(engine.active.in_order(), frozenset())

    for request in plan.paused_requests:
        kv.release(request)
        request.pause(engine.config.get("max_input_len", UNBOUNDED))
        engine.chunk_of.pop(request.request_id, None)
    if kv is not None:
        kv.claim([request for request in plan.context_requests if request.is_first_context_chunk],
                 plan.generation_requests)

    chunks = plan.chunk_sizes
    if chunks is None:
        chunks = [request.remaining_context for request in plan.context_requests]
    context_rows = [[request.request_id, request.context_position, size]
                    for request, size in zip(plan.context_requests, chunks, strict=True)]
    for request, draft in zip(plan.context_requests, plan.draft_lengths or (), strict=False):
        request.draft_len = draft
    for request, size in zip(plan.context_requests, chunks, strict=True):
        request.advance_context(size)
        if request.is_generating:
            request.add_token(0)
    for request in plan.generation_requests:
        request.add_token(0)

    done = [request for request in engine.active if request.is_finished]
    for request in done:
        if kv is not None:
            kv.release(request)
        engine.active.remove(request)
    if kv is not None:
        check_totals(kv)
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


def kv_ops(config: dict, ops: list[dict]) -> dict:
    kv = make_kv(config)
    window = config.get("window") or config["max_seq_len"]
    requests: dict[int, LlmRequest] = {}

    def within_window(tokens: int) -> None:
        if tokens > window:
            missing("attention window")

    def add_sequence(op: dict) -> dict:
        if op.get("beam_width", 1) > 1:
            missing("beams in the block tables")
        if op.get("retention"):
            missing("retention priorities")
        prompt_len = op["prompt_len"] if "prompt_len" in op else len(op["tokens"])
        within_window(prompt_len)
        request = requests.get(op["req"])
        if request is None or not kv.owns(request):
            request = make_request({"id": op["req"], "prompt_len": prompt_len, "max_new_tokens": 1})
        try:
            kv.claim([request], [])
        except OutOfBlocksError:
            return {"error": "out_of_blocks"}
        except InternalError:
            return {"error": "duplicate"}
        requests[op["req"]] = request
        return {"reused_tokens": 0, "num_blocks_per_beam": kv.held_blocks(request), "block_ids": kv.block_ids(request)}

    def append_tokens(op: dict) -> dict:
        request = requests[op["req"]]
        for _ in range(op["count"] if "count" in op else len(op["tokens"])):
            within_window(kv.kv_length(request) + 1)
            try:
                kv.claim([], [request])
            except OutOfBlocksError:
                return {"error": "out_of_blocks"}
        return {"num_blocks_per_beam": kv.held_blocks(request)}

    def remove_sequence(op: dict) -> dict:
        kv.release(requests[op["req"]])
        return {}

    @contextmanager
    def asked(record: dict):
        """The request as the record describes it, for the time of one question."""
        if record.get("beam_width", 1) > 1:
            missing("beams in the block tables")
        request = requests.get(record["id"]) or make_request(record)
        as_claimed = request.max_new_tokens
        update_request(request, record)
        yield request
        request.max_new_tokens = as_claimed

    def needed_one_step(op: dict) -> dict:
        with asked(op["request"]) as request:
            within_window(request.prompt_len)
            return {"blocks": kv.get_needed_blocks_one_step(request, op.get("two_step_lookahead", False))}

    def remaining_to_completion(op: dict) -> dict:
        with asked(op["request"]) as request:
            within_window(request.prompt_len + request.max_new_tokens)
            return {"blocks": kv.get_remaining_blocks_to_completion(request)}

    known = {"add_sequence": add_sequence, "append_tokens": append_tokens, "remove_sequence": remove_sequence,
             "needed_one_step": needed_one_step, "remaining_to_completion": remaining_to_completion}
    results = []
    for op in ops:
        if op["op"] not in known:
            missing("rewinding" if op["op"] == "rewind" else "block reuse")
        result = known[op["op"]](op)
        if "error" not in result:
            result |= {"used_blocks": kv.used_blocks, "free_blocks": kv.free_blocks}
        results.append(result)
        audit(kv)
    return {"results": results}


def kv_fill(config: dict, prompt_len: int, tokens_to_add: int, mode: str) -> dict:
    if prompt_len + tokens_to_add > config["window"]:
        missing("attention window")
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
        need = ledger.blocks_to_completion(request)
        if not ledger.fits(need):
            break
        ledger.spend(need)
        requests.append(request)
    kv.claim(requests, [])
    if mode == "parallel":
        grow(requests)
    for request in requests:
        if mode == "one_by_one":
            grow([request])
        kv.release(request)
    audit(kv)
    return {"blocks_per_request_estimate": need, "num_requests": len(requests), "peak_used_blocks": peak,
            "free_blocks_end": kv.free_blocks, "error": None}
