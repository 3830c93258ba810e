"""GptManager, the entry point of the API.

The constructor checks its arguments, builds the engine and starts the worker thread, which runs all callbacks.
"""

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from .adapter_values import AdapterInfo
from .arguments import Callbacks, EngineArguments, check_threads_are_real, checked_parts
from .build_rank import build_rank
from .clock import reliable
from .config import Parts, TrtGptModelOptionalParams
from .custom_parts import close_unused
from .engine_info import EngineInfo
from .errors import ConfigError, ManagerClosedError
from .interpreter_exit import is_a_worker, list_worker
from .kv.event_log import EventLog
from .kv_events import KvEvent
from .loading_thread import load_in_own_thread
from .loop.callbacks import (
    GetInferenceRequestsCallback,
    PollStopSignalCallback,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
)
from .loop.preparing import Preparing
from .names import SchedulerPolicy, TrtGptModelType
from .one_shot_event import check_drain, checked_timeout
from .requests.adapter_content import checked_task_id, read_adapter
from .requests.inference_request import InferenceRequest
from .thread_stack import start_with_enough_stack
from .worker import SECONDS_BETWEEN_LOOKS, Command, WorkerControl, close_worker, health_of, run_worker, watch_worker

SECONDS_TO_STOP_AFTER_A_TIMEOUT = 5.0
MOST_BYTES = 2**62    # of an adapter that the host program loads: its cache decides
Result = TypeVar("Result")
_REQUIRED: Any = object()
_DEFAULT_PARAMS, _DEFAULT_PARTS = TrtGptModelOptionalParams(), Parts()


