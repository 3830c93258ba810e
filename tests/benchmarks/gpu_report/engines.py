"""Measure engines from outside, through GptManager, its callbacks and its statistics."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from batch_manager.config import KvCacheConfig, Parts, TrtGptModelOptionalParams
from batch_manager.errors import ConfigError
from batch_manager.gpt_manager import GptManager
from batch_manager.names import SchedulerPolicy, TrtGptModelType
from batch_manager.tools.bench.client import DEFAULTS, Client, Receipt
from batch_manager.tools.bench.errors import BenchmarkError
from batch_manager.tools.bench.request_options import RequestOptions
from batch_manager.tools.bench.warm_up import warm_up_requests

from .bench import Bench
from .device_clock import DeviceActivity
from .records import NOT_REACHED, Record
from .shapes import TINY, Shape

STEP_TOKENS = 8192          # max_num_tokens, the default of an engine
TOKENS_PER_BLOCK = 64
GATE_SECONDS = 60.0
GRAPHS, EAGER = "graphs", "eager"


@dataclass(frozen=True, slots=True)
class Stamp:
    """One iteration, recorded when its statistics arrive.

    seconds      value of perf_counter()
    generating   number of generation requests in the step
    contexts     number of context requests in the step
    gpu_bytes    memory used on the GPU
    graphs       number of captured graphs
    """

    seconds: float
    generating: int
    contexts: int
    gpu_bytes: int
    graphs: int = 0


class MeasuredClient(Client):
    """Callbacks that also record every iteration, and can make the worker wait between two iterations.

    stamps   records of the iterations so far
    """

    def __init__(self) -> None:
        super().__init__()
        self.stamps: list[Stamp] = []
        self._hold_when: Callable[[Stamp], bool] | None = None
        self._is_held, self._may_go = threading.Event(), threading.Event()

    def return_stats(self, text: str) -> None:
        record = json.loads(text)
        stamp = Stamp(time.perf_counter(), record.get("Generation Requests", 0), record["Context Requests"],
                      record["Runtime GPU Memory Usage"], record.get("Captured Graphs", 0))
        self.stamps.append(stamp)
        if self._hold_when is not None and self._hold_when(stamp):
            self._hold_when = None
            self._is_held.set()
            self._may_go.wait(GATE_SECONDS)

    def hold_when(self, condition: Callable[[Stamp], bool]) -> None:
        """Make the worker wait after the next iteration whose Stamp satisfies `condition`."""
        self._is_held.clear()
        self._may_go.clear()
        self._hold_when = condition

    def let_go_until(self, condition: Callable[[Stamp], bool]) -> None:
        """Let the waiting worker continue until after the next iteration whose Stamp satisfies `condition`."""
        released, self._may_go = self._may_go, threading.Event()
        self._is_held.clear()
        self._hold_when = condition
        released.set()

    def wait_until_held(self) -> None:
        """Block this thread until the worker waits. Raises BenchmarkError after GATE_SECONDS."""
        if not self._is_held.wait(GATE_SECONDS):
            raise BenchmarkError(f"the engine did not reach the expected iteration within {GATE_SECONDS:.0f} s")

    def let_go(self) -> None:
        self._may_go.set()


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of one serving.

    stamps    records of the iterations
    receipts  request id -> tokens of the request and the time of each token
    seconds   time from the start to the last response
    """

    stamps: list[Stamp]
    receipts: dict[int, Receipt]
    seconds: float

    @property
    def output_tokens(self) -> int:
        return sum(len(receipt.tokens) for receipt in self.receipts.values())

    def step_seconds(self, batch: int) -> float:
        """Return the median time of a step in which the whole batch generates and no context is computed.

        Raises BenchmarkError if there are no two consecutive steps of this kind.
        """
        between = [later.seconds - earlier.seconds for earlier, later in zip(self.stamps, self.stamps[1:])
                   if earlier.generating == later.generating == batch and not earlier.contexts + later.contexts]
        if not between:
            raise BenchmarkError(f"the run has no two consecutive steps in which {batch} requests generate and no "
                                 "context is computed; expected at least one such pair")
        return median(between)

    def generation_rate(self) -> float:
        """Return the tokens/s of the steps in which all requests generate, after the last step with a context.

        Raises BenchmarkError if there are fewer than two of these steps.
        """
        last_context = max((number for number, stamp in enumerate(self.stamps) if stamp.contexts), default=-1)
        most = max(stamp.generating for stamp in self.stamps)
        steps = [stamp for stamp in self.stamps[last_context + 1 :] if stamp.generating == most]
        if len(steps) < 2:
            raise BenchmarkError("the number of steps that generated for all requests, after the last step with a "
                                 f"context, is {len(steps)}; expected at least 2")
        return sum(stamp.generating for stamp in steps[1:]) / (steps[-1].seconds - steps[0].seconds)


