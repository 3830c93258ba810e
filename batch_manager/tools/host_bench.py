"""Measure the host time of one iteration: the time of everything except the model, which is scripted.

    batch-manager host-bench --batch 1 64 256 --iterations 300

The generation loop runs without a worker thread, first without streaming, then with a response for every token. By
default a full batch generates, and no request starts or ends. With --output-tokens N, each request ends after N tokens
and another request replaces it. The callbacks do almost nothing, so the cost of real callbacks is not included.

With --waiting N, N more active requests wait while the full batch runs, because max_num_sequences is larger than
max_batch_size. The scheduler scans them in every iteration. With --queued N, N requests wait in the manager's queue.

With --native, the backend is the native backend around a model that computes nothing. The work of this backend on the
CPU counts as host time. There are two measurements of each setting. In the first, packing, sampling and reading back
run on the CPU. In the second, each generation step replays a CUDA graph, which is a stub, and four parts of the step
are timed:

    write      write the inputs of the step, plan attention
    send       copy the inputs to the buffer from which a GPU reads them
    replay     replay the graph
    read       read the results, make the output of the step

Copies and kernel launches of a GPU are not included.

Times are wall-clock microseconds per iteration. Iterations in which the thread was preempted are left out, unless at
most a tenth of the iterations would remain. *host* is the time of the whole iteration without the model:

    fetch      get callback, admission                  advance    append tokens, find ended requests
    schedule   capacity, micro-batch, check of the plan respond    responses, send callback
    claim      blocks, and the batch for the device     poll       poll callback
    model      the scripted backend (not host time)     report     statistics and their callback

*ratio* is the minimum host time divided by the minimum time of a fixed Python loop of 1,000 turns, which runs between
iterations. The ratio is nearly independent of the speed of the machine.
"""

import argparse
import json
import platform
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from ..arguments import Callbacks, EngineArguments
from ..build import build_loop
from ..config import KvCacheConfig, Parts, TrtGptModelOptionalParams
from ..handover import ScheduledBatch, StepOutput
from ..loop.generation_loop import GenerationLoop
from ..requests.inference_request import InferenceRequest
from ..seams import ModelBackend, PendingStep
from ..testing.scripted_backend import ScriptedBackend
from .__main__ import run_as
from .command_parser import CommandParser, at_least, within
from .interrupts import interrupts_between_steps
from .shared_options import POLICIES, add_shared

WARM_UP_ITERATIONS = 20
SHORTEST_PROMPT = 16
CALIBRATE_EVERY = 5     # iterations
MOST_REQUESTS_OF_OPTION = 100_000       # --batch, --waiting, --queued
MOST_TOKENS = 1_000_000                 # --iterations, --output-tokens
MOST_REQUESTS = 1_000_000               # made before a measurement; a request takes about 3 kB
MOST_BLOCKS = 10_000_000                # of all active requests; a block takes about 450 bytes
MOST_STEP_MS = 60_000
SWITCH_INTERVALS = 1e-6, 60    # seconds

# Method of the loop -> its phase. Model time is included.
PHASES = {"_fetch": "fetch", "_schedule": "schedule", "_claim": "claim", "_start": "claim", "_finish": "advance",
          "_advance": "advance", "_respond": "respond", "_poll_stops": "poll", "_report": "report"}