class GptManager:
    """Runs a GPT-style model with in-flight batching, driven by four callbacks.

    The constructor starts one worker thread. Each iteration of its loop gets requests, schedules, runs a step, sends
    responses, polls stop signals and reports statistics. All callbacks run on this thread, one at a time, and may start
    before the constructor has returned. Every accepted request gets exactly one final response, whatever fails inside
    this process.

    model_path                      folder of a Hugging Face checkpoint: config.json and *.safetensors; or a .gguf file
                                    (of a model in shards, the first file)
    model_type                      batching scheme
    max_beam_width                  largest beam width of any request, 1 to 1,024
    scheduler_policy                which requests may start when KV cache blocks are short
    get_inference_requests_cb       (max_num_requests: int) -> iterable of InferenceRequest; called every iteration,
                                    also for 0 requests; -1 means unbounded. An iteration decides at most
                                    max_admissions_per_iteration items. The callback is not called while items of
                                    its last call are undecided. Return a list. Of an iterable that has neither a length
                                    nor a length hint, like a generator, the engine reads at most that many items,
                                    drops the rest and logs a warning
    send_response_cb                (request_id, tensors: list[NamedTensor], final_response: bool, error: str) -> None
    poll_stop_signal_cb             () -> set of request ids to stop
    return_batch_manager_stats_cb   (json: str) -> None, once per iteration that had an active request or refused a
                                    request
    optional_params                 settings with a default
    terminate_req_id                a request with this id ends the worker once all other requests have ended
    max_draft_tokens                most draft tokens of a sequence that a step verifies, 0 to 64, as far as the backend
                                    allows; None or 0: what optional_params.speculative_config needs
    exclude_input_in_output         responses that are not streamed have generated tokens only
    parts                           replacements for parts of the engine
    trt_engine_path                 alias of model_path

    Raises ConfigError and its subclasses (ModelLoadError, InsufficientMemoryError, ...) before the worker starts, and
    ManagerClosedError while the interpreter exits. An interrupt of the constructor, such as Ctrl-C, interrupts the
    loading and is raised once the loading has stopped.

    With `parallel_config`, each rank constructs a manager with equal arguments. The ranks other than 0 either pass
    their callbacks, which are then called with the same requests and responses, or None for get and send.
    `ParallelConfig` and docs/ranks.md have the rest.

    Dropping the last reference to a manager ends it, like `shutdown(drain=False)`. The worker refers to the callbacks.
    If the callbacks are methods of an object that refers to the manager, object and manager live until `shutdown`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        model_type: TrtGptModelType = _REQUIRED,
        max_beam_width: int = _REQUIRED,
        scheduler_policy: SchedulerPolicy = _REQUIRED,
        get_inference_requests_cb: GetInferenceRequestsCallback | None = _REQUIRED,
        send_response_cb: SendResponseCallback | None = _REQUIRED,
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
            raise ConfigError("this manager was constructed already", "expected one call of __init__",
                              "make another manager")
        if trt_engine_path is not None:
            if model_path is not None:
                raise ConfigError("model_path and trt_engine_path are both set", "they are aliases",
                                  "leave one of them out")
            model_path = trt_engine_path
        required = {"model_type": model_type, "max_beam_width": max_beam_width, "scheduler_policy": scheduler_policy,
                    "get_inference_requests_cb": get_inference_requests_cb, "send_response_cb": send_response_cb}
        missing = [name for name, value in required.items() if value is _REQUIRED]
        if missing:
            raise TypeError(f"GptManager() is missing {', '.join(missing)}")
        check_threads_are_real()
        arguments = EngineArguments(
            model_path=model_path, model_type=model_type, max_beam_width=max_beam_width,
            scheduler_policy=scheduler_policy,
            optional_params=_DEFAULT_PARAMS if optional_params is None else optional_params,
            terminate_req_id=terminate_req_id, max_draft_tokens=0 if max_draft_tokens is None else max_draft_tokens,
            exclude_input_in_output=exclude_input_in_output)
        params = arguments.optional_params
        callbacks = Callbacks(get_inference_requests_cb, send_response_cb, poll_stop_signal_cb,
                              return_batch_manager_stats_cb,
                              may_follow=params.parallel_config is not None and params.parallel_config.num_ranks > 1)
        parts = checked_parts(parts)

        clock = reliable(parts.clock)
        control = WorkerControl(clock, params.hang_warning_s)
        loop = load_in_own_thread(
            lambda: build_rank(arguments, callbacks, replace(parts, clock=clock), control.heartbeat),
            undo=lambda loop: close_unused(loop.backend))
        self._control = control
        self._loop = loop
        self._model_path = arguments.model_path
        if loop.wake is not None:    # a rank that waits for rank 0
            control.wake = loop.wake
        control.listen_to(loop.ranks)
        if loop.preparing is not None:
            loop.preparing.wake = control.wake.set
        if loop.stored is not None:
            loop.stored.wake = control.wake.set
        self._info = EngineInfo.of(loop.limits, loop.backend.info)
        control.not_compiled, control.not_captured = self._info.not_compiled, self._info.not_captured
        control.absent = dict(self._info.absent)
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
                close_unused(loop.backend)
                close_worker(control)
            else:    # the worker was already running when an interrupt came
                self._join(SECONDS_TO_STOP_AFTER_A_TIMEOUT)
            raise

    # ------------------------------------------------------------------ while the engine runs

    def notify(self) -> None:
        """Wake an idle worker at once. Call the method when there is a request to get or to stop."""
        self._check_process()
        self._control.wake.set()

    def check(self, request: InferenceRequest) -> None:
        """Raise the error with which the engine would refuse this request, without submitting it.

        For hosts in which requests wait: a request that can never run need not wait for its refusal. Can be called from
        any thread and any number of times. Does not check what other requests and the clock decide: a duplicate id, a
        full queue, a passed deadline.

        Raises InvalidRequestError and RequestTooLargeError; ManagerClosedError in a forked child.
        """
        self._check_process()
        self._loop.check(request)

    def load_adapter(self, task_id: int, adapter: str | os.PathLike[str] | Mapping[str, Any]) -> AdapterInfo:
        """Load a LoRA adapter, so that requests can name it with the tensor `lora_task_id` alone.

        task_id   an integer in 0..2^64-1
        adapter   folder of an adapter that the peft library wrote; or a mapping with the tensors `lora_weights` and
                  `lora_config`, as in a request

        The adapter stays in the host cache until `forget_adapter`. Reads and checks it on the caller's thread, and
        waits for the end of the worker's iteration. Can be called from any thread, also inside a callback.

        Raises ModelLoadError for a broken folder, InvalidRequestError for wrong tensors and if the id names other
        content; RequestTooLargeError and QueueFullError if the cache is too small or full of adapters in use;
        ConfigError without peft_cache_config; ManagerClosedError.
        """
        self._check_process()
        number, preparing = checked_task_id(task_id), self._preparing()
        if not isinstance(adapter, Mapping):
            if self._model_path is None:
                raise ConfigError("the adapter is a folder and the manager has no model_path",
                                  "the names in a folder are those of the model's files",
                                  "pass the tensors lora_weights and lora_config")
            from .adapters import read_peft_folder

            read = read_peft_folder(adapter, self._model_path)
            adapter = {"lora_weights": read.lora_weights, "lora_config": read.lora_config}
        content = preparing.check(read_adapter(adapter, MOST_BYTES, preparing.largest))
        stored = self._on_worker(lambda: preparing.store.put(number, content, keep=True))
        return AdapterInfo.of(number, stored)

    def take_kv_events(self) -> list[KvEvent]:
        """Return the events of the prefix cache since the last call, at most KvCacheConfig.event_buffer_max_size, the
        newest ones. A gap in `event_id` means that older ones were dropped.

        Can be called from any thread. Raises ConfigError without event_buffer_max_size; ManagerClosedError in a forked
        child.
        """
        self._check_process()
        if not (events := self._kv_events()).keeps:
            raise ConfigError("KvCacheConfig.event_buffer_max_size is 0", "no events are kept",
                              "set it to the number of events to keep")
        return events.take_kept()

    def kv_snapshot(self) -> list[KvEvent]:
        """Return events that say what the prefix cache can find now: "created", and "stored" for all blocks.

        For subscribers that come late: all have the `event_id` of the newest event that they replace. Waits for the end
        of the worker's iteration. Can be called from any thread, also inside a callback.

        Raises ConfigError if the engine makes no events; ManagerClosedError.
        """
        self._check_process()
        events = self._kv_events()
        return list(self._on_worker(events.snapshot))

    def _kv_events(self) -> EventLog:
        if self._loop.kv_events is None:
            raise ConfigError("the engine makes no KV events",
                              "it has no block reuse, or neither Parts.kv_events nor event_buffer_max_size",
                              "set enable_block_reuse and one of these; with several ranks, ask rank 0")
        return self._loop.kv_events

    def forget_adapter(self, task_id: int) -> bool:
        """Free the id of an adapter at once, for later requests and other content. Returns whether it was known.

        Requests that use the adapter go on, and its content goes with the last of them. Can be called from any thread.

        Raises InvalidRequestError for a wrong id; ConfigError without peft_cache_config; ManagerClosedError.
        """
        self._check_process()
        number, preparing = checked_task_id(task_id), self._preparing()
        return self._on_worker(lambda: preparing.store.forget(number))

    def _preparing(self) -> Preparing:
        preparing = self._loop.preparing
        if preparing is None and self._loop.ranks is not None and self._loop.ranks.rank > 0:
            raise ConfigError(f"this process is rank {self._loop.ranks.rank}", "rank 0 has the cache for adapters",
                              "load and forget adapters on rank 0")
        if preparing is None:
            raise ConfigError("the engine has no cache for adapters", "peft_cache_config is None",
                              "set TrtGptModelOptionalParams.peft_cache_config")
        return preparing

    def _on_worker(self, function: Callable[[], Result]) -> Result:
        """Call a function between two iterations of the worker, or at once inside a callback, and return its result."""
        control = self._control
        if control.stopped.is_set:
            raise ManagerClosedError("the manager was shut down", "its worker has ended", "make a new manager")
        command = Command(function)
        if threading.current_thread() is control.worker:
            command.run()
        else:
            control.commands.append(command)
            control.wake.set()
        return command.result(control)

    @property
    def info(self) -> EngineInfo:
        """Vocabulary, lengths, blocks, device and end ids of the engine. Also available after shutdown."""
        return self._info

    @property
    def num_active_requests(self) -> int:
        """The number of accepted requests without a final response, including waiting requests."""
        self._check_process()
        return self._loop.num_alive

    def health(self) -> dict[str, Any]:
        """Return the state of the worker, without waiting for the worker. Can be called from any thread.

        state                  "RUNNING", "DRAINING", "FAILED" or "STOPPED"
        activity               the worker's current activity: "loop", "idle", or foreign code that may hang: a callback
                               or hook ("get", "send", "poll", "stats", "trace", "after_responses", "at_end"),
                               "reading a request", "schedule_request", "model step", or a method of the backend
                               ("memory_usage", "figures")
        seconds_in_activity    seconds since the activity began
        is_hanging             whether the current activity, other than "idle", has lasted more than hang_warning_s
        failure                text of the error that failed the engine, or ""
        active_requests, queued_requests, iterations, final_responses   counts
        errors                 error code -> number of final responses with this code
        unaddressable_items    number of items of the get callback without a usable id; no response can be sent for them
        callback_failures      callback, hook, or method of the backend -> number of calls that raised or returned an
                               unusable value
        not_compiled           as in `info`: why steps on a CPU do not run as compiled code, which is faster
        not_captured           as in `info`: why steps on a GPU are not replayed as graphs, which is faster
        absent                 as in `info`: form of a step that the engine lacks -> the reason
        ranks                  on rank 0: each other rank -> its "state" ("RUNNING", "STOPPED" or "LOST") and
                               "seconds_since_heard"; on another rank: those of rank 0; {} with one rank
        """
        self._check_process()
        return health_of(self._loop, self._control)

    # ------------------------------------------------------------------ the end

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> bool:
        """End the worker. The get callback is not called again.

        drain     True: finish the accepted requests; False: answer them with SHUTDOWN
        timeout   seconds to drain; the requests that are left get SHUTDOWN. None: no limit; a negative one counts as 0

        Returns True once no callback will run again. Returns False if a callback or a step does not return within the
        timeout and 5 more seconds. Inside a callback of this or another manager, the method only requests the shutdown
        and returns False. Idempotent. Can be called from any thread. In a forked child, leaving the `with` block does
        nothing, and all methods raise ManagerClosedError.
        """
        self._check_process()
        check_drain(drain)
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
        """Wait up to `timeout` seconds for the worker to end, without requesting a shutdown. Returns whether the worker
        has ended.

        Inside a callback of this or another manager, the method returns False at once.
        """
        self._check_process()
        if is_a_worker(threading.current_thread()):
            return False
        return self._join(checked_timeout(timeout))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a GptManager cannot be copied or pickled: it owns a thread of this process")

    def __enter__(self) -> "GptManager":
        self._check_process()
        # `terminate_req_id` may have ended the worker before the block began; that is not a shutdown.
        if self._control.stopped.is_set and self._control.draining:
            raise ManagerClosedError("this manager was shut down", "a manager runs once", "make a new one")
        return self

    def __exit__(self, exception_type: type[BaseException] | None, exception: BaseException | None,
                 trace: TracebackType | None) -> None:
        if os.getpid() == self._control.process_id:    # a forked child leaves the block without a shutdown
            self.shutdown(drain=exception_type is None)

    def _join(self, timeout: float | None) -> bool:
        """Wait for the worker and return whether it has ended.

        Thread.join alone does not suffice. Up to Python 3.12, a Ctrl-C inside Thread.join marks the thread as ended,
        and the interpreter no longer waits for the thread.
        """
        control, seconds_left = self._control, float("inf") if timeout is None else timeout
        while not control.stopped.wait(min(max(seconds_left, 0), SECONDS_BETWEEN_LOOKS)) and self._worker.is_alive():
            seconds_left -= SECONDS_BETWEEN_LOOKS
            if seconds_left <= 0:
                return False
        self._worker.join()
        watchdog = self._watchdog    # ends at once, with the worker
        if watchdog.ident is not None and watchdog is not threading.current_thread():
            watchdog.join(timeout)
        return True

    def _check_process(self) -> None:
        if os.getpid() != self._control.process_id:
            raise ManagerClosedError("this process was forked from the one that made the manager",
                                     "the worker thread exists in the parent only", "make a new manager after forking")
