"""A small loop around the real schedulers, the real KV cache manager and the real plan check, with a shadow device.

A shadow device is a model of the device's KV cache; see shadow.py. The loop audits the accounting after each step. It
checks three more rules: the content that a sequence reads matches the sequence's tokens, a block that is written is in
no other block table, and every live request advances.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from batch_manager.config import Limits
from batch_manager.kv.audit import audit
from batch_manager.kv.block_needs import most_blocks
from batch_manager.kv.claims import Claim
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.peft_cache_manager import PeftCacheManager
from batch_manager.kv.window import AttentionWindow
from batch_manager.loop.active_requests import ActiveRequests
from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.requests.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from batch_manager.scheduling.capacity import (
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    StaticBatchScheduler,
)
from batch_manager.scheduling.chunking import DIVISIONS, ContextChunking, chunk_after_reuse, force_chunk
from batch_manager.scheduling.contract import check_plan
from batch_manager.scheduling.interfaces import SchedulerOutput
from batch_manager.scheduling.micro_batch import EvenMicroBatches, TokenBudgetScheduler
from batch_manager.scheduling.simple import SimpleScheduler
from tests.harness.scripted_adapters import adapter_of

from .scenario import LONGEST, Options, RequestPlan, Scenario
from .shadow import GARBAGE, Histories, ShadowDevice, Wrong


@dataclass
class Flight:
    """A step that was launched and not yet read.

    contexts   (request, first position, number of tokens) of each chunk
    failing    requests whose rows yield garbage
    drafted    request -> (number of draft tokens, number of accepted ones)
    """

    contexts: list[tuple[LlmRequest, int, int]]
    generation: list[LlmRequest]
    failing: set[LlmRequest]
    drafted: dict[LlmRequest, tuple[int, int]] = field(default_factory=dict)

    @property
    def requests(self) -> list[LlmRequest]:
        return [request for request, _, _ in self.contexts] + self.generation


class PlanningRun:
    """The run of one scenario. `counts` has the number of each kind of event."""

    def __init__(self, scenario: Scenario) -> None:
        self.options = options = scenario.options
        self.plans = dict(enumerate(scenario.requests))
        self.counts: Counter[str] = Counter()
        self.iteration = 0
        self.kv = KvCacheManager(
            options.spare_blocks + max(blocks_of_largest(plan, options, most_drafts(scenario))
                                       for plan in scenario.requests),
            options.tokens_per_block, LONGEST, max_beam_width=options.max_beam_width, window=options.window,
            sink_token_length=options.sinks, enable_block_reuse=options.reuse,
            enable_partial_reuse=options.partial_reuse, host_blocks=options.host_blocks,
            digest_bits=options.digest_bits,
            max_draft_len=most_drafts(scenario), unread_steps=options.unread_steps,
            now=lambda: self.iteration * options.seconds_per_iteration)
        self.peft = None
        if options.spare_pages is not None:
            self.peft = PeftCacheManager(3 + options.spare_pages)
        self.limits = make_limits(scenario, self.kv.num_blocks)
        self.scheduler = make_scheduler(options, self.limits, self.kv, self.peft)
        self.device = ShadowDevice(options.tokens_per_block, options.window, options.sinks)
        self.histories = Histories()
        self.active = ActiveRequests()
        self.window: deque[Flight] = deque()
        self.steps: Counter[LlmRequest] = Counter()
        self.served: set[int] = set()
        self.patience = 0                                       # iterations in which the first in line did not run
        self.most_iterations = 40 + len(self.plans) * sum(
            2 * (len(plan.prompt) + plan.max_new_tokens) for plan in scenario.requests)

    def run(self) -> Counter[str]:
        waiting = sorted(self.plans, key=lambda number: self.plans[number].arrival)
        while waiting or len(self.active) or self.window:
            while waiting and self.plans[waiting[0]].arrival <= self.iteration:
                self.admit(waiting.pop(0))
            self.step()
            self.stop_some()
            self.look()
            self.iteration += 1
            if self.iteration > self.most_iterations:
                raise Wrong(f"after {self.iteration} iterations these are not done: {list(self.active.in_order)}")
        if self.kv.free_blocks != self.kv.num_blocks:
            raise Wrong("blocks did not come home")
        if self.peft is not None and self.peft.free_pages != self.peft.max_device_pages:
            raise Wrong("adapter pages did not come home")
        if self.served != set(self.plans):
            raise Wrong(f"{set(self.plans) - self.served} were never served")
        self.counts.update(iterations=self.iteration, reused_blocks=self.kv.usage().reused_blocks,
                           evicted_blocks=self.kv.usage().evicted_blocks, requests=len(self.plans))
        return self.counts

    def admit(self, number: int) -> None:
        plan = self.plans[number]
        request = LlmRequest(
            number, list(plan.prompt), plan.max_new_tokens, beam_width=plan.beam_width,
            draft_tokens=range(plan.draft_len), lora_task_id=plan.lora_task_id,
            adapter=adapter_of(plan.lora_task_id, (plan.lora_task_id or 0) + 1), priority=plan.priority,
            cache_salt=plan.cache_salt, token_extra_ids=plan.token_extra_ids, retention=make_retention(plan.retention))
        self.active.add(request)

    # One iteration.

    def step(self) -> None:
        active = list(self.active.in_order)
        if not active:
            if self.window:                                     # all of its requests were stopped
                self.finish_oldest()
            return
        inflight = frozenset(request.request_id for flight in self.window for request in flight.requests)
        self.kv.inflight_request_ids = inflight
        plan = self.scheduler.schedule_request(active, inflight)
        check_plan(self.scheduler, plan, active, inflight, self.kv, self.limits)
        self.judge(plan, active)
        self.launch(plan)
        if not plan.context_requests and not plan.generation_requests or len(self.window) == self.options.depth:
            self.finish_oldest()

    def judge(self, plan: SchedulerOutput, active: list[LlmRequest]) -> None:
        running = [*plan.context_requests, *plan.generation_requests]
        if not running and not self.window:
            raise Wrong("nothing runs and nothing is in flight")
        if plan.paused_requests and self.options.policy != "MAX_UTILIZATION":
            raise Wrong(f"{plan.paused_requests} are to be paused")
        if self.options.policy == "MAX_UTILIZATION":
            first, flying = active[0], {request for flight in self.window for request in flight.requests}
            self.patience = 0 if first in running or first in flying else self.patience + 1
            if self.patience == self.options.depth:
                raise Wrong(f"{first} is first in line and does not run")
        order = {request: place for place, request in enumerate(active)}
        if plan.paused_requests and running:
            first_paused = min(order[request] for request in plan.paused_requests)
            if first_paused < max(order[request] for request in running):
                raise Wrong(f"{active[first_paused]} is paused ahead of one that runs")

    def launch(self, plan: SchedulerOutput) -> None:
        for request in plan.paused_requests:
            self.counts["pauses"] += request.is_started
            self.kv.release(request)
            self.give_pages_back(request)
            request.pause(LONGEST)
        self.look()
        if not (plan.context_requests or plan.generation_requests):
            return
        for request, draft_len in zip(plan.context_requests, plan.draft_lengths or (), strict=False):
            request.draft_tokens = range(draft_len)
        running = [*plan.context_requests, *plan.generation_requests]
        if self.peft is not None:
            self.peft.claim(running)
        sizes = plan.chunk_sizes
        if sizes is None:
            sizes = [request.remaining_context for request in plan.context_requests]
        first_chunks = [request for request in plan.context_requests if request.is_first_context_chunk]
        generation = plan.generation_requests
        drafted = self.draft(generation)
        drafts = [drafted.get(request, (0, 0))[0] for request in generation] if drafted else None
        needed, free = self.kv.blocks_to_claim(first_chunks, generation, (), drafts), self.kv.free_blocks
        claim = self.kv.claim(first_chunks, generation, drafts)
        self.prepare(claim)
        for request, length, draft in zip(generation, claim.kv_lengths.tolist(), drafts or [0] * len(generation),
                                          strict=True):
            if self.kv.kv_length(request) != length + 1 + draft:
                raise Wrong(f"{request} has room for {self.kv.kv_length(request)} tokens after {length} and {draft}")
        if self.options.window is None and free - self.kv.free_blocks != needed:
            raise Wrong(f"{needed} blocks were to be claimed and {free - self.kv.free_blocks} were")
        contexts = [self.begin(request, size) for request, size in zip(plan.context_requests, sizes, strict=True)]
        for request, start, size in contexts:
            if start + size < request.prompt_len and (start + size) % self.options.tokens_per_block:
                raise Wrong(f"a chunk of {request} from {start} ends inside a block: {size} tokens")
        self.steps.update(running)
        failing = {request for request in running if self.steps[request] == self.plan_of(request).fails_at}
        flight = Flight(contexts, list(generation), failing, drafted)
        self.check_budget(flight)
        self.run_ahead([request for request in generation if request not in drafted])
        self.look()
        self.compute(flight)
        self.window.append(flight)
        self.counts["steps"] += 1

    def begin(self, request: LlmRequest, size: int) -> tuple[LlmRequest, int, int]:
        """Launch a chunk of `size` tokens. Returns (request, first position, number of tokens).

        If the chunk is the first one, it begins after the reused tokens.
        """
        if request.is_first_context_chunk:
            reused = self.kv.reused_tokens(request)
            self.counts["reused_tokens"] += reused
            size = chunk_after_reuse(size, reused, request.prompt_len, self.options.tokens_per_block)
            request.skip_context(reused)
        start = request.context_position
        request.advance_context(size)
        return request, start, size

    def draft(self, generation: list[LlmRequest]) -> dict[LlmRequest, tuple[int, int]]:
        """Choose drafts. Returns request -> (number of draft tokens, number of them that the step will accept)."""
        drafted = {}
        for request in generation:
            left = request.prompt_len + request.max_new_tokens - 2 - self.kv.kv_length(request)
            count = min(request.draft_len, left)
            if count > 0:
                drafted[request] = count, self.chance(request, "accept") % (count + 1)
        self.counts["drafts"] += len(drafted)
        return drafted

    def run_ahead(self, generation: list[LlmRequest]) -> None:
        """Claim blocks for steps that never run, and rewind the claims. Blocks that a sequence reads must stay.

        Requests with drafts are left out, because their next position is known only after the last step was read. With
        a depth above 1, nothing is claimed, because the plan of the first step does not allow for these claims.
        """
        if self.options.depth > 1:
            return
        claimed: Counter[LlmRequest] = Counter()
        for number in range(self.options.unread_steps):
            ahead = [request for request in generation if request.beam_width == 1
                     and self.kv.kv_length(request) < request.prompt_len + request.max_new_tokens - 1
                     and self.chance(request, "ahead") >> number & 1]
            if self.options.policy == "MAX_UTILIZATION" and self.kv.blocks_to_claim([], ahead) > self.kv.free_blocks:
                break                                           # this policy plans for one step only
            self.prepare(self.kv.claim([], ahead))
            claimed.update(ahead)
        self.look()
        self.kv.rewind(list(claimed), list(claimed.values()))
        self.counts["steps taken back"] += claimed.total()

    def check_budget(self, flight: Flight) -> None:
        tokens = sum(size for _, _, size in flight.contexts) + sum(
            request.beam_width + flight.drafted.get(request, (0, 0))[0] for request in flight.generation)
        if tokens > self.limits.max_num_tokens:
            raise Wrong(f"{tokens} tokens run and there is room for {self.limits.max_num_tokens}")

    # The device.

    def prepare(self, claim: Claim) -> None:
        """Do the table updates and block copies of a claim on the shadow device, before the step."""
        self.device.update(claim.table_updates)
        self.device.copy(claim.copies)

    def compute(self, flight: Flight) -> None:
        """Do the reads and writes of a launched step on the shadow device."""
        for request, start, size in flight.contexts:
            history = self.history(request, 0)
            row = request.seq_slot * self.options.max_beam_width
            for position in range(start, start + size):
                if request in flight.failing:
                    self.write(request, row, position, GARBAGE)
                else:
                    self.device.read(row, position, history, request)
                    self.write(request, row, position, history[position])
        for request in flight.generation:
            count, accepted = flight.drafted.get(request, (0, 0))
            for beam in range(request.beam_width):
                row = request.seq_slot * self.options.max_beam_width + beam
                tokens = list(request.tokens[beam])
                for _ in range(accepted):
                    tokens.append(self.next_token(request, tokens))
                history = self.history_of(request, tokens)
                self.device.read(row, request.num_tokens - 1, history, request)
                for place in range(count + 1):
                    position = request.num_tokens - 1 + place
                    right = place <= accepted and request not in flight.failing
                    self.write(request, row, position, history[position] if right else GARBAGE)

    def write(self, request: LlmRequest, row: int, position: int, content: int) -> None:
        block_id = self.device.write(row, position, content)
        for other in self.active:
            if not self.kv.owns(other):
                continue
            for beam in range(other.beam_width):
                own = other.seq_slot * self.options.max_beam_width + beam == row
                if other is request and (request.context_read < request.prompt_len or own):
                    continue
                if block_id in self.kv.block_ids(other, beam):
                    raise Wrong(f"{request} writes to block {block_id}, which {other} holds too")

    def history(self, request: LlmRequest, beam: int) -> list[int]:
        return self.history_of(request, request.tokens[beam])

    def history_of(self, request: LlmRequest, tokens: list[int]) -> list[int]:
        domain = request.adapter_digest, request.cache_salt, request.token_extra_ids is not None
        return self.histories.of(domain, tokens, request.token_extra_ids)

    def next_token(self, request: LlmRequest, tokens: list[int], beam: int = 0) -> int:
        return blake2b(repr((tokens, beam)).encode(), digest_size=4).digest()[0] % 2

    def chance(self, request: LlmRequest, what: str) -> int:
        """Return a pseudo-random number that depends only on the request, its progress and `what`."""
        seed = what, request.request_id, request.num_tokens, request.num_pauses
        return int.from_bytes(blake2b(repr(seed).encode(), digest_size=4).digest(), "big")

    # Reading a step.

    def finish_oldest(self) -> None:
        flight = self.window.popleft()
        for request in flight.requests:
            if request.is_finished:
                continue
            if request in flight.failing:
                self.end(request, good=False)
                self.counts["failures"] += 1
        for request, start, size in flight.contexts:
            if not request.is_finished:
                self.context_is_done(request, start + size)
        for request in flight.generation:
            if not request.is_finished:
                self.generation_is_done(request, *flight.drafted.get(request, (0, 0)))
        self.look()

    def context_is_done(self, request: LlmRequest, end: int) -> None:
        request.read_context(end)
        self.kv.publish_context(request, request.context_read)
        self.counts["chunks"] += 1
        if end == request.prompt_len:
            if request.beam_width > 1:
                self.device.copy(self.kv.fork(request))
            self.append_token(request)

    def generation_is_done(self, request: LlmRequest, drafted: int, accepted: int) -> None:
        if drafted > accepted:
            self.kv.rewind([request], drafted - accepted)
            self.counts["rewinds"] += 1
        if request.beam_width > 1:
            parents = [self.chance(request, f"parent {beam}") % request.beam_width
                       for beam in range(request.beam_width)]
            self.device.copy(self.kv.reorder(request, parents))
            request.tokens = [list(request.tokens[parent]) for parent in parents]
            self.counts["reorders"] += 1
        for _ in range(accepted + 1):
            if not request.is_finished:
                self.append_token(request)

    def append_token(self, request: LlmRequest) -> None:
        chosen = [self.next_token(request, tokens, beam) for beam, tokens in enumerate(request.tokens)]
        for tokens, token in zip(request.tokens[1:], chosen[1:], strict=True):
            tokens.append(token)
        has_all = request.add_token(chosen[0])
        self.counts["tokens"] += 1
        if has_all or request.total_generated_tokens == self.plan_of(request).ends_at:
            self.end(request, good=True)

    def stop_some(self) -> None:
        for request in list(self.active.in_order):
            stops_at = self.plan_of(request).stops_at
            if stops_at is not None and stops_at <= self.iteration:
                self.counts["stops"] += 1
                self.end(request, good=True)

    def end(self, request: LlmRequest, good: bool) -> None:
        """End a request. If `good` is True, its computed tokens are right, and their blocks are published."""
        computed = request.num_tokens if request.context_read == request.prompt_len else request.context_read
        request.finish()
        self.kv.release(request, computed if good else 0)
        self.give_pages_back(request)
        self.active.remove(request)
        self.served.add(request.request_id)

    # Checks.

    def look(self) -> None:
        audit(self.kv)
        if self.peft is not None:
            for fault in self.peft.faults():
                raise Wrong(fault)

    def give_pages_back(self, request: LlmRequest) -> None:
        if self.peft is not None:
            self.peft.release(request)

    def plan_of(self, request: LlmRequest) -> RequestPlan:
        return self.plans[request.request_id]


# The parts of a run.


def make_scheduler(options: Options, limits: Limits, kv: KvCacheManager, peft: PeftCacheManager | None):
    if options.policy == "MAX_UTILIZATION":
        capacity = MaxUtilizationScheduler(options.max_num_requests, kv, options.lookahead, peft)
    else:
        of_policy = {"GUARANTEED_NO_EVICT": GuaranteedNoEvictScheduler, "STATIC_BATCH": StaticBatchScheduler}
        capacity = of_policy[options.policy](options.max_num_requests, kv, peft)
    chunking = None
    if options.chunking is not None:
        divisions = {policy.name: divide for policy, divide in DIVISIONS.items()} | {"FORCE_CHUNK": force_chunk}
        chunking = ContextChunking(divisions[options.chunking], options.tokens_per_block, options.max_context_length)
    micro_batch = TokenBudgetScheduler(options.max_batch_size, limits.max_num_tokens, chunking,
                                       options.tokens_per_block, kv.reusable_tokens)
    if options.depth > 1:
        micro_batch = EvenMicroBatches(micro_batch, options.depth)
    return SimpleScheduler(capacity, micro_batch)


def make_limits(scenario: Scenario, num_blocks: int) -> Limits:
    """Return the smallest limits with which every request can run, plus the spare tokens of the scenario's options."""
    options, unit = scenario.options, scenario.options.tokens_per_block
    widest = max(plan.beam_width + plan.draft_len for plan in scenario.requests)
    least = (options.max_batch_size - 1) * widest + max(unit + most_drafts(scenario), widest)
    if options.chunking is None:
        least = max(least, *(len(plan.prompt) + plan.draft_len for plan in scenario.requests))
    return Limits(
        max_batch_size=options.max_batch_size, max_num_tokens=least + options.spare_tokens, max_seq_len=LONGEST,
        max_beam_width=options.max_beam_width, max_num_requests=options.max_num_requests,
        max_num_sequences=1000, unbounded_sequences=True, vocab_size=10, num_blocks=num_blocks, tokens_per_block=unit,
        enable_chunked_context=options.chunking is not None,
        context_chunking_policy=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        scheduler_policy=SchedulerPolicy.MAX_UTILIZATION)


