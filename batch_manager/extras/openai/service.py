"""OpenAIService: answers OpenAI API requests with an AsyncEngine."""

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
from ...errors import BatchManagerError, ConfigError, InvalidRequestError
from ...names import FinishReason
from ...responses.perf_metrics import PerfMetrics
from ...responses.tensors import RESPONSE_TENSORS
from ..chat_template import chat_prompt
from ..generated_text import GeneratedText
from ..token_bytes import TokenPositions
from ..tokenizer import encode, load_tokenizer
from ..turn_end import log_unused_turn_ends
from .errors import OpenAIError, refused
from .fields import WORD, ParsedBody, read_body
from .prompt_log_probs import prompt_log_probs
from .shapes import DONE, Shapes, usage
from .token_names import TokenNames

LONG_BODY = 8192    # bytes; parsing a longer body may delay other requests' tokens
CONTEXT_LOGITS = RESPONSE_TENSORS.index("context_logits")


class OpenAIService:
    """Implements /v1/completions, /v1/chat/completions, /v1/models and /health.

    engine      an AsyncEngine. With takes_all=True, a full queue is answered with 429
    folder      model folder with tokenizer and chat template, or a `.gguf` file
    names       model names that clients may use. If a body names no model, its answer contains the first name. Empty:
                the name of the folder
    tokenizer   a tokenizer of `tokenizers` or transformers; None: the tokenizer in the folder
    observe     called with the PerfMetrics and the number of output tokens of each finished request, as for
                PrometheusStatistics.observe; not called for an output that a stop string ended; None: no calls

    Set `is_draining` to answer new requests with 503 while running requests continue.

    Raises ConfigError if there is no tokenizer.
    """

    def __init__(self, engine: AsyncEngine, folder: str | os.PathLike, names: Sequence[str] = (),
                 tokenizer: Any = None, observe: Callable[[PerfMetrics, int], None] | None = None) -> None:
        self.engine, self.folder, self.observe = engine, os.fspath(folder), observe
        self.names = list(names) or [os.path.basename(os.path.abspath(self.folder))]
        self.tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
        self.token_names = TokenNames(self.tokenizer)
        log_unused_turn_ends(folder, self.tokenizer, engine.info.end_ids, engine.info.vocab_size)
        self.is_draining = False
        self._started = int(time())
        self._guided: Any = None

    async def accept(self, body: bytes, is_chat: bool) -> "Answer":
        """Parse a body and submit its requests to the engine.

        Raises OpenAIError for an invalid body and while the server drains, without submitting a request. If the engine
        refuses a request, the methods of the answer raise OpenAIError.
        """
        arrived = monotonic()
        if self.is_draining:
            raise OpenAIError(503, "the server is shutting down; send the request to another one", code="shutdown")
        try:
            if len(body) > LONG_BODY:        # keep the event loop free
                parsed, prompts = await asyncio.to_thread(self._read, body, is_chat)
            else:
                parsed, prompts = self._read(body, is_chat)
            grammar = None
            if parsed.response_format is not None:
                grammar = await asyncio.to_thread(self._grammar, parsed.response_format)
            if len(body) > LONG_BODY:
                return await asyncio.to_thread(Answer, self, parsed, prompts, grammar, arrived)
            return Answer(self, parsed, prompts, grammar, arrived)
        except ConfigError as error:         # no chat template, no llguidance
            raise OpenAIError(400, str(error)) from None
        except BatchManagerError as error:
            raise OpenAIError.of(error, is_chat=is_chat) from None

    def models(self) -> bytes:
        """Return the body for /v1/models."""
        return orjson.dumps({"object": "list", "data": list(map(self._model, self.names))})

    def model(self, name: str) -> bytes:
        """Return the body for /v1/models/NAME. Raises OpenAIError for a name that the server does not have."""
        self._check_name(name)
        return orjson.dumps(self._model(name))

    def health(self) -> tuple[int, bytes]:
        """Return (status, body) for /health.

        The status is 503 while the server drains, and if the engine has failed or hangs.
        """
        health = self.engine.health()
        state = "DRAINING" if self.is_draining and health["state"] == "RUNNING" else health["state"]
        is_healthy = state == "RUNNING" and not health["is_hanging"]
        body = {"status": state, "active_requests": health["active_requests"],
                "queued_requests": health["queued_requests"]}
        return 200 if is_healthy else 503, orjson.dumps(body)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "batch-manager",
                "max_model_len": self.engine.info.max_seq_len}

    def _check_name(self, name: str) -> None:
        if name not in (*self.names, self.folder):
            raise OpenAIError(404, f"the model {name[:200]!r} does not exist; this server has {self.names[0]!r}",
                              "model", "model_not_found")

    def _read(self, body: bytes, is_chat: bool) -> tuple[ParsedBody, list[list[int]]]:
        """Parse a body and tokenize its prompts. Takes seconds for megabytes of text."""
        parsed = read_body(body, is_chat)
        if parsed.model is not None:
            self._check_name(parsed.model)
        prompts = [self._prompt_ids(parsed, prompt) for prompt in parsed.prompts]
        longest, room = max(map(len, prompts)), self.engine.info.max_seq_len - 1
        if longest > room:
            param = "messages" if is_chat else "prompt"
            raise OpenAIError(400, f"{param}: got {longest:,} tokens; expected at most {room:,}, so that one more "
                              "fits into the context", param, "context_length_exceeded")
        return parsed, prompts

    def _prompt_ids(self, parsed: ParsedBody, prompt: Any) -> list[int]:
        if parsed.is_chat:
            text = chat_prompt(self.folder, prompt, **parsed.template_options)
            return encode(self.tokenizer, text, add_special_tokens=False)
        if isinstance(prompt, str):
            return encode(self.tokenizer, prompt)
        vocab_size = self.engine.info.vocab_size
        if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise OpenAIError(400, f"prompt holds an id outside 0..{vocab_size - 1}; every id must be in the model's "
                              f"vocabulary of {vocab_size:,}; check that the tokenizer belongs to this model", "prompt",
                              "invalid_request")
        return prompt

    def _grammar(self, schema: dict[str, Any] | bool) -> Any:
        """Compile a JSON schema. Slow: call it in a thread."""
        info = self.engine.info
        if not info.end_ids:
            raise refused("response_format", "the model has no end id, so constrained output cannot end; "
                                             "omit the field")
        if self._guided is None:
            from ..guided_decoding import GuidedDecoding
            self._guided = GuidedDecoding(self.tokenizer, vocab_size=info.vocab_size, end_id=info.end_ids[0])
        try:
            return self._guided, self._guided.json_schema(orjson.dumps(schema).decode())
        except InvalidRequestError as error:
            raise OpenAIError(400, f"response_format: {error}", "response_format", error.code.value.lower()) from None


