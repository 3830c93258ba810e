"""Markers: situations that the simulations must reach, such as a request that is paused twice.

Each marker counts how often its situation was reached.
"""

from collections import Counter
from typing import TYPE_CHECKING

from .marker_names import KNOWN

if TYPE_CHECKING:
    from .world import SimulatedWorld


class Markers:
    """Counts the markers that a run reaches.

    counts   marker -> number of times it was reached
    """

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self.counts: Counter[str] = Counter()
        self._full_for = 0
        self._used_before = 0
        self._evicted_before = 0
        self._streamed: set[int] = set()
        self._chunks: Counter[int] = Counter()
        self._freed_slots: set[int] = set()
        self._poisoned_once: set[int] = set()

    def reach(self, name: str) -> None:
        assert name in KNOWN, name
        self.counts[name] += 1

    # requests and responses

    def handed(self, handed) -> None:
        swarm, unit = self._world.swarm, self._world.swarm.tokens_per_block
        prompt, reach = len(handed.prompt), self.reach
        if handed.request_id is None:
            reach("item without an id")
            return
        if handed.must:
            return
        if prompt == 1:
            reach("prompt of one token")
        if unit > 1 and prompt % unit in (0, 1, unit - 1):
            reach(("prompt of a whole number of blocks", "prompt one over a block")[prompt % unit]
                  if prompt % unit < 2 else "prompt one short of a block")
        if prompt == swarm.max_seq_len - 1:
            reach("longest possible prompt")
        if handed.max_new_tokens == 1:
            reach("output of one token")
        if prompt + handed.max_new_tokens > swarm.max_seq_len:
            reach("output cut to the longest sequence")
        if -(-min(prompt + handed.max_new_tokens, swarm.max_seq_len) // unit) == swarm.num_blocks:
            reach("prompt and output fill the pool exactly")
        if handed.seed is not None:
            reach("samples")
        if handed.log_probs:
            reach("log-probs asked for")
        if handed.beam_width > 1:
            self._beams_handed(handed)
        if handed.request_id >= 2**63:
            reach("id above two to the sixty-three")

    def _beams_handed(self, handed) -> None:
        self.reach("beams")
        if handed.beam_width == self._world.swarm.max_beam_width:
            self.reach("as many beams as there may be")
        if handed.seed is not None or handed.log_probs:
            self.reach("beams sample or return log-probs")

    def sent(self, sent, request) -> None:
        """Count the markers of the response `sent`.

        request   the active request of a final response; None if the request never ran or the response is not final
        """
        reach = self.reach
        if not sent.final:
            self._streamed.add(sent.request_id)
            return
        streamed = sent.request_id in self._streamed
        self._streamed.discard(sent.request_id)
        handed = self._world.handed(sent.request_id)
        if handed is not None and handed.beam_width > 1:
            self._beams_sent(sent, request)
        if sent.error:
            name = {"INVALID_REQUEST": "refused as invalid", "TOO_LARGE_FOR_KV_CACHE": "refused as too large",
                    "DUPLICATE_REQUEST_ID": "refused as a duplicate", "QUEUE_FULL": "queue full"}.get(sent.code)
            if name:
                reach(name)
            if sent.code == "DEADLINE":
                reach("timed out while waiting" if request is None else "timed out before its first token")
            return
        if request is None:
            reach("stopped while waiting")
            return
        generated = request.total_generated_tokens
        if sent.reason == 1:
            if generated == 0:
                reach("end id as first token")
            if generated == request.final_length - request.orig_prompt_len - 1:
                reach("end id on the last token allowed")
        if sent.reason == 3:
            reach("ends by length")
        if sent.reason in (1, 3):
            if streamed:
                reach("streams to its end")
            if request.num_pauses:
                reach("paused and finished")
        if sent.reason == 2 and sent.beams is None:
            self._stop_word(handed, request)
        if sent.reason == 4:
            reach("timed out with tokens")
        if sent.reason == 5:
            if generated == 0:
                reach("stopped before its first token")
            if streamed:
                reach("stopped while streaming")
            if request.num_pauses:
                reach("paused and stopped")

    def _beams_sent(self, sent, request) -> None:
        if sent.code == "TOO_LARGE_FOR_KV_CACHE":
            self.reach("beams refused as too large")
        if sent.beams is None:
            return
        reasons, texts = {beam[1] for beam in sent.beams}, request is not None and request.total_generated_tokens
        for reason, name in ((0, "fewer texts than beams"), (1, "beams end by end id"), (2, "beams end by stop word"),
                             (3, "beams end by length")):
            if reason in reasons and (reason or reasons & {1, 2, 3}):
                self.reach(name)
        if 5 in reasons:
            self.reach("beams stopped with texts" if texts else "beams stopped")
        if 4 in reasons and texts:
            self.reach("beams timed out with texts")
        if request is not None and request.num_pauses and reasons & {1, 2, 3}:
            self.reach("beams paused and finished")

    def _stop_word(self, handed, request) -> None:
        tokens = request.tokens[0]
        start = len(tokens) - max(len(word) for word in handed.stop_words if tokens[-len(word):] == word)
        self.reach("ends by stop word")
        if len(tokens) == request.final_length:
            self.reach("stop word on the last token allowed")
        if start < request.orig_prompt_len:
            self.reach("stop word begins in the prompt")
        elif start < request.prompt_len:
            self.reach("stop word begins before a pause")

    def stopped(self, named: list, alive: list) -> None:
        """Count the markers of a poll. Must be called before the final responses of the requests that the poll stops.

        named   the ids that poll returned
        alive   the ids among them that belong to live requests
        """
        world, reach = self._world, self.reach
        loop = world.loop
        if len(named) > len(alive):
            reach("stop of somebody unknown")
        if any(request_id in world.client.ended_this_turn for request_id in named):
            reach("stop on last token")
        if alive and len(alive) == len(world.history.open):
            reach("everybody stopped")
        in_flight = {request.request_id for flight in loop.window._steps for request in flight.requests}
        for request_id in alive:
            request = loop.active.get(request_id)
            if request is None:
                continue
            if request_id in in_flight:
                reach("stopped while in flight")
            if request.is_finished:
                reach("static batch: one stopped who was done")
            elif request.is_context:
                if request.context_position:
                    reach("stopped between chunks")
                elif request.num_pauses:
                    reach("stopped while paused")

    # plans and steps

    def plan(self, active: list, inflight: frozenset, plan) -> None:
        """Count the markers of a plan, before it is executed."""
        reach, swarm, kv = self.reach, self._world.swarm, self._world.loop.kv
        contexts, generation, paused = plan.context_requests, plan.generation_requests, plan.paused_requests
        if contexts and generation:
            reach("contexts and generation together")
        elif contexts:
            reach("contexts only")
        elif generation:
            reach("generation only")
        if len(contexts) + len(generation) == swarm.max_batch_size:
            reach("batch full")
        if inflight and (contexts or generation) and swarm.overlap:
            reach("two micro-batches in flight")
        window = self._world.loop.window
        if swarm.run_ahead and window:
            if window.holds_any(generation):
                reach("ran ahead")
            if window.holds_any([request for request in contexts if not request.is_first_context_chunk]):
                reach("a chunk ran ahead")
            if inflight:
                reach("somebody in lockstep waits while others run ahead")
            if window.holds_any(paused):
                reach("a pause waits for the step in flight")
        if len(contexts) + len(generation) + len(inflight) < len(active):
            reach("somebody waits who could not run")
        if any(kv.kv_length(request) % kv.tokens_per_block == 0 for request in generation):
            reach("new block for a generated token")
        if contexts:
            self._plan_contexts(plan)
        if paused:
            self._plan_pauses(paused)
        if swarm.max_beam_width > 1:
            self._plan_beams(active, inflight, plan)

    def _plan_beams(self, active: list, inflight: frozenset, plan) -> None:
        contexts, generation = plan.context_requests, plan.generation_requests
        if generation and generation[0].beam_width > 1:
            if contexts:
                self.reach("beams and a context in one step")
            if inflight:
                self.reach("beams two micro-batches in flight")
            if self._world.swarm.is_static:
                self.reach("beams in a static batch")
        if generation and any(request.is_generating and request.beam_width != generation[0].beam_width
                              and request.request_id not in inflight for request in active):
            self.reach("another width waits")
        if any(request.beam_width > 1 for request in plan.paused_requests):
            self.reach("beams paused")

    def _plan_contexts(self, plan) -> None:
        reach, swarm = self.reach, self._world.swarm
        sizes = plan.chunk_sizes or [request.remaining_context for request in plan.context_requests]
        cut = whole = 0
        for request, size in zip(plan.context_requests, sizes):
            if request.seq_slot in self._freed_slots and request.is_first_context_chunk:
                reach("slot reused in the iteration it came free")
            if size < request.remaining_context:
                cut += 1
                reach("cut into chunks")
                self._chunks[request.request_id] += 1
                if self._chunks[request.request_id] == 2:
                    reach("cut into three chunks or more")
                if swarm.chunking is None:
                    reach("grown beyond one step while paused")
            else:
                whole += 1
                self._chunks.pop(request.request_id, None)
        if cut > 1:
            reach("two prompts cut in one step")
        if cut and whole:
            reach("chunk and last chunk together")
        if sum(sizes) + sum(request.beam_width for request in plan.generation_requests) == swarm.max_num_tokens:
            reach("token budget used up")

    def _plan_pauses(self, paused: list) -> None:
        reach = self.reach
        reach("paused")
        if len(paused) > 1:
            reach("several paused at once")
        for request in paused:
            self._chunks.pop(request.request_id, None)
            if request.num_pauses == 1:
                reach("paused twice")
            elif request.num_pauses == 4:
                reach("paused five times")
            if request.request_id in self._streamed:
                reach("paused after streaming")
            if request.is_context:
                reach("paused between chunks")
            elif request.final_length - request.num_tokens == 1:
                reach("paused with one token to go")

    def failed(self, failures: list) -> None:
        """Count the markers of the requests that failed in one step."""
        reach, world = self.reach, self._world
        if not failures:
            return
        if len(failures) > 1:
            reach("several failed at once")
        elif len(world.loop.active) > 1:
            reach("failed alone in a batch")
        if any(request.is_context and request.num_pauses for request in world.loop.active):
            reach("failed while another is paused")
        if any(request.beam_width > 1 for request in failures):
            reach("beams fail")
        for request in failures:
            if request.context_position < request.prompt_len:
                reach("failed as a context")
            elif request.final_length - request.num_tokens == 1:
                reach("failed on its last token")

    def blocks_poisoned(self, block_ids: list[int]) -> None:
        self._poisoned_once.update(block_ids)

    def step_ended(self, slots_freed: set[int]) -> None:
        world, reach = self._world, self.reach
        kv, loop = world.loop.kv, world.loop
        used = kv.used_blocks
        self._freed_slots = slots_freed
        if used == kv.num_blocks:
            reach("pool exactly full")
            self._full_for += 1
            if self._full_for == 5:
                reach("pool full for five iterations")
        else:
            self._full_for = 0
        if not used and self._used_before > 1:
            reach("pool emptied at once")
        self._used_before = used
        if len(loop.intake):
            reach("queue in use")
        if loop.callbacks.fetched:
            reach("items wait unread for the next iteration")
        device = world.device
        if device.num_found:
            reach("prompt found in the cache")
            if kv.usage().evicted_blocks > self._evicted_before:
                reach("found and evicted in one step")
            if device.num_partly_found:
                reach("part of a block found in the cache")
            if device.num_brought_back:
                reach("block brought back from the host")
            device.num_found = device.num_partly_found = device.num_brought_back = 0
        self.counts += device.seen                               # adding drops counts of 0
        device.seen.clear()
        self._evicted_before = kv.usage().evicted_blocks
        if world.swarm.window is not None and bool(kv.sequences.dropped.any()):
            reach("block left the window")
            if world.swarm.max_beam_width > 1 and (kv.sequences.dropped * (kv.sequences.beam_widths > 1)).any():
                reach("beams leave the window")
        if world.swarm.is_static and any(request.is_finished for request in loop.active):
            reach("static batch holds finals")
        if self._poisoned_once:
            again = [block_id for block_id in self._poisoned_once if kv.pool.owners(block_id)
                     and not world.device._poisoned[block_id].any()]
            for block_id in again:
                reach("a poisoned block is used again")
                self._poisoned_once.discard(block_id)
