"""An engine that is turned by hand: the loop of a GptManager, without its thread."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ..arguments import check_arguments
from ..build import build_loop
from ..config import Parts, TrtGptModelOptionalParams
from ..errors import ManagerClosedError
from ..kv.audit import audit
from ..names import SchedulerPolicy, TrtGptModelType
from ..requests.llm_request import LlmRequest
from ..seams import ModelBackend
from .scripted_backend import ScriptedBackend


class ManualClock:
    """A clock that stands still until `now` is moved. Deadlines and back-offs then happen when a test says so.

    now   seconds
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def timestamp(self) -> str:
        return "01-01-2026 00:00:00"


class EngineHarness:
    """Runs iterations of an engine in the thread that calls `step`, with your callbacks and parts.

    get, send, poll, stats   the four callbacks of GptManager
    backend      None: a ScriptedBackend
    scheduler    as Parts.scheduler; None: that of the policy
    parts        everything else that Parts has; its backend, scheduler and clock are taken from here
    options      fields of TrtGptModelOptionalParams

    clock      a ManualClock
    backend    the backend that runs

    Raises ConfigError as GptManager does. Close it when it is done, or use it as a context manager: open requests then
    get their finals with SHUTDOWN.
    """

    def __init__(self, get: Callable[[int], Iterable[Any]], send: Callable[[int, list, bool, str], None],
                 poll: Callable[[], set[int]] | None = None, stats: Callable[[str], None] | None = None, *,
                 backend: ModelBackend | None = None, scheduler: Any = None,
                 policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION,
                 model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching, max_beam_width: int = 1,
                 exclude_input_in_output: bool = False, parts: Parts | None = None, **options: Any) -> None:
        params, parts = TrtGptModelOptionalParams(**options), Parts() if parts is None else parts
        check_arguments(model_type, max_beam_width, policy, get, send, poll, stats, params, parts,
                        exclude_input_in_output)
        self.clock = ManualClock()
        self._is_running = False
        self._loop = build_loop(
            model_path=None, model_type=model_type, max_beam_width=max_beam_width, scheduler_policy=policy,
            get_inference_requests_cb=get, send_response_cb=send, poll_stop_signal_cb=poll,
            return_batch_manager_stats_cb=stats, optional_params=params,
            terminate_req_id=None, exclude_input_in_output=exclude_input_in_output,
            parts=replace(parts, backend=ScriptedBackend() if backend is None else backend,
                          scheduler=scheduler, clock=self.clock))
        self.backend = self._loop.backend

    @property
    def active_requests(self) -> list[LlmRequest]:
        """The requests being worked on, in the order a scheduler sees them."""
        return list(self._loop.active.in_order)

    def step(self, iterations: int = 1) -> bool:
        """Run so many iterations. Whether the last one had anything to do.

        Raises what would fail the engine: a lost device, a bug.
        """
        is_busy = False
        for _ in range(iterations):
            is_busy = self._turn()
        return is_busy

    def run(self, most_iterations: int = 10_000) -> int:
        """Run until an iteration has nothing to do. Returns how many had.

        Raises RuntimeError when there is no end after so many.
        """
        for iteration in range(most_iterations):
            if not self._turn():
                return iteration
        raise RuntimeError(f"{len(self._loop.active)} requests are active after {most_iterations:,} iterations; "
                           "expected an end; raise most_iterations, or look at what the scheduler does")

    def _turn(self) -> bool:
        self._refuse_a_callback("turned")
        self._is_running = True
        try:
            return self._loop.step(accept_new=True)
        finally:
            self._is_running = False

    def _refuse_a_callback(self, what: str) -> None:
        if self._is_running:
            raise RuntimeError(f"the harness was to be {what} by a callback, or by something else that an iteration "
                               "calls; an iteration runs already; note what is wanted, and do it after step returned")

    def check(self) -> None:
        """Raise InternalError where a KV cache block is neither free nor owned as the block tables say."""
        audit(self._loop.kv)

    def close(self) -> None:
        """Answer whatever is open with SHUTDOWN, and close the backend. Idempotent. Not for callbacks."""
        self._refuse_a_callback("closed")
        self._loop.answer_the_rest(ManagerClosedError(
            "the harness was closed before the request was done", "what it generated so far is dropped",
            "run it to its end"))
        self.backend.close()

    def __enter__(self) -> "EngineHarness":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
