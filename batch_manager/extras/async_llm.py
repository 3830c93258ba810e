"""Text generation on asyncio. Needs tokenizers: the extra `text`.

    async with await AsyncLLM.start("folder/of/a/model") as llm:
        async for piece in llm.stream("Emma smiled, and", max_tokens=48):
            print(piece, end="", flush=True)
        answer = await llm.chat([{"role": "user", "content": "Who is Emma?"}])
        completions = await llm.generate(["It is a truth", "The evening was"])
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import length_hint
from time import monotonic
from typing import Any, Self

from ..aio import AsyncEngine, RequestFailed, Stream
from ..aio.engine import check_asyncio
from ..aio.switchboard import WITHOUT_QUEUE_LIMITS
from ..config import Parts, TrtGptModelOptionalParams
from ..engine_info import EngineInfo
from ..errors import BatchManagerError, InvalidRequestError, ManagerClosedError
from ..names import FinishReason, SchedulerPolicy, TrtGptModelType
from .generated_text import GeneratedText
from .sampling import Sampling, check_end_ids, in_names_of_options
from .text_requests import Completion, Output, Prompt, Prompts, Timings, cache_of, check_adapter, each_prompt
from .turn_end import log_unused_turn_ends

__all__ = ["AsyncLLM", "AsyncTextPieces", "Completion", "RequestFailed", "Timings"]


class AsyncLLM:
    """A model with a text interface for coroutines: what LLM is for threads.

    Prompts and sampling options are those of LLM. Prompts that take more than a few milliseconds to tokenize are
    tokenized in a thread, off the event loop. May be used from several event loops and threads, as an AsyncEngine.

    The engine ends at `close`, at the end of an `async with` block, when the interpreter exits, or when the AsyncLLM is
    garbage-collected.
    """

    def __init__(self, engine: AsyncEngine | None = None, prompts: Prompts | None = None, *_: Any, **__: Any) -> None:
        """Use `start` to create an AsyncLLM."""
        if not isinstance(engine, AsyncEngine) or not isinstance(prompts, Prompts):
            raise TypeError("AsyncLLM() was called; a model is loaded off the event loop; "
                            "call `await AsyncLLM.start(folder)`")
        self._engine, self._prompts = engine, prompts

    @classmethod
    async def start(cls, model: str | os.PathLike, *, tokenizer: Any = None,
                    scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
                    parts: Parts | None = None, return_stats: Callable[[str], None] | None = None,
                    process: bool = False, adapters: Mapping[str, str | os.PathLike[str]] | None = None,
                    **params: Any) -> Self:
        """Load the model and its tokenizer in a thread, off the event loop, and start the worker.

        process   run the engine in its own process; see AsyncEngine.start
        The other arguments are those of LLM.

        Raises the exceptions of AsyncEngine.start, and ConfigError as LLM does.
        """
        optional_params = TrtGptModelOptionalParams(**{**WITHOUT_QUEUE_LIMITS, **cache_of(adapters), **params})
        check_asyncio("AsyncLLM.start()")
        prompts = await asyncio.to_thread(Prompts, model, tokenizer)
        engine = await AsyncEngine.start(model, TrtGptModelType.InflightFusedBatching, 1, scheduler_policy,
                                         return_stats, optional_params, parts, takes_all=True, process=process)
        try:
            check_end_ids(engine.info)
            for name, folder in (adapters or {}).items():
                await engine.load_adapter(name, folder)
        except BatchManagerError:
            await engine.close()
            raise
        await asyncio.to_thread(prompts.warm_up)
        await asyncio.to_thread(log_unused_turn_ends, prompts.source, prompts.tokenizer, engine.info.end_ids,
                                engine.info.vocab_size)
        return cls(engine, prompts)

    async def generate(self, prompts: Iterable[Prompt] | str, *, adapter: str | None = None,
                       **options: Any) -> list[Completion]:
        """Return one completion per prompt, in order. A single string is one prompt.

        adapter   name of the adapter to generate with; None: the model as it is

        If a prompt is invalid or a request fails, only its own completion has an `error`. Cancelling the task stops all
        requests of the call.

        Raises TypeError for an unknown option, or if `prompts` is neither a string nor an iterable of prompts;
        InvalidRequestError for an invalid `stop`, and for an unknown `adapter`; and ManagerClosedError after `close`.
        """
        sampling = Sampling.of(options)
        self._check_open()
        check_adapter(self._engine.adapters(), adapter)
        arrived, waiting = monotonic(), each_prompt(prompts)
        completions: list[Completion] = []

        async def complete() -> None:
            for prompt in waiting:
                completions.append(completion := Completion())
                try:
                    pieces = AsyncTextPieces(self._engine, completion, adapter)
                    await pieces.submit(self._prompts, prompt, sampling, arrived)
                    async for _ in pieces:
                        pass
                except InvalidRequestError as error:
                    completion.error = RequestFailed(error.code, str(error))
                except RequestFailed as error:
                    completion.error = error

        most_alive = 2 * self.info.max_batch_size
        alive = [asyncio.ensure_future(complete()) for _ in range(min(most_alive, length_hint(waiting, most_alive)))]
        try:
            await asyncio.gather(*alive)
        finally:
            for task in alive:                 # cancelled, or an exception of the iterable of prompts
                task.cancel()
        return completions

    def stream(self, prompt: Prompt, *, adapter: str | None = None, **options: Any) -> "AsyncTextPieces":
        """Return an async iterator over the output of one prompt, piece by piece.

        The request is submitted at once. A request with a long prompt, which is tokenized in a thread, is submitted
        when the first piece is awaited; only its options are checked at once.

        Raises InvalidRequestError for an invalid prompt or option, RequestFailed for what only the engine refuses, such
        as too long a prompt or an option out of its range, and the exceptions of `generate`.
        """
        sampling = Sampling.of(options)
        self._check_open()
        check_adapter(self._engine.adapters(), adapter)
        pieces = AsyncTextPieces(self._engine, Completion(), adapter)
        pieces.submit_soon(self._prompts, prompt, sampling, monotonic())
        return pieces

    async def chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
                   template_options: dict[str, Any] | None = None, **options: Any) -> Completion:
        """Format a conversation with the chat template, and return the model's answer to it. See LLM.chat.

        To stream an answer, pass the messages to `stream`.
        """
        prompt = await asyncio.to_thread(self._prompts.chat, messages, tools, template_options)
        (completion,) = await self.generate([prompt], **options)
        return completion

    @property
    def info(self) -> EngineInfo:
        """The engine's limits and model facts; see GptManager.info."""
        return self._engine.info

    @property
    def tokenizer(self) -> Any:
        return self._prompts.tokenizer

    def health(self) -> dict[str, Any]:
        """See AsyncEngine.health."""
        return self._engine.health()

    async def close(self, drain: bool = False, timeout: float | None = None) -> bool:
        """End the engine; see GptManager.shutdown. Idempotent."""
        return await self._engine.close(drain, timeout)

    async def __aenter__(self) -> Self:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._engine.is_closed:
            raise ManagerClosedError("the AsyncLLM is closed", "a closed AsyncLLM generates nothing", "make a new one")


