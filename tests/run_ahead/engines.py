"""Runs the requests of a RunAheadScenario in an engine, in lockstep or with run-ahead, in the calling thread.

The result, a `Run`, has the responses and counts of events.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from batch_manager import KvCacheConfig, TrtGptModelOptionalParams, TrtGptModelType
from batch_manager.clock import SystemClock
from batch_manager.handover import RowFailure, ScheduledBatch
from batch_manager.kv.audit import audit
from batch_manager.runtime import packing
from batch_manager.runtime.block_tables import generation_rows
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.deterministic.differential import make_checkpoint
from tests.harness.client import ArrivingClient
from tests.harness.world import make_loop

from .late_backend import NOT_DRAWN, NOT_READ, NOT_RUN, TWICE, Faults, LateBackend
from .scenarios import WIDEST, RunAheadScenario, shift_batched

MOST_ITERATIONS = 4_000
HOST_BLOCK_BYTES = 1 << 16              # no block of a small model is larger


@dataclass(frozen=True, slots=True)
class Response:
    tensors: dict[str, np.ndarray]
    is_final: bool
    error: str

    def same(self, other: "Response") -> bool:
        """Whether both responses have the same tensors, bit by bit, the same `is_final` and the same error."""
        return (self.is_final, self.error) == (other.is_final, other.error) and self.tensors.keys() == (
            other.tensors.keys()) and all(
            (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
            for mine, theirs in zip(self.tensors.values(), other.tensors.values(), strict=True))


@dataclass(slots=True)
class Run:
    """The result of running a scenario in one engine.

    responses   request id -> its responses, in order
    counts      numbers of "steps", of steps launched with another in flight ("ahead"), "failed steps", "pauses", "void"
                rows, "discarded" tokens and "generated" tokens
    """

    responses: dict[int, list[Response]]
    counts: Counter = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What an engine with run-ahead gets in addition to the scenario: faults, stops and a backend whose steps run late.

    fault_rate   probability that a step fails
    eagerness    `eagerness` of the LateBackend
    stops        request id -> iteration from which the poll callback names the request
    own_queue    whether the scripted backend itself delays its steps; otherwise, a LateBackend delays them
    """

    seed: int
    fault_rate: float = 0.0
    eagerness: float = 0.0
    stops: Mapping[int, int] = field(default_factory=dict)
    own_queue: bool = False


def make_backend(scenario: RunAheadScenario, parent: Path, **options):
    """Return a new backend for the scenario.

    parent    folder for the checkpoints of native backends
    options   further arguments of a ScriptedBackend
    """
    if scenario.is_scripted:
        return ScriptedBackend(
            vocab_size=scenario.vocab, max_seq_len=scenario.max_seq_len, num_blocks=scenario.num_blocks,
            key=scenario.seed, tokens_per_block=scenario.tokens_per_block, num_slots=scenario.max_batch_size,
            window=scenario.window,
            sink=scenario.sinks, host_blocks=scenario.host_blocks, **options)
    kv = KvCacheConfig(
        tokens_per_block=scenario.tokens_per_block, max_tokens=scenario.num_blocks * scenario.tokens_per_block,
        max_attention_window=scenario.window, sink_token_length=scenario.sinks, enable_block_reuse=scenario.reuse,
        host_cache_size=scenario.host_blocks * HOST_BLOCK_BYTES)
    params = TrtGptModelOptionalParams(
        dtype=scenario.dtype, device="cpu", deterministic=True, cpu_compile=False, num_threads=1,
        max_batch_size=scenario.max_batch_size, max_seq_len=scenario.max_seq_len, kv_cache_config=kv)
    layout = packing.split if scenario.model_type is TrtGptModelType.InflightBatching else packing.packed
    return build_native_backend(make_checkpoint(scenario.family, parent), params, layout=layout,
                                num_slots=scenario.max_batch_size, max_beam_width=WIDEST)


def make_late_backend(scenario: RunAheadScenario, parent: Path, ahead: Ahead, faults: Faults):
    """Return a new backend for the scenario whose steps run after the next launch, and fail as `faults` decides."""
    if not scenario.is_scripted:
        inner = make_backend(scenario, parent)
        (form,) = inner._forms._forms                          # `packed` alone
        fail_inside(form, "_divide", form._head, "logits", faults)
        return LateBackend(inner, faults, partial(poison, inner), ahead.eagerness, ahead.seed)

    def strike(batch: ScheduledBatch) -> None:
        faults.strike(batch, (NOT_READ, TWICE))

    def strike_or_spoil(batch: ScheduledBatch) -> dict[int, RowFailure]:
        strike(batch)
        return faults.failures(batch)

    # A step must spoil blocks when it runs. When it is read, later steps may have run and cleared its blocks.
    hooks = {"on_step": faults.failures, "on_finish": strike} if ahead.own_queue else {"on_finish": strike_or_spoil}
    inner = make_backend(scenario, parent, is_asynchronous=ahead.own_queue, **hooks)
    fail_inside(inner, "_lay_out", inner, "_decode", faults)
    return inner if ahead.own_queue else LateBackend(inner, faults, partial(poison, inner), ahead.eagerness, ahead.seed)


