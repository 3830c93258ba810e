"""GptManager: what a server holds in its hand.

The constructor checks, builds and starts the worker, in this order. Everything else a user meets happens in callbacks,
on that thread.
"""

import os
import threading
import weakref
from dataclasses import replace
from types import TracebackType
from typing import Any

from .arguments import check_arguments
from .build import build_loop
from .clock import reliable
from .config import Parts, TrtGptModelOptionalParams
from .engine_info import EngineInfo
from .errors import ConfigError, ManagerClosedError
from .interpreter_exit import is_a_worker, list_worker
from .loading_thread import in_a_thread_of_its_own
from .loop.callbacks import (
    GetInferenceRequestsCallback,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from .names import SchedulerPolicy, TrtGptModelType
from .one_shot_event import checked_timeout
from .thread_stack import start_with_enough_stack
from .worker import WorkerControl, close_worker, health_of, run_worker, watch_worker

SECONDS_TO_STOP_AFTER_A_TIMEOUT = 5.0
SECONDS_BETWEEN_LOOKS = 1.0
_REQUIRED: Any = object()
_DEFAULT_PARAMS, _DEFAULT_PARTS = TrtGptModelOptionalParams(), Parts()


class GptManager:
    """Runs a GPT-style model with in-flight batching, driven by four callbacks.

    One worker thread, started by this constructor, turns the loop: get requests, schedule, run a step, send responses,
    poll stop signals, report statistics. All callbacks run on it, one at a time, and may start before the constructor
    has returned. Every accepted request gets exactly one final response, whatever fails inside this process.

    model_path                      folder of a Hugging Face checkpoint: config.json and *.safetensors; or a .gguf file,
                                    of a model in shards the first
    model_type                      batching scheme
    max_beam_width                  largest beam width any request may ask for, >= 1
    scheduler_policy                who may start when KV cache blocks are short
    get_inference_requests_cb       (max_num_requests: int) -> iterable of InferenceRequest; called every iteration,
                                    also with 0; -1 when unbounded. Not while more than an iteration reads of what it
                                    returned (max_admissions_per_iteration) is still unread. Of a generator, or
                                    anything else that does not know its size, one iteration's worth is read and the
                                    rest dropped, with a log line: return a list
    send_response_cb                (request_id, tensors: list[NamedTensor], final_response: bool, error: str) -> None
    poll_stop_signal_cb             () -> set of request ids to stop
    return_batch_manager_stats_cb   (json: str) -> None, once per iteration that had an active request
    optional_params                 everything with a default
    terminate_req_id                a request with this id ends the worker once all others are done
    max_draft_tokens                not built yet: None or 0
    exclude_input_in_output         responses that are not streamed hold generated tokens only
    parts                           replacements for parts of the engine
    trt_engine_path                 another name of model_path

    Raises ConfigError and its subclasses (ModelLoadError, InsufficientMemoryError, ...), before any thread exists, and
    ManagerClosedError while the interpreter exits. What interrupts the constructor, such as Ctrl-C, interrupts the
    loading, and passes once that has come to its end.

    The last reference to a manager that is dropped ends it, as `shutdown(drain=False)` does. The worker holds the
    callbacks: where they are methods of an object that holds the manager, that one lives until `shutdown`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        model_type: TrtGptModelType = _REQUIRED,
        max_beam_width: int = _REQUIRED,
        scheduler_policy: SchedulerPolicy = _REQUIRED,
        get_inference_requests_cb: GetInferenceRequestsCallback = _REQUIRED,
        send_response_cb: SendResponseCallback = _REQUIRED,
        poll_stop_signal_cb: PollStopSignalCallback | None = None,
        return_batch_manager_stats_cb: ReturnBatchManagerStatsCallback | None = None,
        optional_params: TrtGptModelOptionalParams | None = _DEFAULT_PARAMS,
        terminate_req_id: int | None = None,
        max_draft_tokens: int | None = None,
        exclude_input_in_output: bool = False,
        parts: Parts | None = _DEFAULT_PARTS,
        *,
        trt_engine_path: str | os.PathLike[str] | None = None,
    ) -> None:
        if hasattr(self, "_control"):
            raise ConfigError("this manager was constructed already", "its worker runs", "make another manager")
        if trt_engine_path is not None:
            if model_path is not None:
                raise ConfigError("model_path and trt_engine_path are both given", "they are two names of one thing",
                                  "leave one of them out")
            model_path = trt_engine_path
        params = _DEFAULT_PARAMS if optional_params is None else optional_params
        parts = _DEFAULT_PARTS if parts is None else parts
        required = {"model_type": model_type, "max_beam_width": max_beam_width, "scheduler_policy": scheduler_policy,
                    "get_inference_requests_cb": get_inference_requests_cb, "send_response_cb": send_response_cb}
        missing = [name for name, value in required.items() if value is _REQUIRED]
        if missing:
            raise TypeError(f"GptManager() is missing {', '.join(missing)}")
        check_arguments(model_type, max_beam_width, scheduler_policy, get_inference_requests_cb, send_response_cb,
                        poll_stop_signal_cb, return_batch_manager_stats_cb, params, parts, exclude_input_in_output,
                        terminate_req_id, max_draft_tokens)

        clock = reliable(parts.clock)
        control = WorkerControl(clock, params.hang_warning_s)
        loop = in_a_thread_of_its_own(lambda: build_loop(
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
            parts=replace(parts, clock=clock),
            heartbeat=control.heartbeat,
        ), undo=lambda loop: loop.backend.close())
        self._control = control
        self._loop = loop
        self._info = EngineInfo.of(loop.limits, loop.backend.info)
        self._worker = control.worker = threading.Thread(
            target=run_worker, args=(loop, control, params.idle_poll_interval_s),
            name="batch_manager worker", daemon=False)
        self._watchdog = threading.Thread(
            target=watch_worker, args=(control,), name="batch_manager watchdog", daemon=True)
        weakref.finalize(self, control.ask_to_abort).atexit = False
        try:
            list_worker(control)
            if params.hang_warning_s:
                start_with_enough_stack(self._watchdog)
            start_with_enough_stack(self._worker)
        except BaseException:
            control.ask_to_abort()
            if control.claim_the_loop():
                loop.backend.close()
                close_worker(control)
            else:    # an interrupt came when the worker was running already
                self._join(SECONDS_TO_STOP_AFTER_A_TIMEOUT)
            raise

    # ------------------------------------------------------------------ what a server asks

    def notify(self) -> None:
        """Wake an idle worker at once: there is something to get, or to stop."""
        self._check_process()
        self._control.wake.set()

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine: vocabulary, lengths, blocks, device, the checkpoint's end ids. After shutdown too."""
        return self._info

    @property
    def num_active_requests(self) -> int:
        """Accepted requests that have not had their final response."""
        self._check_process()
        return self._loop.intake.num_alive

    def health(self) -> dict[str, Any]:
        """How the worker is, from any thread, without waiting for it.

        state                  "RUNNING", "DRAINING", "FAILED" or "STOPPED"
        activity               what the worker does now: "loop", "idle", or the code it is inside that may hang: a
                               callback or hook ("get", "send", "poll", "stats", "trace", "after_responses",
                               "at_end"), "reading a request", "schedule_request", "model step", "memory_usage",
                               "figures"
        seconds_in_activity    since when
        is_hanging             longer than hang_warning_s without a heartbeat, and not idle
        failure                text of the error that failed the engine, or ""
        active_requests, queued_requests, iterations, final_responses
        errors                 error finals by code
        callback_failures      callback or hook -> calls that raised
        """
        self._check_process()
        return health_of(self._loop, self._control)

    # ------------------------------------------------------------------ the end

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> bool:
        """End the worker. The get callback is not called again.

        drain     True: finish what was accepted; False: answer it with SHUTDOWN
        timeout   seconds to drain, then the rest is answered with SHUTDOWN; None: as long as it takes

        Returns True once no callback will run again; False when called from inside a callback, of this manager or
        another, where it only asks, or when a callback or a step did not come back within the timeout and 5 more
        seconds. Idempotent, from any thread. A `with` block that ends in a forked child does nothing there; every other
        method raises in it.
        """
        self._check_process()
        timeout = checked_timeout(timeout)
        control = self._control
        control.ask_to_drain() if drain else control.ask_to_abort()
        if is_a_worker(threading.current_thread()):
            return False
        if not self._join(timeout):
            control.ask_to_abort()
            return self._join(SECONDS_TO_STOP_AFTER_A_TIMEOUT)
        return True

    def wait_until_terminate(self, timeout: float | None = None) -> bool:
        """Wait for the worker to end without asking it to, at most `timeout` seconds. True when it has.

        From inside a callback, of this manager or another, it does not wait: False.
        """
        self._check_process()
        if is_a_worker(threading.current_thread()):
            return False
        return self._join(checked_timeout(timeout))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a GptManager cannot be copied or pickled: it is one worker in one process")

    def __enter__(self) -> "GptManager":
        self._check_process()
        # A worker that `terminate_req_id` ended may have done so before the block began: this manager was not closed.
        if self._control.stopped.is_set and self._control.draining:
            raise ManagerClosedError("this manager was shut down", "a manager runs once", "make a new one")
        return self

    def __exit__(self, exception_type: type[BaseException] | None, exception: BaseException | None,
                 trace: TracebackType | None) -> None:
        if os.getpid() == self._control.process_id:    # a forked child leaves the block as it was leaving it
            self.shutdown(drain=exception_type is None)

    def _join(self, timeout: float | None) -> bool:
        """Wait for the worker. Not by Thread.join alone: up to Python 3.12 a Ctrl-C inside of it makes `threading` take
        the thread for one that has ended, and the interpreter would not wait for it any more."""
        control, seconds_left = self._control, float("inf") if timeout is None else timeout
        while not control.stopped.wait(min(max(seconds_left, 0), SECONDS_BETWEEN_LOOKS)) and self._worker.is_alive():
            seconds_left -= SECONDS_BETWEEN_LOOKS
            if seconds_left <= 0:
                return False
        self._worker.join()
        watchdog = self._watchdog    # ends with the worker, at once, if it was ever started and is not who asks
        if watchdog.ident is not None and watchdog is not threading.current_thread():
            watchdog.join(timeout)
        return True

    def _check_process(self) -> None:
        if os.getpid() != self._control.process_id:
            raise ManagerClosedError("this process was forked from the one that made the manager",
                                     "the worker thread lives in the parent only", "make a new manager after forking")