class AsyncTextPieces:
    """An async iterator over the output of one prompt, in pieces of whole characters, without the stop string.

    `completion` has the output so far. It is complete when the iteration has ended. The request stops at `cancel` or
    `aclose`, when the reading task is cancelled, and when the iterator is dropped, for example by leaving the loop. One
    coroutine reads at a time.

    If the request is refused or fails, the iterator first returns the pieces generated before the failure. Then `anext`
    raises RequestFailed once.
    """

    def __init__(self, engine: AsyncEngine, completion: Completion, adapter: str | None) -> None:
        """Use AsyncLLM.stream."""
        self.completion, self._adapter = completion, adapter
        self._engine = engine
        self._stream: Stream | None = None
        self._output: Output | None = None
        self._later: tuple[Prompts, Prompt, Sampling, float] | None = None
        self._is_submitting = False

    def submit_soon(self, prompts: Prompts, prompt: Prompt, sampling: Sampling, arrived: float) -> None:
        """Submit a request, or keep it for the first `anext` if its prompt is long."""
        if not prompts.are_long(prompt):
            self._submit(*prompts.request(prompt, sampling, self._engine.info, self.completion), sampling, arrived)
            return
        sampling.check()
        with _names_of_options():
            self._engine.check(sampling.tensors([0], self._engine.info), **sampling.request_options)
        self._later = prompts, prompt, sampling, arrived

    async def submit(self, prompts: Prompts, prompt: Prompt, sampling: Sampling, arrived: float) -> None:
        """Submit a request, whose prompt is tokenized in a thread if it is long."""
        given = prompt, sampling, self._engine.info, self.completion
        prepared = (await asyncio.to_thread(prompts.request, *given) if prompts.are_long(prompt)
                    else prompts.request(*given))
        self._submit(*prepared, sampling, arrived)

    def _submit(self, tensors: dict[str, Any], text: GeneratedText, sampling: Sampling, arrived: float) -> None:
        options = {**sampling.request_options, "adapter": self._adapter, **self._engine.arrival_option(arrived)}
        with _names_of_options():
            self._stream = self._engine.stream(tensors, **options)
        self._output = Output(text, self.completion)

    def cancel(self) -> None:
        """Stop the request, and end this iterator. Idempotent. Call it on the event loop of the reader."""
        self._later = None
        if self._stream is not None and self._output is not None:
            self._stream.cancel()
            self._output.end(FinishReason.CANCELLED)

    async def aclose(self) -> None:
        """Like `cancel`."""
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._is_submitting:
            raise RuntimeError("another coroutine awaits these pieces; they have one reader at a time; "
                               "let one coroutine read and pass the pieces on")
        if self._later is not None:
            later, self._later, self._is_submitting = self._later, None, True
            try:
                await self.submit(*later)
            finally:
                self._is_submitting = False
        stream, output = self._stream, self._output
        if stream is None or output is None:                             # cancelled before it was submitted
            raise StopAsyncIteration
        try:
            while not output.is_over:
                piece = await self._next(stream, output)
                if piece:
                    return piece
        except asyncio.CancelledError:
            self.cancel()
            raise
        error, output.failure = output.failure, None
        if error is not None:
            raise error
        raise StopAsyncIteration

    async def _next(self, stream: Stream, output: Output) -> str:
        try:
            delta = await anext(stream)
        except StopAsyncIteration:                                       # `cancel` was called meanwhile
            return output.end(FinishReason.CANCELLED)
        except RequestFailed as error:
            return output.fail(error)
        if output.is_over:
            return ""
        piece = output.add(delta)
        if output.is_over and delta.finish_reason is FinishReason.NOT_FINISHED:
            stream.cancel()                    # after a stop string, the engine would continue
        return piece


@contextmanager
def _names_of_options() -> Iterator[None]:
    """Put the names of options in place of those of tensors in a RequestFailed."""
    try:
        yield
    except RequestFailed as error:
        raise RequestFailed(error.code, in_names_of_options(error.message)) from None