class _Choice:
    """One output of an answer.

    waits_for_prompt   whether the client requested log-probabilities of the prompt, and they have not arrived yet
    prompt             log-probabilities of the prompt that have arrived and have not been sent; None: there are none
    """

    __slots__ = ("index", "stream", "text", "prompt_ids", "waits_for_prompt", "prompt", "first_token", "positions",
                 "metrics", "observe")

    def __init__(self, index: int, stream: Stream, text: GeneratedText, prompt_ids: list[int], waits_for_prompt: bool,
                 positions: TokenPositions | None, observe: Callable[[PerfMetrics, int], None] | None) -> None:
        self.index, self.stream, self.text, self.positions, self.observe = index, stream, text, positions, observe
        self.prompt_ids, self.waits_for_prompt, self.prompt = prompt_ids, waits_for_prompt, None
        self.first_token: float | None = None
        self.metrics: PerfMetrics | None = None      # comes with the last delta; never after a stop string

    def add(self, delta: Delta) -> str:
        if self.first_token is None:
            self.first_token = monotonic()
        piece, self.metrics = self.text.add(delta), delta.metrics
        if self.metrics is not None and self.observe is not None:
            self.observe(self.metrics, len(self.text.tokens))
        if self.is_over:
            self.stream.cancel()             # after a stop string, the engine would continue
        return piece

    @property
    def is_over(self) -> bool:
        return self.text.finish_reason is not FinishReason.NOT_FINISHED