def make_retention(plan: tuple | None) -> KvCacheRetentionConfig | None:
    if plan is None:
        return None
    ranges, priority, duration = plan
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(*one) for one in ranges], priority, duration)


def most_drafts(scenario: Scenario) -> int:
    return max((plan.draft_len for plan in scenario.requests), default=0)


def blocks_of_largest(plan: RequestPlan, options: Options, most_drafts: int) -> int:
    """Return the number of blocks with which the request can run alone, also after a pause.

    The function counts blocks token by token. With a look-ahead or drafts, it does not subtract blocks that leave the
    window. For drafts with a window and no pauses, it returns the engine's reservation, which test_reservations.py
    compares with growing sequences.
    """
    prompt_len, end = len(plan.prompt), len(plan.prompt) + plan.max_new_tokens
    starts = [prompt_len]
    if options.policy == "MAX_UTILIZATION":
        if plan.beam_width == 1:
            starts = range(prompt_len, end)
        if options.lookahead or most_drafts:
            options = replace(options, window=None, sinks=0)
    elif options.window is not None and most_drafts:
        window = AttentionWindow(options.window, LONGEST, options.tokens_per_block, options.sinks,
                                 unread_steps=options.unread_steps, max_draft_len=most_drafts)
        return most_blocks(prompt_len, plan.max_new_tokens, window, plan.beam_width,
                           own_last=options.reuse and not options.sinks)
    return max(_most_held(start, end, plan.beam_width, options) for start in starts)


def _most_held(prompt_len: int, end: int, beam_width: int, options: Options) -> int:
    unit, beams = options.tokens_per_block, beam_width
    with_reuse = options.reuse and not options.sinks
    held: list[int] = [1] * ((prompt_len - 1 if with_reuse else prompt_len) // unit)
    if len(held) * unit < prompt_len:
        held.append(beams)
    most, sink_blocks = sum(held), -(-options.sinks // unit)
    for length in range(prompt_len + 1, end + 1):
        if (length - 1) % unit == 0:
            held.append(beams)
        most = max(most, sum(held))
        if options.window is not None:
            gone = (length - options.unread_steps - options.window) // unit - sink_blocks
            for place in range(sink_blocks, sink_blocks + max(gone, 0)):
                held[place] = 0
    return most
