"""The scripted model as the simulator drives it: it fails on order, and what is cleared is really gone.

The scripted backend reads tokens back through the block tables. What a real model has in a block depends on all that
came before it as well, and nobody may read what was computed under another salt. So where prompts are reused every
block is stamped with both by whoever writes its first token, and a prompt that is found must find its own stamps (I16).
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from zlib import crc32

import numpy as np

from batch_manager.errors import DeviceLostError
from batch_manager.handover import LENGTH, RowFailure, ScheduledBatch, StepOutput
from batch_manager.names import ErrorCode
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.runtime.scripted_backend import UNWRITTEN, ScriptedBackend

from .drawing import Drawing
from .faults import Faults, Place
from .spoiling import once, one_row_too_few, one_row_too_many, one_token_too_few, with_a_wrong_token


@dataclass(slots=True)
class Order:
    """What is to go wrong with one batch, whole or in parts.

    raises      (slots of a part) -> the error that part raises, or None
    in_finish   when it is read, not when it is launched
    """

    raises: Callable[[list[int]], BaseException | None] = lambda slots: None
    in_finish: bool = False
    failures: dict[int, RowFailure] = field(default_factory=dict)
    spoils: Callable[[StepOutput], StepOutput] | None = None


NO_ORDER = Order()


class SimulatedDevice(ScriptedBackend):
    """A scripted backend with orders.

    blame        (request, code, must) called for everybody a fault must cost, or may
    blocks_of    (request, beam=0) -> the blocks one beam of it holds
    before_step  (batch) called once for every batch, before it runs
    check        (holds, rule) where something is wrong
    stamps       where prompts are reused: block -> (salt, checksum of the tokens before it)
    """

    def __init__(self, *, faults: Faults, owner_of: Callable[[int], LlmRequest],
                 blocks_of: Callable[..., list[int]], blame: Callable[..., None],
                 before_step: Callable[[ScheduledBatch], None], check: Callable[[bool, str], None],
                 is_reused: bool, **options) -> None:
        super().__init__(on_step=self._on_step, **options)
        self._faults = faults
        self._owner_of, self._blocks_of = owner_of, blocks_of
        self._blame = blame
        self._before_step, self._check_rule = before_step, check
        self.stamps: dict[int, tuple] | None = {} if is_reused else None
        self._host_stamps: dict[int, tuple] = {}
        self.num_found = self.num_partly_found = self.num_brought_back = 0
        self._orders: dict[int, Order] = {}
        self._newest = -1
        self.seen: Counter[str] = Counter()                         # markers
        self.drawing = Drawing(check, self.seen)
        self.is_lost = False
        self.num_bisected = 0
        self._waits_for_several = False

    # what the loop calls

    def start(self, batch: ScheduledBatch) -> "SimulatedStep":
        if self.is_lost:
            raise DeviceLostError("the device is lost")
        if batch.iteration > self._newest:                          # else it is a part of one that failed
            self._newest = batch.iteration
            self._before_step(batch)
            if self.stamps is not None:
                self._stamp(batch)
            self._orders.pop(batch.iteration - 2, None)
            name = self._faults.draw(Place.MODEL)
            if self._waits_for_several and name is None and batch.num_sequences > 1:
                name = "model.memory_above"
            self._orders[batch.iteration] = self._order(name, batch) if name else NO_ORDER
        else:
            self.num_bisected += 1
            order = self.order_of(batch)
            self._check_rule(order.raises is not NO_ORDER.raises or order.spoils is not None,
                             "I29: a step failed, and is run again, to which nothing had happened")
        if self.is_lost:
            raise DeviceLostError("the device is lost")
        if batch.iteration % 2 and not self.order_of(batch).in_finish:
            self._raise(self.order_of(batch), batch)                # before it has looked at anything of the batch
        return SimulatedStep(self, batch, super().start(batch))

    def _set_up(self, batch: ScheduledBatch) -> None:
        super()._set_up(batch)
        self.drawing.set_up(batch, self._owner_of)

    def _decode(self, batch: ScheduledBatch, step, sums: np.ndarray, failures: dict) -> StepOutput:
        output = super()._decode(batch, step, sums, failures)
        if self.drawing:
            place = {slot: row for row, slot in enumerate(step.slots.tolist())}
            rows = [place[slot] for slot in output.slots.tolist()]
            words = self._words(sums[rows], self._state["draw"][output.slots])
            self.drawing.draw(output, words, (step.starts + step.counts)[rows], self._state["log_probs"][output.slots],
                              self.info.vocab_size)
        for beams in output.beams.values():
            over = beams.hypotheses is not None
            self.seen["beams part"] += not over and beams.parents.tolist() != list(range(len(beams.parents)))
            self.seen["a beam has no text"] += not over and not np.isfinite(beams.cum_log_probs).all()
            self.seen["a search ends early"] += over and all(text.finish != LENGTH for text in beams.hypotheses)
        return output

    def clear_blocks(self, block_ids: list[int]) -> None:
        super().clear_blocks(block_ids)
        self._pool.reshape(-1, self.info.tokens_per_block)[block_ids] = UNWRITTEN

    def copy_blocks(self, copies: list) -> None:
        super().copy_blocks(copies)
        if self.stamps is None:
            return
        for copy in copies:
            source = self._host_stamps if copy.from_host else self.stamps
            (self._host_stamps if copy.to_host else self.stamps)[copy.destination] = source.get(copy.source)
            self.num_brought_back += copy.from_host

    # stamps

    def _stamp(self, batch: ScheduledBatch) -> None:
        """Check what new sequences found, then mark what the batch writes."""
        size = self.info.tokens_per_block
        for work in batch.context:
            owner = self._owner_of(work.slot)
            blocks, tokens = self._blocks_of(owner), owner.tokens[0]
            end = work.start + len(work.token_ids)
            if work.setup is not None and work.start:
                self.num_found += 1
                self.num_partly_found += bool(work.start % size)
                self.seen["beams find a prompt in the cache"] += owner.beam_width > 1
                for place in range(-(-work.start // size)):
                    self._check_rule(self.stamps.get(blocks[place]) == stamp_of(owner, tokens, place * size),
                                     f"I16: {owner} found block {blocks[place]}, which is somebody else's")
            if len(blocks) == -(-owner.prompt_len // size):       # none has left a window
                for place in range(-(-work.start // size), -(-end // size)):
                    self.stamps[blocks[place]] = stamp_of(owner, tokens, place * size)
        for slot, length in zip(batch.generation.slots.tolist(), batch.generation.kv_lengths.tolist()):
            if length % size == 0:
                owner = self._owner_of(slot)
                for beam, tokens in enumerate(owner.tokens):
                    self.stamps[self._blocks_of(owner, beam)[-1]] = stamp_of(owner, tokens, length)

    # orders

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
        error = order.raises(batch.slots())
        if error is not None:
            raise error

    def _order(self, name: str, batch: ScheduledBatch) -> Order:
        """Also says who must fail because of it."""
        slots, rng = batch.slots(), self._faults.rng
        victim = rng.choice(slots)
        in_finish = rng.random() < 0.5
        kind = name.removeprefix("model.")
        alone = len(slots) == 1
        rows = [work.slot for work in batch.context if work.is_last_chunk] + batch.generation.slots.tolist()
        if kind == "memory_above":
            self._waits_for_several = alone
        if (kind == "wrong_token" and not rows) or (kind == "memory_above" and alone):
            return NO_ORDER                                        # it would change nothing
        self._faults.hit(name)

        if kind == "raises_for_one":
            self._blame(self._owner_of(victim), ErrorCode.MODEL_ERROR)
            return Order(lambda part: RuntimeError("planted") if victim in part else None, in_finish)
        if kind == "raises_once":
            if alone:                                              # it fails alone, and is not run again
                self._blame(self._owner_of(victim), ErrorCode.MODEL_ERROR)
            errors = [rng.choice([RuntimeError, SystemExit, GeneratorExit])("planted")]
            return Order(lambda part: errors.pop() if errors else None, in_finish)
        if kind in ("raises_for_all", "memory_always"):
            code, error = ((ErrorCode.MODEL_ERROR, RuntimeError) if kind == "raises_for_all"
                           else (ErrorCode.OUT_OF_MEMORY, MemoryError))
            for slot in slots:
                self._blame(self._owner_of(slot), code)
            return Order(lambda part: error("planted"), in_finish)
        if kind == "memory_above":
            most = rng.randrange(1, len(slots))
            return Order(lambda part: MemoryError("planted") if len(part) > most else None, in_finish)
        if kind == "nan_in_row":
            self._blame_readers_of(self._blocks_written(batch, victim), batch, victim)
            return Order(failures={victim: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")})
        if kind == "nan_in_block":
            blocks = self._blocks_written(batch, victim)[-1:]
            self._blame_readers_of(blocks, batch, victim)
            self.poison_blocks(blocks)
            return NO_ORDER
        if kind == "wrong_token":
            return self._wrong_token(rows, rng)
        if kind == "wrong_rows":
            if alone:
                self._blame(self._owner_of(victim), ErrorCode.MODEL_ERROR)
            return Order(spoils=once(rng.choice([one_row_too_few, one_token_too_few, one_row_too_many])))
        assert kind == "device_lost"
        self.is_lost = True
        return NO_ORDER

    def _wrong_token(self, rows: list[int], rng: Random) -> Order:
        victim = rng.choice(rows)
        self._blame(self._owner_of(victim), ErrorCode.INVALID_TOKEN)
        token = rng.choice([-1, self.info.vocab_size, 2**31 - 1])

        def spoil(output: StepOutput) -> StepOutput:
            tokens, finish, beams = output.tokens.copy(), output.finish.copy(), dict(output.beams)
            if victim in beams:
                beams[victim] = with_a_wrong_token(beams[victim], token)
            else:
                tokens[output.slots == victim] = token
                finish[output.slots == victim] = 0
            return replace(output, tokens=tokens, finish=finish, beams=beams)
        return Order(spoils=spoil)

    def _blocks_written(self, batch: ScheduledBatch, slot: int) -> list[int]:
        """The blocks a new batch writes to for a slot, in order."""
        size = self.info.tokens_per_block
        for work in batch.context:
            if work.slot == slot:
                start, end, beams = work.start, work.start + len(work.token_ids), 1
                break
        else:
            start = int(batch.generation.kv_lengths[batch.generation.slots.tolist().index(slot)])
            end, beams = start + 1, batch.generation.beam_width
        self._tables.update(batch)                                 # the batch has not run yet
        first = slot * batch.max_beam_width
        return self._tables.rows[first:first + beams, start // size:(end - 1) // size + 1].T.ravel().tolist()

    def _blame_readers_of(self, blocks: list[int], batch: ScheduledBatch, victim: int) -> None:
        """The victim cannot go on, nor can whoever of the batch sees one of the blocks."""
        self._blame(self._owner_of(victim), ErrorCode.NON_FINITE_LOGITS)
        for slot in batch.slots():
            owner = self._owner_of(slot)
            held = {block for beam in range(owner.beam_width) for block in self._blocks_of(owner, beam)}
            if slot != victim and not held.isdisjoint(blocks):
                self._blame(owner, ErrorCode.NON_FINITE_LOGITS, must=False)


def stamp_of(owner: LlmRequest, tokens: list[int], start: int) -> tuple:
    """What is in a block besides its own tokens."""
    return owner.cache_salt, crc32(array("q", tokens[:start]).tobytes())


class SimulatedStep:
    """A step whose order may be to fail when it is read."""

    def __init__(self, device: SimulatedDevice, batch: ScheduledBatch, pending) -> None:
        self._device, self._batch, self._pending = device, batch, pending

    def finish(self) -> StepOutput:
        order = self._device.order_of(self._batch)
        if order.in_finish:
            self._device._raise(order, self._batch)
        output = self._pending.finish()
        return output if order.spoils is None else order.spoils(output)
