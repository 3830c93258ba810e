"""The simulator's scripted model, which fails when a fault is chosen. Clearing a block overwrites its content.

The scripted backend reads tokens back through the block tables. In a real model, the content of a block also depends on
all earlier tokens, and no request may read a block that was computed with another salt. With block reuse, the step that
writes the first token of a block stamps the block with its salt and a checksum of the earlier tokens. The blocks of a
cached prompt must have the stamps that the request expects (I16).
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from zlib import crc32

import numpy as np

from batch_manager.errors import DeviceLostError
from batch_manager.handover import LENGTH, BlockCopy, RowFailure, ScheduledBatch, StepOutput
from batch_manager.names import ErrorCode
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.testing.scripted_backend import UNWRITTEN, ScriptedBackend, ScriptedStep, draft_tokens_of

from .drawing import Drawing
from .faults import Faults, Place
from .spoiling import one_row_too_few, one_row_too_many, one_token_too_few, with_a_wrong_token


@dataclass(slots=True)
class Order:
    """The effects of the fault that is chosen for a batch, also on the parts of the batch when it is bisected.

    raises      (slots of a part of the batch) -> the error that running the part raises, or None
    in_finish   whether the error is raised when the step is read, or when it runs
    poisons     slot -> (block, first token) pairs: once a batch with the slot has run, the block has non-finite values
                from this token on
    rank        the rank on which `raises` holds
    """

    raises: Callable[[list[int]], BaseException | None] = lambda slots: None
    in_finish: bool = False
    failures: dict[int, RowFailure] = field(default_factory=dict)
    spoils: Callable[[StepOutput, list[int]], StepOutput] | None = None
    poisons: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    rank: int = 0


NO_ORDER = Order()


class SimulatedDevice(ScriptedBackend):
    """A scripted backend that chooses faults, and checks what a batch reads and writes.

    blame        (request, code, iteration, must) called for each request that a fault of a step must or may fail
    blocks_of    (request, beam=0) -> the blocks that one of the request's beams holds
    table_of     (request) -> [beams, blocks] block table, in which released blocks keep their index
    before_step  (batch) called once for each batch, before the batch runs
    check        (holds, rule) notes a violation of the rule unless it holds
    stamps       block -> stamp_of its first token; None without block reuse
    load_fails   (iteration) -> whether the load of an adapter for this step fails now
    """

    def __init__(self, *, faults: Faults, owner_of: Callable[[int], LlmRequest],
                 blocks_of: Callable[..., list[int]], table_of: Callable[[LlmRequest], np.ndarray],
                 blame: Callable[..., None],
                 before_step: Callable[[ScheduledBatch], None], check: Callable[[bool, str], None],
                 is_reused: bool, load_fails: Callable[[int], bool], num_ranks: int = 1, starts_late: bool = False,
                 **options) -> None:
        super().__init__(on_step=self._on_step, on_load=self._on_load, **options)
        self._load_fails, self._running = load_fails, -1
        self.num_ranks, self._starts_late = num_ranks, starts_late
        self._faults = faults
        self._owner_of, self._blocks_of, self._table_of = owner_of, blocks_of, table_of
        self._owners: dict[int, dict[int, LlmRequest]] = {}         # iteration -> slot -> its request at the launch
        self._failed: set[int] = set()                              # iterations that raised, or whose output is wrong
        self._blame = blame
        self._before_step, self._check_rule = before_step, check
        self.stamps: dict[int, tuple] | None = {} if is_reused else None
        self._host_stamps: dict[int, tuple] = {}
        self._host_ids: list[int] = []                              # whose memory was asked for since they were taken
        self.num_found = self.num_partly_found = self.num_brought_back = 0
        self._orders: dict[int, Order] = {}
        self._newest = -1
        self.seen: Counter[str] = Counter()                         # markers
        self.drawing = Drawing(check, self.seen)
        self.is_lost = False
        self.num_bisected = 0
        self._waits_for_several = False

    # what the loop calls

    def launch(self, batch: ScheduledBatch) -> None:
        """Choose what happens in a batch. Called when a batch is launched, before it runs on any rank."""
        if self.is_lost:
            raise DeviceLostError("the device is lost")
        if batch.iteration > self._newest:                          # otherwise, the batch is a part of a failed batch
            self._newest = batch.iteration
            self._owners[batch.iteration] = {slot: self._owner_of(slot) for slot in batch.slots()}
            self._before_step(batch)
            for old in (self._orders, self._owners):
                old.pop(batch.iteration - 4, None)
            name = self._faults.draw(Place.MODEL)
            if self._waits_for_several and name is None and batch.num_sequences > 1:
                name = "model.memory_above"
            order = self._order(name, batch) if name else NO_ORDER
            if self.num_ranks > 1 and order.raises is not NO_ORDER.raises:
                order = replace(order, rank=self._faults.rng.randrange(self.num_ranks))
            self._orders[batch.iteration] = order
        else:
            self.num_bisected += 1
            # A step that was launched before the previous one failed may fail with it.
            order = self.order_of(batch)
            self._check_rule(order.raises is not NO_ORDER.raises or order.spoils is not None
                             or batch.iteration - 1 in self._failed,
                             "I29: a step failed, and is run again, to which nothing had happened")

    def start(self, batch: ScheduledBatch) -> "ScriptedStep":
        if not batch.num_sequences:                                 # operations alone, while nothing else is to be done
            if self._faults.draw(Place.MODEL) == "model.raises_once":
                self._faults.hit("model.raises_once")
                raise RuntimeError("planted")
            return super().start(batch)
        if self.num_ranks == 1:
            self.launch(batch)
        if self.is_lost:
            raise DeviceLostError("the device is lost")
        if batch.iteration % 2 and not self.order_of(batch).in_finish:
            if self._starts_late:                                   # see LeadingBackend
                self._tables.update(batch)
            self._raise(self.order_of(batch), batch)                # before the backend reads the batch
        return SimulatedStep(self, batch, super().start(batch))

    def _set_up(self, batch: ScheduledBatch) -> None:
        super()._set_up(batch)                                      # after the operations, before tokens are written
        self.drawing.set_up(batch, self._owners[batch.iteration].__getitem__)

    def _lay_out(self, batch: ScheduledBatch):
        layout = super()._lay_out(batch)
        if self.stamps is not None:
            self._stamp(batch)
        return layout

    def _sums(self, batch: ScheduledBatch, step) -> np.ndarray:
        slots = batch.slots()                                       # only a part of the slots if the batch is bisected
        for slot, blocks in self.order_of(batch).poisons.items():   # after its own tokens are written
            for block_id, first_token in blocks if slot in slots else ():
                self._poisoned[block_id, first_token:] = self._any_poisoned = True
        return super()._sums(batch, step)

    def _decode(self, batch: ScheduledBatch, step, sums: np.ndarray, failures: dict) -> StepOutput:
        output = super()._decode(batch, step, sums, failures)
        if self.drawing and not batch.has_drafts:
            place = {slot: row for row, slot in enumerate(step.slots.tolist())}
            rows = [place[slot] for slot in output.slots.tolist()]
            words = self._words(sums[rows], self._state["salt"][output.slots])
            self.drawing.draw(output, words, (step.starts + step.counts)[rows], self._state["log_probs"][output.slots],
                              self.info.vocab_size)
        self._look_at_beams(output)
        return output

    def _draw_with_drafts(self, slot: int, words: np.ndarray, lengths: np.ndarray):
        return self.drawing.draw_with_drafts(slot, words, lengths, self.info.vocab_size,
                                             super()._draw_with_drafts(slot, words, lengths))

    def _look_at_beams(self, output: StepOutput) -> None:
        for results in output.hypotheses.values():
            self.seen["a search ends early"] += all(result.finish != LENGTH for result in results)
        if output.parents is None:
            return
        for row, slot in enumerate(output.slots.tolist()):
            tokens = slice(output.row_starts[row], output.row_starts[row + 1])
            if slot in self._searches and slot not in output.hypotheses:
                parents = output.parents[tokens].tolist()
                self.seen["beams part"] += parents != list(range(len(parents)))
                self.seen["a beam has no text"] += not np.isfinite(output.log_probs[tokens]).all()

    def clear_block(self, block_id: int, first_token: int) -> None:
        super().clear_block(block_id, first_token)
        self._pool.reshape(-1, self.info.tokens_per_block)[block_id, first_token:] = UNWRITTEN

    def _carry_out(self, operation) -> None:
        super()._carry_out(operation)
        if self.stamps is not None and isinstance(operation, BlockCopy):
            source = self._host_stamps if operation.from_host else self.stamps
            stamps = self._host_stamps if operation.to_host else self.stamps
            stamps[operation.destination] = source.get(operation.source)
            self.num_brought_back += operation.from_host

    def host_block(self, host_id: int) -> memoryview:
        self._host_ids.append(host_id)
        return super().host_block(host_id)

    def take_host_ids(self) -> list[int]:
        taken, self._host_ids = self._host_ids, []
        return taken

    def host_stamp(self, host_id: int) -> tuple | None:
        return self._host_stamps.get(host_id)

    def set_host_stamp(self, host_id: int, stamp: tuple | None) -> None:
        self._host_stamps[host_id] = stamp

    def run_all(self) -> None:
        """Run all launched steps, so that the contents of the blocks can be checked."""
        while self._queue:
            self.run(self._queue.popleft())

    # stamps

    def _stamp(self, batch: ScheduledBatch) -> None:
        """Check the stamps of new sequences' cached blocks. Then stamp each block whose first token the batch writes.

        The stamps can be made at the launch, because the tokens before these blocks are already known.
        """
        size, owners, per_slot = self.info.tokens_per_block, self._owners[batch.iteration], batch.max_beam_width
        for work in batch.context:
            owner, row = owners[work.slot], self._tables.rows[work.slot * per_slot]
            tokens, end = owner.tokens[0], work.start + len(work.token_ids)
            if work.setup is not None and work.start:
                self.num_found += 1
                self.num_partly_found += bool(work.start % size)
                self.seen["beams find a prompt in the cache"] += owner.beam_width > 1
                for place in range(-(-work.start // size)):
                    self._check_rule(self.stamps.get(int(row[place])) == stamp_of(owner, tokens, place * size),
                                     f"I16: {owner} found block {row[place]}, which is somebody else's")
            for place in range(-(-work.start // size), -(-end // size)):
                self.stamps[int(row[place])] = stamp_of(owner, tokens, place * size)
        drafts_of = draft_tokens_of(batch)
        for slot, length in zip(batch.generation.slots.tolist(), batch.generation.kv_lengths.tolist()):
            drafts = drafts_of.get(slot, [])
            for first in range(-(-length // size) * size, length + 1 + len(drafts), size):
                for beam, tokens in enumerate(owners[slot].tokens):
                    row = self._tables.rows[slot * per_slot + beam]
                    self.stamps[int(row[first // size])] = stamp_of(owners[slot], [*tokens, *drafts], first)

    # orders

    def _run(self, step) -> StepOutput:
        self._running = step.batch.iteration
        return super()._run(step)

    def _on_load(self, operation) -> None:
        """Fail a load of the step that runs. The step is run again in parts, and the load works then."""
        if self._load_fails(self._running):
            order = self._orders.get(self._running, NO_ORDER)
            if order.raises is NO_ORDER.raises:
                self._orders[self._running] = replace(order, raises=lambda slots: None)
            for owner in self._owners.get(self._running, {}).values():
                self._blame(owner, ErrorCode.MODEL_ERROR, self._running, must=False)
            raise RuntimeError("planted")

    def order_of(self, batch: ScheduledBatch) -> Order:
        return self._orders.get(batch.iteration, NO_ORDER)

    def _on_step(self, batch: ScheduledBatch) -> dict[int, RowFailure] | None:
        order = self.order_of(batch)
        if not order.in_finish:
            self._raise(order, batch)
        if order.failures:
            slots = batch.slots()
            return {slot: failure for slot, failure in order.failures.items() if slot in slots}
        return None

    @staticmethod
    def _raise(order: Order, batch: ScheduledBatch) -> None:
        error = order.raises(batch.slots()) if order.rank == 0 else None
        if error is not None:
            raise error

    def step_of(self, rank: int, batch: ScheduledBatch) -> None:
        """Called in a step of another rank: raise what the order of the batch says."""
        order = self.order_of(batch)
        error = order.raises(batch.slots()) if order.rank == rank else None
        if error is not None:
            self._failed.add(batch.iteration)
            raise error

    def _order(self, name: str, batch: ScheduledBatch) -> Order:
        """Return the Order for the fault `name`, and call `blame` for the requests that the fault must or may fail."""
        slots, rng = batch.slots(), self._faults.rng
        victim = rng.choice(slots)

        def blame(slot: int, code: ErrorCode, must: bool = True) -> None:
            self._blame(self._owner_of(slot), code, batch.iteration, must=must)

        in_finish = rng.random() < 0.5
        kind = name.removeprefix("model.")
        alone = len(slots) == 1
        rows = [work.slot for work in batch.context if work.is_last_chunk] + batch.generation.slots.tolist()
        if kind == "memory_above":
            self._waits_for_several = alone
        if (kind == "wrong_token" and not rows) or (kind == "memory_above" and alone):
            return NO_ORDER                                        # the fault would have no effect
        self._faults.hit(name)

        if kind == "raises_for_one":
            blame(victim, ErrorCode.MODEL_ERROR)
            return Order(lambda part: RuntimeError("planted") if victim in part else None, in_finish)
        if kind == "raises_once":
            if alone:                                  # a batch of one is not run again, but without its drafts
                blame(victim, ErrorCode.MODEL_ERROR, not batch.has_drafts)
            errors = [rng.choice([RuntimeError, SystemExit, GeneratorExit])("planted")]

            def raises(part: list[int]) -> BaseException | None:
                if errors and len(part) == 1 and not alone:    # the first run failed with the step before it
                    blame(part[0], ErrorCode.MODEL_ERROR, not batch.has_drafts)
                return errors.pop() if errors else None

            return Order(raises, in_finish)
        if kind in ("raises_for_all", "memory_always"):
            code, error = ((ErrorCode.MODEL_ERROR, RuntimeError) if kind == "raises_for_all"
                           else (ErrorCode.OUT_OF_MEMORY, MemoryError))
            for slot in slots:
                blame(slot, code)
            return Order(lambda part: error("planted"), in_finish)
        if kind == "memory_above":
            most = rng.randrange(1, len(slots))
            return Order(lambda part: MemoryError("planted") if len(part) > most else None, in_finish)
        if kind == "nan_in_row":
            self._blame_readers_of(self._blocks_written(batch, victim), batch, victim)
            return Order(failures={victim: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")})
        if kind == "nan_in_block":
            start, end, _ = self._span(batch, victim)
            size = self.info.tokens_per_block
            first_token = start % size if start // size == (end - 1) // size else 0
            blocks = self._blocks_written(batch, victim)[-1:]
            self._blame_readers_of(blocks, batch, victim)
            return Order(poisons={victim: [(block_id, first_token) for block_id in blocks]})
        if kind == "wrong_token":
            victim = rng.choice(rows)
            blame(victim, ErrorCode.INVALID_TOKEN)
            return self._wrong_token(victim, rng)
        if kind == "wrong_rows":
            if alone:
                blame(victim, ErrorCode.MODEL_ERROR, not batch.has_drafts)
            spoils = [rng.choice([one_row_too_few, one_token_too_few, one_row_too_many])]

            def spoil(output: StepOutput, part: list[int]) -> StepOutput:
                if spoils and len(part) == 1 and not alone:    # the first run was not read: the step before it failed
                    blame(part[0], ErrorCode.MODEL_ERROR, not batch.has_drafts)
                return spoils.pop()(output) if spoils else output

            return Order(spoils=spoil)
        assert kind == "device_lost"
        self.is_lost = True
        return NO_ORDER

    def _wrong_token(self, victim: int, rng: Random) -> Order:
        token = rng.choice([-1, self.info.vocab_size, 2**31 - 1])
        return Order(spoils=lambda output, part: with_a_wrong_token(output, victim, token))

    def _span(self, batch: ScheduledBatch, slot: int) -> tuple[int, int, int]:
        """Return (first position that a batch writes for a slot, position after the last one, number of beams)."""
        for work in batch.context:
            if work.slot == slot:
                return work.start, work.start + len(work.token_ids), 1
        generation = batch.generation
        row = generation.slots.tolist().index(slot)
        start, drafts = int(generation.kv_lengths[row]), generation.num_drafts
        return start, start + 1 + (0 if drafts is None else int(drafts[row])), generation.beam_width

    def _blocks_written(self, batch: ScheduledBatch, slot: int) -> list[int]:
        """Return the ids of the blocks that a new batch writes for a slot, in the order of their positions."""
        size = self.info.tokens_per_block
        start, end, beams = self._span(batch, slot)
        table = self._table_of(self._owner_of(slot))
        return table[:beams, start // size:(end - 1) // size + 1].T.ravel().tolist()

    def _blame_readers_of(self, blocks: list[int], batch: ScheduledBatch, victim: int) -> None:
        """Blame the request in the slot `victim`. Other requests of the batch with one of `blocks` may fail too."""
        self._blame(self._owner_of(victim), ErrorCode.NON_FINITE_LOGITS, batch.iteration)
        for slot in batch.slots():
            owner = self._owner_of(slot)
            held = {block for beam in range(owner.beam_width) for block in self._blocks_of(owner, beam)}
            if slot != victim and not held.isdisjoint(blocks):
                self._blame(owner, ErrorCode.NON_FINITE_LOGITS, batch.iteration, must=False)


def stamp_of(owner: LlmRequest, tokens: list[int], start: int) -> tuple:
    """Return (salt, digest of the adapter, checksum of the tokens before `start`)."""
    return owner.cache_salt, owner.adapter_digest, crc32(array("q", tokens[:start]).tobytes())


class SimulatedStep:
    """A step that fails when it is read, if a fault is chosen for it."""

    def __init__(self, device: SimulatedDevice, batch: ScheduledBatch, pending) -> None:
        self._device, self._batch, self._pending = device, batch, pending

    def finish(self) -> StepOutput:
        order = self._device.order_of(self._batch)
        try:
            if order.in_finish:
                self._device.run_up_to(self._pending)  # it has run: the tables may change now
                self._device._raise(order, self._batch)
            output = self._pending.finish()
        except BaseException:
            self._device._failed.add(self._batch.iteration)
            raise
        if order.spoils is None:
            return output
        self._device._failed.add(self._batch.iteration)
        return order.spoils(output, self._batch.slots())