def fail_inside(owner, lays_out: str, drawer: object, draws: str, faults: Faults) -> None:
    """Make steps fail at two points: before they write to the KV cache, and between the model's run and the sampling.

    At both points, the block tables are updated and the operations of the batch are done.

    lays_out   name of the method of `owner`, a backend or a form, that is called first, with the batch
    draws      name of the method of `drawer` that is called between the model's run and the sampling
    """
    lay_out, draw, running = getattr(owner, lays_out), getattr(drawer, draws), []

    def failing_layout(batch, *given):
        running[:] = [batch]
        faults.strike(batch, (NOT_RUN,))
        return lay_out(batch, *given)

    def failing_draw(*given):
        faults.strike(running[0], (NOT_DRAWN,))
        return draw(*given)

    setattr(owner, lays_out, failing_layout)
    setattr(drawer, draws, failing_draw)


def poison(backend, batch: ScheduledBatch, slots: list[int]) -> None:
    """Overwrite with NaN the keys and values that the step of `batch` wrote for `slots`, in a native backend's pool."""
    spans = [(work.slot * batch.max_beam_width, range(work.start, work.start + len(work.token_ids)))
             for work in batch.context if work.slot in slots]
    spans += [(row, [length]) for slot, length, row in zip(*map(np.ndarray.tolist, generation_rows(batch)))
              if slot in slots]
    size = backend.info.tokens_per_block
    for row, positions in spans:
        for position in positions:
            backend._parts.pool[backend._parts.tables.rows[row, position // size], :, :, :, position % size] = np.nan


def run_in_lockstep(scenario: RunAheadScenario, parent: Path) -> Run:
    return drive(scenario, make_backend(scenario, parent), run_ahead=False, stops={})


def run_ahead(scenario: RunAheadScenario, parent: Path, ahead: Ahead) -> tuple[Run, Faults]:
    faults = Faults(ahead.seed, ahead.fault_rate)
    backend = make_late_backend(scenario, parent, ahead, faults)
    run = drive(scenario, backend, run_ahead=True, stops=ahead.stops, faults=faults)
    return run, faults


class RunAheadClient(ArrivingClient):
    """A client that hands over the requests of a scenario and stores their responses and statistics in a Run.

    open_ids   ids of requests without a final response
    stop_at    request id -> iteration from which the poll callback names the request
    """

    def __init__(self, scenario: RunAheadScenario, run: Run, stop_at: Mapping[int, int]) -> None:
        asks = scenario.asks
        super().__init__([(asks[request_id].arrival, asks[request_id].request(request_id))
                          for request_id in sorted(asks, key=lambda request_id: asks[request_id].arrival)])
        self.run, self.stop_at, self.open_ids = run, stop_at, set(asks)

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        assert request_id in self.open_ids, f"request {request_id} gets a response after its final one"
        self.run.responses[request_id].append(Response(
            {tensor.name: np.asarray(tensor.tensor) for tensor in tensors}, final, error))
        if final:
            self.open_ids.discard(request_id)

    def named_stops(self) -> set[int]:
        return {request_id for request_id, at in self.stop_at.items() if at <= self.iteration}

    def record_received(self, record: str) -> None:
        stats = json.loads(record)
        self.run.counts["pauses"] += stats["Paused Requests"]
        self.run.counts["generated"] += stats["Generated Tokens"]
        self.run.counts["failed steps"] = stats["Failed Steps"]


def drive(scenario: RunAheadScenario, backend, *, run_ahead: bool, stops: Mapping[int, int],
          faults: Faults | None = None) -> Run:
    """Run the scenario on `backend` until all requests have their final responses, and return the results.

    Closes the backend. Raises AssertionError if the loop fails, does not end or leaves blocks in use.

    stops   request id -> iteration from which the poll callback names the request
    """
    run = Run({request_id: [] for request_id in scenario.asks})
    client = RunAheadClient(scenario, run, stops)
    loop = make_loop(client, backend=backend, clock=SystemClock(), policy=scenario.policy,
                     model_type=scenario.model_type, max_beam_width=WIDEST, exclude_input=True,
                     params=scenario.params(run_ahead), parts={"logits_post_processor_batched": shift_batched})
    assert run_ahead or not loop.limits.runs_ahead    # run_ahead is ignored if the pool holds a window only in lockstep
    watch(loop, run.counts, faults)
    try:
        while client.open_ids or not loop.is_empty:
            loop.step(accept_new=True)
            client.iteration += 1
            assert loop.failure is None, loop.failure
            assert client.iteration < MOST_ITERATIONS, \
                f"after {client.iteration:,} iterations {sorted(client.open_ids)} are not answered"
        loop.step(accept_new=True)                                # drops steps in flight, which belong to no request
        audit(loop.kv)
        assert not loop.window and loop.kv.used_blocks == 0, f"{loop.kv.used_blocks} blocks are held at the end"
    finally:
        backend.close()
    run.counts["discarded"] = loop.window.num_discarded_tokens
    return run


def watch(loop, counts: Counter, faults: Faults | None) -> None:
    """Patch the loop's step window to count launches, launches with another step in flight, and rows that become void.

    Before a step is read, `faults.ended` is set to the step's iteration and to the slots whose requests have ended.
    """
    window = loop.window
    launch, take_back, read = window.launch, window._unclaim_later_steps, window.read

    def watched_launch(batch, requests) -> None:
        counts["steps"] += 1
        counts["ahead"] += len(window) > 0
        launch(batch, requests)

    def watched_take_back(failed) -> None:
        before = sum(len(flight.void) for flight in window._steps)
        take_back(failed)
        counts["void"] += sum(len(flight.void) for flight in window._steps) - before

    def watched_read():
        flight = window._steps[0]
        if faults is not None:
            faults.ended = flight.batch.iteration, [slot for slot, request in zip(flight.batch.slots(), flight.requests)
                                                    if request.is_finished]
        return read()

    window.launch, window._unclaim_later_steps, window.read = watched_launch, watched_take_back, watched_read
