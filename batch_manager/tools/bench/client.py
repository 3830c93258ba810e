"""The callbacks of a benchmark. They record the tokens of each request and the time of each token."""

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ...gpt_manager import GptManager
from ...requests.inference_request import InferenceRequest
from ...responses.perf_metrics import PerfMetrics
from .errors import BenchmarkError
from .gate import Gate
from .request_options import RequestOptions

DEFAULTS = RequestOptions()
LONGEST_SLEEP_S = 60.0      # an engine that stops before the next arrival is noticed; time.sleep refuses 1e10 s


@dataclass(slots=True)
class Receipt:
    """The responses to one request. Times are seconds since the start of the run.

    tokens      generated tokens; with beams, those of the best beam
    times       time at which each token was received
    error       text of an error response; "": no error
    arrival_s   arrival of the request; latencies count from it
    final_s     time of the final response; None: not yet
    queue_s     seconds from arrival to the first step; None: unknown, or timings were not requested
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    arrival_s: float = 0.0
    final_s: float | None = None
    queue_s: float | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """Progress of a run.

    done          requests with a final response
    total         all requests
    arrived       requests that have arrived, including the requests that are done
    tokens        tokens generated so far
    seconds       seconds since the start of the run
    """

    done: int
    total: int
    arrived: int
    tokens: int
    seconds: float


class Client:
    """The callbacks of one manager, and the arrived requests that the manager has not taken yet.

    An arrived request waits in the client until the manager has room for it and the run's `Gate` allows it.

    prompts_included   whether non-streamed responses begin with the prompt (exclude_input_in_output is off)
    last_response      time of the latest final response, in seconds since the start of the run
    stats              statistics records of the iterations so far; filled by `keep_stats`, a statistics callback
    """

    def __init__(self, *, prompts_included: bool = False) -> None:
        self._waiting: deque[InferenceRequest] = deque()
        self._backlog: deque[dict[str, Any]] = deque()      # closed loop: a request arrives when another is done
        self._receipts: dict[int, Receipt] = {}
        self._prompt_lengths: dict[int, int] | None = {} if prompts_included else None
        self._num_open = self._num_inside = 0
        self._started = 0.0
        self._is_answered = False
        self._all_done = threading.Event()
        self._streaming, self._options = True, DEFAULTS
        self._gate: Gate | None = None
        self.last_response = 0.0
        self.stats: list[str] = []

    # ------------------------------------------------------------------ callbacks, on the worker thread

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        if self._is_answered:           # the iteration of the last response is over, and its statistics have arrived
            self._is_answered = False
            self._all_done.set()
        waiting = self._waiting
        if not waiting:
            return []
        count = len(waiting) if max_num_requests < 0 else min(max_num_requests, len(waiting))
        if self._gate is not None:
            oldest = self._receipts[waiting[0].request_id].arrival_s
            now = time.perf_counter() - self._started
            count = min(count, self._gate.allows(now, len(waiting), oldest, self._num_inside))
        self._num_inside += count
        return [waiting.popleft() for _ in range(count)]

    def send(self, request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        now = time.perf_counter() - self._started
        receipt = self._receipts[request_id]
        if error_message:
            receipt.error = error_message
        else:
            output_ids = tensors[0].array.tolist()[0][0]
            if not self._streaming:                     # the rows of beams are padded to the longest beam
                output_ids = output_ids[:int(tensors[1].array.flat[0])]
                if self._prompt_lengths is not None:
                    output_ids = output_ids[self._prompt_lengths[request_id]:]
            receipt.tokens += output_ids
            receipt.times += [now] * len(output_ids)
        if final_response:
            self.last_response = receipt.final_s = now
            if self._options.timings and (metrics := PerfMetrics.of(tensors)) is not None:
                receipt.queue_s = metrics.queue_s
            self._num_open -= 1
            self._num_inside -= 1
            if self._backlog:
                self._arrive([self._backlog.popleft()], now)
            self._is_answered = not self._num_open

    def keep_stats(self, record: str) -> None:
        self.stats.append(record)

    # ------------------------------------------------------------------ the thread that serves

    def serve(self, manager: GptManager, requests: list[dict], *, streaming: bool, started: float,
              limit_s: float = math.inf) -> dict[int, Receipt]:
        """Serve requests at their arrival times, wait for all final responses, and return request id -> Receipt.

        started   value of perf_counter() at the start of the run; arrival times and timestamps count from it
        limit_s   time limit, in seconds since `started`

        Raises BenchmarkError if a request fails, the time limit passes or the engine stops answering.
        """
        receipts = self.serve_all(manager, requests, streaming=streaming, started=started, limit_s=limit_s)
        errors = [receipt.error for receipt in receipts.values() if receipt.error]
        if errors:
            raise BenchmarkError(f"{len(errors)} of {len(requests)} requests failed, the first with: {errors[0]}")
        return receipts

    def serve_all(self, manager: GptManager, requests: list[dict], *, streaming: bool, started: float,
                  limit_s: float = math.inf, concurrency: int = 0, options: RequestOptions = DEFAULTS,
                  gate: Gate | None = None) -> dict[int, Receipt]:
        """Like `serve`, but a failed request only sets the error of its receipt.

        concurrency   requests in progress at a time: the next request arrives when one is done, and arrival times are
                      ignored; 0: requests arrive at their times
        options       options of every request
        gate          limits the submission of arrived requests; None: no limit

        Raises BenchmarkError if the time limit passes or the engine stops answering.
        """
        self._started, self._streaming, self._options, self._gate = started, streaming, options, gate
        self._receipts = {request["id"]: Receipt(arrival_s=request["arrival_s"]) for request in requests}
        if self._prompt_lengths is not None:
            self._prompt_lengths = {request["id"]: len(request["prompt"]) for request in requests}
        self._num_open, self._num_inside = len(requests), 0
        self._all_done.clear()

        arriving = deque(sorted(requests, key=lambda request: request["arrival_s"]))
        if concurrency:
            first = [arriving.popleft() for _ in range(min(concurrency, len(arriving)))]
            self._backlog, arriving = arriving, deque()
            self._arrive(first, time.perf_counter() - started)
            manager.notify()
        while arriving:
            wait_s = arriving[0]["arrival_s"] - (time.perf_counter() - started)
            time.sleep(min(max(0.0, wait_s), LONGEST_SLEEP_S))
            now = time.perf_counter() - started
            arrived = []
            while arriving and arriving[0]["arrival_s"] <= now:
                arrived.append(self._make(arriving.popleft()))
            self._waiting.extend(arrived)           # requests that arrive together become visible to `get` together
            manager.notify()
            self._check(manager, limit_s)
        while not self._all_done.wait(1.0):
            self._check(manager, limit_s)
        return self._receipts

    def count(self) -> Count:
        """Return the progress of the run. Any thread may call this method, which does not slow the worker down."""
        receipts = self._receipts
        now = time.perf_counter() - self._started
        arrived = (len(receipts) - len(self._backlog) if self._backlog
                   else sum(receipt.arrival_s <= now for receipt in receipts.values()))
        return Count(len(receipts) - self._num_open, len(receipts), arrived,
                     sum(len(receipt.tokens) for receipt in receipts.values()), now)

    def _check(self, manager: GptManager, limit_s: float) -> None:
        if manager.wait_until_terminate(0) or manager.health()["callback_failures"]["send"]:
            raise BenchmarkError("the engine stopped before all requests were answered; expected a final response for "
                                 f"each; see its health: {manager.health()}")
        if time.perf_counter() - self._started > limit_s:
            raise BenchmarkError(f"{self._num_open} of {len(self._receipts)} requests are unfinished after the time "
                                 f"limit of {limit_s:.0f} s")

    def _arrive(self, requests: list[dict[str, Any]], now: float) -> None:
        for request in requests:
            self._receipts[request["id"]].arrival_s = now
        self._waiting.extend([self._make(request) for request in requests])

    def _make(self, request: dict[str, Any]) -> InferenceRequest:
        arrival_s = self._receipts[request["id"]].arrival_s
        return self._options.make(request, streaming=self._streaming,
                                  arrival_time=time.monotonic() - (time.perf_counter() - self._started - arrival_s))
