"""One simulated engine."""

from collections import deque
from collections.abc import Callable
from typing import Any

from ...errors import counted
from ...requests.inference_request import InferenceRequest
from ...stats.trace import IterationTrace
from .cost_model import CostModel
from .engine_settings import EngineSettings, make_loop
from .lean_loop import LeanLoop, inference_request
from .leap import Leap
from .log_book import LogBook
from .traffic import Traffic
from .virtual_time import VirtualClock


class Replica:
    """One simulated engine. Requests are identified by their index in the traffic.

    number       number of the replica, from 0
    on_final     called with (index, virtual seconds) at the final response of a request
    seed         with `number`, seeds the random scatter of step times
    leaps        whether to compute many uneventful iterations at once, with the same figures. If `trace` is given, each
                 iteration runs by itself

    unfinished   number of the replica's requests without a final response
    """

    def __init__(self, number: int, settings: EngineSettings, cost: CostModel, traffic: Traffic, log_book: LogBook, *,
                 seed: int = 0, leaps: bool = True, on_final: Callable[[int, float], None] | None = None,
                 trace: Callable[[IterationTrace], None] | None = None) -> None:
        self.number = number
        self.clock = VirtualClock()
        self.unfinished = 0
        self._traffic, self._log_book, self._on_final = traffic, log_book, on_final
        self._waiting: deque[tuple[int, float]] = deque()      # (request, its arrival in virtual seconds)
        self._leap: Leap | None = None
        self._loop, self.backend = make_loop(settings, cost, self.clock, log_book,
                                             seed=(seed, number), get=self._get, send=self._send,
                                             trace=trace)
        self._lean = None
        if leaps and trace is None and LeanLoop.fits(self._loop, traffic):
            self._lean = LeanLoop(self._loop, self.backend, traffic, log_book, self._waiting, self._answer)

    @property
    def next_s(self) -> float:
        """When `step` must be called next, in virtual seconds: after all requests that arrive earlier or then."""
        return self.clock.now if self._leap is None else self._leap.next_s

    @property
    def is_running(self) -> bool:
        """Whether the engine has an active request."""
        return bool(self._loop.active.in_order)

    @property
    def iterations(self) -> int:
        return self._loop.iteration if self._lean is None else self._lean.iterations

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the KV cache pool."""
        return self._loop.kv.pool.num_blocks

    @property
    def recomputed_tokens(self) -> int:
        """Number of tokens computed again after a pause."""
        return self._loop.timings.recomputed_tokens if self._lean is None else self._lean.recomputed_tokens

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens found in the KV cache."""
        return self.backend.reused_tokens

    def hand_over(self, index: int, now: float, arrived_at_s: float) -> None:
        """Queue the request `index` at `now`. An idle replica begins at once."""
        if not self.unfinished:
            self.clock.now = max(self.clock.now, now)
        elif self._leap is not None and self._lean is not None and self._lean.has_room:
            leap, self._leap = self._leap, None
            self._lean.carry_out(leap, leap.begun_before(now))
        self._waiting.append((index, arrived_at_s))
        self._log_book.replica[index] = self.number
        self.unfinished += 1

    def step(self) -> None:
        """Carry out the pending leap if there is one, else run one iteration.

        A leap is a group of iterations that are computed together. The replica must have an unfinished request.
        """
        if self._lean is None:
            before = self._loop.iteration, self.unfinished
            self._loop.step(accept_new=True)
            if (self._loop.iteration, self.unfinished) == before:
                raise RuntimeError(f"replica {self.number} makes no progress with "
                                   f"{counted(self.unfinished, 'unfinished request')}")
            return
        if self._leap is not None:
            leap, self._leap = self._leap, None
            self._lean.carry_out(leap, len(leap))
        else:
            self._lean.iterate()
        self._leap = self._lean.possible_leap()

    def _get(self, max_num_requests: int) -> list[InferenceRequest]:
        waiting = self._waiting
        count = len(waiting) if max_num_requests < 0 else min(max_num_requests, len(waiting))
        return [inference_request(self._traffic, *waiting.popleft()) for _ in range(count)]

    def _send(self, index: int, tensors: list[Any], is_final: bool, error: str) -> None:
        if is_final:
            self._answer(index, error)

    def _answer(self, index: int, error: str) -> None:
        if error:
            self._log_book.errors[index] = error
        self.unfinished -= 1
        if self._on_final is not None:
            self._on_final(index, self.clock.now)
