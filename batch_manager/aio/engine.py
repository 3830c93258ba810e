"""AsyncEngine: a GptManager whose requests are async iterators."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Self

from ..config import Parts, TrtGptModelOptionalParams
from ..engine_info import EngineInfo
from ..errors import ConfigError, InvalidRequestError, ManagerClosedError
from ..gpt_manager import GptManager
from ..names import ErrorCode, FinishReason, SchedulerPolicy, TrtGptModelType
from ..requests.inference_request import InferenceRequest
from .engine_process import EngineProcess
from .mailbox import Delta, Mailbox, RequestFailed, Wants
from .messages import PackedRequest, packed
from .switchboard import Switchboard


class AsyncEngine:
    """Runs a model for the coroutines of a process.

        async with await AsyncEngine.start(folder) as engine:
            async for delta in engine.stream({"input_ids": ids, "request_output_len": 64}):
                ...
            result = await engine.generate({"input_ids": ids, "request_output_len": 64})

    Requests may come from any number of event loops, and from threads. Each event loop that waits for responses is
    woken once for all responses of an iteration. An engine without references ends, as a GptManager
    does.
    """

    def __init__(self, manager: GptManager | EngineProcess, switchboard: Switchboard, says_arrival: bool) -> None:
        """Engines are made by `start`.

        says_arrival   requests are told when they were handed over, because the engine's clock is time.monotonic
        """
        self._manager, self._switchboard, self._says_arrival = manager, switchboard, says_arrival

    @classmethod
    async def start(cls, model_path: str | os.PathLike[str] | None = None,
                    model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching, max_beam_width: int = 1,
                    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
                    return_batch_manager_stats_cb: Callable[[str], None] | None = None,
                    optional_params: TrtGptModelOptionalParams | None = None, parts: Parts | None = None, *,
                    takes_all: bool = False, process: bool = False) -> Self:
        """Load the model, off the event loop, and start the worker.

        The arguments are those of GptManager; its other callbacks are the engine's own. Responses hold generated tokens
        only. `return_batch_manager_stats_cb` and hooks in `parts` are called on the worker's thread.

        takes_all   hand each request to the engine at once: there it waits by priority and deadline, and is refused
                    with QUEUE_FULL where too many wait (max_queued_requests), as servers do. False: requests wait
                    here, in order and without a bound, until the engine has room for them
        process     run the engine in a process of its own: the host's threads and the engine's never wait for each
                    other's interpreter lock, and an engine that crashes fails its streams and nothing else. `parts` and
                    logits post-processors are pickled: they are classes and functions of importable modules. Hooks and
                    the statistics callback are called in this process, on a thread of the engine's
        Raises      what the constructor of GptManager raises
        """
        for name, value in (("process", process), ("takes_all", takes_all)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}", "True or False", f"set {name} to one of them")
        return await asyncio.to_thread(cls._make, model_path, model_type, max_beam_width, scheduler_policy,
                                       return_batch_manager_stats_cb, optional_params, parts, takes_all, process)

    @classmethod
    def _make(cls, model_path: Any, model_type: TrtGptModelType, max_beam_width: int,
              scheduler_policy: SchedulerPolicy, stats: Callable[[str], None] | None,
              optional_params: TrtGptModelOptionalParams | None, parts: Parts | None, takes_all: bool,
              process: bool) -> Self:
        switchboard, parts = Switchboard(takes_all), Parts() if parts is None else parts
        if process:
            return cls(EngineProcess(switchboard, {
                "model_path": model_path, "model_type": model_type, "max_beam_width": max_beam_width,
                "scheduler_policy": scheduler_policy, "optional_params": optional_params, "parts": parts,
            }, stats, takes_all), switchboard, parts.clock is None)
        if isinstance(parts, Parts):           # else the manager says so
            parts = switchboard.hooked_into(parts)
        return cls(GptManager(model_path, model_type, max_beam_width, scheduler_policy, switchboard.get,
                              switchboard.send, switchboard.poll, stats, optional_params, parts=parts,
                              exclude_input_in_output=True), switchboard, parts.clock is None)

    def stream(self, tensors: Mapping[str, Any], **options: Any) -> "Stream":
        """Hand a request over, now, and return the stream of what it generates.

        tensors, options   of an InferenceRequest, whose id the engine chooses. Its `arrival_time`, from which queue
                           time and `deadline_s` count, is now, unless `parts` has a clock
        Raises   RequestFailed for names that are none, and where the engine was closed. What is wrong with a value is
                 raised by the stream.
        """
        return Stream(self, self._hand_over(tensors, True, options))

    async def generate(self, tensors: Mapping[str, Any], **options: Any) -> Delta:
        """All that a request generates, in one piece.

        Raises   RequestFailed
        """
        return await anext(Stream(self, self._hand_over(tensors, False, options)))

    async def close(self, drain: bool = True, timeout: float | None = None) -> bool:
        """End the engine, off the event loop; see GptManager.shutdown. Streams that are left end with SHUTDOWN."""
        return await asyncio.to_thread(self._manager.shutdown, drain, timeout)

    @property
    def info(self) -> EngineInfo:
        """See GptManager.info."""
        return self._manager.info

    @property
    def num_wake_ups(self) -> int:
        """How often an event loop was woken so far."""
        return self._switchboard.num_wake_ups

    def health(self) -> dict[str, Any]:
        """See GptManager.health."""
        return self._manager.health()

    async def __aenter__(self) -> Self:
        self._manager.__enter__()
        return self

    async def __aexit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=exception_type is None)

    def _hand_over(self, tensors: Mapping[str, Any], is_streaming: bool, options: dict[str, Any]) -> Mailbox:
        for name in ("request_id", "is_streaming"):
            if name in options:
                raise TypeError(f"{name} is given; the engine chooses ids, stream() streams and generate() does not; "
                                "leave it out")
        switchboard = self._switchboard
        if switchboard.closed is not None:
            raise RequestFailed(switchboard.closed.code, str(switchboard.closed))
        if self._says_arrival:                 # it may wait here
            options = {"arrival_time": monotonic(), **options}
        request_id = switchboard.next_id()
        try:
            request = InferenceRequest(request_id, tensors, is_streaming=is_streaming, **options)
        except InvalidRequestError as error:
            raise RequestFailed(error.code, str(error)) from None
        if request.streaming is not None:      # what `generate` returns would be the first token
            raise RequestFailed(ErrorCode.INVALID_REQUEST, "the tensor streaming is given; stream() streams and "
                                "generate() does not; leave it out")
        mailbox = Mailbox(request_id, Wants.of(request))
        handed: InferenceRequest | PackedRequest = request
        if isinstance(self._manager, EngineProcess):
            try:
                handed = packed(request)
            except InvalidRequestError as error:
                raise RequestFailed(error.code, str(error)) from error
        switchboard.hand_over(mailbox, handed)
        self._manager.notify()
        return mailbox


class Stream:
    """What a request generates, as an async iterator of Delta. One coroutine reads it.

    Where the reader is slower than the engine, what it has not read is one delta. A request without a reader
    is stopped: the task was cancelled, the stream was dropped, or `cancel` was called. One that the engine had not
    taken yet never runs.

    `anext` raises RequestFailed where the request was refused or failed; it has the tokens so far. It raises
    RuntimeError while another coroutine waits for the stream, which goes on.
    """

    def __init__(self, engine: AsyncEngine, mailbox: Mailbox) -> None:
        self._engine, self._mailbox = engine, mailbox      # a reader keeps the engine
        self._tokens: list[int] = []
        self._is_over = False

    @property
    def request_id(self) -> int:
        return self._mailbox.request_id

    def cancel(self) -> None:
        """Stop the request, and end the stream. From any thread."""
        self._is_over = True
        mailbox, engine = self._mailbox, self._engine
        if not (mailbox.is_cancelled or mailbox.has_ended):
            engine._switchboard.stop(mailbox)
            with contextlib.suppress(ManagerClosedError):      # in a forked child
                engine._manager.notify()
        if mailbox.loop is not None:
            with contextlib.suppress(RuntimeError):            # the loop was closed: no task waits
                mailbox.loop.call_soon_threadsafe(mailbox.wake)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        mailbox = self._mailbox
        if mailbox.is_awaited and not self._is_over:
            raise RuntimeError("two coroutines read one stream at a time; one coroutine reads it; let one read and "
                               "hand the deltas on")
        mailbox.loop = asyncio.get_running_loop()
        while not self._is_over:
            taken = mailbox.take()
            if taken is None:
                self._engine._switchboard.check_process()
                try:
                    await mailbox.something()
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
