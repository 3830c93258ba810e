"""Past bugs of this engine or of similar engines, reintroduced by patches.

A bug is a function that gets pytest's `monkeypatch` and breaks the engine again. The test runs seeds of the simulator
until one finds a violation. A seed chooses a swarm, which is a random configuration. `Bug.world` limits the swarm to
configurations that the bug affects. Without the bug, the same seeds find no violation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from batch_manager.decoding.position_ring import PositionRing
from batch_manager.guard import ContainingBlock
from batch_manager.kv import prefix_cache
from batch_manager.kv.block_pool import BlockPool, OutOfBlocksError
from batch_manager.kv.claims import PrefixClaim
from batch_manager.kv.eviction import EvictionOrder
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.ledger import KvLedger
from batch_manager.kv.prefix_index import PrefixIndex, PrefixNode
from batch_manager.kv.reservations import Reservations
from batch_manager.kv.sequence_table import SequenceTable
from batch_manager.loop.active_requests import ActiveRequests
from batch_manager.loop.advance import Outcome
from batch_manager.loop.callbacks import GuardedCallbacks
from batch_manager.loop.finals import Finals
from batch_manager.loop.generation_loop import GenerationLoop
from batch_manager.loop.intake import Intake
from batch_manager.loop.waiting_requests import WaitingRequests
from batch_manager.names import ContextChunkingPolicy, FinishReason, SchedulerPolicy, TrtGptModelType
from batch_manager.requests import admission
from batch_manager.requests.admission import Admission
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.scheduling.capacity import MaxUtilizationScheduler
from batch_manager.steps.output_check import StepOutputCheck
from batch_manager.steps.resources import Resources
from batch_manager.steps.runner import StepRunner
from batch_manager.steps.window import StepWindow
from batch_manager.testing.scripted_backend import ScriptedBackend

IN_FLIGHT = {"model_type": TrtGptModelType.InflightFusedBatching}
TIGHT = {**IN_FLIGHT, "policy": SchedulerPolicy.MAX_UTILIZATION, "chunking": None, "overlap": False,
         "run_ahead": False, "is_asynchronous": False,
         "tokens_per_block": 2, "num_blocks": 24, "max_seq_len": 40, "max_batch_size": 8, "max_num_tokens": 64,
         "max_num_sequences": 8}
NO_EVICT = {**TIGHT, "policy": SchedulerPolicy.GUARANTEED_NO_EVICT}
BUSY = {"arrival": 0.3, "burst": 3, "prompt": 12, "output": 20, "prioritised": 0.0}
STREAMING = {**BUSY, "streams": 1.0}
STOPPING = {**BUSY, "stops": 0.2}
REUSING = {**TIGHT, "reuse": True}
OVERLAPPING = {**TIGHT, "overlap": True}
RUNNING_AHEAD = {**TIGHT, "run_ahead": True, "is_asynchronous": True}
ALIKE = {**BUSY, "shares_prefix": 0.9, "salted": 0.5}


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug and the configurations of the simulator that find it.

    failure      the number of a known failure, or how the bug was found
    needs        the feature of the engine without which the bug cannot occur, if any
    first_seed   where the search begins: at a seed that finds it, if the first few do not. The search goes on with
                 all others
    """

    name: str
    failure: str
    plant: Callable[[Any], None]
    world: dict[str, Any] = field(default_factory=lambda: TIGHT)
    traffic: dict[str, Any] = field(default_factory=lambda: BUSY)
    faults: tuple[str, ...] = ()
    needs: str | None = None
    first_seed: int = 0


def same_block_twice_in_one_release(patch) -> None:
    def give_back(self, block_ids, front=False):
        for block_id in block_ids:
            self._owners[block_id] -= 1
            if self._owners[block_id] == 0:
                self.free.append(block_id, front)

    def release(self, request, *args):
        if self.owns(request):
            block_ids = self.block_ids(request)
            self.pool.give_back([*block_ids, block_ids[-1]])
            self.sequences.remove(request)
    patch.setattr(BlockPool, "give_back", give_back)
    patch.setattr(KvCacheManager, "release", release)


def a_stop_forgets_the_blocks(patch) -> None:
    release = Resources.release

    def forgetful(self, request, **options):
        if request.total_generated_tokens == 0 or request.num_tokens == request.final_length:
            release(self, request, **options)
        else:
            self._setups.pop(request.request_id, None)
    patch.setattr(Resources, "release", forgetful)