COLUMNS = ("fetch", "schedule", "claim", "model", "advance", "respond", "poll", "report")
REPLAY_COLUMNS = ("write", "send", "replay", "read")        # parts of "model" in a step that replays a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of one measurement.

    output_len   number of tokens after which a request ends and another request replaces it; 0: no request ends
    step_ms      milliseconds of a step on an asynchronous device; 0: a synchronous device that takes no time
    run_ahead    whether to launch the next step before the last one is read; None: only if the device is asynchronous
    native       True: the native backend around a model that computes nothing; False: a scripted backend
    replays      whether the native backend replays stubs of graphs
    waiting      number of active requests beyond the full batch
    queued       number of requests in the manager's queue
    """

    batch: int
    iterations: int
    streaming: bool
    policy: str
    tokens_per_block: int = 64
    output_len: int = 0
    step_ms: float = 0.0
    run_ahead: bool | None = None
    native: bool = False
    replays: bool = False
    waiting: int = 0
    queued: int = 0

    @property
    def num_active(self) -> int:
        return self.batch + self.waiting

    @property
    def turns(self) -> int:
        """Iterations for which requests and blocks must suffice."""
        return WARM_UP_ITERATIONS + self.iterations + 8

    @property
    def max_seq_len(self) -> int:
        return SHORTEST_PROMPT + self.tokens_per_block + max(self.turns, self.output_len)

    @property
    def blocks_of_each(self) -> int:
        return -(-self.max_seq_len // self.tokens_per_block) + 1

    @property
    def num_requests(self) -> int:
        """Number of requests of the measurement, including those that replace requests that end."""
        replaced = -(-self.turns * self.batch // self.output_len) + self.batch if self.output_len else 0
        return self.batch + self.waiting + self.queued + replaced

    def why_too_large(self) -> str:
        """Return why no machine has room for this setting, or ""."""
        if self.num_requests > MOST_REQUESTS:
            return (f"{self.iterations:,} iterations of {self.batch:,} requests that end after {self.output_len:,} "
                    f"tokens need {self.num_requests:,} requests; expected at most {MOST_REQUESTS:,}; "
                    "lower --batch or --iterations, or raise --output-tokens")
        if (blocks := self.num_active * self.blocks_of_each) > MOST_BLOCKS:
            return (f"{self.num_active:,} active requests of up to {self.max_seq_len:,} tokens need {blocks:,} blocks "
                    f"of the KV cache; expected at most {MOST_BLOCKS:,}; lower --batch, --waiting, --iterations or "
                    "--output-tokens")
        return ""


class Stopwatch:
    """Adds up the nanoseconds spent in each phase of an iteration."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(COLUMNS + REPLAY_COLUMNS, 0)

    def watch(self, phase: str, call: Callable) -> Callable:
        """Return `call` wrapped so that its time, without the time of the model, is added to the phase."""
        spent = self.spent

        def timed(*args: Any, **named: Any) -> Any:
            model, began = spent["model"], perf_counter_ns()
            try:
                return call(*args, **named)
            finally:
                spent[phase] += perf_counter_ns() - began - (spent["model"] - model)

        return timed

    def take(self) -> dict[str, int]:
        """Return phase -> nanoseconds since the last call of `take`, and reset them to 0."""
        taken = dict(self.spent)
        self.spent.update(dict.fromkeys(self.spent, 0))
        return taken


class TimedBackend:
    """A model backend whose time is counted as the phase `model`."""

    def __init__(self, backend: ModelBackend, stopwatch: Stopwatch) -> None:
        self._start = stopwatch.watch("model", backend.start)
        self._finish = stopwatch.watch("model", stopwatch.watch("read", lambda step: step.finish()))
        self.info, self.memory_usage, self.close = backend.info, backend.memory_usage, backend.close
        self.device = backend

    def start(self, batch: ScheduledBatch) -> "TimedStep":
        return TimedStep(self._start(batch), self._finish)


@dataclass(slots=True)
class TimedStep:
    step: PendingStep
    timed_finish: Callable[[PendingStep], StepOutput]

    def finish(self) -> StepOutput:
        return self.timed_finish(self.step)


