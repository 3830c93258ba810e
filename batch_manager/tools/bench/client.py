"""The callbacks of a benchmark. They record the tokens of each request and the time of each token."""

import heapq
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ...errors import counted
from ...gpt_manager import GptManager
from ...requests.inference_request import InferenceRequest
from ...responses.perf_metrics import PerfMetrics
from .errors import BenchmarkError
from .gate import Gate
from .request_options import RequestOptions
from .sessions import is_later_turn, next_turns

DEFAULTS = RequestOptions()
NOT_SENT = "not sent: an earlier turn of its session failed"
LONGEST_CHECK_S = 1.0       # between two looks at the health of the engine
LONGEST_SLEEP_S = 60.0      # an engine that stops before the next arrival is noticed; time.sleep refuses 1e10 s


@dataclass(slots=True)
class Receipt:
    """The responses to one request. Times are seconds since the start of the run.

    tokens      generated tokens; with beams, those of the best beam
    times       time at which each token was received
    error       text of an error response; "": no error
    arrival_s   arrival of the request; latencies count from it. Infinity: a later turn that has not arrived
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

    An arrived request waits in the client until the manager has room for it and the run's `Gate` allows it. A later
    turn of a session arrives `think_s` after the answer to the turn before it.

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
        self._all_done, self._wake = threading.Event(), threading.Event()
        self._next_turns: dict[int, dict[str, Any]] = {}        # request id -> the next turn of its session
        self._open_turns: dict[int, dict[str, Any]] = {}        # request id -> a turn that another one follows
        self._thinking: deque[tuple[float, int, dict[str, Any]]] = deque()      # arrival, request id, turn
        self._streaming, self._options = True, DEFAULTS
        self._gate: Gate | None = None
        self.last_response = 0.0
        self.stats: list[str] = []

    # ------------------------------------------------------------------ callbacks, on the worker thread

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        if self._is_answered:           # the iteration of the last response is over, and its statistics have arrived
            self._is_answered = False
            self._all_done.set()
            self._wake.set()
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
            is_over = not self._next_turns or self._end_turn(request_id, receipt, now)
            if is_over and self._backlog:
                self._arrive([self._backlog.popleft()], now)
            self._is_answered = not self._num_open

    def _end_turn(self, request_id: int, receipt: Receipt, now: float) -> bool:
        """Let the next turn of the request's session arrive. Returns whether the session is over.

        After a failed turn, the later turns fail too.
        """
        turn = self._next_turns.get(request_id)
        if turn is None:
            return True
        if receipt.error:
            while turn is not None:
                unsent = self._receipts[turn["id"]]
                unsent.error, unsent.arrival_s = NOT_SENT, now
                self._num_open -= 1
                turn = self._next_turns.get(turn["id"])
            return True
        turn["prompt"] = [*self._open_turns.pop(request_id)["prompt"], *receipt.tokens, *turn["prompt"]]
        if think_s := turn.get("think_s", 0.0):
            self._receipts[turn["id"]].arrival_s = now + think_s
            self._thinking.append((now + think_s, turn["id"], turn))
            self._wake.set()
        else:
            self._arrive([turn], now)
        return False

    def keep_stats(self, record: str) -> None:
        self.stats.append(record)

    # ------------------------------------------------------------------ the thread that serves

    def serve(self, manager: GptManager, requests: list[dict], *, streaming: bool, started: float,
              limit_s: float = math.inf, options: RequestOptions = DEFAULTS) -> dict[int, Receipt]:
        """Serve requests at their arrival times, wait for all final responses, and return request id -> Receipt.

        The prompt of a later turn is replaced by the whole prompt: the history and the tokens of the new turn.

        started   value of perf_counter() at the start of the run; arrival times and timestamps count from it
        limit_s   time limit, in seconds since `started`
        options   options of every request

        Raises BenchmarkError if a request fails, the time limit passes or the engine stops answering.
        """
        receipts = self.serve_all(manager, requests, streaming=streaming, started=started, limit_s=limit_s,
                                  options=options)
        errors = [receipt.error for receipt in receipts.values() if receipt.error]
        if errors:
            raise BenchmarkError(f"{len(errors)} of {counted(len(requests), 'request')} failed, the first with: "
                                 f"{errors[0]}")
        return receipts

    def serve_all(self, manager: GptManager, requests: list[dict], *, streaming: bool, started: float,
                  limit_s: float = math.inf, concurrency: int = 0, options: RequestOptions = DEFAULTS,
                  gate: Gate | None = None) -> dict[int, Receipt]:
        """Like `serve`, but a failed request only sets the error of its receipt.

        concurrency   requests or sessions in progress at a time: the next one arrives when one is done, and arrival
                      times are ignored; 0: they arrive at their times
        options       options of every request
        gate          limits the submission of arrived requests; None: no limit

        Raises BenchmarkError if the time limit passes or the engine stops answering.
        """
        self._started, self._streaming, self._options, self._gate = started, streaming, options, gate
        self._next_turns, self._thinking = next_turns(requests), deque()
        self._open_turns = {request["id"]: request for request in requests if request["id"] in self._next_turns}
        self._receipts = {request["id"]: Receipt(arrival_s=math.inf if is_later_turn(request) else request["arrival_s"])
                          for request in requests}
        if self._prompt_lengths is not None:
            self._prompt_lengths = {}
        self._num_open, self._num_inside = len(requests), 0
        self._all_done.clear()

        in_order = sorted((request for request in requests if not is_later_turn(request)),
                          key=lambda request: request["arrival_s"])
        # A heap of (arrival, position among equal arrivals, request). Only this thread uses it.
        arriving: list[tuple[float, int, dict[str, Any]]] = []
        if concurrency:
            self._backlog = deque(in_order[concurrency:])
            self._arrive(in_order[:concurrency], time.perf_counter() - started)
            manager.notify()
        else:
            arriving = [(request["arrival_s"], position, request) for position, request in enumerate(in_order)]
        has_turns = bool(self._next_turns)
        while arriving or (has_turns and not self._all_done.is_set()):
            while self._thinking:
                heapq.heappush(arriving, self._thinking.popleft())
            wait_s = arriving[0][0] - (time.perf_counter() - started) if arriving else LONGEST_CHECK_S
            if has_turns and wait_s > 0:            # an answer may let a turn arrive earlier than all others
                self._wake.wait(min(wait_s, LONGEST_CHECK_S))
                self._wake.clear()
            else:
                time.sleep(min(max(0.0, wait_s), LONGEST_SLEEP_S))
            now = time.perf_counter() - started
            arrived = []
            while arriving and arriving[0][0] <= now:
                arrived.append(self._make(heapq.heappop(arriving)[2]))
            self._waiting.extend(arrived)           # requests that arrive together become visible to `get` together
            if arrived:
                manager.notify()
            self._check(manager, limit_s)
        while not self._all_done.wait(LONGEST_CHECK_S):
            self._check(manager, limit_s)
        return self._receipts

    def count(self) -> Count:
        """Return the progress of the run. Any thread may call this method, which does not slow the worker down."""
        receipts = self._receipts
        now = time.perf_counter() - self._started
        arrived = (len(receipts) - len(self._backlog) if self._backlog and not self._next_turns
                   else sum(receipt.arrival_s <= now for receipt in receipts.values()))
        return Count(len(receipts) - self._num_open, len(receipts), arrived,
                     sum(len(receipt.tokens) for receipt in receipts.values()), now)

    def _check(self, manager: GptManager, limit_s: float) -> None:
        if manager.wait_until_terminate(0) or manager.health()["callback_failures"]["send"]:
            raise BenchmarkError("the engine stopped before all requests were answered; expected a final response for "
                                 f"each; see its health: {manager.health()}")
        if time.perf_counter() - self._started > limit_s:
            raise BenchmarkError(f"{self._num_open} of {counted(len(self._receipts), 'request')} are unfinished after "
                                 f"the time limit of {limit_s:.0f} s")

    def _arrive(self, requests: list[dict[str, Any]], now: float) -> None:
        for request in requests:
            self._receipts[request["id"]].arrival_s = now
        self._waiting.extend([self._make(request) for request in requests])

    def _make(self, request: dict[str, Any]) -> InferenceRequest:
        arrival_s = self._receipts[request["id"]].arrival_s
        if self._prompt_lengths is not None:
            self._prompt_lengths[request["id"]] = len(request["prompt"])
        return self._options.make(request, streaming=self._streaming,
                                  arrival_time=time.monotonic() - (time.perf_counter() - self._started - arrival_s))
