"""An engine for tests: the loop of a GptManager without its thread."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ..arguments import Callbacks, EngineArguments, checked_parts
from ..build import build_loop
from ..config import Parts, TrtGptModelOptionalParams
from ..errors import ManagerClosedError, counted
from ..kv.audit import audit
from ..names import SchedulerPolicy, TrtGptModelType
from ..requests.llm_request import LlmRequest
from ..seams import ModelBackend
from .scripted_backend import ScriptedBackend


class ManualClock:
    """A clock that a test advances by setting `now`, to control deadlines and back-offs.

    now   seconds
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def timestamp(self) -> str:
        return "01-01-2026 00:00:00"


class EngineHarness:
    """Runs an engine, with your callbacks and parts, in the thread that calls `step`.

    get, send, poll, stats   the four callbacks of GptManager
    backend      the backend to use; None: a new ScriptedBackend
    scheduler    as Parts.scheduler; None: the scheduler that `policy`, a SchedulerPolicy, names
    parts        other parts. The arguments `backend` and `scheduler` and the ManualClock replace those in `parts`
    options      fields of TrtGptModelOptionalParams

    Attributes:

    clock      the ManualClock
    backend    the backend in use

    Raises ConfigError as GptManager does. Close the harness, or use it as a context manager. Closing answers live
    requests with an error of code SHUTDOWN.
    """

    def __init__(self, get: Callable[[int], Iterable[Any]], send: Callable[[int, list, bool, str], None],
                 poll: Callable[[], set[int]] | None = None, stats: Callable[[str], None] | None = None, *,
                 backend: ModelBackend | None = None, scheduler: Any = None,
                 policy: SchedulerPolicy = SchedulerPolicy.MAX_UTILIZATION,
                 model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching, max_beam_width: int = 1,
                 exclude_input_in_output: bool = False, parts: Parts | None = None, **options: Any) -> None:
        arguments = EngineArguments(
            model_type=model_type, max_beam_width=max_beam_width, scheduler_policy=policy,
            optional_params=TrtGptModelOptionalParams(**options), exclude_input_in_output=exclude_input_in_output)
        self.clock = ManualClock()
        self._is_running = False
        self._loop = build_loop(arguments, Callbacks(get, send, poll, stats), replace(
            checked_parts(parts), backend=ScriptedBackend() if backend is None else backend, scheduler=scheduler,
            clock=self.clock))
        self.backend = self._loop.backend

    @property
    def active_requests(self) -> list[LlmRequest]:
        """The active requests, in the order that a scheduler gets them."""
        return list(self._loop.active.in_order)

    def step(self, iterations: int = 1) -> bool:
        """Run a number of iterations. Returns whether the last one had work to do.

        Raises errors that would make a GptManager fail, such as DeviceLostError and InternalError.
        """
        is_busy = False
        for _ in range(iterations):
            is_busy = self._iterate()
        return is_busy

    def run(self, most_iterations: int = 10_000) -> int:
        """Run until an iteration has no work. Returns the number of iterations that had work.

        Raises RuntimeError if the engine still has work after `most_iterations`.
        """
        for iteration in range(most_iterations):
            if not self._iterate():
                return iteration
        raise RuntimeError(f"the engine has {counted(len(self._loop.active), 'active request')} after "
                           f"{counted(most_iterations, 'iteration')}; expected none; "
                           "increase most_iterations, or check the scheduler")

    def _iterate(self) -> bool:
        self._refuse_in_callback("run")
        self._is_running = True
        try:
            return self._loop.step(accept_new=True)
        finally:
            self._is_running = False

    def _refuse_in_callback(self, action: str) -> None:
        if self._is_running:
            raise RuntimeError(f"a callback or hook tried to {action} the harness during an iteration; expected calls "
                               "between iterations; set a flag in the callback, and act on it after step has returned")

    def check(self) -> None:
        """Check the block accounting. Raises InternalError if the block tables and the free blocks are inconsistent."""
        audit(self._loop.kv)

    def close(self) -> None:
        """Answer live requests with an error of code SHUTDOWN, and close the backend. Idempotent.

        Raises RuntimeError if a callback or hook calls this method.
        """
        self._refuse_in_callback("close")
        self._loop.answer_the_rest(ManagerClosedError(
            "the harness was closed before the request ended", "requests must end before close()",
            "call run() first"))
        self.backend.close()

    def __enter__(self) -> "EngineHarness":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
