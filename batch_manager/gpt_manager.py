"""GptManager: the worker thread, and everything about its life.

The constructor checks, builds and starts the worker, in this order. Everything else a user meets happens in callbacks,
on that thread. The worker holds no reference to the manager, so that dropping the last one ends it.
"""

import contextlib
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from .build import build_loop
from .clock import SystemClock
from .config import Parts, TrtGptModelOptionalParams
from .errors import BatchManagerError, ConfigError, DeviceLostError, InternalError, ManagerClosedError
from .loop.generation_loop import GenerationLoop
from .names import SchedulerPolicy, TrtGptModelType

log = logging.getLogger("batch_manager")

SECONDS_TO_STOP_AFTER_A_TIMEOUT = 5.0
_REQUIRED: Any = object()


class GptManager:
    """Runs a GPT-style model with in-flight batching, driven by four callbacks.

    One worker thread, started by this constructor, turns the loop: get requests, schedule, run a step, send responses,
    poll stop signals, report statistics. All callbacks run on it, one at a time, and may start before the constructor
    has returned. Every accepted request gets exactly one final response, whatever fails inside this process.

    model_path                      folder of a Hugging Face checkpoint: config.json and *.safetensors
    model_type                      batching scheme
    max_beam_width                  largest beam width any request may ask for, >= 1
    scheduler_policy                who may start when KV cache blocks are short
    get_inference_requests_cb       (max_num_requests: int) -> iterable of InferenceRequest; called every iteration,
                                    also with 0; -1 when unbounded
    send_response_cb                (request_id, tensors: list[NamedTensor], final_response: bool, error: str) -> None
    poll_stop_signal_cb             () -> set of request ids to stop
    return_batch_manager_stats_cb   (json: str) -> None, once per iteration that had an active request
    optional_params                 everything with a default
    terminate_req_id                a request with this id ends the worker once all others are done
    max_draft_tokens                not built yet: None or 0
    exclude_input_in_output         responses that are not streamed hold generated tokens only
    parts                           replacements for parts of the engine
    trt_engine_path                 another name of model_path

    Raises ConfigError and its subclasses (ModelLoadError, InsufficientMemoryError, ...), before any thread exists.
    """

    def __init__(
        self,
        model_path: str | os.PathLike | None = None,
        model_type: TrtGptModelType = _REQUIRED,
        max_beam_width: int = _REQUIRED,
        scheduler_policy: SchedulerPolicy = _REQUIRED,
        get_inference_requests_cb: Callable[[int], Any] = _REQUIRED,
        send_response_cb: Callable[[int, list, bool, str], None] = _REQUIRED,
        poll_stop_signal_cb: Callable[[], set[int]] | None = None,
        return_batch_manager_stats_cb: Callable[[str], None] | None = None,
        optional_params: TrtGptModelOptionalParams | None = None,
        terminate_req_id: int | None = None,
        max_draft_tokens: int | None = None,
        exclude_input_in_output: bool = False,
        parts: Parts | None = None,
        *,
        trt_engine_path: str | os.PathLike | None = None,
    ) -> None:
        if trt_engine_path is not None:
            if model_path is not None:
                raise ConfigError("model_path and trt_engine_path are both given", "they are two names of one thing")
            model_path = trt_engine_path
        params = TrtGptModelOptionalParams() if optional_params is None else optional_params
        parts = Parts() if parts is None else parts
        _check_arguments(model_type, max_beam_width, scheduler_policy, get_inference_requests_cb, send_response_cb,
                         poll_stop_signal_cb, return_batch_manager_stats_cb, params, terminate_req_id,
                         max_draft_tokens, exclude_input_in_output, parts)

        control = _Control(SystemClock() if parts.clock is None else parts.clock, params.hang_warning_s)
        loop = _in_a_thread_of_its_own(lambda: build_loop(
            model_path=model_path,
            model_type=model_type,
            max_beam_width=max_beam_width,
            scheduler_policy=scheduler_policy,
            get_inference_requests_cb=get_inference_requests_cb,
            send_response_cb=send_response_cb,
            poll_stop_signal_cb=poll_stop_signal_cb,
            return_batch_manager_stats_cb=return_batch_manager_stats_cb,
            optional_params=params,
            terminate_req_id=terminate_req_id,
            exclude_input_in_output=exclude_input_in_output,
            parts=parts,
            heartbeat=control.beat,
        ))
        self._control = control
        self._loop = loop
        self._worker = threading.Thread(
            target=_run, args=(loop, control, params.idle_poll_interval_s), name="batch_manager worker", daemon=False)
        _controls.add(control)
        weakref.finalize(self, control.ask_to_abort).atexit = False
        try:
            self._worker.start()
        except BaseException:
            loop.backend.close()
            raise
        if params.hang_warning_s:
            threading.Thread(target=_watch, args=(control,), name="batch_manager watchdog", daemon=True).start()

    # ------------------------------------------------------------------ what a server asks

    def notify(self) -> None:
        """Wake an idle worker at once: there is something to get, or to stop."""
        self._check_process()
        self._control.wake.set()

    @property
    def num_active_requests(self) -> int:
        """Accepted requests that have not had their final response."""
        self._check_process()
        return len(self._loop.active) + len(self._loop.intake)

    def health(self) -> dict[str, Any]:
        """How the worker is, from any thread, without waiting for it.

        state                  "RUNNING", "DRAINING", "FAILED" or "STOPPED"
        activity               what the worker does now: "loop", "idle", "model step", or the callback it is inside
        seconds_in_activity    since when
        is_hanging             longer than hang_warning_s without a heartbeat
        failure                text of the error that failed the engine, or ""
        active_requests, queued_requests, iterations, final_responses
        errors                 error finals by code
        callback_failures      callback -> calls that raised
        """
        self._check_process()
        control, loop = self._control, self._loop
        activity, since = control.activity, control.beat_at
        seconds = max(control.clock.monotonic() - since, 0.0)
        if control.stopped.is_set():
            state = "STOPPED"
        elif loop.failure is not None:
            state = "FAILED"
        else:
            state = "DRAINING" if control.draining or loop.intake.is_terminating else "RUNNING"
        return {
            "state": state,
            "activity": activity,
            "seconds_in_activity": seconds,
            "is_hanging": state != "STOPPED" and 0 < control.hang_warning_s < seconds,
            "failure": "" if loop.failure is None else loop.failure.response_text(),
            "active_requests": len(loop.active),
            "queued_requests": len(loop.intake),
            "iterations": loop.reporter.iteration,
            "final_responses": loop.finals.num_sent,
            "errors": {code.value: count for code, count in loop.finals.errors.copy().items()},
            "callback_failures": dict(loop.callbacks.failures),
        }

    # ------------------------------------------------------------------ the end

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> bool:
        """End the worker. The get callback is not called again.

        drain     True: finish what was accepted; False: answer it with SHUTDOWN
        timeout   seconds to drain, then the rest is answered with SHUTDOWN; None: as long as it takes

        Returns True once no callback will run again; False when called from inside a callback, where it only asks, or
        when a callback or a step did not come back within the timeout and 5 more seconds. Idempotent, from any thread.
        """
        self._check_process()
        control = self._control
        control.ask_to_drain() if drain else control.ask_to_abort()
        if threading.current_thread() is self._worker:
            return False
        if not self._join(timeout):
            control.ask_to_abort()
            return self._join(SECONDS_TO_STOP_AFTER_A_TIMEOUT)
        return True

    def wait_until_terminate(self, timeout: float | None = None) -> bool:
        """Wait for the worker to end without asking it to. True when it has."""
        self._check_process()
        if threading.current_thread() is self._worker:
            return False
        return self._join(timeout)

    def __enter__(self) -> "GptManager":
        self._check_process()
        if self._control.stopped.is_set():
            raise ManagerClosedError("this manager was shut down", "a manager runs once", "make a new one")
        return self

    def __exit__(self, exception_type, exception, trace) -> None:
        self.shutdown(drain=exception_type is None)

    def _join(self, timeout: float | None) -> bool:
        self._worker.join(timeout)
        return not self._worker.is_alive()

    def _check_process(self) -> None:
        if os.getpid() != self._control.process_id:
            raise ManagerClosedError("this process was forked from the one that made the manager",
                                     "the worker thread lives in the parent only", "make a new manager after forking")