class Clients:
    """Callbacks that cost almost nothing. All requests are created in advance."""

    def __init__(self, requests: list[InferenceRequest], *, more_than_asked: int = 0) -> None:
        self._requests = deque(requests)
        self._more_than_asked = more_than_asked         # extra requests of the first call of get
        self.num_responses = 0

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        if not max_num_requests:
            return []
        count, self._more_than_asked = max_num_requests + self._more_than_asked, 0
        return [self._requests.popleft() for _ in range(min(count, len(self._requests)))]

    def send(self, request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        self.num_responses += 1

    def poll(self) -> set[int]:
        return set()

    def return_stats(self, record: str) -> None:
        pass


def make_loop(setting: Setting, stopwatch: Stopwatch, *, reuses: bool = False,
              hook: Callable | None = None) -> tuple[GenerationLoop, Clients]:
    """Return a loop, whose phases the stopwatch measures, and its callbacks. Its first iteration computes all contexts.
    With `reuses`, blocks are reusable, and `hook` may take their events."""
    batch, longest_prompt = setting.batch, SHORTEST_PROMPT + setting.tokens_per_block
    sizes = dict(vocab_size=32000, max_seq_len=setting.max_seq_len, num_blocks=batch * setting.blocks_of_each,
                 tokens_per_block=setting.tokens_per_block, num_slots=setting.num_active)
    if setting.native:
        from .stub_model import native_backend_without_a_model

        model = native_backend_without_a_model(**sizes, replays=setting.replays, watch=stopwatch.watch)
    else:
        model = ScriptedBackend(**sizes, verify=False, is_asynchronous=setting.step_ms > 0,
                                step_seconds=setting.step_ms / 1e3)
    backend = TimedBackend(model, stopwatch)
    clients = Clients(list(_requests(setting)), more_than_asked=setting.queued)
    params = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(enable_block_reuse=reuses, tokens_per_block=setting.tokens_per_block),
        max_batch_size=batch, max_num_sequences=setting.num_active, max_queued_requests=setting.queued,
        max_admissions_per_iteration=setting.num_active + setting.queued,
        max_num_tokens=batch * longest_prompt, run_ahead=setting.run_ahead)
    loop = build_loop(
        EngineArguments(scheduler_policy=POLICIES[setting.policy], optional_params=params,
                        exclude_input_in_output=True),
        Callbacks(clients.get, clients.send, clients.poll, clients.return_stats),
        Parts(backend=backend, kv_events=hook))

    for method, phase in PHASES.items():
        setattr(loop, method, stopwatch.watch(phase, getattr(loop, method)))
    return loop, clients


def _requests(setting: Setting):
    """Yield the requests of a full batch, then more requests.

    The next `setting.waiting` requests become active and wait for room in the batch. `setting.queued` requests stay in
    the manager's queue. The others replace requests that end.

    Prompt lengths differ, so that not all requests need a new block in the same iteration. If requests end, the
    requests of the first batch end one after the other.
    """
    batch, output_len = setting.batch, setting.output_len
    for number in range(setting.num_requests):
        prompt = [7 + number % 1000] * (SHORTEST_PROMPT + number % setting.tokens_per_block)
        length = output_len or setting.turns
        if output_len and number < batch:
            length = 1 + number * output_len // batch
        yield InferenceRequest(number, {"input_ids": prompt, "request_output_len": length},
                               is_streaming=setting.streaming)


def measure(setting: Setting) -> dict[str, Any]:
    """Run one setting and return its times in microseconds. Ctrl-C ends it between two iterations."""
    with interrupts_between_steps() as check_interrupt:
        return _measure(setting, check_interrupt)


