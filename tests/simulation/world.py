"""The simulated world: the real loop and worker function, a virtual clock, a scripted model and a faulty server.

    SimulatedWorld(draw(seed, available())).run() -> Result

No code waits, and there are no threads. The worker function runs a stand-in for the loop, which checks the state before
and after every step. All randomness comes from the seed.
"""

import traceback
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from random import Random

from batch_manager.config import KvCacheConfig, PeftCacheConfig, SpeculativeConfig
from batch_manager.errors import BatchManagerError
from batch_manager.guard import Guard
from batch_manager.handover import ScheduledBatch
from batch_manager.kv.block_pool import OutOfBlocksError
from batch_manager.loop.followed_callbacks import FollowedCallbacks
from batch_manager.names import ContextChunkingPolicy, ErrorCode, SchedulerPolicy
from batch_manager.parallel.leading import LeadingBackend
from batch_manager.parallel.link import Link
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.capacity import STARVED_PLANS
from batch_manager.scheduling.interfaces import RequestScheduler, SchedulerOutput
from batch_manager.scheduling.waiting import REASONS
from batch_manager.stats.trace import IterationTrace
from batch_manager.worker import run_worker
from tests.harness.clock import VirtualClock
from tests.harness.kv_replay import KEY, Replay
from tests.harness.ranks import MemoryRanks, ScriptedRank, TellsDrawnTokens, different_tokens
from tests.harness.worker import exit_of_the_interpreter, virtual_control
from tests.harness.world import make_loop, quiet_log

from . import invariants
from .adapters import Adapters
from .client import PlantedInterrupt, SimulatedClient
from .device import SimulatedDevice
from .draft_model import SimulatedDraftModel
from .drafter import SimulatedDrafter
from .faults import Faults, Place
from .first_in_line import FirstInLine
from .history import Closed, Handed, HistoryChecker, Sent, scripted_oracle
from .markers import Markers
from .rank_clients import RankClient
from .store import SimulatedStore
from .swarm import TERMINATE_ID, Swarm
from .traffic import Traffic
from .transfers import SimulatedTransfers

STEP_S, IDLE_S = 0.02, 0.0048
MOST_IDLE_TURNS = 1_100               # in a row, while requests are unanswered; a load lasts up to 1,000 of them
BOUND_ON_WAITING = 2                  # iterations per step of work ahead of a request
MOST_VIOLATIONS = 20
EVERY_RANKS = 4                       # turns between two comparisons of the ranks' caches
HARMLESS = ("rank.late", "rank.asks_for_the_end")
REFUSALS = ("INVALID_REQUEST", "TOO_LARGE_FOR_KV_CACHE", "LORA_TASK_NOT_CACHED", "QUEUE_FULL")


@dataclass(slots=True)
class Result:
    """The result of one seed.

    iterations   number of iterations of the loop that had work
    violations   the first violations, at most MOST_VIOLATIONS
    digests      digest of the state and of the previous digest, for each turn
    """

    seed: int
    iterations: int = 0
    requests: int = 0
    finals: int = 0
    tokens: int = 0
    violations: list[str] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    markers: Counter[str] = field(default_factory=Counter)
    digests: list[bytes] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return self.digests[-1].hex() if self.digests else ""