def a_counter_is_kept_beside_the_books(patch) -> None:
    append = EvictionOrder.append

    def counting(self, block_id, front=False):
        self._counted = getattr(self, "_counted", len(self._default))
        append(self, block_id, front)
        if block_id % 7:                                         # some returned blocks are not counted
            self._counted += 1
    counted = EvictionOrder.popitem

    def taking(self, wanted=1):
        self._counted = getattr(self, "_counted", len(self._default)) - wanted
        return counted(self, wanted)
    patch.setattr(EvictionOrder, "append", counting)
    patch.setattr(EvictionOrder, "popitem", taking)
    patch.setattr(EvictionOrder, "__len__", lambda self: getattr(self, "_counted", len(self._default)))


def a_failed_claim_keeps_what_it_took(patch) -> None:
    claim = KvCacheManager.claim

    def one_after_the_other(self, first_chunks, generation, *drafts):
        try:
            return claim(self, first_chunks, generation, *drafts)
        except OutOfBlocksError:
            for request in first_chunks[:1]:                     # the first request keeps its blocks
                wanted = -(-request.prompt_len // self.tokens_per_block)
                if wanted <= self.free_blocks:
                    private = 1 if request.prompt_len % self.tokens_per_block else 0
                    self.sequences.add(request, self.pool.take(wanted), 0, private)
            raise
    patch.setattr(KvCacheManager, "claim", one_after_the_other)


def a_new_block_comes_one_token_late(patch) -> None:
    def crossing(self, slots):
        return slots[self.kv_lengths[slots] % self.tokens_per_block == 1]
    patch.setattr(SequenceTable, "crossing", crossing)


def nobody_is_too_large(patch) -> None:
    admit = Admission.admit

    def generous(self, item):
        limits = self.limits
        object.__setattr__(limits, "num_blocks", limits.num_blocks * 1000)
        try:
            return admit(self, item)
        finally:
            object.__setattr__(limits, "num_blocks", limits.num_blocks // 1000)
    patch.setattr(Admission, "admit", generous)


def one_block_is_counted_that_is_not_there(patch) -> None:
    admit = Admission.admit

    def generous(self, item):
        object.__setattr__(self.limits, "num_blocks", self.limits.num_blocks + 1)
        try:
            return admit(self, item)
        finally:
            object.__setattr__(self.limits, "num_blocks", self.limits.num_blocks - 1)
    patch.setattr(Admission, "admit", generous)


def the_oldest_gives_way(patch) -> None:
    schedule = MaxUtilizationScheduler.schedule_request

    def backwards(self, active_requests):
        fitting, paused = schedule(self, active_requests)
        if paused and fitting and fitting[0].is_generating:
            oldest = fitting.pop(0)
            paused = [*paused, oldest]
        return fitting, paused
    patch.setattr(MaxUtilizationScheduler, "schedule_request", backwards)


def the_oldest_is_passed_over_now_and_then(patch) -> None:
    schedule, plans = MaxUtilizationScheduler.schedule_request, count()

    def absent_minded(self, active_requests):
        fitting, paused = schedule(self, active_requests)
        if next(plans) % 7 == 0 and len(fitting) > 1:
            del fitting[0]
        return fitting, paused
    patch.setattr(MaxUtilizationScheduler, "schedule_request", absent_minded)


def a_paused_request_resumes_one_token_early(patch) -> None:
    pause = LlmRequest.pause

    def forgetful(self, max_input_len):
        pause(self, max_input_len)
        if self.prompt_len > self.orig_prompt_len:
            self.tokens[0].pop()
            self.prompt_len -= 1
            self.max_new_tokens += 1
    patch.setattr(LlmRequest, "pause", forgetful)


def a_paused_request_goes_to_the_back(patch) -> None:
    claim = GenerationLoop._claim

    def to_the_back(self, plan, record):
        for request in plan.paused_requests if plan is not None else ():
            self.active.in_order.remove(request)
            self.active.in_order.append(request)
        return claim(self, plan, record)
    patch.setattr(GenerationLoop, "_claim", to_the_back)


def nothing_is_set_aside_for_what_follows(patch) -> None:
    def next_step_only(self, request):
        return 0 if self._sequences.has(request) else self.blocks_for_next_step(request)
    patch.setattr(KvLedger, "blocks_to_completion", next_step_only)
    for name in ("blocks_to_completion_of_owners", "blocks_to_completion_of_started"):
        if hasattr(KvLedger, name):
            patch.setattr(KvLedger, name, lambda self, *requests: 0)


def a_withdrawn_request_still_counts(patch) -> None:
    withdraw = WaitingRequests.withdraw

    def forgetful(self, request_ids):
        tokens = self.num_tokens
        taken = withdraw(self, request_ids)
        if taken:
            self.num_tokens = tokens
        return taken
    patch.setattr(WaitingRequests, "withdraw", forgetful)


def sends_by(patch, call) -> None:
    """Send each response, including final ones, with `call(callbacks, *response)`."""
    def send_last(self, listed, key, request_id, tensors, error_message, code):
        if code is not None:
            self.unanswered.errors[code] = self.unanswered.errors.get(code, 0) + 1
        self.unanswered.num_sent += 1
        del listed[key]
        call(self, request_id, tensors, True, error_message)
    patch.setattr(GuardedCallbacks, "send_last", send_last)
    patch.setattr(GuardedCallbacks, "send",
                  lambda self, request_id, tensors: call(self, request_id, tensors, False, ""))


def nothing_guards_a_callback(patch) -> None:
    sends_by(patch, lambda self, *response: self._send(*response))


def only_an_exception_is_contained(patch) -> None:
    suppresses = ContainingBlock._suppresses
    patch.setattr(ContainingBlock, "_suppresses",
                  lambda self, error: isinstance(error, Exception) and suppresses(self, error))


def a_final_is_sent_again_after_the_callback_raised(patch) -> None:
    def send(self, *response):
        try:
            self._send(*response)
        except BaseException as error:
            self.guard.note_failure("send", error)
            try:
                self._send(*response)
            except BaseException as again:
                self.guard.note_failure("send", again)
    sends_by(patch, send)


def a_double_takes_the_place_of_the_first(patch) -> None:
    decide = Intake._decide
    patch.setattr(Intake, "_decide", lambda self, item, request_id, is_alive, *, has_room: decide(
        self, item, request_id, lambda _: False, has_room=has_room))

    add = ActiveRequests.add

    def overwrite(self, request):
        self._by_id.pop(request.request_id, None)
        add(self, request)
    patch.setattr(ActiveRequests, "add", overwrite)


def a_stop_is_remembered(patch) -> None:
    poll = GuardedCallbacks.poll_stops

    def remembering(self):
        self.remembered = getattr(self, "remembered", set()) | poll(self)
        return set(self.remembered)
    patch.setattr(GuardedCallbacks, "poll_stops", remembering)


def a_stop_on_the_last_token_ends_it_twice(patch) -> None:
    end, poll = Finals.end, GenerationLoop._poll_stops
    patch.setattr(Finals, "end", lambda self, request, reason, **options: (
        setattr(self, "just_ended", (request, self._deliveries._deliveries[request.request_id])),
        end(self, request, reason, **options)))

    def poll_again(self):
        stops = self.callbacks.poll_stops()
        last = getattr(self.finals, "just_ended", None)
        self.finals.just_ended = None
        if last is not None and last[0].request_id in stops and last[0].request_id not in self.active:
            self.finals._send_final(*last, FinishReason.CANCELLED)
        self.callbacks.poll_stops, once = lambda: stops, self.callbacks.poll_stops
        try:
            poll(self)
        finally:
            self.callbacks.poll_stops = once
    patch.setattr(GenerationLoop, "_poll_stops", poll_again)


def only_the_first_of_a_batch_is_told(patch) -> None:
    bisect = StepRunner.bisect

    def first_only(self, batch, asked, error):
        output = bisect(self, batch, asked, error)
        for slot in list(output.failures)[1:]:
            del output.failures[slot]
        return output
    patch.setattr(StepRunner, "bisect", first_only)


def blocks_are_given_on_as_they_are(patch) -> None:
    fail = Finals.fail
    patch.setattr(Finals, "fail", lambda self, request, code, message, *, clear_blocks=False: fail(
        self, request, code, message))


def ids_are_those_of_a_tokenizer(patch) -> None:
    ids = admission.ids
    patch.setattr(admission, "ids", lambda given, limit: ids(given, limit + 10))


def values_are_checked_and_read_again_later(patch) -> None:
    admit, activate = Admission.admit, Resources.admit
    items = {}

    def remembering(self, item):
        admitted = admit(self, item)
        items[id(admitted.request)] = item
        return admitted

    def read_again(self, admitted, *rest):
        request = admitted.request if hasattr(admitted, "request") else admitted
        request.tokens[0][:request.orig_prompt_len] = list(items[id(request)].input_ids)
        return activate(self, admitted, *rest)
    patch.setattr(Admission, "admit", remembering)
    patch.setattr(Resources, "admit", read_again)


def the_final_comes_before_the_blocks_are_free(patch) -> None:
    def end(self, request, reason, **options):
        delivery = self._deliveries._deliveries[request.request_id]
        self._send_final(request, delivery, reason)
        self._take_out(request)
    patch.setattr(Finals, "end", end)


# Bugs of cached prompts.


def a_look_up_does_not_protect_what_it_found(patch) -> None:
    start = PrefixClaim._start

    def protect_late(self, request, nodes):
        started = start(self, request, nodes)                    # takes blocks, and may overwrite the cached ones
        for block_id in started.block_ids[:len(nodes)]:
            self._pool.share(block_id)
        return started
    patch.setattr(PrefixClaim, "_protect", lambda self: None)
    patch.setattr(PrefixClaim, "_start", protect_late)


def a_block_can_be_found_before_it_is_computed(patch) -> None:
    claim = Resources.claim

    def publishing(self, plan, *rest):
        batch = claim(self, plan, *rest)
        for request in plan.context_requests:
            self._kv.publish_context(request, request.prompt_len)
        return batch
    patch.setattr(Resources, "claim", publishing)


def an_index_buffer_is_as_large_as_the_pool(patch) -> None:
    set_up = ScriptedBackend._set_up                             # runs with the block tables of the step

    def packing(self, batch):
        buffer, used = np.empty(self.info.num_blocks, np.int32), 0
        for slot in batch.slots():
            mapped = int(self._tables.mapped[slot])
            buffer[np.arange(used, used + mapped)] = self._tables.rows[slot, :mapped]
            used += mapped
        return set_up(self, batch)
    patch.setattr(ScriptedBackend, "_set_up", packing)


def the_hash_decides_and_has_four_bits(patch) -> None:
    init = PrefixIndex.__init__
    patch.setattr(PrefixIndex, "__init__", lambda self, digest_bits=4: init(self, 4))
    patch.setattr(PrefixNode, "child", lambda self, key: self.children.get(key.digest))


def the_salt_is_no_part_of_the_domain(patch) -> None:
    domain = prefix_cache._domain
    patch.setattr(prefix_cache, "_domain", lambda request: domain(request)._replace(cache_salt=None))


# Bugs of this product that the simulator found.


def refusals_are_lost_with_the_engine(patch) -> None:
    for name in ("fail", "answer_the_rest"):
        whole = getattr(GenerationLoop, name)

        def without(self, error, whole=whole):
            self.unanswered.refusals.clear()
            whole(self, error)
        patch.setattr(GenerationLoop, name, without)


def refusals_come_after_the_finals_of_a_broken_plan(patch) -> None:
    def late(self, error):
        for request in list(self.active.in_order):
            self.finals.fail(request, error.code, str(error))
        self.window.drop_all()
        return Outcome()
    patch.setattr(GenerationLoop, "_answer_all_active", late)


def what_a_step_in_flight_writes_is_not_cleared(patch) -> None:
    patch.setattr(Resources, "_clear_unread", lambda self, request: None)


def a_step_is_run_again_with_who_has_ended(patch) -> None:
    def run_again(self, flight):
        return self._runner.bisect(flight.batch, flight.step.requested, flight.step.error)
    patch.setattr(StepWindow, "_run_again", run_again)


def what_ran_on_a_failed_step_stands(patch) -> None:
    patch.setattr(StepWindow, "_unclaim_later_steps", lambda self, failed: None)


def what_ran_on_a_failed_step_keeps_its_place(patch) -> None:
    patch.setattr(Resources, "unclaim", lambda self, batch, requests, void: None)


def beams_run_ahead(patch) -> None:
    init = LlmRequest.__init__

    def free(self, *given, **options):
        init(self, *given, **options)
        self.in_lockstep = False
    patch.setattr(LlmRequest, "__init__", free)


def a_device_keeps_one_token_of_a_slot(patch) -> None:
    patch.setattr(PositionRing, "at", lambda self, slots, positions: self.values[slots, positions * 0])
    patch.setattr(PositionRing, "put",
                  lambda self, slots, positions, values: self.values.__setitem__((slots, positions * 0), values))


def a_slot_is_what_its_new_owner_asked_for(patch) -> None:
    """Each row is checked as one of the request that has its slot when the step is read, not when it was launched."""
    checked = StepOutputCheck.checked

    def late(self, batch, output, asked):
        return checked(self, batch, output, {slot: self._requested[slot] for slot in batch.slots()
                                            if slot in self._requested})
    patch.setattr(StepOutputCheck, "checked", late)


def the_first_in_line_pauses_itself(patch) -> None:
    schedule = MaxUtilizationScheduler.schedule_request

    def itself(self, active_requests):
        fitting, paused = schedule(self, active_requests)
        first = active_requests[0]
        if not (fitting or paused) and first.is_started and self.kv_cache_manager.inflight_request_ids:
            return [], [first]
        return fitting, paused
    patch.setattr(MaxUtilizationScheduler, "schedule_request", itself)


def a_window_saves_blocks_for_who_may_be_paused(patch) -> None:
    most_blocks = Reservations.most_blocks
    patch.setattr(Reservations, "most_blocks", lambda self, request, **options: most_blocks(self, request))


def an_abort_keeps_the_blocks(patch) -> None:
    patch.setattr(GenerationLoop, "_release_everything", lambda self: None)


def nobody_looks_at_what_a_step_returned(patch) -> None:
    patch.setattr(StepOutputCheck, "checked", lambda self, batch, output, asked: output)


BUGS = [
    Bug("the same block twice in one release", "F01", same_block_twice_in_one_release),
    Bug("a stop forgets the blocks", "F03", a_stop_forgets_the_blocks, traffic=STOPPING),
    Bug("a counter is kept beside the books", "F04", a_counter_is_kept_beside_the_books),
    Bug("a failed claim keeps what it took", "F05", a_failed_claim_keeps_what_it_took,
        faults=("allocator.fails_once",)),
    Bug("a new block comes one token late", "F07", a_new_block_comes_one_token_late),
    Bug("nobody is too large for the pool", "F16", nobody_is_too_large, {**TIGHT, "num_blocks": 6}),
    Bug("one block is counted that is not there", "F16", one_block_is_counted_that_is_not_there,
        {**TIGHT, "num_blocks": 10}),
    Bug("the oldest gives way", "F17", the_oldest_gives_way),
    Bug("the oldest is passed over now and then", "C10", the_oldest_is_passed_over_now_and_then),
    Bug("a paused request resumes one token early", "F19", a_paused_request_resumes_one_token_early,
        traffic=STREAMING),
    Bug("a paused request goes to the back", "F20", a_paused_request_goes_to_the_back),
    Bug("nothing is set aside for what follows", "S2", nothing_is_set_aside_for_what_follows, NO_EVICT),
    Bug("a withdrawn request still counts", "F22", a_withdrawn_request_still_counts, traffic=STOPPING),
    Bug("nothing guards a callback", "F24", nothing_guards_a_callback, faults=("send.raises_on_final",)),
    Bug("a final is sent again after the callback raised", "F25", a_final_is_sent_again_after_the_callback_raised,
        faults=("send.raises_on_final",)),
    Bug("a double takes the place of the first", "F27", a_double_takes_the_place_of_the_first,
        faults=("get.duplicate",)),
    Bug("a stop is remembered", "F28", a_stop_is_remembered, traffic=STOPPING, faults=("send.hands_over_again",)),
    Bug("only an Exception is contained", "F30", only_an_exception_is_contained, faults=("send.raises_on_final",)),
    Bug("a stop on the last token ends it twice", "F31", a_stop_on_the_last_token_ends_it_twice, traffic=STOPPING,
        faults=("stop.finisher",)),
    Bug("only the first of a batch is told", "F41", only_the_first_of_a_batch_is_told,
        faults=("model.raises_for_all",)),
    Bug("blocks with values that are not finite are given on", "F42", blocks_are_given_on_as_they_are,
        faults=("model.nan_in_row",)),
    Bug("ids are those of a tokenizer", "F48", ids_are_those_of_a_tokenizer, traffic={**BUSY, "invalid": 0.3}),
    Bug("values are checked, and read again later", "F49", values_are_checked_and_read_again_later,
        traffic={**BUSY, "burst": 1}),
    Bug("the final comes before the blocks are free", "S9", the_final_comes_before_the_blocks_are_free),

    Bug("a look-up does not protect what it found", "F02", a_look_up_does_not_protect_what_it_found, REUSING, ALIKE,
        needs="reuse"),
    Bug("a block can be found before it is computed", "F06", a_block_can_be_found_before_it_is_computed,
        {**REUSING, "chunking": ContextChunkingPolicy.EQUAL_PROGRESS, "max_num_tokens": 8}, ALIKE, needs="reuse"),
    Bug("an index buffer is as large as the pool, and filled by reference", "F09",
        an_index_buffer_is_as_large_as_the_pool, REUSING,
        {**ALIKE, "salted": 0.0, "prompt": 30, "output": 4, "arrival": 0.5, "burst": 8}, needs="reuse"),
    Bug("the hash decides, and has four bits", "F11", the_hash_decides_and_has_four_bits, REUSING, ALIKE,
        needs="reuse"),
    Bug("the salt is no part of the domain", "F12", the_salt_is_no_part_of_the_domain, REUSING, ALIKE,
        needs="reuse"),

    Bug("nobody looks at what a step returned", "found here", nobody_looks_at_what_a_step_returned,
        faults=("model.wrong_rows",)),
    Bug("refusals are lost with the engine", "found here", refusals_are_lost_with_the_engine,
        traffic={**BUSY, "invalid": 0.5}, faults=("model.device_lost",)),
    Bug("refusals come after the finals of a broken plan", "found here",
        refusals_come_after_the_finals_of_a_broken_plan, faults=("allocator.fails_once", "get.duplicate")),
    Bug("an abort keeps the blocks", "found here", an_abort_keeps_the_blocks,
        {**TIGHT, "endings": ((40, "life.shutdown"), (200, "drain"))}, {**BUSY, "arrival": 0.5}),
    Bug("what a stopped request's step in flight writes is not cleared", "found here",
        what_a_step_in_flight_writes_is_not_cleared, OVERLAPPING, STOPPING,
        ("model.raises_once", "model.nan_in_row", "stop.all"), first_seed=15),
    Bug("what a discarded row writes is not cleared", "of its kind", what_a_step_in_flight_writes_is_not_cleared,
        RUNNING_AHEAD, STOPPING, ("model.nan_in_row", "stop.all"), first_seed=13),
    Bug("a step is run again with who has ended", "of its kind", a_step_is_run_again_with_who_has_ended,
        OVERLAPPING, STOPPING, ("model.raises_once", "stop.all"), first_seed=39),
    Bug("what ran on a failed step stands", "of its kind", what_ran_on_a_failed_step_stands, RUNNING_AHEAD, BUSY,
        ("model.raises_once",)),
    Bug("what ran on a failed step keeps its place", "of its kind", what_ran_on_a_failed_step_keeps_its_place,
        RUNNING_AHEAD, BUSY, ("model.raises_once",)),
    Bug("beams run ahead", "of its kind", beams_run_ahead, {**RUNNING_AHEAD, "max_beam_width": 3, "num_blocks": 60},
        {**BUSY, "streams": 0.0, "beams": 0.6}),
    Bug("a device keeps one token of a slot", "of its kind", a_device_keeps_one_token_of_a_slot, RUNNING_AHEAD, BUSY,
        ("model.raises_once",)),
    Bug("a slot is what its new owner asked for", "of its kind", a_slot_is_what_its_new_owner_asked_for,
        RUNNING_AHEAD, {**STOPPING, "asks_more": 0.5}),
    Bug("the first in line pauses itself", "found here", the_first_in_line_pauses_itself,
        {**RUNNING_AHEAD, "num_blocks": 20, "max_batch_size": 4, "max_num_sequences": 4},
        {**BUSY, "prompt": 30, "output": 12}),
    Bug("a window saves blocks for who may be paused", "found here", a_window_saves_blocks_for_who_may_be_paused,
        {**TIGHT, "window": 4, "num_blocks": 6}, {**BUSY, "prompt": 4, "output": 30, "prioritised": 0.5}),
]

# Bugs of the worker's thread, patched in before the package is imported, each in its own process. Bugs that need a
# certain order of threads are in tests/interleaving/plants.py.
THREAD_BUGS = {
    "F34 the worker is a daemon, and nobody tells it that the interpreter ends": """
        import threading
        init = threading.Thread.__init__
        threading.Thread.__init__ = lambda self, *args, **options: init(self, *args, **{**options, "daemon": True})
        threading._register_atexit = lambda function: None
        """,
    "F34 the worker is told by atexit, which runs after threads are joined": """
        import atexit, threading
        threading._register_atexit = atexit.register
        """,
}
