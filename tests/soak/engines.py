"""The engines of a soak: they have different features and run side by side in one process."""

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
from batch_manager.clock import SystemClock
from batch_manager.errors import ErrorCode
from batch_manager.handover import RowFailure, ScheduledBatch
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness import world as harness

STEP_S = 0.02
VOCAB = 23
MAX_SEQ_LEN = 64
TOKENS_PER_BLOCK = 4
STEP_FAULTS = 0.001         # probability that a step raises; also the probability that one of its rows fails

# Idle workers sleep this long, so that they do not disturb the busy one. `notify` wakes them.
IDLE_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """The configuration of one engine.

    salts      whether some requests have a cache_salt; a tenth of all requests have a unique one
    verifies   whether the scripted model reads back each sequence in each step and checks its calls, which takes time
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
        """Return the description of the scripted model for the history checker."""
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


class HurriedClock(SystemClock):
    """Real time plus STEP_S for each step, so that deadlines pass as with a real model.

    A `VirtualClock` cannot be used, because the worker is a thread that waits in real time.
    """

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class Planted(Exception):
    """An injected exception."""


class UnreliableModel:
    """The on_step function of a scripted model.

    Each call advances the clock. Rarely, a call fails the step or one of its rows.
    """

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
    """Return a running manager with a scripted model."""
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
