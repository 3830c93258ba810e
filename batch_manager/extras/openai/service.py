"""OpenAIService: bodies in, answers out, over one AsyncEngine."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import Any
from uuid import uuid4

import orjson

from ...aio import AsyncEngine, RequestFailed, Stream
from ...aio.mailbox import Delta
from ...errors import BatchManagerError, ConfigError
from ...names import FinishReason
from ...responses.perf_metrics import PerfMetrics
from ...responses.tensors import RESPONSE_TENSORS
from ..chat_template import chat_prompt
from ..generated_text import GeneratedText
from ..gguf_tokenizer import is_gguf_file
from ..tokenizer import encode, load_tokenizer
from .errors import OpenAIError, refused
from .fields import WORD, Asked, read_body
from .prompt_log_probs import prompt_log_probs
from .shapes import DONE, Shapes, usage
from .token_names import TokenNames

LONG_BODY = 8192    # bytes: to read more may take longer than a token of the other requests does
CONTEXT_LOGITS = RESPONSE_TENSORS.index("context_logits")


class OpenAIService:
    """What a server does for /v1/completions, /v1/chat/completions, /v1/models and /health.

    engine    an AsyncEngine; with takes_all=True its bounds answer 429, and priorities hold among those that wait
    folder    of the model, with its tokenizer and chat template; or a `.gguf` file
    names     of the model, as clients may call it; the first one is told. Empty: the folder's
    tokenizer   None: the folder's
    observe   called with the timings of each request that ended and the number of its tokens, as
              PrometheusStatistics.observe is; not after a stop string

    `is_draining` may be set: new requests are then answered 503, and those that run go on.

    Raises ConfigError where there is no tokenizer.
    """

    def __init__(self, engine: AsyncEngine, folder: str | os.PathLike, names: Sequence[str] = (),
                 tokenizer: Any = None, observe: Callable[[PerfMetrics, int], None] | None = None) -> None:
        self.engine, self.folder, self.observe = engine, os.fspath(folder), observe
        self.names = list(names) or [os.path.basename(os.path.abspath(self.folder))]
        self.tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
        self.token_names = TokenNames(self.tokenizer)
        self.is_draining = False
        self._started = int(time())
        self._guided: Any = None

    async def accept(self, body: bytes, is_chat: bool) -> "Answer":
        """Read a body and hand its requests to the engine.

        Raises OpenAIError, and then nothing was handed over. What the engine refuses is raised by the answer.
        """
        arrived = monotonic()
        if self.is_draining:
            raise OpenAIError(503, "the server is draining", code="shutdown")
        try:
            if len(body) > LONG_BODY:        # other requests go on meanwhile
                asked, prompts = await asyncio.to_thread(self._read, body, is_chat)
            else:
                asked, prompts = self._read(body, is_chat)
            grammar = None
            if asked.response_format is not None:
                grammar = await asyncio.to_thread(self._grammar, asked.response_format)
            return Answer(self, asked, prompts, grammar, arrived)
        except ConfigError as error:         # no chat template, no llguidance
            raise OpenAIError(400, str(error)) from None
        except BatchManagerError as error:
            raise OpenAIError.of(error) from None

    def models(self) -> bytes:
        """The answer of /v1/models."""
        return orjson.dumps({"object": "list", "data": [
            {"id": name, "object": "model", "created": self._started, "owned_by": "batch-manager",
             "max_model_len": self.engine.info.max_seq_len} for name in self.names]})

    def health(self) -> tuple[int, bytes]:
        """(status, body) of /health: 503 while the server drains, and where the engine failed or hangs."""
        health = self.engine.health()
        state = "DRAINING" if self.is_draining and health["state"] == "RUNNING" else health["state"]
        is_well = state == "RUNNING" and not health["is_hanging"]
        told = {"status": state, "active_requests": health["active_requests"],
                "queued_requests": health["queued_requests"]}
        return 200 if is_well else 503, orjson.dumps(told)

    def _read(self, body: bytes, is_chat: bool) -> tuple[Asked, list[list[int]]]:
        """What a body asks for, and the tokens of its prompts. A prompt of megabytes takes seconds."""
        asked = read_body(body, is_chat)
        if asked.model is not None and asked.model not in (*self.names, self.folder):
            raise OpenAIError(404, f"the model {asked.model[:200]!r} does not exist; this server has {self.names[0]!r}",
                              "model", "model_not_found")
        prompts = [self._prompt_ids(asked, prompt) for prompt in asked.prompts]
        longest, room = max(map(len, prompts)), self.engine.info.max_seq_len - 1
        if longest > room:
            param = "messages" if is_chat else "prompt"
            raise OpenAIError(400, f"{param}: {longest:,} tokens were given; at most {room:,} are expected, for one "
                              "more must fit into the context", param, "context_length_exceeded")
        return asked, prompts

    def _prompt_ids(self, asked: Asked, prompt: Any) -> list[int]:
        if asked.is_chat:
            text = chat_prompt(self.folder, prompt, **asked.template_options)
            return encode(self.tokenizer, text, add_special_tokens=False)
        return encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt

    def _grammar(self, schema: dict[str, Any] | bool) -> Any:
        """Compiles; takes a while. On a thread of its own."""
        info = self.engine.info
        if not info.end_ids:
            raise refused("response_format", "the model has no end id, so that a text could not end")
        if self._guided is None:
            from ..guided_decoding import GuidedDecoding
            source = self.tokenizer if is_gguf_file(self.folder) else os.path.join(self.folder, "tokenizer.json")
            self._guided = GuidedDecoding(source, vocab_size=info.vocab_size, end_id=info.end_ids[0])
        return self._guided, self._guided.json_schema(orjson.dumps(schema).decode())


class _Choice:
    """One of the texts of an answer.

    waits_for_prompt   the log-probabilities of its prompt are asked for, and the engine has not told them yet
    prompt             what is to be told of them next; None: nothing
    """

    __slots__ = ("index", "stream", "text", "prompt_ids", "waits_for_prompt", "prompt", "first_token", "offset",
                 "metrics", "observe")

    def __init__(self, index: int, stream: Stream, text: GeneratedText, prompt_ids: list[int], waits_for_prompt: bool,
                 offset: int, observe: Callable[[PerfMetrics, int], None] | None) -> None:
        self.index, self.stream, self.text, self.offset, self.observe = index, stream, text, offset, observe
        self.prompt_ids, self.waits_for_prompt, self.prompt = prompt_ids, waits_for_prompt, None
        self.first_token: float | None = None
        self.metrics: PerfMetrics | None = None      # comes with the end; never after a stop string

    def add(self, delta: Delta) -> str:
        if self.first_token is None:
            self.first_token = monotonic()
        piece, self.metrics = self.text.add(delta), delta.metrics
        if self.metrics is not None and self.observe is not None:
            self.observe(self.metrics, len(self.text.tokens))
        if self.is_over:
            self.stream.cancel()             # after a stop string the engine would go on
        return piece

    @property
    def is_over(self) -> bool:
        return self.text.finish_reason is not FinishReason.NOT_FINISHED


class Answer:
    """What one body is answered with. Either `events` or `whole` is called, once.

    is_streaming   `events` it is
    identity       the id that clients are told
    """

    def __init__(self, service: OpenAIService, asked: Asked, prompts: list[list[int]], grammar: Any,
                 arrived: float) -> None:
        self.is_streaming = asked.is_streaming
        self.identity = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid4().hex}"
        self._service, self._asked, self._arrived = service, asked, arrived
        self._shapes = Shapes(asked.is_chat, self.identity, int(time()), asked.model or service.names[0],
                              service.token_names)
        self._prompt_tokens = sum(map(len, prompts))
        self._choices: list[_Choice] = []
        # A row of the vocabulary's size, from an object that may be as large: once for all texts.
        self._sampling, self._bias = asked.sampling, None
        if asked.sampling.logit_bias:
            self._bias = asked.sampling.bias(service.engine.info.vocab_size)
            self._sampling = replace(asked.sampling, logit_bias=None)
        self._echoes = [self._text_of(prompt, tokens) if asked.echo else ""
                        for prompt, tokens in zip(asked.prompts, prompts, strict=True)]
        try:
            for number, prompt_ids in enumerate(prompts):
                for copy in range(asked.count):
                    self._start(prompt_ids, copy, grammar, len(self._echoes[number]))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """The client is gone: stop what runs. From the event loop."""
        for choice in self._choices:
            choice.stream.cancel()

    async def whole(self) -> bytes:
        """The body of an answer that does not stream. Raises OpenAIError."""
        texts = [[echo] for echo in self._echoes for _ in range(self._asked.count)]
        try:
            for choice in self._choices:     # all of them run; they are only read in turn
                async for delta in choice.stream:
                    texts[choice.index].append(await self._piece(choice, delta))
                    if choice.is_over:
                        break
        except RequestFailed as error:
            raise OpenAIError.of(error) from None
        finally:
            self.cancel()
        return self._shapes.whole(
            [("".join(texts[choice.index]), self._log_probs(choice, choice.text), choice.text.finish_reason)
             for choice in self._choices], self._usage(), self._timings())

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, `[DONE]` the last. Raises OpenAIError before the first one; later an error is an event.
        """
        has_begun = False
        try:
            async for event in self._events():
                yield event
                has_begun = True
        except RequestFailed as error:
            if not has_begun:
                raise OpenAIError.of(error) from None
            yield b"data: " + OpenAIError.of(error).body() + b"\n\n"
        finally:
            self.cancel()
        yield DONE

    # ---------------------------------------------------------------- inside

    def _start(self, prompt_ids: list[int], copy: int, grammar: Any, offset: int) -> None:
        sampling, engine = self._sampling, self._service.engine
        if copy and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + copy) & WORD)
        options = {} if grammar is None else {"logits_post_processor": grammar[0].processor(grammar[1])}
        tensors = {**sampling.tensors(prompt_ids, engine.info), "return_perf_metrics": True}
        if self._bias is not None:
            tensors["embedding_bias"] = self._bias
        with_prompt = self._asked.echo and sampling.log_probs
        ends: list[int] = []
        if with_prompt:
            tensors["return_context_logits"] = True
            # Who scores a prompt leaves out as many entries at the end as were generated: an end token is one of them.
            # The engine tells of a stop word what it does not tell of an end id, but min_length is about end ids.
            if not sampling.min_tokens:
                ends = tensors.pop("end_id", [])
        if ends:
            tensors["stop_words_list"] = [[end] for end in ends]
        text = GeneratedText(self._service.tokenizer, prompt_ids, sampling.stop, end_is_told=bool(ends))
        stream = engine.stream(tensors, priority=sampling.priority, arrival_time=self._arrived, **options)
        self._choices.append(_Choice(len(self._choices), stream, text, prompt_ids, with_prompt, offset,
                                     self._service.observe))

    async def _events(self) -> AsyncIterator[bytes]:
        if len(self._choices) == 1:
            async for event in self._events_of(self._choices[0]):
                yield event
        else:
            async for event in _merged([self._events_of(choice) for choice in self._choices]):
                yield event
        if self._asked.with_usage or self._asked.with_timings:
            yield self._shapes.usage(self._usage(), self._timings())

    async def _events_of(self, choice: _Choice) -> AsyncIterator[bytes]:
        shapes, index, told = self._shapes, choice.index, self._asked.with_usage_in_every_chunk
        before = shapes.role(index) if self._asked.is_chat else b""
        echo = self._echoes[index // self._asked.count]
        if echo:
            before = shapes.chunk(index, echo, None, None)
        async for delta in choice.stream:
            piece = await self._piece(choice, delta)
            log_probs = self._log_probs(choice, delta)
            used = self._usage() if told else None
            if choice.is_over:
                yield before + shapes.last(index, piece, log_probs, choice.text.finish_reason, used)
                return
            if piece or log_probs is not None or before:
                yield before + (shapes.chunk(index, piece, log_probs, used) if piece or log_probs is not None else b"")
                before = b""

    async def _piece(self, choice: _Choice, delta: Delta) -> str:
        if choice.waits_for_prompt and delta.responses:
            choice.waits_for_prompt = False
            logits = delta.responses[0][CONTEXT_LOGITS].array[0]
            choice.prompt = await asyncio.to_thread(prompt_log_probs, logits, choice.prompt_ids,
                                                    self._asked.sampling.top_log_probs)
        piece = choice.add(delta)
        if self._asked.generates:
            return piece
        # echo with max_tokens=0: a token was generated, and is not told
        for told in (delta, choice.text):
            told.tokens, told.log_probs, told.top_log_probs = [], [], []
        return ""

    def _log_probs(self, choice: _Choice, given: Delta | GeneratedText) -> dict[str, Any] | None:
        if not self._asked.sampling.log_probs:
            return None
        tokens, values, likeliest = given.tokens, given.log_probs, given.top_log_probs
        if choice.prompt is not None:        # it is told before the first of the text's own
            tokens, values, likeliest = (own + mine for own, mine in zip(
                (choice.prompt.tokens, choice.prompt.log_probs, choice.prompt.top_log_probs),
                (tokens, values, likeliest)))
            choice.offset, choice.prompt = 0, None
        told = self._shapes.log_probs(tokens, values, likeliest, choice.offset)
        if self.is_streaming:
            choice.offset += sum(map(self._service.token_names.width, tokens))
        return told

    def _usage(self) -> dict[str, Any]:
        """`cached_tokens` of each prompt's first text; left out until all of these have told it."""
        told = [choice.metrics for choice in self._choices[:: self._asked.count]]
        cached = None if None in told else sum(metrics.cached_tokens for metrics in told)
        return usage(self._prompt_tokens, sum(len(choice.text.tokens) for choice in self._choices), cached)

    def _timings(self) -> dict[str, float | None] | None:
        if not self._asked.with_timings:
            return None
        first = min((choice.first_token for choice in self._choices if choice.first_token is not None), default=None)
        queued = [choice.metrics.queue_s for choice in self._choices if choice.metrics is not None]
        return {"queue_ms": _milliseconds(max(queued, default=None)),
                "time_to_first_token_ms": _milliseconds(None if first is None else first - self._arrived),
                "total_ms": _milliseconds(monotonic() - self._arrived)}

    def _text_of(self, prompt: str | list[int], tokens: list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(tokens)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


async def _merged(iterators: list[AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    """What the iterators yield, as it comes. The first exception ends all."""
    arrived: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

    async def read(iterator: AsyncIterator[bytes]) -> None:
        try:
            async for event in iterator:
                arrived.put_nowait(event)
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.ensure_future(read(iterator)) for iterator in iterators]
    try:
        left = len(tasks)
        while left:
            event = await arrived.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