class _WakeUp:
    """An event for one waiter that costs an idle worker half of what threading.Event does: no lock is made a wait.

    `set` never blocks, so a forked child may call it whatever the parent's worker was doing.
    """

    def __init__(self) -> None:
        self._set = threading.Lock()
        self._set.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):    # it is set already
            self._set.release()

    def wait_and_clear(self, seconds: float) -> None:
        self._set.acquire(timeout=seconds)


class _Control:
    """What other threads tell the worker, and what the worker lets them see. Plain attributes; no lock is held."""

    def __init__(self, clock: Any, hang_warning_s: float) -> None:
        self.clock = clock
        self.hang_warning_s = hang_warning_s
        self.process_id = os.getpid()
        self.wake = _WakeUp()
        self.stopped = threading.Event()
        self.draining = False
        self.aborting = False
        self.activity = "loop"
        self.beat_at = clock.monotonic()

    def beat(self, activity: str, now: float) -> None:
        self.beat_at = now
        self.activity = activity

    def ask_to_drain(self) -> None:
        self.draining = True
        self.wake.set()

    def ask_to_abort(self) -> None:
        self.draining = self.aborting = True
        self.wake.set()


def _in_a_thread_of_its_own(build: Callable[[], GenerationLoop]) -> GenerationLoop:
    """What `build` returns or raises, computed on a thread that has ended when this returns.

    OpenMP keeps a team of threads for every thread that ever computed. With one for the caller, which loaded the model,
    and one for the worker there are more threads than cores, and libgomp then puts a team to sleep at every barrier: a
    step of a 135M model on two cores took 40 ms instead of 20.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["loop"] = build()
        except BaseException as error:
            outcome["error"] = error

    builder = threading.Thread(target=work, name="batch_manager loading", daemon=True)
    builder.start()
    builder.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["loop"]


def _run(loop: GenerationLoop, control: _Control, idle_poll_interval_s: float) -> None:
    """The worker: iterations until it is told to stop, then an answer for whoever is left."""
    try:
        while not control.aborting:
            if (control.draining or loop.intake.is_terminating) and loop.is_empty:
                break
            try:
                is_busy = loop.step(accept_new=not control.draining)
            except BaseException as error:
                _fail(loop, error)
                is_busy = False
            if not is_busy:
                control.beat("idle", control.clock.monotonic())
                control.wake.wait_and_clear(idle_poll_interval_s)
                control.beat("loop", control.clock.monotonic())
    finally:
        try:
            loop.answer_the_rest(ManagerClosedError(
                "the engine was shut down before the request was done", fix="send it to another instance"))
        finally:
            loop.backend.close()
            control.stopped.set()
            control.wake.set()
            _controls.discard(control)


def _fail(loop: GenerationLoop, error: BaseException) -> None:
    """The step raised what nothing inside contains: a lost device, or a bug. Everybody is answered; the host lives."""
    log.critical("the engine failed with %s; every request is answered with ENGINE_FAILED until shutdown\n%s",
                 type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
    if isinstance(error, DeviceLostError | InternalError):
        failure: BatchManagerError = error
    else:
        failure = InternalError(f"the engine raised {type(error).__name__}", "it cannot go on",
                                "shut the manager down, make a new one, and report the log")
    loop.fail(failure)


def _watch(control: _Control) -> None:
    """Say once, with all stacks, when the worker has been inside one thing for too long. Nothing is killed."""
    reported_beat = None
    while not control.stopped.wait(control.hang_warning_s / 4):
        beat_at = control.beat_at
        seconds = control.clock.monotonic() - beat_at
        if seconds > control.hang_warning_s and reported_beat != beat_at:
            reported_beat = beat_at
            stacks = "\n".join(f"thread {thread}:\n{''.join(traceback.format_stack(frame))}"
                               for thread, frame in sys._current_frames().items())
            log.error("no heartbeat of the worker for %.0f s; it is in: %s\n%s", seconds, control.activity, stacks)


# Interpreter exit. `threading` joins the workers (they are no daemons) before `atexit` runs, so a worker has to be told
# earlier: `threading` offers this hook for exactly that, and concurrent.futures uses it the same way.
_controls: "weakref.WeakSet[_Control]" = weakref.WeakSet()


def _abort_all_workers() -> None:
    for control in list(_controls):
        control.ask_to_abort()


threading._register_atexit(_abort_all_workers)


def _check_arguments(model_type, max_beam_width, scheduler_policy, get_cb, send_cb, poll_cb, stats_cb, params,
                     terminate_req_id, max_draft_tokens, exclude_input_in_output, parts) -> None:
    required = {"model_type": model_type, "max_beam_width": max_beam_width, "scheduler_policy": scheduler_policy,
                "get_inference_requests_cb": get_cb, "send_response_cb": send_cb}
    missing = [name for name, value in required.items() if value is _REQUIRED]
    if missing:
        raise TypeError(f"GptManager() is missing {', '.join(missing)}")
    if not isinstance(model_type, TrtGptModelType):
        raise ConfigError(f"model_type is {model_type!r}", "a member of TrtGptModelType")
    if not isinstance(scheduler_policy, SchedulerPolicy):
        raise ConfigError(f"scheduler_policy is {scheduler_policy!r}", "a member of SchedulerPolicy")
    if isinstance(max_beam_width, bool) or not isinstance(max_beam_width, int) or max_beam_width < 1:
        raise ConfigError(f"max_beam_width is {max_beam_width!r}", "an integer of at least 1")
    for name, callback in (("get_inference_requests_cb", get_cb), ("send_response_cb", send_cb)):
        if not callable(callback):
            raise ConfigError(f"{name} is a {type(callback).__name__}", "a callable")
    for name, callback in (("poll_stop_signal_cb", poll_cb), ("return_batch_manager_stats_cb", stats_cb)):
        if callback is not None and not callable(callback):
            raise ConfigError(f"{name} is a {type(callback).__name__}", "a callable or None")
    if not isinstance(params, TrtGptModelOptionalParams):
        raise ConfigError(f"optional_params is a {type(params).__name__}", "a TrtGptModelOptionalParams")
    if not isinstance(parts, Parts):
        raise ConfigError(f"parts is a {type(parts).__name__}", "a Parts")
    if terminate_req_id is not None and (isinstance(terminate_req_id, bool) or not isinstance(terminate_req_id, int)
                                         or not 0 <= terminate_req_id < 2**64):
        raise ConfigError(f"terminate_req_id is {terminate_req_id!r}", "an id in 0..2^64-1, or None")
    if max_draft_tokens not in (None, 0):
        raise ConfigError(f"max_draft_tokens is {max_draft_tokens!r}", "draft tokens are not built yet", "leave it out")
    if not isinstance(exclude_input_in_output, bool):
        raise ConfigError(f"exclude_input_in_output is {exclude_input_in_output!r}", "True or False")
