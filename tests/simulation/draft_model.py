"""The draft model of a simulated engine: a scripted model of its own, which agrees with the engine's in some steps."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from batch_manager.errors import InternalError
from batch_manager.handover import RowFailure, ScheduledBatch
from batch_manager.kv.audit import audit
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.window import AttentionWindow
from batch_manager.loop.draft_model import DraftModel, room_for_drafts
from batch_manager.names import ErrorCode
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.testing.scripted_backend import ScriptedBackend

from .drafter import Texts
from .faults import Faults, Place

if TYPE_CHECKING:
    from .world import SimulatedWorld


class SimulatedDraftModel(DraftModel):
    """A draft model of the package, whose cache and drafts are checked.

    All steps of a call have the key of the engine's model with the probability that drafts are right; else, some do. If
    all do, every draft of a plain request is the next token of its text, unless the draft model's cache is wrong.

    held     see SimulatedDrafter
    """

    def __init__(self, world: "SimulatedWorld", model: dict[str, Any]) -> None:
        swarm, rng = world.swarm, Random(f"draft model {world.swarm.seed}")
        self._world, self._rng, self._texts, self._right = world, rng, Texts(world, model), swarm.drafts_right
        self._is_right = False
        self.faults = Faults(rng, swarm.faults, swarm.fault_rate)
        length = rng.choice([swarm.max_seq_len, swarm.max_seq_len, max(swarm.max_seq_len // 2, 2)])
        num_blocks = rng.choice([1, swarm.num_blocks, 2 * swarm.num_blocks, 512])
        unit, self._key = swarm.tokens_per_block, model["key"]
        window = room_for_drafts(AttentionWindow(swarm.window or length, length, unit, swarm.sinks))
        self.backend = ScriptedBackend(
            max_seq_len=length, num_blocks=num_blocks, tokens_per_block=unit, num_slots=swarm.max_batch_size,
            is_asynchronous=rng.random() < 0.5, on_step=self._on_step, **model)
        self.cache = KvCacheManager(
            num_blocks, unit, length, window=swarm.window, sink_token_length=swarm.sinks,
            unread_steps=window.unread_steps, max_draft_len=window.max_draft_len, enable_block_reuse=swarm.reuse)
        super().__init__(self.backend, self.cache, swarm.max_num_tokens, world.clock.monotonic)

    @property
    def held(self) -> set[LlmRequest]:
        return {*self._setups, *self._of, *self._lost}

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        self._is_right = self._rng.random() < self._right
        self.backend.key = self._key
        try:
            proposed = super().propose(requests, max_lengths)
        except BaseException:
            self._world.client.failures["propose"] += 1      # once, also if a step behind the failed one fails too
            raise
        for request, drafts in zip(requests, proposed):
            if drafts:
                self._world.mark("a draft model drafts")
            handed = self._world.handed(request.request_id)
            if self._is_right and handed is not None and handed.is_plain:
                text = self._texts.after(request, len(drafts))
                self._world.check([*drafts[:len(text)]] == text[:len(drafts)],
                                  f"I36: the draft model drafts {drafts} for {request}, whose text goes on with {text}")
        return proposed

    def violations(self) -> Iterator[str]:
        """Check the accounting of the draft model's cache. Yield a message for each violation."""
        try:
            audit(self.cache)
        except InternalError as error:
            yield f"I9: of the draft model: {error}"
        if not self.held and self.cache.used_blocks:
            yield f"I17: nobody drafts and {self.cache.used_blocks} blocks of the draft model are held"

    def _on_step(self, batch: ScheduledBatch) -> dict[int, RowFailure] | None:
        rng = self._rng
        self.backend.key = self._key if self._is_right or rng.random() < 0.5 else self._key + 1
        name = self.faults.draw(Place.DRAFTER) if batch.num_sequences else None
        if name is None:
            return None
        self.faults.hit(name)
        if name == "drafter.raises":
            raise rng.choice([RuntimeError, SystemExit, GeneratorExit, MemoryError])("planted")
        code = rng.choice([ErrorCode.NON_FINITE_LOGITS, ErrorCode.MODEL_ERROR])
        return {rng.choice(batch.slots()): RowFailure(code, "planted")}
