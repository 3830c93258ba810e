"""The invariants after every iteration, computed again from the block tables without the engine's own checks.

The index is the engine's table of cached blocks.

    I9   every block is free or held                 I13  a block being written has one owner and is not in the index
    I10  owners = tables that name the block         I14  the index has each of its blocks once, under its parent
    I11  the free order has no block twice           I15  a block in the index was computed and is finite
    I12  shared blocks are full                      I16  a block is found in its own domain only
    I36  drafts enter a step alone, take no cached block and are gone after it
    I17  without live requests no block is held      C23  nothing is left of ended requests
    I35  the events of the cache, replayed, are the index   I36  the traffic with others, see traffic.py
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.loop.drafting import Drafting

if TYPE_CHECKING:
    from .world import SimulatedWorld

EVERY = 16      # iterations between two runs of the slow checks


def faults(world: "SimulatedWorld") -> Iterator[str]:
    """Check all invariants of the module docstring. Yield a message for each violation."""
    yield from books(world.loop.kv)
    yield from leftovers(world)
    yield from world.first_in_line.step_ended()
    if world.drafter is not None:
        yield from drafts(world)
    if world.replay is not None:
        for fault in world.replay.faults(world.loop.kv):
            yield f"I35: {fault}"
    if world.loop.kv.cache is not None and world.step_number % EVERY == 0:
        yield from index(world)


def books(kv: KvCacheManager) -> Iterator[str]:
    """Check I9 to I13 for every block. Yield a message for each violation."""
    pool, sequences, size = kv.pool, kv.sequences, kv.tokens_per_block
    owners = pool._owners
    named = [0] * kv.num_blocks
    ends, lengths, dropped = sequences.ends.tolist(), sequences.kv_lengths.tolist(), sequences.dropped.tolist()
    for slot, request in enumerate(sequences.owners):
        if request is None:
            continue
        if request.seq_slot != slot:
            yield f"I10: slot {slot} belongs to {request}, which is in another"
            continue
        end, length = ends[slot], lengths[slot]
        if end != -(-length // size):
            yield f"I9: {request} has {length} tokens in {end} blocks"
        first = slot * sequences.max_beam_width
        for row in sequences.block_ids[first:first + request.beam_width, :end].tolist():
            gone = 0
            for block_id in row:
                if block_id < 0:
                    gone += 1
                else:
                    named[block_id] += 1
            if gone != dropped[slot]:
                yield f"I9: {request} lost {gone} blocks and dropped {dropped[slot]}"
            if length % size and length > request.prompt_len and owners[row[-1]] != 1:
                yield f"I13: block {row[-1]} is being written by {request} and has {owners[row[-1]]} owners"
    if named != owners:
        wrong = next(block_id for block_id in range(kv.num_blocks) if named[block_id] != owners[block_id])
        yield f"I10: block {wrong} is in {named[wrong]} tables and has {owners[wrong]} owners"
    free = pool.free_order()
    if len(set(free)) != len(free):
        yield "I11: the free order has a block twice"
    if len(free) != owners.count(0) or any(map(owners.__getitem__, free)):
        yield f"I11: {len(free)} blocks are free and {owners.count(0)} have no owner, or not the same ones"
    if kv.free_blocks + kv.used_blocks != kv.num_blocks or kv.used_blocks != kv.num_blocks - owners.count(0):
        yield "I9: free and used blocks do not add up"


def leftovers(world: "SimulatedWorld") -> Iterator[str]:
    """Check I17 and C23: the loop keeps state for live requests only, and its counts of them are right."""
    loop = world.loop
    active, intake = loop.active, loop.intake
    waiting = [admitted.request for admitted in intake.waiting.queue]
    preparing = [one.admitted.request for one in intake.waiting.preparing.waiting]
    loading = [] if loop.stored is None else [one.admitted.request for one in loop.stored._waiting]
    preparing += loading
    alive = {request.request_id for request in [*active, *waiting, *preparing]}
    if alive != world.history.open.keys():
        yield f"I1: alive are {sorted(alive)}, waiting for a final {sorted(world.history.open)}"
    if not alive and loop.kv.used_blocks:
        yield f"I17: nobody is alive and {loop.kv.used_blocks} blocks are held"
    if intake.waiting.ids != {request.request_id for request in [*waiting, *preparing]}:
        yield "C23: the queue and its ids differ"
    if len(intake) != len(waiting) + len(preparing):
        yield f"C23: {len(intake)} requests are said to wait"
    if intake.waiting.num_tokens != sum(request.prompt_len for request in [*waiting, *preparing]):
        yield f"C23: {intake.waiting.num_tokens} tokens are said to wait"
    if intake._bytes_of.keys() != alive or intake._bytes_in_flight != sum(intake._bytes_of.values()):
        yield f"C23: {intake._bytes_in_flight} bytes are said to be in flight"
    if loop.adapters is not None:
        for fault in loop.adapters.faults():
            yield f"I34: {fault}"
        if loop.adapters.store.users.keys() != {request.request_id for request in [*active, *waiting, *loading]
                                                if request.adapter is not None}:
            yield "I34: the store counts other requests than those that are alive"
    if not intake._deadlines.keys() <= alive:
        yield "C23: the deadline of somebody who has ended is kept"
    if len(loop.deliveries) != len(active) or len(loop._resources._setups) != len(active):
        yield "C23: deliveries or setups are kept for somebody who has ended"
    slots = [request.seq_slot for request in active]
    if len(set(slots)) != len(slots) or len(slots) + len(active._free_slots) != active._num_slots:
        yield "C23: slots do not add up"
    for owner in loop.kv.sequences.owners:
        if owner is not None and active.get(owner.request_id) is not owner:
            yield f"I17: {owner} has ended and holds blocks"


def drafts(world: "SimulatedWorld") -> Iterator[str]:
    """Check I36 and C23 for drafts."""
    started = {request for request in world.loop.active if world.loop.kv.owns(request)}
    for request in world.loop.active:
        if request.draft_len and not world.loop.window.holds(request):
            yield f"I36: {request} has {request.draft_len} drafts and is in no step"
    if not world.drafter.held <= started:
        yield "C23: the drafter was not told of the end or the pause of a request"
    drafting = next(each for each in world.loop._resources.others if isinstance(each, Drafting))
    if not drafting._of.keys() <= started:
        yield "C23: the drafts of somebody who has ended or pauses are counted"
    if world.swarm.draft_model:
        yield from world.drafter.violations()


def index(world: "SimulatedWorld") -> Iterator[str]:
    """Check I12, I14 and I15: each index entry has the tokens that are in its block."""
    cache, device = world.loop.kv.cache, world.device
    if world.loop._resources.device_work._operations or cache.copies:    # blocks that are not copied or cleared yet
        return
    device.run_all()
    size, owners = device.info.tokens_per_block, world.loop.kv.pool._owners
    seen: set[int] = set()
    for node in cache.index:
        if node.block_id is None:
            tokens = device._host["token"][node.host_id * size:(node.host_id + 1) * size]
            if tokens[:len(node.key.tokens)].tolist() != list(node.key.tokens):
                yield f"I15: host block {node.host_id} can be found under tokens that are not in it"
            continue
        if node.block_id in seen:
            yield f"I14: block {node.block_id} is in the index twice"
        seen.add(node.block_id)
        tokens = node.key.tokens
        stored = device._pool[node.block_id * size:node.block_id * size + len(tokens)].tolist()
        if stored != list(tokens):
            yield f"I15: block {node.block_id} can be found under tokens that are not in it"
        if device._poisoned[node.block_id, :len(tokens)].any():
            yield f"I15: block {node.block_id} can be found and is not finite"
        if len(tokens) < size and owners[node.block_id]:
            yield f"I12: block {node.block_id} is shared and not full"
        if node.parent.children.get(node.key.digest) is not node:
            yield f"I14: block {node.block_id} is not where its parent has it"


def plan_faults(world: "SimulatedWorld", active: list, inflight: frozenset, plan) -> Iterator[str]:
    """Check I20 to I25 and C10 on a plan that the scheduler returns."""
    running = [*plan.context_requests, *plan.generation_requests]
    ready = [request for request in active if not request.is_finished and request.request_id not in inflight]
    for request in [*running, *plan.paused_requests]:
        if request.is_finished or request.request_id not in world.history.open:
            yield f"I25: {request} has ended and is in a plan"
    if plan.paused_requests and world.never_pauses:
        yield f"I21: {plan.paused_requests[0]} is paused"
    if not running and ready and not world.loop.window and not plan.paused_requests:
        yield f"I22: {len(ready)} requests could run and none does"
    yield from world.first_in_line.planned(active, inflight, plan)
    arrivals = world.arrivals
    for ahead, behind in zip(active, active[1:]):
        if ahead.adapter is not None or behind.adapter is not None or world.traffic is not None and (
                {ahead.request_id, behind.request_id} & world.traffic.loading):
            continue                                               # it may have waited for its adapter or blocks
        if (-ahead.priority, arrivals[ahead.request_id]) > (-behind.priority, arrivals[behind.request_id]):
            yield f"I24: {ahead} stands ahead of {behind}, which came first"


def batch_faults(world: "SimulatedWorld", batch) -> Iterator[str]:
    """Check I20 on a batch that the device gets."""
    swarm = world.swarm
    if batch.num_sequences > swarm.max_batch_size:
        yield f"I20: {batch.num_sequences} sequences, at most {swarm.max_batch_size}"
    if not batch.num_sequences:
        yield "I20: an empty batch"
    widths = {world.loop.kv.sequences.owners[slot].beam_width for slot in batch.generation.slots.tolist()}
    if widths - {batch.generation.beam_width} or max(widths, default=1) > swarm.max_beam_width:
        yield f"I20: beam widths {sorted(widths)} in a step of {batch.generation.beam_width}"
    tokens = batch.num_context_tokens + len(batch.generation) * batch.generation.beam_width
    if batch.generation.num_drafts is not None:
        tokens += int(batch.generation.num_drafts.sum())
        if batch.generation.num_drafts.max() > swarm.drafts:
            yield f"I20: {batch.generation.num_drafts.max()} drafts, at most {swarm.drafts}"
    if tokens > swarm.max_num_tokens and not swarm.is_static:
        yield f"I20: {tokens} tokens, at most {swarm.max_num_tokens}"
    for work in batch.context:
        if not work.is_last_chunk and (work.start + len(work.token_ids)) % swarm.tokens_per_block:
            yield "I20: a chunk that is not the last does not end with a block"