class Engine:
    """One manager, and the client that measures it.

    load_seconds   seconds that the construction of the manager took
    label          "graphs" if the engine has captured graphs, otherwise "eager"
    note           why an engine that was to capture graphs has none; otherwise ""
    """

    def __init__(self, bench: Bench, manager: GptManager, client: MeasuredClient, shape: Shape,
                 load_seconds: float) -> None:
        self.bench, self.manager, self.client, self.shape = bench, manager, client, shape
        self.load_seconds, self.label, self.note = load_seconds, EAGER, ""

    def warm_up(self, batch: int) -> None:
        """Serve a full batch of requests that end one after the other."""
        if self.bench.is_dry:                       # one request is enough for statistics
            self.serve(equal_requests(self.shape, 1, 1, 1))
        else:
            self.serve(warm_up_requests(batch, self.shape.vocabulary, None, 0))

    def set_label(self, graphs: bool, reasons: list[str]) -> None:
        """Set `label` and `note` by the statistics of the newest iteration.

        graphs    whether the engine was to capture graphs
        reasons   why the engine has no graphs, if this is known
        """
        num_graphs = self.client.stamps[-1].graphs
        self.label = GRAPHS if num_graphs else EAGER
        if graphs and not num_graphs:
            self.note = f"no graphs were captured: {reasons[-1] if reasons else 'the reason is unknown'}"[:300]
            graphless(self.bench, self.shape).write_text(self.note)

    def serve(self, requests: list[dict[str, Any]], *, streaming: bool = False,
              options: RequestOptions = DEFAULTS) -> Served:
        """Serve the requests within the remaining time of the section.

        Raises BenchmarkError if the time is too short, a request fails, or an output has the wrong length.
        """
        self.client.stamps = []
        limit = self.bench.pick(max(self.bench.seconds_left, 1.0), GATE_SECONDS)
        receipts = self.client.serve(self.manager, requests, streaming=streaming, started=time.perf_counter(),
                                     limit_s=limit, options=options)
        wrong = [request["id"] for request in requests
                 if len(receipts[request["id"]].tokens) != request["max_tokens"]]
        if wrong:
            raise BenchmarkError(f"{len(wrong)} of {len(requests)} outputs have the wrong length")
        return Served(self.client.stamps, receipts, self.client.last_response)

    def generate(self, batch: int, context: int, steps: int) -> Served:
        """Serve `batch` equal requests, with about `steps` steps in which all of them generate.

        context   mean tokens of a sequence in the KV cache during these steps
        """
        steps += 2 * -(-batch * context // STEP_TOKENS) + 2
        return self.serve(equal_requests(self.shape, batch, max(context - steps // 2, 1), steps))


def graphless(bench: Bench, shape: Shape) -> Path:
    """Return the path of a file that exists if graphs could not be captured for the model."""
    return bench.folder / f"{shape.name} without graphs"


def equal_requests(shape: Shape, count: int, prompt: int, output: int) -> list[dict[str, Any]]:
    """Return `count` requests of random tokens and equal lengths that arrive at once, in the form of a workload."""
    return make_requests(shape, [(prompt, output)] * count)


def make_requests(shape: Shape, lengths: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return requests of random tokens in the form of a workload, one for each (prompt, output) of `lengths`."""
    random = np.random.default_rng(0)
    return [{"id": number, "arrival_s": 0.0, "max_tokens": int(output),
             "prompt": random.integers(3, shape.vocabulary, prompt).tolist()}
            for number, (prompt, output) in enumerate(lengths)]


@contextlib.contextmanager
def engine(bench: Bench, shape: Shape, *, max_batch: int, graphs: bool = True, kv_tokens: int | None = None,
           max_num_tokens: int = STEP_TOKENS, **options: Any) -> Iterator[Engine]:
    """Context manager that yields a warm engine with random weights. The end of `with` ends the engine immediately.

    If an engine with graphs cannot be constructed, an engine without graphs is yielded, and its
    `note` has the reason.

    graphs      whether the engine is to capture graphs
    kv_tokens   tokens of the KV cache pool; None: most of the free memory
    options     further arguments of TrtGptModelOptionalParams
    """
    shape, client = bench.pick(shape, TINY), MeasuredClient()
    block = bench.pick(TOKENS_PER_BLOCK, 16)
    if bench.is_dry:
        max_batch, kv_tokens, max_num_tokens = min(max_batch, 2), 512, 64
        options["cpu_compile"] = False            # with compilation, the kernels would not run

    def construct(cuda_graphs: bool) -> GptManager:
        return GptManager(
            shape.write(bench.folder), TrtGptModelType.InflightFusedBatching, max_beam_width=1,
            scheduler_policy=SchedulerPolicy.GUARANTEED_NO_EVICT, get_inference_requests_cb=client.get,
            send_response_cb=client.send, return_batch_manager_stats_cb=client.return_stats,
            optional_params=TrtGptModelOptionalParams(
                kv_cache_config=KvCacheConfig(max_tokens=kv_tokens, tokens_per_block=block),
                enable_chunked_context=True, max_batch_size=max_batch, max_num_tokens=max_num_tokens,
                device=str(bench.device), dtype=str(bench.dtype).removeprefix("torch."), load_format="dummy",
                cuda_graphs=cuda_graphs, **options),
            exclude_input_in_output=True, parts=Parts())

    reasons, began = [], time.perf_counter()
    try:
        manager = construct(graphs)
    except ConfigError as error:
        if not graphs:
            raise
        reasons.append(str(error))
        began = time.perf_counter()
        manager = construct(False)
    try:
        made = Engine(bench, manager, client, shape, time.perf_counter() - began)
        made.warm_up(max_batch)
        made.set_label(graphs, reasons)
        yield made
    finally:
        client.let_go()
        manager.shutdown(drain=False, timeout=30)
        bench.clock.forget()


def watch(bench: Bench, made: Engine, batch: int, context: int, steps: int) -> DeviceActivity:
    """Return the activity of the device during `steps` iterations in which the whole batch generates.

    The worker waits while the tracer starts and ends.

    Raises BenchmarkError if the engine does not reach these iterations.
    """
    client, seen = made.client, 0

    def all_generate(stamp: Stamp) -> bool:
        return stamp.generating == batch and not stamp.contexts

    def enough(stamp: Stamp) -> bool:
        nonlocal seen
        seen += 1
        return seen >= steps

    client.hold_when(all_generate)
    output = 2 * -(-batch * context // STEP_TOKENS) + steps + bench.pick(16, 2)
    requests = equal_requests(made.shape, batch, context, output)
    failures: list[BenchmarkError] = []

    def serve() -> None:
        try:
            made.serve(requests)
        except BenchmarkError as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="gpu_report serves")
    thread.start()
    try:
        client.wait_until_held()
        bench.clock.synchronize()
        with bench.clock.watch() as found:
            client.let_go_until(enough)
            client.wait_until_held()
    finally:
        client.let_go()
        thread.join()
    if failures:
        raise failures[0]
    return found[0]


def not_reached(goal: str, case: str, reason: str) -> Record:
    return Record(goal, case, status=NOT_REACHED, note=reason)


def joined(*notes: str) -> str:
    """Join the notes that are not empty."""
    return "; ".join(filter(None, notes))
