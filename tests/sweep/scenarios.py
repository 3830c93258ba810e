"""Small scenarios with one or two of each kind of event. Tests inject faults into their runs.

    run = Run(SCENARIOS["paused"]); run.start(); run.faults()

A run has the real loop, the real worker function without a thread, a virtual clock, the scripted model, and a server
that records requests and responses. It takes a few milliseconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batch_manager.config import KvCacheConfig
from batch_manager.handover import RowFailure, ScheduledBatch
from batch_manager.kv.audit import audit
from batch_manager.names import ErrorCode, SchedulerPolicy, TrtGptModelType
from batch_manager.requests.inference_request import InferenceRequest
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.worker import run_worker
from tests.harness.client import Client
from tests.harness.clock import VirtualClock
from tests.harness.worker import virtual_control
from tests.harness.world import make_loop, quiet_log
from tests.simulation.history import Closed, Handed, HistoryChecker, Other, Polled, Sent, scripted_oracle

IDLE_S = 0.005
MOST_TURNS = 400


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a scenario.

    must   error code of the request's refusal; "" if it must be accepted; None if it has no usable id
    """

    request_id: Any
    prompt: int = 3
    new_tokens: int = 3
    must: str | None = ""
    options: dict[str, Any] = field(default_factory=dict)
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """The requests and stops of a run, and the options of its engine.

    arrivals   for each call of get, the items that it returns
    stops      number of a call of poll -> ids that it returns
    ends       (number of the call of get at which the shutdown is requested, "drain" or "abort")
    """

    name: str
    arrivals: tuple[tuple[Arrival, ...], ...]
    stops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ends: tuple[int, str] = (5, "drain")
    as_generator: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    kv: dict[str, Any] = field(default_factory=dict)
    late_fault: bool = False


NO_ID, TOO_LONG = Arrival("x", must=None), {"prompt": 30, "must": "INVALID_REQUEST"}
MIXED = ((Arrival(1, new_tokens=4), Arrival(2, streams=True), NO_ID),
         (Arrival(3, **TOO_LONG), Arrival(4, new_tokens=2)), (Arrival(1, must="DUPLICATE_REQUEST_ID"), Arrival(5)))
TIGHT = {"tokens_per_block": 2, "num_blocks": 8, "max_seq_len": 24}
WIDE = {"tokens_per_block": 2, "num_blocks": 40, "max_seq_len": 24}
LONG = ((Arrival(1, 4, 6), Arrival(2, 4, 6), Arrival(3, 3, 5)), (Arrival(4, 2, 2),))


def _plant_not_finite(batch: ScheduledBatch) -> dict[int, RowFailure]:
    """An on_step function: return non-finite logits of slot 0 in iteration 2, and no failure in other iterations."""
    return {0: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")} if batch.iteration == 2 else {}


def _late_fault() -> Callable[[ScheduledBatch], None]:
    """Return an on_step function that raises once, in a step with several requests.

    On an asynchronous device, the next step has been launched before the error appears.
    """
    errors = [RuntimeError("planted")]

    def on_step(batch: ScheduledBatch) -> None:
        if batch.iteration >= 2 and batch.num_sequences > 1 and errors:
            raise errors.pop()
    return on_step


AHEAD, ASYNCHRONOUS = {"run_ahead": True}, {"is_asynchronous": True}


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in [
    Scenario("mixed", MIXED, backend=WIDE),
    Scenario("generator", MIXED, {2: (2, 99)}, as_generator=True, backend=WIDE),
    Scenario("stopped", MIXED, {1: (2,), 3: (1, 5)}, ends=(4, "abort"), backend=WIDE),
    Scenario("paused", LONG, backend=TIGHT, options={"max_num_tokens": 12}),
    Scenario("queued", LONG, {1: (4,)}, ends=(3, "abort"), backend=WIDE, options={"max_num_sequences": 2}),
    Scenario("no evict", LONG, engine={"policy": SchedulerPolicy.GUARANTEED_NO_EVICT}, backend=TIGHT),
    Scenario("chunked", ((Arrival(1, 9, 2), Arrival(2, 7, 2, streams=True)), (Arrival(3, 5, 2),)), backend=WIDE,
             options={"enable_chunked_context": True, "max_num_tokens": 6}),
    Scenario("reused", ((Arrival(1, 6, 3), Arrival(2, 6, 3)), (), (), (), (Arrival(3, 6, 3),)), ends=(9, "drain"),
             backend=WIDE, kv={"enable_block_reuse": True}),
    Scenario("overlapped", LONG, {3: (2,)}, backend=WIDE, options={"enable_trt_overlap": True}),
    Scenario("static", ((Arrival(1, 3, 2), Arrival(2, 2, 4)), (Arrival(3, 3, 2),)), {2: (2,)}, backend=WIDE,
             engine={"model_type": TrtGptModelType.V1}),
    Scenario("not finite", ((Arrival(1, 3, 4), Arrival(2, 3, 4)),), backend={**WIDE, "on_step": _plant_not_finite}),
    Scenario("beams", ((Arrival(1, 3, 3, options={"beam_width": 2}), Arrival(2, 3, 3)), (Arrival(3, 2, 2),)),
             engine={"max_beam_width": 2}, backend=WIDE),
    Scenario("runs ahead", LONG, {3: (2,)}, backend=WIDE | ASYNCHRONOUS, options=AHEAD),
    Scenario("runs ahead, paused", LONG, backend=TIGHT | ASYNCHRONOUS, options=AHEAD | {"max_num_tokens": 12}),
    Scenario("runs ahead, late fault", LONG, {4: (2,)}, backend=WIDE | ASYNCHRONOUS, options=AHEAD,
             kv={"enable_block_reuse": True}, late_fault=True),
]}