def _measure(setting: Setting, check_interrupt: Callable[[], None]) -> dict[str, Any]:
    stopwatch = Stopwatch()
    loop, clients = make_loop(setting, stopwatch)
    for _ in range(WARM_UP_ITERATIONS):
        loop.step(accept_new=True)
        check_interrupt()
    responses = clients.num_responses

    rows: list[dict[str, int]] = []
    undisturbed: list[dict[str, int]] = []
    calibration: list[int] = []
    stopwatch.take()
    device, first_began = loop.backend.device, perf_counter_ns()
    idle_before = device.idle_seconds if setting.step_ms else 0.0
    for number in range(setting.iterations):
        check_interrupt()
        if number % CALIBRATE_EVERY == 0 and not setting.step_ms:
            calibration.append(calibration_ns())
        preemptions = _preemptions()
        began = perf_counter_ns()
        loop.step(accept_new=True)
        whole = perf_counter_ns() - began
        row = stopwatch.take()
        row["host"] = whole - (0 if setting.native else row["model"])
        rows.append(row)
        if _preemptions() == preemptions:
            undisturbed.append(row)
    idle_share = 0.0
    if setting.step_ms:
        idle_share = (device.idle_seconds - idle_before) / ((perf_counter_ns() - first_began) / 1e9)
    num_undisturbed = len(undisturbed)
    if num_undisturbed > setting.iterations // 10:
        rows = undisturbed
    host = [row["host"] for row in rows]
    generating = sum(request.is_generating for request in loop.active)
    assert (generating, len(loop.active)) == (setting.batch, setting.num_active) or setting.output_len, (
        "requests ended or started during the measurement")
    assert len(loop.intake) == setting.queued or setting.output_len, "requests left the queue during the measurement"
    loop.backend.close()

    return {
        "batch": setting.batch,
        "streaming": setting.streaming,
        "output_len": setting.output_len,
        "waiting": setting.waiting,
        "queued": setting.queued,
        "iterations": setting.iterations,
        "undisturbed": num_undisturbed,
        "step_ms": setting.step_ms,
        "runs_ahead": loop.limits.runs_ahead,
        "device_idle_percent": round(100 * idle_share, 2) if setting.step_ms else None,
        "native": setting.native,
        "replays": setting.replays,
        "ratio": round(min(host) / min(calibration), 3) if calibration else None,
        "responses_per_iteration": round((clients.num_responses - responses) / setting.iterations, 2),
        "host_us": {"median": _us(np.median(host)), "min": _us(min(host)),
                    **{f"p{percent}": _us(np.percentile(host, percent)) for percent in (10, 90, 99)}},
        "phases_us": {phase: _us(np.median([row[phase] for row in rows])) for phase in COLUMNS},
        "replay_us": {phase: _us(np.median([row[phase] for row in rows])) for phase in REPLAY_COLUMNS}
                     if setting.replays else None,
    }


class _Thing:
    __slots__ = ("number", "name")

    def __init__(self, number: int) -> None:
        self.number, self.name = number, "name"

    def twice(self) -> int:
        return self.number + self.number


def calibration_ns() -> int:
    """Run a fixed Python loop, and return its nanoseconds.

    The loop creates objects, calls methods and fills a dictionary and lists.
    """
    began = perf_counter_ns()
    things: dict[int, _Thing] = {}
    for number in range(1000):
        things[number & 255] = thing = _Thing(number)
        pair = [thing.twice(), thing.name]
        assert pair[0] == 2 * number
    return perf_counter_ns() - began