class SimulatedWorld:
    """The run of one seed. `history` checks the calls, invariants.py the state, and `markers` counts situations."""

    def __init__(self, swarm: Swarm, *, trace: list[IterationTrace] | None = None,
                 history: list | None = None) -> None:
        """Build the world of a swarm. The run appends to the lists `trace` and `history`, if they are given."""
        self.swarm = swarm
        self._kept_trace, self._kept_history = trace, history
        self.result = Result(swarm.seed)
        self.clock = VirtualClock()
        self.control = virtual_control(self.clock)
        self.faults = Faults(Random(f"faults {swarm.seed}"), swarm.faults, swarm.fault_rate)
        self.markers = Markers(self)
        self.mark = self.markers.reach
        model = {"vocab_size": swarm.vocab_size, "key": swarm.seed, "window": swarm.window, "sink": swarm.sinks}
        self.history = HistoryChecker(scripted_oracle(model), swarm.max_seq_len, swarm.is_static)
        self.adapters = Adapters(self)
        self.store = SimulatedStore(self) if swarm.stored_blocks else None
        self.transfers = SimulatedTransfers(self) if swarm.transfers is not None else None
        self.client = SimulatedClient(self, Random(f"client {swarm.seed}"))
        self.device = (SimulatedDevice if swarm.ranks == 1 else SimulatedRank0)(
            faults=self.faults, owner_of=lambda slot: self.loop.kv.sequences.owners[slot],
            blocks_of=lambda request, beam=0: self.loop.kv.block_ids(request, beam),
            table_of=lambda request: self.loop.kv.sequences.table(request), blame=self.blame,
            is_asynchronous=swarm.is_asynchronous,
            before_step=self._before_device_step, check=self.check, is_reused=swarm.reuse,
            max_seq_len=swarm.max_seq_len, num_blocks=swarm.num_blocks,
            tokens_per_block=swarm.tokens_per_block, num_slots=swarm.max_batch_size, num_ranks=swarm.ranks,
            starts_late=swarm.late_ranks is not None, **model,
            load_fails=self.adapters.load_fails, adapter_pages=swarm.adapter_pages,
            **({"host_blocks": swarm.host_blocks} if swarm.host_blocks else {}))
        self.ranks: SimulatedRanks | None = None if swarm.ranks == 1 else SimulatedRanks(self)
        drafter = SimulatedDraftModel if swarm.draft_model else SimulatedDrafter
        self.drafter = drafter(self, model) if swarm.drafts else None
        self.replay = Replay() if swarm.reuse and not swarm.seed % 2 else None
        self.loop = self._build()
        self.first_in_line = FirstInLine(self)
        self.never_pauses = swarm.is_static or swarm.policy is SchedulerPolicy.GUARANTEED_NO_EVICT

        self.step_number = 0
        self.has_traffic = True
        self.get_is_over = False
        self._idle_turns = 0
        self._digest = b""
        self._endings = list(swarm.endings)
        self._in_a_callback: Callable[[], None] | None = None
        self._engine_may_fail = False
        self._blamed: dict[int, set[ErrorCode]] = {}             # id -> codes that the request may end with
        self._doomed: dict[int, int | None] = {}                 # id that must end with a code -> step to be read first
        self._steps_read: set[int] = set()
        self._requests: dict[int, LlmRequest] = {}             # id -> active request
        self._planned: set[int] = set()                        # ids that were active at the last plan
        self._failed_now: list[LlmRequest] = []
        self._slots_freed: set[int] = set()
        self._work = 0                                           # steps of all requests so far
        self._work_done = 0                                      # steps of all ended requests
        self._begun: dict[int, tuple[int, int, int]] = {}        # id -> (iteration, work done by then, own work)
        self._failing_claims = 0
        self.arrivals: dict[int, int] = {}                       # id -> number of items read before it

    def _build(self):
        swarm, client = self.swarm, self.client
        backend = self.device if self.ranks is None else LeadingBackend(
            self.device, self.ranks.leader, swarm.late_ranks)
        loop = make_loop(
            client, backend=backend, clock=self.clock, policy=swarm.policy, model_type=swarm.model_type,
            max_beam_width=swarm.max_beam_width, terminate_req_id=TERMINATE_ID, exclude_input=swarm.exclude_input,
            parts={"trace": self._note_trace, "after_responses": client.after_responses, "at_end": client.at_end,
                   "kv_events": self.replay, "drafter": self.drafter, "block_store": self.store},
            heartbeat=self.control.heartbeat, as_arrays=True,
            kv_cache_config=KvCacheConfig(enable_block_reuse=swarm.reuse, max_attention_window=swarm.window,
                                          sink_token_length=swarm.sinks, host_cache_size=swarm.host_blocks,
                                          event_hash_key=KEY, disk_min_tokens=swarm.stored_tokens),
            enable_trt_overlap=swarm.overlap, run_ahead=swarm.run_ahead,
            enable_chunked_context=swarm.chunking is not None,
            context_chunking_policy=swarm.chunking or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
            max_batch_size=swarm.max_batch_size, max_num_tokens=swarm.max_num_tokens,
            max_num_sequences=swarm.max_num_sequences, max_queued_requests=swarm.max_queued_requests,
            max_queued_tokens=swarm.max_queued_tokens, max_bytes_in_flight=swarm.max_bytes_in_flight,
            max_admissions_per_iteration=swarm.max_admissions, flush_stats_when_idle=swarm.flush_stats,
            speculative_config=SpeculativeConfig("custom", swarm.drafts) if swarm.drafts else None,
            peft_cache_config=PeftCacheConfig(host_cache_size=swarm.adapter_bytes) if swarm.adapters else None,
            kv_transfer_config=swarm.transfers)
        reject = loop._resources.reject_drafts

        def watched_reject(requests, num_rejected):
            self.mark("drafts rejected")
            reject(requests, num_rejected)

        loop._resources.reject_drafts = watched_reject
        if swarm.adapters:
            self.adapters.watch(loop)
        self.traffic = None if loop.stored is None else Traffic(self, loop.stored)
        fetched = loop.callbacks.fetched
        fetched.read_next = client.noting(fetched.read_next)
        loop.scheduler = WatchedScheduler(self, loop.scheduler)
        self._watch_claims(loop.kv)
        self._watch_window(loop.window)
        return loop

    # running

    def run(self) -> Result:
        result = self.result
        with quiet_log():
            try:
                run_worker(WatchedLoop(self), self.control, IDLE_S)
            except (Exception, SystemExit, GeneratorExit, PlantedInterrupt) as error:
                self.check(self._engine_may_fail, f"C14: {error!r} ended the worker")
        self._close()
        result.hits, result.markers = self.faults.hits + self.adapters.faults.hits, self.markers.counts
        if self.drafter is not None:
            result.hits += self.drafter.faults.hits
        for part in (self.store, self.transfers):
            if part is not None:
                result.hits += part.faults.hits
        result.requests, result.finals = self.history.num_handed, self.client.num_finals
        return result

    def step(self, *, accept_new: bool) -> bool:
        """Run one turn of the worker: advance the world, run the loop's step, check everything."""
        self.step_number += 1
        self.get_is_over = not accept_new
        self.check(accept_new == (not self.control.draining), "I26: get goes on although a shutdown was asked for")
        self.client.new_turn()
        self._move()
        callbacks, began_at = self.loop.callbacks, self.clock.now
        asked_before, back_off = callbacks.failures["get"], self.clock.now < callbacks.fetched.back_off.ends_at
        is_busy = self.loop.step(accept_new=accept_new)
        if back_off and callbacks.failures["get"] == asked_before:
            self.mark("get is left alone after a failure")
        self.check(self.client.not_told == 0, "I31: an iteration without after_responses behind its responses")
        if self.traffic is not None:
            for fault in self.traffic.violations(began_at):
                self.check(False, fault)
        self._look(is_busy)
        return is_busy

    def _move(self) -> None:
        """Advance the clock between two turns, begin the endings that are due, and cause clock faults."""
        while self._endings and self._endings[0][0] <= self.step_number:
            self._end(self._endings.pop(0)[1])
        if self.swarm.adapters:
            self.adapters.move()
        if self.traffic is not None:
            self.traffic.move()
        name = self.faults.draw(Place.CLOCK)
        if name is not None:
            self.faults.hit(name)
            rng = self.faults.rng
            self.clock.now += {"clock.forward": 3600.0, "clock.backward": -rng.uniform(0.001, 0.5),
                               "clock.stands_still": 0.0}[name]
        if name != "clock.stands_still":
            self.clock.now += STEP_S / 4
        if self.ranks is not None:
            self.ranks.move()

    def _end(self, name: str) -> None:
        """Begin the ending `name`, such as "drain". A run may have several endings."""
        rng, loop, control = self.faults.rng, self.loop, self.control
        kind = name.removeprefix("life.")
        if kind != "endless_arrivals":
            self.has_traffic = "life.endless_arrivals" in self._hit_endings()
        if kind == "drain":
            if not loop.is_empty:
                self.mark("drained")
            self.ask_to_drain()
            return
        if kind == "terminate request":
            if not control.draining:
                self.client.hand_over_the_end()
                self.ask_to_drain_later()
            return
        if kind == "twice":
            self.ask_to_drain()
            self.faults.hit(name)
            self.ask_to_drain()
        elif kind == "endless_arrivals":
            self.faults.hit(name)
            self.ask_to_drain()
        elif kind == "shutdown":
            self._note_what_ends()
            self.faults.hit(name)
            control.ask_to_abort()
        elif kind == "from_a_callback":
            self._in_a_callback = lambda: (self.faults.hit(name), self.mark("shut down inside a callback"),
                                           rng.choice([control.ask_to_drain, control.ask_to_abort])())
        elif kind == "collected":
            self.clock.interrupt(rng.randrange(12), lambda: (self.faults.hit(name), control.ask_to_abort()))
        elif kind == "interpreter_exit":
            self.clock.interrupt(rng.randrange(12), lambda: (self.faults.hit(name), exit_of_the_interpreter(control)))
        else:
            assert kind == "killed"
            self.clock.interrupt(rng.randrange(12), self._kill)

    def _hit_endings(self) -> set[str]:
        return {name for name in self.faults.hits if name.startswith("life.")}

    def _kill(self) -> None:
        self.faults.hit("life.killed")
        self._engine_may_fail = True
        raise SystemExit("planted")

    def ask_to_drain(self) -> None:
        self.control.ask_to_drain()

    def ask_to_drain_later(self) -> None:
        """Schedule a drain in 200 turns, for the case that the engine does not read the terminate request."""
        self._endings.append((self.step_number + 200, "drain"))
        self._endings.sort()

    def _note_what_ends(self) -> None:
        if len(self.loop.intake):
            self.mark("shut down with a queue")
        if len(self.loop.active):
            self.mark("shut down with requests running")

    def terminate_was_read(self) -> None:
        if self.history.open:
            self.mark("terminate request with others alive")

    @property
    def _may_be_lost(self) -> bool:
        return self._engine_may_fail or self.device.is_lost or self.ranks is not None and self.ranks.may_be_lost

    def engine_failed(self, error: BatchManagerError, reason: str) -> None:
        """Note that the worker declared the engine failed. Check that a simulated fault was the reason."""
        self.check(self._may_be_lost, f"I29: the engine failed by itself: {reason}")
        self._engine_may_fail = True
        if len(self.loop.intake):
            self.mark("engine failed with a queue")
        self.control_end_is_near()

    def control_end_is_near(self) -> None:
        """Schedule a drain in 20 turns. Until then, the failed engine answers requests."""
        self._endings.append((self.step_number + 20, "drain"))
        self._endings.sort()

    def _close(self) -> None:
        """Check the state after the worker has ended."""
        intake, client = self.loop.intake, self.client
        self.check(self.control.stopped.is_set and self.device.closed, "C14: the worker ended and did not say so")
        if not self.result.violations:
            exact = not self._engine_may_fail
            self.record(Closed(self.clock.now, *((intake.num_accepted, intake.num_refused, intake.unaddressable)
                                                 if exact else ())))
            if exact:
                for name, count in self.loop.callbacks.failures.items():
                    self.check(count == client.failures[name], f"I28: {count} failures of {name} were counted")
            self.check(self.loop.is_empty, "C14: something is left")
            if exact:
                kv = self.loop.kv
                self.check(kv.used_blocks == 0, f"C23: {kv.used_blocks} blocks are held after the end")
        if self.swarm.draft_model:
            self.check(self.drafter.backend.closed, "C14: the worker ended, and the draft model is not closed")
        self.check(client.not_told == 0 and client.endings == 1,
                   f"I31: {client.not_told} responses without after_responses, {client.endings} calls of at_end")
        if self.ranks is not None:
            self.check(self.ranks.all_ended(), "C14: another rank has not ended")
            for rank, of_rank in self.ranks.clients.items():
                if rank not in self.ranks.stopped and not self.result.violations:
                    of_rank.judge(self.ranks.followers[rank]._guard.failures, not self._may_be_lost)
        client.judge_what_was_kept()
        client.over = "the run has ended"

    # checks

    def check(self, holds: bool, rule: str) -> None:
        """If `holds` is False, note a violation of `rule` and end the run."""
        if not holds and len(self.result.violations) < MOST_VIOLATIONS:
            self.result.violations.append(f"{rule}  (turn {self.step_number})")
            self.control.draining = self.control.aborting = True

    def record(self, event: object) -> None:
        """Add a call to the history, and note its anomalies."""
        self.history.feed(event)
        if self.history.anomalies:
            for anomaly in self.history.anomalies:
                self.check(False, anomaly)
            self.history.anomalies.clear()
        if self._kept_history is not None:
            self._kept_history.append(event)

    def _look(self, is_busy: bool) -> None:
        loop, result = self.loop, self.result
        if is_busy:
            result.iterations += 1
            self._idle_turns = 0
        else:
            self._idle_turns += 1
            if self._idle_turns == 2 and not self.control.draining:
                self.mark("all idle in between")
            self.check(self._idle_turns < MOST_IDLE_TURNS or loop.is_empty, "I22: alive and idle")
        if loop.failure is None:
            for fault in invariants.faults(self):
                self.check(False, fault)
            if self.ranks is not None:
                self.check(not (fault := self.ranks.fault()), fault)
        self.markers.step_ended(self._slots_freed)
        self.markers.failed(self._failed_now)
        if self._failed_now:
            self._failed_now = []
        if self._slots_freed:
            self._slots_freed = set()
        if self.device.num_bisected:
            self.mark("a step run in parts")
            self.device.num_bisected = 0
        self._check_waiting()
        self._take_digest()

    def _check_waiting(self) -> None:
        """Check I24: the oldest request has not waited longer than the work before it takes."""
        if self.traffic is not None:
            for request_id in self.loop.stored.request_ids & self._begun.keys():
                begun, ahead, own = self._begun[request_id]
                self._begun[request_id] = begun + 1, ahead, own
        for request_id in self.history.open:
            begun, ahead, own = self._begun.get(request_id, (self.result.iterations, 0, 0))
            waited = self.result.iterations - begun
            bound = BOUND_ON_WAITING * self.swarm.depth * (self._work - ahead) + 20
            if self.swarm.adapters:
                bound += STARVED_PLANS
            if waited > bound:
                self.check(False, f"I24: request {request_id} has waited {waited} iterations for {bound}")
            return

    def _take_digest(self) -> None:
        loop = self.loop
        state = [self.step_number, self.result.iterations, loop.finals.num_sent, loop.iteration,
                 self.client.next_id, round(self.clock.now * 1e6), len(loop.intake), loop.intake._bytes_in_flight]
        for request in loop.active:
            state += (request.request_id & 0x7FFFFFFFFFFFFFFF, request.num_tokens, request.tokens[0][-1],
                      request.context_position, request.seq_slot, request.num_pauses, request.state.value)
            if request.beam_width > 1:
                state += [tokens[-1] for tokens in request.tokens]
        kv = loop.kv
        block_ids = array("i", kv.pool.free_order())
        for owner in kv.sequences.owners:
            if owner is not None:
                for beam in range(owner.beam_width):
                    block_ids.extend(kv.block_ids(owner, beam))
        self._digest = blake2b(self._digest + array("q", state).tobytes() + block_ids.tobytes(),
                               digest_size=8).digest()
        self.result.digests.append(self._digest)

    # what callbacks and parts report

    def callback_begins(self, name: str) -> None:
        if self.control.stopped.is_set:
            self.check(False, f"I26: {name} runs after the worker had ended")
        if self._in_a_callback is not None:
            act, self._in_a_callback = self._in_a_callback, None
            act()

    def alive(self) -> list[int]:
        return list(self.history.open)

    def is_alive(self, request_id: object) -> bool:
        return request_id in self.history.open

    def expected_room(self) -> int:
        limit = self.swarm.max_num_sequences
        if limit == -1:
            return -1
        limit = self.swarm.max_batch_size if limit is None else limit
        return max(limit - len(self.loop.active) - len(self.loop.intake), 0)

    def handed(self, request_id: int) -> Handed | None:
        """Return the item of the live request with this id, or None."""
        waiting = self.history.open.get(request_id)
        return waiting[0].handed if waiting else None

    def note_handed(self, handed: Handed) -> None:
        self.markers.handed(handed)
        if handed.request_id is None:
            return
        if self.swarm.max_num_sequences == -1:
            self.mark("unbounded sequences")
        if handed.request_id in self.history.open:
            self.mark("duplicate of one that runs" if handed.request_id in self.loop.active
                      else "duplicate of one that waits")
        else:
            if handed.request_id in self.client.recently_ended:
                self.mark("id reused at once")
            self._begin(handed)

    def _begin(self, handed: Handed) -> None:
        swarm = self.swarm
        tokens = min(len(handed.prompt) + handed.max_new_tokens, swarm.max_seq_len)
        own = -(-tokens // swarm.tokens_per_block) + handed.max_new_tokens + 2
        self.arrivals[handed.request_id] = self.history.num_handed
        self._begun[handed.request_id] = self.result.iterations, self._work_done, own
        self._work += own
        if -(-tokens // swarm.tokens_per_block) == swarm.num_blocks and "allocator.smallest_pool" in swarm.faults:
            self.faults.hit("allocator.smallest_pool")

    def note_sent(self, sent: Sent) -> None:
        """Check the response `sent` before it is added to the history."""
        if sent.tokens is not None:
            self.result.tokens += len(sent.tokens)
        request = self._requests.get(sent.request_id)
        self.markers.sent(sent, request)
        if not sent.final or sent.code == "DUPLICATE_REQUEST_ID":
            return
        request_id, loop = sent.request_id, self.loop
        begun, _, own = self._begun.pop(request_id, (self.result.iterations, 0, 0))
        self._work_done += own
        if sent.code in REFUSALS:                                # the id may belong to another live request
            if sent.code == "QUEUE_FULL":
                self._judge_queue_full(sent)
            return
        if self.result.iterations - begun >= 100:
            self.mark("alive for a hundred iterations")
        if request is not None:
            self._slots_freed.add(request.seq_slot)
            del self._requests[request_id]
        if not (self._engine_may_fail or self.control.aborting):
            self.check(request_id not in loop.active, f"C5: request {request_id} is told the end and is still active")
            for owner in loop.kv.sequences.owners:
                if owner is not None and owner.request_id == request_id:
                    self.check(False, f"I18: request {request_id} is told the end and holds blocks")
        self._judge_blame(sent, self._blamed.pop(request_id, set()), request)

    def _judge_blame(self, sent: Sent, codes: set[ErrorCode], request: LlmRequest | None) -> None:
        """Check I29: a request fails if a fault must fail it, and only if a fault may fail it.

        codes     codes of the faults that may fail the request
        request   the active request; None if the request never ran
        """
        read_in = self._doomed.pop(sent.request_id, -1)
        is_doomed = read_in is None or read_in in self._steps_read
        names = {code.value for code in codes}
        if sent.code in ("NON_FINITE_LOGITS", "INVALID_TOKEN", "MODEL_ERROR", "OUT_OF_MEMORY"):
            self.check(sent.code in names, f"I29: request {sent.request_id} ended with {sent.error} and nothing had "
                                           "happened to it")
            if request is not None:
                self._failed_now.append(request)
        elif sent.code == "ENGINE_FAILED":
            self.check(self._may_be_lost or "ENGINE_FAILED" in names,
                       f"I29: request {sent.request_id} ended with {sent.error}")
        elif sent.code == "SHUTDOWN":
            self.check(self.control.aborting, f"C14: request {sent.request_id} was answered with SHUTDOWN")
        elif not sent.error and sent.reason in (1, 2, 3):
            self.check(not is_doomed, f"I29: request {sent.request_id} had to end with {sorted(names)}")

    def _judge_queue_full(self, sent: Sent) -> None:
        swarm, queue = self.swarm, self.loop.intake.waiting.queue
        tokens = sum(admitted.request.prompt_len for admitted in queue)
        prompt = len(self.history.open[sent.request_id][0].handed.prompt)
        if swarm.adapters or self.loop.stored:
            return                               # others wait elsewhere, or the host cache is full of adapters in use
        self.check(len(queue) >= swarm.max_queued_requests or tokens + prompt > swarm.max_queued_tokens
                   or swarm.max_bytes_in_flight < 10**6, f"C20: {sent.error}, with {len(queue)} waiting")

    def note_stops(self, named: list, alive: list) -> None:
        self.markers.stopped(named, alive)

    def blame(self, request: LlmRequest, code: ErrorCode, iteration: int | None = None, *, must: bool = True) -> None:
        """Note that a fault must fail `request` with `code`, or may do so if `must` is False.

        iteration   the step that must be read before the request fails; None if the request fails in any case
        """
        if must:
            self._doomed.setdefault(request.request_id, iteration)
        self._blamed.setdefault(request.request_id, set()).add(code)
        if code is ErrorCode.NON_FINITE_LOGITS:
            self.markers.blocks_poisoned(self.loop.kv.block_ids(request))

    def note_plan(self, active: list[LlmRequest], inflight: frozenset, plan: SchedulerOutput) -> None:
        for fault in invariants.plan_faults(self, active, inflight, plan):
            self.check(False, fault)
        self._requests = {request.request_id: request for request in active}
        for request in active if self.swarm.adapters else ():
            for open_ in self.history.open.get(request.request_id, ()):
                if open_.handed.prompt == request.tokens[0][:request.prompt_len]:      # not one that was refused
                    if not open_.handed.mark:
                        self.adapters.note_active(request, open_.handed)
                    break
        self._planned = {*self._requests}
        self.markers.plan(active, inflight, plan)
        for request, behind in zip(active, active[1:]):
            if behind.priority < request.priority:
                self.mark("overtaken by priority")
                break

    def _before_device_step(self, batch: ScheduledBatch) -> None:
        self.clock.now += STEP_S
        if batch.context and batch.has_drafts:
            self.mark("drafts and a context in one step")
        for fault in invariants.batch_faults(self, batch):
            self.check(False, fault)

    def _note_trace(self, iteration: IterationTrace) -> None:
        """Check that a trace has each active request once: in the step, paused or waiting."""
        ran = [*(chunk[0] for chunk in iteration.context), *iteration.generation, *iteration.paused]
        waiting = [request_id for ids in iteration.waiting.values() for request_id in ids]
        self.check(len(ran + waiting) == len({*ran, *waiting}) and iteration.waiting.keys() <= {*REASONS},
                   f"iteration {iteration.iteration} of the trace names a request twice, or an unknown reason")
        if ran:
            self.check({*ran, *waiting} == self._planned,
                       f"iteration {iteration.iteration} of the trace does not name each active request")
        if self._kept_trace is not None:
            self._kept_trace.append(iteration)

    # the allocator

    def _watch_claims(self, kv) -> None:
        """Check I19 and I21: make some claims fail, and check that a failed claim changes nothing."""
        claim = kv.claim

        def watched(first_chunks, generation, num_drafts=None, context_drafts=()):
            needed = kv.blocks_to_claim(first_chunks, generation, (), num_drafts, context_drafts)
            if num_drafts is not None:
                self.mark("drafts in a step")
                self.check(needed <= kv.usage().free_blocks, "I36: drafts take blocks with cached content")
            if kv.free_blocks == 0 and kv.pool.extra_owners:
                self.faults.hit("allocator.full_of_shared")
            stolen = self._steal(kv, needed)
            before = (kv.free_blocks, kv.pool.extra_owners, kv.sequences.num_mentions(),
                      kv.sequences.kv_lengths.tolist())
            try:
                return claim(first_chunks, generation, num_drafts, context_drafts)
            except OutOfBlocksError as error:
                self.check(bool(stolen), f"I21: an allocation failed: {error}")
                after = (kv.free_blocks, kv.pool.extra_owners, kv.sequences.num_mentions(),
                         kv.sequences.kv_lengths.tolist())
                self.check(before == after, f"I19: a failed allocation changed {before} to {after}")
                for request in self.loop.active:
                    if not request.is_finished:                  # the final of a held request has no error
                        self.blame(request, ErrorCode.ENGINE_FAILED)
                raise
            finally:
                if stolen:
                    kv.pool.give_back(stolen[::-1], front=True)

        kv.claim = watched

    def _watch_window(self, window) -> None:
        """Wrap methods of the window of steps in flight, to note each step that is read or taken back.

        The fault of a step that was taken back must fail no request.
        """
        read, take_back, run_again = window.read, window._unclaim_later_steps, window._run_again

        def watched_read():
            flight = window._steps[0]
            self._steps_read.add(flight.batch.iteration)
            ended = any(request.is_finished for request in flight.requests)
            failed = self._runner_failures()
            result = read()
            if ended:
                self.mark("a row is discarded")
                if self._runner_failures() > failed:
                    self.mark("a step fails behind a discarded row")
            return result

        def watched_take_back(failed):
            if window._steps:
                self.mark("a step fails with another in flight")
            take_back(failed)
            for flight in window._steps:
                if flight.void:
                    self.mark("a step that ran ahead is taken back")
                    self.first_in_line.taken_back(flight.void)
                for request in flight.void:
                    if self._doomed.get(request.request_id) == flight.batch.iteration:
                        del self._doomed[request.request_id]

        def watched_run_again(flight):
            if any(request.is_finished for request in flight.requests):
                self.mark("a step is run again without those who ended")
            return run_again(flight)

        window.read, window._unclaim_later_steps, window._run_again = watched_read, watched_take_back, watched_run_again

    def _runner_failures(self) -> int:
        return self.loop._runner.num_failed_steps

    def _steal(self, kv, needed: int) -> list[int]:
        """Take blocks before a claim of `needed` blocks, so that the claim fails.

        Returns the ids of the taken blocks, or [] if no fault is chosen.
        """
        if not needed:
            return []
        name = self.faults.draw(Place.ALLOCATOR)
        if name == "allocator.fails_for_a_while":
            self._failing_claims = self.faults.rng.randint(2, 5)
        if self._failing_claims:
            self._failing_claims -= 1
            name = "allocator.fails_for_a_while"
        if name not in ("allocator.fails_once", "allocator.fails_for_a_while"):
            return []
        self.faults.hit(name)
        count = kv.free_blocks - self.faults.rng.randrange(needed)
        return (kv.pool if kv.cache is None else kv.cache).take(count)


class SimulatedRank0(TellsDrawnTokens, SimulatedDevice):
    """The device of rank 0 among several."""

    def take_drawn(self, batch: ScheduledBatch | None = None) -> tuple:
        assert batch is not None
        self.launch(batch)                             # a rank may run the batch before this one does
        return super().take_drawn(batch)


class SimulatedRanks(MemoryRanks):
    """The other ranks of a simulated engine, and what happens to them.

    may_be_lost   whether a rank is gone, so that the engine fails
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._faults, device = world, world.faults, world.device
        self.may_be_lost = False
        self.backends = {rank: ScriptedRank(device.info, partial(device.step_of, rank))
                         for rank in range(1, world.swarm.ranks)}
        self.clients = {rank: RankClient(world, rank) for rank in self.backends if world.swarm.rank_callbacks}
        super().__init__(self.backends, monotonic=lambda: world.clock.now,    # an exception for rank 0 strikes not here
                         on_idle=self._idle, followed=self._followed)
        self.leader.on_end = lambda drain: world._end("drain")

    def _followed(self, rank: int, link: Link, guard: Guard) -> FollowedCallbacks | None:
        return self.clients[rank].followed(link, guard) if self.clients else None

    def _idle(self, seconds: float) -> None:
        self._world.clock.now += seconds

    def move(self) -> None:
        """Between two turns: the ranks run, and sometimes something happens to one of them."""
        name = None if self.may_be_lost else self._faults.draw(Place.RANK)
        rng = self._faults.rng
        if name is None or name not in HARMLESS and rng.randrange(8):    # a loss ends the run
            return
        self._faults.hit(name)
        rank = rng.choice(list(self.backends))
        to_leader, to_rank = self.transports[rank]
        kind = name.removeprefix("rank.")
        if kind == "late":
            self.late[rank] = rng.randint(1, 6)
            return
        if kind == "asks_for_the_end":
            self.followers[rank].link.ask_to_end(True)
            self.tick()
            return
        self.may_be_lost = True
        if kind == "stopped":
            self.stopped.add(rank)
        elif kind == "killed":
            to_leader.close()
            to_rank.close()
        else:
            self.followers[rank].link.tick()           # a BEAT is on its way to rank 0
            frame = to_leader.arrives.pop()
            if kind == "altered":
                at = rng.randrange(len(frame))
                frame = frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1:]
                to_leader.arrives.append(frame)
            elif kind == "twice":
                to_leader.arrives.extend([frame, frame])
            else:
                to_leader.arrives.append(frame[:rng.randrange(1, len(frame))])
                to_rank.close()

    def fault(self) -> str:
        """Return what another rank has in its cache that rank 0 has not, or ""."""
        loop = self._world.loop
        if self._world.step_number % EVERY_RANKS or loop.window or loop._resources.device_work.has_pending:
            return ""
        device = self._world.device
        own = device._pool.reshape(-1, device.info.tokens_per_block)
        for rank, backend in self.backends.items():
            if rank not in self.errors and (difference := different_tokens(loop, own, backend)):
                return f"R1: rank {rank} has other tokens: {difference}"
        return ""

    def all_ended(self) -> bool:
        """Whether every rank that was not stopped has closed its backend."""
        self.late.clear()
        self.run()
        return all(backend.closed for rank, backend in self.backends.items() if rank not in self.stopped)


class WatchedLoop:
    """Replaces the loop in the worker function. Its `step` is a turn of the simulated world."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._loop = world, world.loop
        self.step, self.is_done, self.health = world.step, world.loop.is_done, world.loop.health

    def fail(self, error: BatchManagerError) -> None:
        self._world.engine_failed(error, traceback.format_exc(limit=-3))
        self._loop.fail(error)

    def end(self, error: BatchManagerError, health: Callable[[], dict]) -> None:
        self._world._note_what_ends()
        self._loop.end(error, health)


class WatchedScheduler(RequestScheduler):
    """A scheduler whose plans are checked before the engine gets them."""

    def __init__(self, world: SimulatedWorld, scheduler: RequestScheduler) -> None:
        self._world, self._scheduler = world, scheduler

    def schedule_request(self, active_requests, inflight_request_ids) -> SchedulerOutput:
        plan = self._scheduler.schedule_request(active_requests, inflight_request_ids)
        self._world.note_plan(active_requests, inflight_request_ids, plan)
        return plan