class Answer:
    """The answer to one HTTP request. Call `events` once if `is_streaming`, otherwise call `whole` once.

    identity   id of the answer, as its JSON contains it
    """

    def __init__(self, service: OpenAIService, parsed: ParsedBody, prompts: list[list[int]], grammar: Any,
                 arrived: float) -> None:
        self.is_streaming = parsed.is_streaming
        self.identity = f"{'chatcmpl' if parsed.is_chat else 'cmpl'}-{uuid4().hex}"
        self._service, self._parsed, self._arrived = service, parsed, arrived
        self._shapes = Shapes(parsed.is_chat, self.identity, int(time()), parsed.model or service.names[0],
                              service.token_names, parsed.is_streaming and parsed.with_usage)
        self._prompt_tokens = sum(map(len, prompts))
        self._choices: list[_Choice] = []
        # The bias may have an entry for every token. Convert it once for all outputs.
        self._sampling, self._bias = parsed.sampling, None
        if parsed.sampling.logit_bias:
            self._bias = parsed.sampling.bias(service.engine.info.vocab_size)
            self._sampling = replace(parsed.sampling, logit_bias=None)
        self._echoes = [self._text_of(prompt, tokens) if parsed.echo else ""
                        for prompt, tokens in zip(parsed.prompts, prompts, strict=True)]
        requests = [self._request(prompt_ids, copy, grammar) for prompt_ids in prompts for copy in range(parsed.count)]
        streams = service.engine.streams([(tensors, options) for tensors, options, _ in requests])
        with_prompt = parsed.echo and parsed.sampling.log_probs
        for index, (stream, (_, _, text)) in enumerate(zip(streams, requests)):
            number = index // parsed.count
            positions = None
            if parsed.sampling.log_probs:
                positions = TokenPositions(service.token_names.bytes, prompts[number], len(self._echoes[number]))
            self._choices.append(_Choice(index, stream, text, prompts[number], with_prompt, positions,
                                         service.observe))

    def cancel(self) -> None:
        """Stop all requests of the answer. Called on the event loop."""
        for choice in self._choices:
            choice.stream.cancel()

    async def whole(self) -> bytes:
        """Return the body of a non-streaming answer. Raises OpenAIError."""
        reads = [asyncio.ensure_future(self._whole_text(choice)) for choice in self._choices]
        try:
            texts = await asyncio.gather(*reads)         # the first refusal ends all
        except RequestFailed as error:
            raise OpenAIError.of(error, is_chat=self._parsed.is_chat) from None
        finally:
            for read in reads:
                read.cancel()
            self.cancel()
        return self._shapes.whole(
            [(text, self._log_probs(choice, choice.text), choice.text.finish_reason)
             for choice, text in zip(self._choices, texts, strict=True)], self._usage(), self._timings())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events; the last is `[DONE]`.

        An error before the first event raises OpenAIError. A later error is an event.
        """
        has_begun = False
        try:
            async for event in self._events():
                yield event
                has_begun = True
        except RequestFailed as error:
            if not has_begun:
                raise OpenAIError.of(error, is_chat=self._parsed.is_chat) from None
            yield b"data: " + OpenAIError.of(error, is_chat=self._parsed.is_chat).body() + b"\n\n"
        finally:
            self.cancel()
        yield DONE

    # ---------------------------------------------------------------- inside

    def _request(self, prompt_ids: list[int], copy: int,
                 grammar: Any) -> tuple[dict[str, Any], dict[str, Any], GeneratedText]:
        """Return the tensors and options of the request for one output, and the object that collects the output."""
        sampling, engine = self._sampling, self._service.engine
        if copy and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + copy) & WORD)
        options = {} if grammar is None else {"logits_post_processor": grammar[0].processor(grammar[1])}
        tensors = {**sampling.tensors(prompt_ids, engine.info), "return_perf_metrics": True}
        if self._bias is not None:
            tensors["embedding_bias"] = self._bias
        ends: list[int] = []
        if self._parsed.echo and sampling.log_probs:
            tensors["return_context_logits"] = True
            # Evaluation clients drop as many trailing entries as `usage` counts completion tokens, so the end token
            # needs an entry. The engine returns the tokens of a stop word, but not an end id. End ids are therefore
            # passed as stop words, except with min_length, which applies to end ids only.
            if not sampling.min_tokens:
                ends = tensors.pop("end_id", [])
        if ends:
            tensors["stop_words_list"] = [[end] for end in ends]
        text = GeneratedText(self._service.tokenizer, prompt_ids, sampling.stop, ends_in_stop_words=bool(ends))
        options |= {"priority": sampling.priority, "arrival_time": self._arrived}
        return tensors, options, text

    async def _whole_text(self, choice: _Choice) -> str:
        """Read the stream of an output to its end or to a stop string, and return the text.

        If the request asks for an echo, the returned text begins with the text of the prompt.
        """
        pieces = [self._echoes[choice.index // self._parsed.count]]
        async for delta in choice.stream:
            pieces.append(await self._piece(choice, delta))
            if choice.is_over:
                break
        return "".join(pieces)

    async def _events(self) -> AsyncIterator[bytes]:
        if len(self._choices) == 1:
            async for event in self._events_of(self._choices[0]):
                yield event
        else:
            async for event in _merged([self._events_of(choice) for choice in self._choices]):
                yield event
        if self._parsed.with_usage or self._parsed.with_timings:
            yield self._shapes.usage(self._usage(), self._timings())

    async def _events_of(self, choice: _Choice) -> AsyncIterator[bytes]:
        shapes, index, with_usage = self._shapes, choice.index, self._parsed.with_usage_in_every_chunk
        echo, has_begun = self._echoes[index // self._parsed.count], False
        async for delta in choice.stream:
            if not has_begun:
                has_begun, used = True, self._usage() if with_usage else None
                if self._parsed.is_chat:
                    yield shapes.role(index, used)
                elif echo:
                    yield shapes.chunk(index, echo, None, used)
            piece = await self._piece(choice, delta)
            log_probs = self._log_probs(choice, delta)
            used = self._usage() if with_usage else None
            if choice.is_over:
                yield shapes.last(index, piece, log_probs, choice.text.finish_reason, used)
                return
            if piece or log_probs is not None:
                yield shapes.chunk(index, piece, log_probs, used)

    async def _piece(self, choice: _Choice, delta: Delta) -> str:
        if choice.waits_for_prompt and delta.responses:
            choice.waits_for_prompt = False
            logits = delta.responses[0][CONTEXT_LOGITS].array[0]
            choice.prompt = await asyncio.to_thread(prompt_log_probs, logits, choice.prompt_ids,
                                                    self._parsed.sampling.top_log_probs)
        piece = choice.add(delta)
        if self._parsed.generates:
            return piece
        # echo with max_tokens=0: one token was generated; do not send it
        for each in (delta, choice.text):
            each.tokens, each.log_probs, each.top_log_probs = [], [], []
        return ""

    def _log_probs(self, choice: _Choice, given: Delta | GeneratedText) -> dict[str, Any] | None:
        if not self._parsed.sampling.log_probs:
            return None
        tokens, values, likeliest = given.tokens, given.log_probs, given.top_log_probs
        if choice.prompt is not None:        # sent before the first token of the output
            tokens, values, likeliest = (own + mine for own, mine in zip(
                (choice.prompt.tokens, choice.prompt.log_probs, choice.prompt.top_log_probs),
                (tokens, values, likeliest)))
            choice.positions, choice.prompt = TokenPositions(self._service.token_names.bytes, (), 0), None
        if self.is_streaming and not tokens:
            return None
        return self._shapes.log_probs(tokens, values, likeliest, choice.positions)

    def _usage(self) -> dict[str, Any]:
        """Return the usage object.

        `cached_tokens` is the sum over all prompts, from the metrics of each prompt's first output. It is omitted until
        all first outputs have metrics.
        """
        all_metrics = [choice.metrics for choice in self._choices[:: self._parsed.count]]
        cached = None if None in all_metrics else sum(metrics.cached_tokens for metrics in all_metrics)
        return usage(self._prompt_tokens, sum(len(choice.text.tokens) for choice in self._choices), cached)

    def _timings(self) -> dict[str, float | None] | None:
        if not self._parsed.with_timings:
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
    """Yield from all iterators concurrently, in order of arrival. The first exception ends the iteration."""
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