class Run(Client):
    """One run of a scenario, and its callbacks.

    Tests inject faults into the loop, the backend, the clock, the control block and, with `spoiled`, the callbacks.

    spoiled     name of a callback -> function that is called before the callback; "item" -> function that is called
                before an item is read
    final_ids   ids with a final response, in order
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        self.clock = VirtualClock()
        self.control = virtual_control(self.clock)
        self.backend = ScriptedBackend(num_slots=8, key=7, vocab_size=50, **scenario.backend,
                                       **({"on_step": _late_fault()} if scenario.late_fault else {}))
        self.spoiled: dict[str, Callable[[], None]] = {}
        self.num_gets = self.num_polls = 0
        self.requests = [[(arrival, _request(arrival)) for arrival in arrivals] for arrivals in scenario.arrivals]
        self.final_ids: list[int] = []
        model = {"vocab_size": 50, "key": 7, "window": None, "sink": 0}
        self.history = HistoryChecker(scripted_oracle(model), scenario.backend["max_seq_len"],
                                      scenario.engine.get("model_type") is TrtGptModelType.V1)
        self.loop = make_loop(
            self, backend=self.backend, clock=self.clock, parts={"trace": lambda trace: None},
            heartbeat=self.control.heartbeat, as_arrays=True, kv_cache_config=KvCacheConfig(**scenario.kv),
            **scenario.engine, **{"max_batch_size": 4, "max_num_tokens": 24, **scenario.options})

    def start(self) -> None:
        with quiet_log():
            run_worker(self.loop, self.control, IDLE_S)

    def faults(self) -> list[str]:
        """Return the violations of a finished run."""
        loop, items = self.loop, self.loop.unanswered
        self.history.feed(Closed(self.clock.now, items.num_accepted, items.num_refused, items.num_unaddressable))
        found = list(self.history.anomalies)
        if not self.control.stopped.is_set or not loop.is_empty:
            found.append("C14: the worker ended and left something")
        if items.num_sent != len(self.final_ids):
            found.append(f"I28: {items.num_sent} finals were counted, {len(self.final_ids)} received")
        if loop.failure is None and not self.control.aborting:
            try:
                audit(loop.kv)
                if loop.kv.used_blocks or len(loop.active) or len(loop.intake) or len(loop.deliveries):
                    found.append("I17: somebody holds something at the end")
            except Exception as error:
                found.append(f"I9: {error}")
        return found

    # callbacks

    def items(self, max_num_requests: int) -> Any:
        self.history.feed(Other(self.clock.now))
        self.num_gets += 1
        turn, how = self.scenario.ends
        if self.num_gets >= turn and not self.control.draining:    # repeated if an exception struck in the first call
            self.control.ask_to_drain() if how == "drain" else self.control.ask_to_abort()
        self.spoiled.get("get", _nothing)()
        requests = self.requests.pop(0) if self.requests else []
        if self.scenario.as_generator:
            return self._one_by_one(requests)
        for arrival, _ in requests:
            self._hand_over(arrival)
        return [request for _, request in requests]

    def _one_by_one(self, requests: list[tuple[Arrival, Any]]) -> Any:
        for arrival, request in requests:
            self.spoiled.get("item", _nothing)()
            self._hand_over(arrival)
            yield request

    def _hand_over(self, arrival: Arrival) -> None:
        if arrival.must is None:
            self.history.feed(Handed(self.clock.now, None))
            return
        must = None if arrival.must == "DUPLICATE_REQUEST_ID" else arrival.must
        self.history.feed(Handed(self.clock.now, arrival.request_id, must, _prompt(arrival), arrival.new_tokens,
                                 streams=arrival.streams))

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        response = Sent(self.clock.now, request_id, final, error)
        if tensors:
            arrays = {}
            for named in tensors:
                arrays[named.name] = named.tensor
            length = int(arrays["sequence_length"][0, 0])
            response.tokens = arrays["output_ids"][0, 0][:length].tolist()
            response.reason = int(arrays["finish_reason"][0, 0])
        beams = tensors and arrays["sequence_length"].shape[1] > 1
        if beams:                                                  # the output is skipped: this oracle has one beam
            response.tokens, response.error = None, "[SHUTDOWN] stands for several beams"
        self.history.feed(response)
        if final:
            self.final_ids.append(request_id)
        self.spoiled.get("send", _nothing)()

    def named_stops(self) -> set[int]:
        self.num_polls += 1
        if self.num_polls > MOST_TURNS:
            self.control.ask_to_abort()
            self.history.anomalies.append("C14: it does not come to an end")
        self.spoiled.get("poll", _nothing)()
        stops = self.scenario.stops.get(self.num_polls - 1, ())
        self.history.feed(Polled(self.clock.now, [i for i in stops if i in self.loop.unanswered.alive]))
        return set(stops)

    def record_received(self, record: str) -> None:
        self.history.feed(Other(self.clock.now))
        self.spoiled.get("stats", _nothing)()


def _nothing() -> None:
    pass


def _prompt(arrival: Arrival) -> list[int]:
    return [(i * i) % 50 for i in range(arrival.prompt)]


def _request(arrival: Arrival) -> InferenceRequest:
    if arrival.must is None:
        return object()
    tensors = {"input_ids": _prompt(arrival), "request_output_len": arrival.new_tokens, **arrival.options}
    return InferenceRequest(arrival.request_id, tensors, is_streaming=arrival.streams)
