"""Ranks of one model in one thread: a leader and followers over memory, without sockets and without waiting."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from batch_manager.config import MAX_DRAFT_TOKENS
from batch_manager.decoding.position_ring import columns_for
from batch_manager.errors import BatchManagerError, DeviceLostError
from batch_manager.guard import Guard
from batch_manager.handover import BlockCopy, ScheduledBatch, StepOutput
from batch_manager.loop.followed_callbacks import FollowedCallbacks
from batch_manager.loop.follower import Follower
from batch_manager.loop.generation_loop import GenerationLoop
from batch_manager.parallel.channel import Channel, MemoryTransport
from batch_manager.parallel.leader import Leader
from batch_manager.parallel.link import Link
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.seams import BackendInfo, MemoryUsage
from batch_manager.testing.scripted_backend import UNWRITTEN, ScriptedBackend, draft_tokens_of

RANK_TIMEOUT_S = 4.0
COLUMNS = columns_for(MAX_DRAFT_TOKENS)
MOST_WAITS_FOR_A_STEP = 5_000          # of the leader, in which nobody does anything


class MemoryRanks:
    """A Leader, and a Follower for each other rank. While the leader waits, the followers take turns.

    on_idle   (seconds) called when no rank has anything to do, with the time for which the leader would wait
    stopped   ranks that do nothing, as after SIGSTOP
    late      rank -> number of waits of the leader for which its frames are held back
    """

    def __init__(self, backends: Mapping[int, Any], *, monotonic: Callable[[], float] = lambda: 0.0,
                 on_idle: Callable[[float], None] = lambda seconds: None,
                 followed: Callable[[int, Link, Guard], FollowedCallbacks | None] = lambda *rank: None) -> None:
        """
        backends   rank -> backend, for every rank but 0
        followed   (rank, link, guard) -> the callbacks of a rank
        """
        self.on_idle, self.stopped, self.late = on_idle, set(), {}
        self._idle_waits: Counter[int] = Counter()     # by the number of steps begun
        self.transports: dict[int, tuple[MemoryTransport, MemoryTransport]] = {
            rank: MemoryTransport.pair() for rank in backends}
        channels = {rank: Channel(mine, RANK_TIMEOUT_S) for rank, (mine, _) in self.transports.items()}
        for channel in channels.values():
            channel.trust()
        self.leader = Leader(channels, self._wait, RANK_TIMEOUT_S)
        self.leader.is_starting = False
        self.followers: dict[int, Follower] = {}
        self.errors: dict[int, BaseException] = {}
        for rank, backend in backends.items():
            channel = Channel(self.transports[rank][1], RANK_TIMEOUT_S)
            channel.trust()
            link = Link(rank, len(backends) + 1, channel, lambda seconds, ranks: ranks, RANK_TIMEOUT_S)
            link.is_starting = False
            guard = Guard(monotonic)
            self.followers[rank] = Follower(link, backend, guard, callbacks=followed(rank, link, guard))

    def run(self) -> bool:
        """Give each follower turns until nobody has anything to do. Returns whether anybody had."""
        was_busy = False
        for rank, follower in self.followers.items():
            while rank not in self.stopped and rank not in self.late and rank not in self.errors and (
                    self.transports[rank][1].arrives or follower.is_busy or self.transports[rank][0].is_closed):
                was_busy = True
                try:
                    follower.step(accept_new=True)
                except DeviceLostError as error:
                    follower.fail(error)
                if follower.is_done(draining=False, aborting=False):
                    self.end(rank, follower.failure)
        return was_busy

    def end(self, rank: int, error: BatchManagerError | None) -> None:
        self.errors[rank] = error or DeviceLostError("", "")
        self.followers[rank].end(self.errors[rank], self.followers[rank].health)

    def _wait(self, seconds: float, ranks: Collection[int]) -> Collection[int]:
        if not self.run() and not any(self.transports[rank][0].arrives for rank in ranks):
            self._idle_waits[self.leader._num_steps] += 1
            assert self._idle_waits[self.leader._num_steps] < MOST_WAITS_FOR_A_STEP, "rank 0 waits for ever"
            self.on_idle(seconds)
            self.late = {rank: waits - 1 for rank, waits in self.late.items() if waits > 1}
            self.tick()
        return list(ranks)

    def tick(self) -> None:
        for rank, follower in self.followers.items():
            if rank not in self.stopped and rank not in self.errors:
                follower.link.tick()
        self.leader.tick()


class TellsDrawnTokens:
    """Makes a scripted backend that of rank 0: it tells the other ranks which tokens it has drawn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._drawn: list[tuple[int, int, int, int]] = []

    def note_drawn(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Keep (slot, beam, position, token) of each last token of an output."""
        generation = batch.generation
        ends = {work.slot: work.end for work in batch.context}
        ends.update(zip(generation.slots.tolist(), (generation.kv_lengths + 1).tolist()))
        starts = range(len(output.slots) + 1) if output.row_starts is None else output.row_starts.tolist()
        for row, slot in enumerate(output.slots.tolist()):
            tokens = output.tokens[starts[row]:starts[row + 1]].tolist()
            if output.parents is not None and not batch.has_drafts:
                self._drawn += [(slot, beam, ends[slot], token) for beam, token in enumerate(tokens)]
            elif tokens:                               # with drafts: the accepted ones, then one more
                self._drawn.append((slot, 0, ends[slot] + len(tokens) - 1, tokens[-1]))

    def start(self, batch: ScheduledBatch) -> "DrawnStep":
        return DrawnStep(self, batch, super().start(batch))

    def take_drawn(self, batch: ScheduledBatch | None = None) -> tuple[np.ndarray, ...]:
        drawn, self._drawn = self._drawn, []
        return (np.array(drawn, np.int32),) if drawn else ()


class DrawingBackend(TellsDrawnTokens, ScriptedBackend):
    """A ScriptedBackend for rank 0."""


class DrawnStep:
    def __init__(self, backend: TellsDrawnTokens, batch: ScheduledBatch, pending: Any) -> None:
        self._backend, self._batch, self._pending = backend, batch, pending

    def finish(self) -> StepOutput:
        output = self._pending.finish()
        self._backend.note_drawn(self._batch, output)
        return output


class ScriptedRank:
    """The backend of another rank than 0 beside a DrawingBackend. It keeps a KV cache pool by its frames alone.

    on_step   (batch) called in each step after its tokens are written; may raise
    pool      [blocks, tokens per block] the token at each place; it must be the same as on rank 0
    """

    def __init__(self, info: BackendInfo, on_step: Callable[[ScheduledBatch], None] = lambda batch: None) -> None:
        self.info, self.on_step, self.closed, self.num_steps = info, on_step, False, 0
        size = info.tokens_per_block
        self.pool = np.full((info.num_blocks, size), UNWRITTEN, np.int32)
        self.host_pool = np.full((info.host_blocks, size), UNWRITTEN, np.int32)
        self._tables = BlockTables(info.num_slots, -(-info.max_seq_len // size))
        self._drawn: dict[tuple[int, int, int], int] = {}
        self._num_operations = 0

    def put_drawn(self, drawn: np.ndarray) -> None:
        for slot, beam, position, token in drawn.tolist():
            self._drawn[slot, beam, position % COLUMNS] = token

    def start(self, batch: ScheduledBatch) -> "ScriptedRank":
        self._tables.update(batch)
        for operation in batch.new_operations(self._num_operations):
            if isinstance(operation, BlockCopy):
                source = self.host_pool if operation.from_host else self.pool
                destination = self.host_pool if operation.to_host else self.pool
                count = operation.num_tokens
                destination[operation.destination, :count] = source[operation.source, :count]
            self._num_operations += 1
        size, width = self.info.tokens_per_block, batch.max_beam_width
        for work in batch.context:
            positions = work.start + np.arange(len(work.token_ids))
            self.pool[self._tables.rows[work.slot * width, positions // size], positions % size] = work.token_ids
        generation, drafts_of = batch.generation, draft_tokens_of(batch)
        for slot, length in zip(generation.slots.tolist(), generation.kv_lengths.tolist()):
            for beam in range(generation.beam_width):
                tokens = [self._drawn[slot, beam, length % COLUMNS], *drafts_of.get(slot, ())]
                for position, token in enumerate(tokens, length):
                    self.pool[self._tables.rows[slot * width + beam, position // size], position % size] = token
        self.on_step(batch)
        self.num_steps += 1
        return self

    def finish(self) -> None:
        """See FollowingBackend: the result is not used."""

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage(cpu=self.pool.nbytes)

    def close(self) -> None:
        self.closed = True


def different_tokens(loop: GenerationLoop, own: np.ndarray, rank: ScriptedRank) -> str:
    """Compare the cached tokens of all sequences with the pool of another rank. Returns what differs, or "".

    own   [blocks, tokens per block] the pool of rank 0. A block that does not have its tokens there is left out: its
          step has not run, or has failed
    """
    size, sequences = loop.kv.tokens_per_block, loop.kv.sequences
    for slot, request in enumerate(sequences.owners):
        if request is None:
            continue
        length = int(sequences.kv_lengths[slot])
        for beam in range(request.beam_width):
            for index, block in enumerate(loop.kv.block_ids(request, beam)):
                wanted = request.tokens[beam][index * size:min((index + 1) * size, length)]
                if (block >= 0 and own[block, :len(wanted)].tolist() == wanted
                        and rank.pool[block, :len(wanted)].tolist() != wanted):
                    return f"{request}, beam {beam}, block {block}: {rank.pool[block].tolist()}, expected {wanted}"
    return ""