def _preemptions() -> int:
    """Return the number of involuntary context switches of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _us(nanoseconds: float) -> float:
    return round(float(nanoseconds) / 1e3, 1)


def table(results: list[dict[str, Any]]) -> str:
    """Format the results as text. Phases are medians and may not add up to the median host time."""
    head = f"{'batch':>6} {'streaming':>9} | {'host':>8} {'min':>8} {'p99':>8} {'ratio':>6} | "
    lines = [head + " ".join(f"{phase:>8}" for phase in COLUMNS)]
    lines += [
        f"{result['batch']:>6} {'yes' if result['streaming'] else 'no':>9} | "
        + " ".join(f"{result['host_us'][name]:>8.1f}" for name in ("median", "min", "p99"))
        + f" {'' if result['ratio'] is None else format(result['ratio'], '.3f'):>6} | "
        + " ".join(f"{result['phases_us'][phase]:>8.1f}" for phase in COLUMNS)
        for result in results
    ]
    for result in results:
        if result["step_ms"]:
            how = "running ahead" if result["runs_ahead"] else "in lockstep"
            lines.append(f"{result['batch']:>6} {'yes' if result['streaming'] else 'no':>9} | the device waits "
                         f"{result['device_idle_percent']} % of the time, {how}")
        if result["replays"]:
            parts = ", ".join(f"{phase} {time:.1f}" for phase, time in result["replay_us"].items())
            lines.append(f"{result['batch']:>6} {'yes' if result['streaming'] else 'no':>9} | with replayed graphs, "
                         f"the model is {parts}")
    return "\n".join(lines)


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        pass


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="batch-manager host-bench", description=__doc__,
                           epilog="exit status: 0 measured; 2 an argument is wrong; 130 Ctrl-C")
    add = parser.add_argument
    requests = partial(at_least, at_most=MOST_REQUESTS_OF_OPTION)
    tokens = partial(at_least, at_most=MOST_TOKENS)
    add("--batch", type=requests(1), nargs="+", default=[1, 64, 256], help="requests in the batch (1 64 256)")
    add("--iterations", type=tokens(1), default=300, help="measured iterations per setting (300)")
    add_shared(add, "--policy", shown="guaranteed_no_evict", default="guaranteed_no_evict")
    add_shared(add, "--streaming", "measure only with, or only without it", "both")
    add_shared(add, "--output-tokens", "another request replaces a finished one; 0: outputs do not end", "0",
               type=tokens(0), default=0)
    add("--step-ms", type=within(0, MOST_STEP_MS), default=0.0,
        help="milliseconds of a step on an asynchronous device; host time then includes waiting for it (0)")
    add("--run-ahead", action=argparse.BooleanOptionalAction, default=None,
        help="launch steps before the last one is read (on with --step-ms)")
    add_shared(add, "--tokens-per-block", shown="64", default=64)
    add("--waiting", type=requests(0), default=0, help="active requests beyond the full batch (0)")
    add("--queued", type=requests(0), default=0, help="requests in the manager's queue (0)")
    add("--native", action="store_true",
        help="count the native backend, around a model that computes nothing, as host time; also with replayed graphs")
    add("--spinning-client", action="store_true",
        help="run another thread that computes without a pause, as a client might")
    add("--switch-interval", type=within(*SWITCH_INTERVALS), metavar="SECONDS",
        help="for sys.setswitchinterval; matters with --spinning-client")
    options = parser.parse_args(argv)
    if options.native and (options.step_ms or options.run_ahead):
        parser.error("--native was given with --step-ms or --run-ahead; the native backend on a CPU is synchronous; "
                     "leave out one of them")

    setting = partial(Setting, iterations=options.iterations, policy=options.policy, output_len=options.output_tokens,
                      tokens_per_block=options.tokens_per_block, step_ms=options.step_ms, run_ahead=options.run_ahead,
                      native=options.native, waiting=options.waiting, queued=options.queued)
    if reason := setting(batch=max(options.batch), streaming=False).why_too_large():
        parser.error(reason)

    interval = sys.getswitchinterval()
    if options.switch_interval is not None:
        sys.setswitchinterval(options.switch_interval)
    stop = threading.Event()
    if options.spinning_client:
        threading.Thread(target=_spin, args=(stop,), daemon=True).start()
    try:
        results = [measure(setting(batch=batch, streaming=streaming, replays=replays))
                   for replays in ((False, True) if options.native else (False,))
                   for streaming in ((False, True) if options.streaming is None else (options.streaming,))
                   for batch in options.batch]
    finally:
        stop.set()
        sys.setswitchinterval(interval)

    print(table(results))
    print(json.dumps({"tool": "host_benchmark", "python": platform.python_version(), "policy": options.policy,
                      "tokens_per_block": options.tokens_per_block, "spinning_client": options.spinning_client,
                      "waiting": options.waiting, "queued": options.queued,
                      "results": results}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as("host-bench"))
