"""The engines that are soaked: different features, side by side in one process, for as long as it lives."""

import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from batch_manager import (
    ContextChunkingPolicy,
    GptManager,
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelType,
)
from batch_manager.errors import ErrorCode
from batch_manager.handover import RowFailure, ScheduledBatch
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness import world as harness

STEP_S = 0.02
VOCAB = 23
MAX_SEQ_LEN = 64
TOKENS_PER_BLOCK = 4
STEP_FAULTS = 0.001         # probability that a step raises, and that a row of it is spoilt

# A worker with nothing to do sleeps this long: `notify` wakes it, and the others should not disturb who is at work.
IDLE_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One configuration.

    salts      requests keep their cached prompts apart, each with a salt of its own in a tenth of them
    verifies   the model reads every history back in every step, and checks how it is driven; that takes time
    """

    name: str
    policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION
    model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching
    num_blocks: int = 48
    window: int | None = None
    sinks: int = 0
    reuse: bool = False
    host_blocks: int = 0
    salts: bool = False
    max_beam_width: int = 1
    verifies: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_static(self) -> bool:
        return self.model_type is TrtGptModelType.V1

    @property
    def model(self) -> dict[str, Any]:
        """What the checker of histories has to know of the scripted model."""
        return {"vocab_size": VOCAB, "key": 0, "window": self.window, "sink": self.sinks, "max_seq_len": MAX_SEQ_LEN,
                "is_static": self.is_static}


def chunked(policy: ContextChunkingPolicy) -> dict[str, Any]:
    return {"enable_chunked_context": True, "max_num_tokens": 24, "context_chunking_policy": policy}


NO_EVICT = SchedulerPolicy.GUARANTEED_NO_EVICT
ENGINES = (
    Engine("a pool that is too small, reuse, host blocks", num_blocks=34, reuse=True, host_blocks=24, salts=True,
           verifies=True, options=chunked(ContextChunkingPolicy.FIRST_COME_FIRST_SERVED)),
    Engine("overlap, reuse, windows", NO_EVICT, window=24, reuse=True, salts=True,
           options={"enable_trt_overlap": True} | chunked(ContextChunkingPolicy.EQUAL_PROGRESS)),
    Engine("beams, split layout", model_type=TrtGptModelType.InflightBatching, num_blocks=90, reuse=True,
           max_beam_width=3),
    Engine("static batches", NO_EVICT, TrtGptModelType.V1, num_blocks=136),
    Engine("sinks, unbounded", NO_EVICT, window=12, sinks=4, num_blocks=60, options={"max_num_sequences": -1}),
    Engine("overlap, pauses", num_blocks=40, options={"enable_trt_overlap": True}),
)


class HurriedClock:
    """The real time, and STEP_S more with every step: deadlines pass as they would with a model."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    @staticmethod
    def timestamp() -> str:
        return time.strftime("%m-%d-%Y %H:%M:%S")


class Planted(Exception):
    """Raised because somebody was told to."""


class UnreliableModel:
    """What happens in a step: time passes, and now and then it fails, or one of its rows does."""

    def __init__(self, clock: HurriedClock, rng: Random) -> None:
        self._clock, self._rng = clock, rng
        self.num_faults = 0

    def __call__(self, batch: ScheduledBatch) -> dict[int, RowFailure] | None:
        self._clock.ahead += STEP_S
        die = self._rng.random()
        if die > 2 * STEP_FAULTS:
            return None
        self.num_faults += 1
        if die > STEP_FAULTS:
            raise Planted
        return {self._rng.choice(batch.slots()): RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")}


def make_manager(engine: Engine, callbacks: Any, clock: HurriedClock, rng: Random) -> GptManager:
    """A manager with its worker, over a scripted model."""
    backend = ScriptedBackend(vocab_size=VOCAB, max_seq_len=MAX_SEQ_LEN, num_blocks=engine.num_blocks,
                              tokens_per_block=TOKENS_PER_BLOCK, num_slots=8, window=engine.window, sink=engine.sinks,
                              host_blocks=engine.host_blocks, verify=engine.verifies,
                              on_step=UnreliableModel(clock, rng))
    return harness.make_manager(
        callbacks, backend=backend, parts={"clock": clock}, as_arrays=True, policy=engine.policy,
        model_type=engine.model_type, max_beam_width=engine.max_beam_width, max_batch_size=8,
        kv_cache_config=KvCacheConfig(
            enable_block_reuse=engine.reuse, host_cache_size=engine.host_blocks, sink_token_length=engine.sinks,
            max_attention_window=engine.window),
        idle_poll_interval_s=IDLE_POLL_INTERVAL_S, flush_stats_when_idle=True, **engine.options)
