"""Fixtures that run requests through the real schedulers and the real KV cache accounting, without a model.

    play        runs requests to their end, and checks the plan and the accounting in every iteration
    timeline    runs requests like `play`, and returns a table: a row for each iteration, a column for each request.
                C5: five context tokens were computed; G: a token was generated; P: the request was paused
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from batch_manager.config import Limits
from batch_manager.kv.audit import audit
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.loop.active_requests import ActiveRequests
from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.contract import check_plan
from batch_manager.scheduling.interfaces import RequestScheduler, SchedulerOutput
from batch_manager.scheduling.policies import make_scheduler

MOST_ITERATIONS = 20_000


@dataclass
class Play:
    """A run of requests through the schedulers and the accounting, with the settings in the fields.

    requests   list of (number of prompt tokens, number of new tokens[, arrival iteration[, priority]])
    """

    requests: list[tuple]
    policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION
    chunking: ContextChunkingPolicy | None = None
    max_batch_size: int = 4
    max_num_tokens: int = 12
    num_blocks: int = 100
    tokens_per_block: int = 2
    max_seq_len: int = 1000
    scheduler: Callable[[Limits, KvCacheManager], RequestScheduler] = make_scheduler
    rows: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limits = Limits(
            max_batch_size=self.max_batch_size, max_num_tokens=self.max_num_tokens, max_seq_len=self.max_seq_len,
            max_beam_width=1, max_num_requests=self.max_batch_size, max_num_sequences=self.max_batch_size,
            unbounded_sequences=True, vocab_size=10, num_blocks=self.num_blocks,
            tokens_per_block=self.tokens_per_block, enable_chunked_context=self.chunking is not None,
            context_chunking_policy=self.chunking or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
            scheduler_policy=self.policy)
        self.kv = KvCacheManager(self.num_blocks, self.tokens_per_block, self.max_seq_len)
        self.plans = self.scheduler(self.limits, self.kv)
        self.active = ActiveRequests()
        self.all = [LlmRequest(number, [0] * prompt, new, priority=more[1] if len(more) > 1 else 0.5)
                    for number, (prompt, new, *more) in enumerate(self.requests)]
        self.arrivals = [more[0] if more else 0 for _, _, *more in self.requests]

    def run(self) -> "Play":
        while len(self.rows) <= max(self.arrivals, default=0) or len(self.active):
            assert len(self.rows) < MOST_ITERATIONS, "it does not end"
            self.step()
        audit(self.kv)
        assert self.kv.free_blocks == self.num_blocks, "blocks did not come home"
        return self

    def step(self) -> SchedulerOutput:
        for request, arrival in zip(self.all, self.arrivals, strict=True):
            if arrival == len(self.rows):
                self.active.add(request)
        active = list(self.active.in_order)
        plan = self.plans.schedule_request(active, frozenset())
        check_plan(self.plans, plan, active, frozenset(), self.kv, self.limits)
        assert not active or plan.context_requests or plan.generation_requests, "nothing runs"
        row = ["."] * len(self.all)

        for request in plan.paused_requests:
            row[request.request_id] = "P"
            self.kv.release(request)
            request.pause(self.max_seq_len)
        self.kv.claim([request for request in plan.context_requests if request.is_first_context_chunk],
                      plan.generation_requests)
        chunks = plan.chunk_sizes or [request.remaining_context for request in plan.context_requests]
        for request, chunk in zip(plan.context_requests, chunks, strict=True):
            row[request.request_id] = f"C{chunk}"
            request.advance_context(chunk)
            request.read_context(request.context_position)
            if request.is_generating:
                self.add_token(request)
        for request in plan.generation_requests:
            row[request.request_id] = "G"
            self.add_token(request)

        self.rows.append(row)
        self.kv.check_totals()
        return plan

    def add_token(self, request: LlmRequest) -> None:
        request.add_token(0)
        if request.is_finished:
            self.kv.release(request)
            self.active.remove(request)

    def picture(self) -> str:
        width = max((len(cell) for row in self.rows for cell in row), default=1)
        return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in self.rows)


@pytest.fixture(scope="session")
def play() -> type[Play]:
    return Play


@pytest.fixture(scope="session")
def timeline() -> Callable[..., str]:
    return lambda requests, **options: Play(requests, **options).run().picture()
