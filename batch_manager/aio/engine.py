"""AsyncEngine: a GptManager whose requests are async iterators."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Never, Self

from ..adapter_values import AdapterInfo
from ..arguments import Callbacks, EngineArguments, by_name, checked_parts
from ..config import Parts, TrtGptModelOptionalParams, unknown_option
from ..engine_info import EngineInfo
from ..errors import AdapterNotCachedError, ConfigError, InvalidRequestError, ManagerClosedError, RequestError
from ..gpt_manager import GptManager
from ..kv_events import KvEvent
from ..names import ErrorCode, FinishReason, SchedulerPolicy, TrtGptModelType
from ..requests.inference_request import InferenceRequest, request_options, unknown_request_option
from .adapter_names import AdapterNames, Lease
from .engine_process import EngineProcess
from .mailbox import Delta, Mailbox, RequestFailed, Wants
from .messages import PackedRequest, packed
from .switchboard import WITHOUT_QUEUE_LIMITS, Switchboard


class AsyncEngine:
    """An engine whose requests are awaited by coroutines.

        async with await AsyncEngine.start(folder) as engine:
            request = {"input_ids": ids, "request_output_len": 64, "end_id": engine.info.end_ids or None}
            async for delta in engine.stream(request):
                ...
            result = await engine.generate(request)

    Requests may be submitted from several event loops and threads. An iteration wakes each waiting event loop once, for
    all responses to that loop. An engine that is garbage-collected ends, like a GptManager.
    """

    def __init__(self, manager: GptManager | EngineProcess | None = None, switchboard: Switchboard | None = None,
                 sets_arrival_time: bool = True, *_: Any, **__: Any) -> None:
        """Use `start` to create an engine.

        sets_arrival_time   set `arrival_time` of each request; False if the engine's clock is not time.monotonic
        """
        if not isinstance(switchboard, Switchboard) or not isinstance(manager, GptManager | EngineProcess):
            raise TypeError("AsyncEngine() was called; a model is loaded off the event loop; "
                            "call `await AsyncEngine.start(folder)`")
        self._manager: GptManager | EngineProcess = manager
        self._switchboard, self._sets_arrival_time = switchboard, sets_arrival_time
        self._adapters = AdapterNames(manager)

    @classmethod
    async def start(cls, model_path: str | os.PathLike[str] | None = None,
                    model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching, max_beam_width: int = 1,
                    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
                    return_batch_manager_stats_cb: Callable[[str], None] | None = None,
                    optional_params: TrtGptModelOptionalParams | None = None, parts: Parts | None = None, *,
                    takes_all: bool = False, process: bool = False, **unknown: Never) -> Self:
        """Load the model in a thread, off the event loop, and start the worker.

        The method takes the arguments of GptManager, except for the callbacks that the engine itself implements.
        Responses contain generated tokens only. The worker's thread calls `return_batch_manager_stats_cb` and the hooks
        in `parts`.

        takes_all   what happens if more requests wait than max_queued_requests or max_queued_tokens allow. True: the
                    engine refuses further ones with QUEUE_FULL; use this in servers. False: these two limits do not
                    apply unless they are set to another value than their default. Either way, waiting requests run in
                    the order of their priorities, and neither a refusal nor a deadline waits for room
        process     run the engine in its own process. Host and engine then have separate interpreter locks, and a crash
                    of the engine fails its streams only. Logits post-processors are pickled, and so is `parts`
                    without its hooks. Their classes and functions must therefore be in importable modules, and so must
                    the classes of register_model, which the engine process imports by name. Hooks and the statistics
                    callback run in the process that calls `start`, on an internal thread
        Raises      the errors of the constructor of GptManager
        """
        for name in unknown:
            raise TypeError(unknown_option(name, "optional_params"))
        for name, value in (("process", process), ("takes_all", takes_all)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}", "expected a bool", f"pass {name}=True or {name}=False")
        check_asyncio("AsyncEngine.start()")
        arguments = EngineArguments(
            model_path=model_path, model_type=model_type, max_beam_width=max_beam_width,
            scheduler_policy=scheduler_policy,
            optional_params=TrtGptModelOptionalParams() if optional_params is None else optional_params,
            exclude_input_in_output=True)
        config = arguments.optional_params.parallel_config
        if process and config is not None and config.num_ranks > 1:
            raise ConfigError(f"process is True, and parallel_config has {config.num_ranks} ranks",
                              "each rank is a process that the launcher started", "leave process out")
        if not takes_all:
            arguments = replace(arguments, optional_params=_without_queue_limits(arguments.optional_params))
        switchboard = Switchboard()
        callbacks = Callbacks(switchboard.get, switchboard.send, switchboard.poll, return_batch_manager_stats_cb)
        return await asyncio.to_thread(cls._make, arguments, switchboard, callbacks, checked_parts(parts), process)

    @classmethod
    def _make(cls, arguments: EngineArguments, switchboard: Switchboard, callbacks: Callbacks, parts: Parts,
              process: bool) -> Self:
        manager: GptManager | EngineProcess
        if process:
            manager = EngineProcess(switchboard, arguments, parts, callbacks.return_batch_manager_stats_cb)
        else:
            manager = GptManager(**by_name(arguments), **by_name(callbacks), parts=switchboard.hooked_into(parts))
        return cls(manager, switchboard, parts.clock is None)

    def stream(self, tensors: Mapping[str, Any], **options: Any) -> "Stream":
        """Submit a request immediately and return the stream of its output.

        tensors, options   arguments of InferenceRequest; the engine chooses the id. The default of `arrival_time`
                           is the time of this call. If `parts` has a clock, the default of `arrival_time` is the
                           time at which the engine takes the request. The option `adapter` is the name of a loaded
                           adapter, in place of the tensor `lora_task_id`; None: no adapter
        Raises   RequestFailed for a request that can never run: with an unknown tensor name, an invalid value, too long
                 a prompt, the tensor `streaming`; for one that cannot be pickled (with `process`), and if the engine is
                 closed. What other requests and the clock decide, such as a full queue, raises in the stream
        """
        (stream,) = self._submit([self._prepare(tensors, True, options)])
        return stream

    def streams(self, requests: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list["Stream"]:
        """Submit several requests together, given as (tensors, options), and return their streams.

        The worker gets them at the same time, so those that a full queue refuses are refused before any has a token.

        Raises RequestFailed as `stream`, without submitting any of them.
        """
        prepared: list[tuple[Mailbox, InferenceRequest | PackedRequest]] = []
        try:
            for tensors, options in requests:
                prepared.append(self._prepare(tensors, True, dict(options)))
        except BaseException:
            for mailbox, _ in prepared:
                mailbox.close()
            raise
        return self._submit(prepared)

    async def generate(self, tensors: Mapping[str, Any], **options: Any) -> Delta:
        """Submit a request and return its whole output. Takes the arguments of `stream`. Raises RequestFailed."""
        (stream,) = self._submit([self._prepare(tensors, False, options)])
        return await anext(stream)

    def check(self, tensors: Mapping[str, Any], **options: Any) -> None:
        """Raise RequestFailed if `stream` would refuse the request, without submitting it. Takes its arguments."""
        lease, given = self._leased(tensors, options)
        try:
            self._request(given, True, options)
        finally:
            if lease is not None:
                lease.end()

    async def load_adapter(self, name: str, adapter: str | os.PathLike[str] | Mapping[str, Any], *,
                           replaces: bool = False) -> AdapterInfo:
        """Load a LoRA adapter in a thread, off the event loop, for requests with the option `adapter=name`.

        adapter    folder that the peft library wrote, or the tensors `lora_weights` and `lora_config`
        replaces   whether the name may be in use. Requests that have the adapter of that name go on with it, and later
                   ones get the new one

        Raises ConfigError without peft_cache_config, and for a name in use; the other errors of
        GptManager.load_adapter.
        """
        return await asyncio.to_thread(self._adapters.load, name, adapter, replaces)

    async def unload_adapter(self, name: str) -> None:
        """Free a name and its adapter. Requests that have the adapter go on.

        Raises ConfigError for an unknown name.
        """
        await asyncio.to_thread(self._adapters.unload, name)

    def adapters(self) -> dict[str, AdapterInfo]:
        """Return the facts of the loaded adapters by name."""
        return self._adapters.infos

    def adapter_name(self, task_id: int) -> str | None:
        """Return the name under which `load_adapter` loaded the adapter of a task id, also after it was unloaded."""
        return self._adapters.name_of(task_id)

    async def kv_snapshot(self) -> list[KvEvent]:
        """See GptManager.kv_snapshot. Waits in a thread, off the event loop. Raises its errors."""
        return await asyncio.to_thread(self._manager.kv_snapshot)

    async def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """End the engine in a thread, off the event loop; see GptManager.shutdown for the arguments and the result.

        Streams that are still open at the end raise RequestFailed with SHUTDOWN.
        """
        return await asyncio.to_thread(self._manager.shutdown, drain, timeout)

    @property
    def info(self) -> EngineInfo:
        """See GptManager.info."""
        return self._manager.info

    @property
    def is_closed(self) -> bool:
        """Whether the engine has ended and accepts no requests."""
        return self._switchboard.closed is not None

    @property
    def num_wake_ups(self) -> int:
        """The number of times that the engine woke an event loop."""
        return self._switchboard.num_wake_ups

    def health(self) -> dict[str, Any]:
        """See GptManager.health."""
        return self._manager.health()

    async def __aenter__(self) -> Self:
        self._manager.__enter__()
        return self

    async def __aexit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=exception_type is None)

    def _request(self, tensors: Mapping[str, Any], is_streaming: bool, options: dict[str, Any]) -> InferenceRequest:
        """Make a request. Raises RequestFailed if it can never run."""
        for name, way_out in (("request_id", "leave it out"), ("is_streaming", "call stream() for a stream, generate() "
                                                               "for the whole output")):
            if name in options:
                raise TypeError(f"{name} was given; the engine sets it; {way_out}")
        switchboard = self._switchboard
        if switchboard.closed is not None:
            raise RequestFailed(switchboard.closed.code, str(switchboard.closed))
        options = {name: value for name, value in options.items() if name != "adapter"}
        try:
            request = InferenceRequest(switchboard.next_id(), tensors, is_streaming=is_streaming,
                                       **{**self.arrival_option(monotonic()), **options})
        except InvalidRequestError as error:
            raise RequestFailed(error.code, str(error)) from None
        except TypeError:
            for name in options:
                if name not in request_options():
                    raise TypeError(unknown_request_option(name)) from None
            raise
        if request.streaming is not None:      # `generate` would return the first token only
            raise RequestFailed(ErrorCode.INVALID_REQUEST, "the tensor 'streaming' was given; stream() streams and "
                                "generate() does not; leave it out")
        try:
            self._manager.check(request)
        except RequestError as error:
            raise RequestFailed(error.code, str(error)) from None
        return request

    def _leased(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Lease | None, Mapping[str, Any]]:
        """Return a lease of the option `adapter`, and the tensors with its id. Raises RequestFailed."""
        name = options.get("adapter")
        if name is None:
            return None, tensors
        error: RequestError
        if "lora_task_id" in tensors:
            error = InvalidRequestError(f"adapter is {name!r}"[:200] + ", and the tensor 'lora_task_id' is given",
                                        "a request has one adapter", "leave one of them out")
        else:
            lease = self._adapters.lease(name)
            if lease is not None:
                return lease, {**tensors, "lora_task_id": lease.task_id}
            error = AdapterNotCachedError(f"there is no adapter {name!r}"[:200], "expected the name of a loaded one",
                                          "load it first")
        raise RequestFailed(error.code, str(error))

    def arrival_option(self, arrived: float) -> dict[str, float]:
        """The option `arrival_time` of a request that arrived at `arrived`, in seconds of time.monotonic().

        Empty if the engine has another clock.
        """
        return {"arrival_time": arrived} if self._sets_arrival_time else {}

    def _prepare(self, tensors: Mapping[str, Any], is_streaming: bool,
                 options: dict[str, Any]) -> tuple[Mailbox, InferenceRequest | PackedRequest]:
        """Make a request and its mailbox. Raises RequestFailed if it can never run."""
        lease, given = self._leased(tensors, options)
        try:
            request = self._request(given, is_streaming, options)
            mailbox = Mailbox(request.request_id, Wants.of(request), _running_loop())
            submitted: InferenceRequest | PackedRequest = request
            if isinstance(self._manager, EngineProcess):
                submitted = packed(request)
        except BaseException as error:
            if lease is not None:
                lease.end()
            if isinstance(error, InvalidRequestError):
                raise RequestFailed(error.code, str(error)) from error
            raise
        mailbox.lease = lease
        return mailbox, submitted

    def _submit(self, prepared: Sequence[tuple[Mailbox, InferenceRequest | PackedRequest]]) -> list["Stream"]:
        """Submit requests, which the worker gets together, and return their streams."""
        self._switchboard.submit(prepared)
        self._manager.notify()
        return [Stream(self, mailbox) for mailbox, _ in prepared]


def check_asyncio(what: str) -> None:
    """Raise ConfigError if no asyncio event loop runs on this thread."""
    if _running_loop() is None:
        raise ConfigError(f"{what} was awaited, and no asyncio event loop runs on this thread",
                          "this interface is for asyncio, not for trio or curio",
                          "run it with asyncio.run(), or with anyio on its asyncio backend; under trio, call an LLM in "
                          "threads: await trio.to_thread.run_sync(...)")


def _without_queue_limits(params: TrtGptModelOptionalParams) -> TrtGptModelOptionalParams:
    default = TrtGptModelOptionalParams()
    changes: dict[str, Any] = {name: limit for name, limit in WITHOUT_QUEUE_LIMITS.items()
                               if getattr(params, name) == getattr(default, name)}
    return replace(params, **changes)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Stream:
    """The output of a request, as an async iterator of Delta for one coroutine.

    If the reader is slower than the engine, unread responses are merged into one delta. The request stops when the
    reading task is cancelled, the stream is garbage-collected, or `cancel` is called. If the engine has not taken the
    request by then, the request never runs.

    `anext` raises RequestFailed, with the tokens so far, if the request is refused or fails. It raises RuntimeError
    while another coroutine awaits the stream. The other coroutine continues.
    """

    def __init__(self, engine: AsyncEngine, mailbox: Mailbox) -> None:
        self._engine, self._mailbox = engine, mailbox      # keep the engine alive while a reader exists
        self._tokens: list[int] = []
        self._is_over = False

    @property
    def request_id(self) -> int:
        return self._mailbox.request_id

    def cancel(self) -> None:
        """Stop the request and end the stream. Can be called from any thread."""
        self._is_over = True
        mailbox, engine = self._mailbox, self._engine
        if not (mailbox.is_cancelled or mailbox.has_ended):
            engine._switchboard.stop(mailbox)
            with contextlib.suppress(ManagerClosedError):      # in a forked child
                engine._manager.notify()
        if mailbox.loop is not None:
            with contextlib.suppress(RuntimeError):            # the loop is closed: no task waits
                mailbox.loop.call_soon_threadsafe(mailbox.wake)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        mailbox = self._mailbox
        if mailbox.is_awaited and not self._is_over:
            raise RuntimeError("another coroutine awaits this stream; a stream has one reader at a time; let "
                               "one coroutine read and pass the deltas on")
        try:
            mailbox.loop = asyncio.get_running_loop()
        except RuntimeError:
            check_asyncio("a stream")
            raise
        while not self._is_over:
            taken = mailbox.take()
            if taken is None:
                self._engine._switchboard.check_process()
                try:
                    await mailbox.arrival()
                except BaseException:
                    self.cancel()
                    raise
            elif isinstance(taken, str):
                self._is_over = True
                raise RequestFailed(*ErrorCode.of(taken), self._tokens)
            else:
                self._tokens += taken.tokens
                self._is_over = taken.finish_reason is not FinishReason.NOT_FINISHED
                return taken
        raise StopAsyncIteration

    def __del__(self) -> None:
        mailbox = getattr(self, "_mailbox", None)
        if mailbox is not None and not (mailbox.is_cancelled or mailbox.has_ended):
            self._engine._switchboard.stop(mailbox)
