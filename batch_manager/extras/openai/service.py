"""OpenAIService: answers OpenAI API requests with an AsyncEngine."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter, sleep, time
from typing import Any, TypeVar
from uuid import uuid4

import orjson

from ...aio import AsyncEngine, RequestFailed, Stream
from ...aio.mailbox import Delta
from ...contained_log import log
from ...errors import BatchManagerError, ConfigError
from ...names import FinishReason
from ...requests.context_phase import ContextPhaseParams
from ...responses.perf_metrics import PerfMetrics
from ...responses.tensors import RESPONSE_TENSORS
from ..chat_template import chat_prompt, check_variables, compile_templates
from ..generated_text import GeneratedText
from ..sampling import check_end_ids
from ..token_bytes import SpelledPositions, TokenPositions
from ..tokenizer import TooManyTokens, encode, load_tokenizer
from ..tool_calls.model_formats import AUTO, ModelFormats
from ..tool_calls.output import Collected, ParsedOutput
from ..tool_calls.parser import Event
from ..turn_end import log_unused_turn_ends
from .errors import OpenAIError, refused, without_paths
from .fields import WORD, ParsedBody, read_body
from .held_calls import HeldCalls
from .prompt_log_probs import prompt_log_probs
from .shapes import DONE, Shapes, WholeLogProbs, finish_reason, message_of, usage
from .token_names import TokenNames
from .transfers import answered

LONG_BODY = 8192    # bytes; parsing a longer body may delay other requests' tokens
MANY_VALUES = 256   # of a body; a kilobyte has as many texts, and each has to be tokenized
FEW_OUTPUTS = 8     # preparing more may delay them, too
MANY_TOKENS = 1000  # of an answer, whose log-probabilities may have taken megabytes
SECONDS_AT_ONCE, SECONDS_OF_A_PAUSE = 0.002, 0.0001     # of long work in a thread
PROMPT_TOKENS_AT_ONCE = 256      # in an event with log-probabilities; more would take milliseconds to serialize
LONGEST_OPENING = 256            # characters of a prompt's end; the opening of reasoning is shorter
CONTEXT_LOGITS = RESPONSE_TENSORS.index("context_logits")
_Item = TypeVar("_Item")


class OpenAIService:
    """Implements /v1/completions, /v1/chat/completions, /v1/models and /health; the other forms of chats use it.

    engine      an AsyncEngine. With takes_all=True, a full queue is answered with 429
    folder      model folder with tokenizer and chat template, or a `.gguf` file
    names       model names that clients may use. If a body names no model, its answer contains the first name. Empty:
                the name of the folder
    tokenizer   a tokenizer of `tokenizers` or transformers; None: the tokenizer in the folder
    tool_call_parser, reasoning_parser   names of formats; `auto`: those of the chat template; `none`: no calls, and
                reasoning in the text
    observe     called with the PerfMetrics and the number of output tokens of each finished request, as for
                PrometheusStatistics.observe; not called for an output that a stop string ended; None: no calls

    `has_freed_much` is set when a call with a large body, many outputs or many tokens begins and ends.

    Set `is_draining` to answer new requests with 503 while running requests continue.

    Raises ConfigError if there is no tokenizer, or if the checkpoint has more than 8 end ids.
    """

    def __init__(self, engine: AsyncEngine, folder: str | os.PathLike, names: Sequence[str] = (),
                 tokenizer: Any = None, observe: Callable[[PerfMetrics, int], None] | None = None, *,
                 tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self.engine, self.folder, self.observe = engine, os.fspath(folder), observe
        self.names = list(names) or [os.path.basename(os.path.abspath(self.folder))]
        self.tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
        self.token_names = TokenNames(self.tokenizer)
        check_end_ids(engine.info)
        log_unused_turn_ends(folder, self.tokenizer, engine.info.end_ids, engine.info.vocab_size)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)      # characters
        self.is_draining = self.has_freed_much = False
        self._started = int(time())
        self._ids = list(range(engine.info.vocab_size))
        self.formats = ModelFormats(folder, self.tokenizer, tool_call_parser, reasoning_parser)
        self._guided: Any = None
        self._held_calls = HeldCalls(self.formats, self._guided_decoding if engine.info.end_ids else None)

    def prepare(self) -> None:
        """Import and compile what requests with messages, tools or a response_format need.

        Without this call, their first request does it, and may delay other requests' tokens. What is not installed, or
        missing in the folder, is skipped.
        """
        for part in (partial(compile_templates, self.folder), self.formats.prepare, self._warm_up):
            with contextlib.suppress(BatchManagerError, OpenAIError):
                part()

    async def accept(self, body: bytes, is_chat: bool,
                     read: Callable[[bytes], ParsedBody] | None = None) -> "Answer":
        """Parse a body and submit its requests to the engine.

        read   parses the body of another form of chats; None: it is a completion or a chat of OpenAI's API

        Raises OpenAIError for an invalid body and while the server drains, without submitting a request. If the engine
        refuses a request, the methods of the answer raise OpenAIError.
        """
        arrived = monotonic()
        with self._errors_for_clients(is_chat, body):
            parsed, prompts, is_long = await self._read_body(body, is_chat, read)
            grammar = None
            if parsed.response_format is not None or parsed.tools is not None:
                grammar = await asyncio.to_thread(self._held_calls.compiled, parsed)
                parsed.response_format = None    # a schema may be megabytes of small objects
                if parsed.tools is not None:
                    parsed.tools.given = []
            is_long = is_long or parsed.count * len(prompts) > FEW_OUTPUTS
            make = partial(Answer, self, parsed, prompts, grammar, arrived, is_long)
            return await asyncio.to_thread(make) if is_long else make()

    async def num_prompt_tokens(self, body: bytes, read: Callable[[bytes], ParsedBody]) -> int:
        """Return the number of tokens of the prompt of a body, without a request.

        Raises OpenAIError as `accept` does, also for a prompt that is longer than the context.
        """
        with self._errors_for_clients(True, body):
            _, prompts, _ = await self._read_body(body, True, read)
            return sum(map(len, prompts))

    async def _read_body(self, body: bytes, is_chat: bool, read: Callable[[bytes], ParsedBody] | None
                         ) -> tuple[ParsedBody, list[list[int]], bool]:
        """Return the parsed body, the ids of its prompts, and whether it is long, without holding the event loop."""
        if len(body) > LONG_BODY or body.count(b",") > MANY_VALUES:
            return *await asyncio.to_thread(self._read, body, is_chat, read, with_pauses), True
        return *self._read(body, is_chat, read), False

    @contextlib.contextmanager
    def _errors_for_clients(self, is_chat: bool, body: bytes) -> Iterator[None]:
        """Turn errors of the package into OpenAIErrors. Raises one while the server drains."""
        if self.is_draining:
            raise OpenAIError(503, "the server is shutting down; send the request to another one", code="shutdown")
        try:
            yield
        except ConfigError as error:         # no chat template, no llguidance; the way out is for the server's operator
            log.warning("a request to the OpenAI service cannot be answered: %s", error)
            raise OpenAIError(400, without_paths(f"{error.fact}; {error.expectation}", self.folder)) from None
        except BatchManagerError as error:
            raise OpenAIError.of(error, is_chat=is_chat) from None
        finally:
            self.has_freed_much |= len(body) > LONG_BODY

    def models(self) -> bytes:
        """Return the body for /v1/models."""
        return orjson.dumps({"object": "list", "data": [*map(self._model, self.names),
                                                        *map(self._model, self.engine.adapters())]})

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
        parent = {"parent": self.names[0]} if self.adapter_of(name) is not None else {}
        return {"id": name, "object": "model", "created": self._started, "owned_by": "batch-manager", **parent,
                "max_model_len": self.engine.info.max_seq_len}

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a client names as the model; None: it names the base model, or no model."""
        return model if model is not None and not self.is_base(model) and model in self.engine.adapters() else None

    def is_base(self, name: str) -> bool:
        """Whether a client that names this model means the base model."""
        return name in (*self.names, self.folder)

    def _check_name(self, name: str) -> None:
        if not self.is_base(name) and self.adapter_of(name) is None:
            raise OpenAIError(404, f"the model {name[:200]!r} does not exist; this server has {self.names[0]!r}",
                              "model", "model_not_found")

    def _read(self, body: bytes, is_chat: bool, read: Callable[[bytes], ParsedBody] | None = None,
              each: Callable[[list[Any]], Iterable[Any]] = iter) -> tuple[ParsedBody, list[list[int]]]:
        """Parse a body and tokenize its prompts. Takes seconds for megabytes of text.

        each   iterates over the prompts
        """
        parsed = read_body(body, is_chat) if read is None else read(body)
        if parsed.model is not None:
            self._check_name(parsed.model)
        prompts = [self._shared(self._prompt_ids(parsed, prompt)) for prompt in each(parsed.prompts)]
        parsed.template_options = {}
        if not parsed.echo:                  # megabytes of small objects, which need not live as long as the answer
            parsed.prompts = []
        return parsed, prompts

    def _shared(self, ids: list[int]) -> list[int]:
        """Return the ids with the integer objects of `_ids`.

        The engine's prefix cache keeps some of the objects. New ones would take 32 bytes each, and the memory of a
        million of them would stay for the few that are kept.
        """
        return ids if max(ids, default=0) >= len(self._ids) else list(map(self._ids.__getitem__, ids))

    def _prompt_ids(self, parsed: ParsedBody, prompt: Any) -> list[int]:
        if parsed.is_chat:
            check_variables(parsed.template_options)
            text = chat_prompt(self.folder, prompt, self._tools_of(parsed), **parsed.template_options)
            parsed.prompt_end = text[-LONGEST_OPENING:]
            return self._encoded(text, "messages", add_special_tokens=False)
        if isinstance(prompt, str):
            return self._encoded(prompt, "prompt")
        vocab_size = self.engine.info.vocab_size
        if len(prompt) > self._room:
            raise self._too_long("prompt", f"{len(prompt):,}")
        if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise OpenAIError(400, f"prompt holds an id outside 0..{vocab_size - 1}; every id must be in the model's "
                              f"vocabulary of {vocab_size:,}; check that the tokenizer belongs to this model", "prompt",
                              "invalid_request")
        return prompt

    def _tools_of(self, parsed: ParsedBody) -> list[dict[str, Any]] | None:
        if parsed.max_thinking_tokens is not None and self.formats.reasoning is None:
            raise refused("max_thinking_tokens", "the chat template has no known format of reasoning; leave it out, or "
                                                 "let the server's operator name the format with --reasoning-parser")
        if parsed.tools is None:
            return None
        if self.formats.calls is None:
            raise refused("tools", "the chat template has no known format of tool calls; leave them out, or let the "
                                   "server's operator name the format with --tool-call-parser")
        return parsed.tools.given

    @property
    def _room(self) -> int:
        return self.engine.info.max_seq_len - 1

    def _encoded(self, text: str, param: str, **options: Any) -> list[int]:
        if len(text) > self._room * self._longest_token:       # encoding it would take seconds and much memory
            raise self._too_long(param, f"{len(text):,} characters, which are more than {self._room:,}")
        try:
            return encode(self.tokenizer, text, most=self._room, **options)
        except TooManyTokens as error:
            raise self._too_long(param, f"{error.num_tokens:,}") from None

    def _too_long(self, param: str, got: str) -> OpenAIError:
        return OpenAIError(400, f"{param}: got {got} tokens; expected at most {self._room:,}, so that one more fits "
                           "into the context", param, "context_length_exceeded")

    def _warm_up(self) -> None:
        from ..tool_calls import thinking  # noqa: F401

        if self.engine.info.end_ids:
            self._guided_decoding().json_schema({"type": "object"})

    def _guided_decoding(self) -> Any:
        info = self.engine.info
        if self._guided is None:
            from ..guided_decoding import GuidedDecoding
            self._guided = GuidedDecoding(self.tokenizer, vocab_size=info.vocab_size, end_id=info.end_ids[0],
                                          more_end_ids=info.end_ids[1:])
        return self._guided


class _Choice:
    """One output of an answer.

    waits_for_prompt   whether the client requested log-probabilities of the prompt, and they have not arrived yet
    prompt             log-probabilities of the prompt that have arrived and have not been sent; None: there are none
    text               collects the output. ParsedOutput: `add` returns events
    """

    __slots__ = ("index", "stream", "text", "prompt_ids", "waits_for_prompt", "prompt", "first_token", "positions",
                 "metrics", "observe", "context_phase")

    def __init__(self, index: int, stream: Stream, text: GeneratedText | ParsedOutput, prompt_ids: list[int],
                 waits_for_prompt: bool, positions: TokenPositions | None,
                 observe: Callable[[PerfMetrics, int], None] | None) -> None:
        self.index, self.stream, self.text, self.positions, self.observe = index, stream, text, positions, observe
        self.prompt_ids, self.waits_for_prompt, self.prompt = prompt_ids, waits_for_prompt, None
        self.first_token: float | None = None
        self.metrics: PerfMetrics | None = None      # comes with the last delta; never after a stop string
        self.context_phase: ContextPhaseParams | None = None

    def add(self, delta: Delta) -> Any:
        if self.first_token is None:
            self.first_token = monotonic()
        piece, self.metrics = self.text.add(delta), delta.metrics
        if delta.context_phase_params is not None:
            self.context_phase = delta.context_phase_params
        if self.metrics is not None and self.observe is not None:
            self.observe(self.metrics, len(self.text.tokens))
        self.text.log_probs.clear()          # those of the delta are sent, or serialized
        self.text.top_log_probs.clear()
        if self.is_over and delta.finish_reason is FinishReason.NOT_FINISHED:
            self.stream.cancel()             # after a stop string, the engine would continue
        return piece

    @property
    def is_over(self) -> bool:
        return self.text.finish_reason is not FinishReason.NOT_FINISHED

    @property
    def reason(self) -> str | None:
        """OpenAI's name of the finish reason."""
        return finish_reason(self.text.finish_reason, isinstance(self.text, ParsedOutput) and self.text.has_whole_calls)


class Answer:
    """The answer to one HTTP request. Call `events` once if `is_streaming`, otherwise call `whole` once.

    identity   id of the answer, as its JSON contains it
    model      name of the model, likewise
    form       what another form of the API needs

    Another form calls `parts` in place of `events` and `whole`, and reads `reason`, `stopped_by` and `usage` after it.
    """

    def __init__(self, service: OpenAIService, parsed: ParsedBody, prompts: list[list[int]], grammar: Any,
                 arrived: float, is_large: bool) -> None:
        self.is_streaming = parsed.is_streaming
        self.identity = f"{'chatcmpl' if parsed.is_chat else 'cmpl'}-{uuid4().hex}"
        self.model, self.form = parsed.model or service.names[0], parsed.form
        self._service, self._parsed, self._arrived, self._is_large = service, parsed, arrived, is_large
        self._shapes = Shapes(parsed.is_chat, self.identity, int(time()), self.model,
                              service.token_names, parsed.is_streaming and parsed.with_usage)
        self._prompt_tokens, self._adapter = sum(map(len, prompts)), service.adapter_of(parsed.model)
        self._choices: list[_Choice] = []
        # The bias may have an entry for every token. Convert it once for all outputs.
        self._sampling, self._bias = parsed.sampling, None
        if parsed.sampling.logit_bias:
            self._bias = parsed.sampling.bias(service.engine.info.vocab_size)
            self._sampling = replace(parsed.sampling, logit_bias=None)
        self._echoes = [""] * len(prompts)
        if parsed.echo:
            self._echoes = list(map(self._text_of, parsed.prompts, prompts))
        outputs = range(parsed.count * len(prompts))
        texts: list[GeneratedText | ParsedOutput] = []
        self._is_parsed = parsed.is_chat and (parsed.tools is not None or parsed.has_events or (
            parsed.has_reasoning and service.formats.reasoning is not None))

        def requests() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
            for index in with_pauses(outputs) if is_large else outputs:
                number, copy = divmod(index, parsed.count)
                tensors, options, text = self._request(prompts[number], copy, grammar)
                texts.append(text)
                yield tensors, options

        streams = service.engine.streams(requests())
        with_prompt = parsed.echo and parsed.sampling.log_probs
        for index, (stream, text) in enumerate(zip(streams, texts, strict=True)):
            number = index // parsed.count
            positions = None
            if parsed.sampling.log_probs:
                positions = TokenPositions(service.token_names.bytes, prompts[number], len(self._echoes[number]))
            self._choices.append(_Choice(index, stream, text, prompts[number] if with_prompt else [], with_prompt,
                                         positions, service.observe))

    def cancel(self) -> None:
        """Stop all requests of the answer. Called on the event loop."""
        num_tokens = sum(len(choice.text.tokens) for choice in self._choices)
        self._service.has_freed_much |= self._is_large or num_tokens > MANY_TOKENS
        for choice in self._choices:
            if not choice.is_over:
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
            [(message_of(text) if isinstance(text, Collected) else text, log_probs, choice.reason)
             for choice, (text, log_probs) in zip(self._choices, texts, strict=True)], self.usage(), self._timings(),
            None if (context := self._choices[0].context_phase) is None else answered(context))

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

    async def parts(self) -> AsyncIterator[list[Event]]:
        """Yield the events of the only output, as they arrive. Raises OpenAIError."""
        (choice,) = self._choices
        try:
            async for delta in choice.stream:
                yield choice.add(delta)
                if choice.is_over:
                    break
        except RequestFailed as error:
            raise OpenAIError.of(error, is_chat=True) from None
        finally:
            self.cancel()

    @property
    def reason(self) -> str | None:
        """OpenAI's name of the reason for which the only output ended."""
        return self._choices[0].reason

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the only output."""
        return self._choices[0].text.stopped_by

    # ---------------------------------------------------------------- inside

    def _request(self, prompt_ids: list[int], copy: int,
                 grammar: Any) -> tuple[dict[str, Any], dict[str, Any], GeneratedText | ParsedOutput]:
        """Return the tensors and options of the request for one output, and the object that collects the output."""
        sampling, engine = self._sampling, self._service.engine
        if copy and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + copy) & WORD)
        options = self._post_processor(prompt_ids, grammar)
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
        if self._is_parsed:
            text = self._parsed_output(prompt_ids)
        else:
            text = GeneratedText(self._service.tokenizer, prompt_ids, sampling.stop, ends_in_stop_words=bool(ends))
        options |= {"priority": sampling.priority, "arrival_time": self._arrived, "adapter": self._adapter,
                    "request_type": self._parsed.request_type}
        if self._parsed.context_phase is not None:
            tensors["context_phase_params"] = self._parsed.context_phase.to_array()
        return tensors, options, text

    def _parsed_output(self, prompt_ids: list[int]) -> ParsedOutput:
        parsed, tools = self._parsed, self._parsed.tools
        return self._service.formats.output(
            parsed.prompt_end, prompt_ids, parsed.sampling.stop, None if tools is None else tools.schemas,
            1 if tools is not None and not tools.is_parallel else None, parsed.has_reasoning)

    def _post_processor(self, prompt_ids: list[int], grammar: Any) -> dict[str, Any]:
        """Return the option with the request's logits post-processor; empty: it has none."""
        held = None if grammar is None else grammar[0].processor(grammar[1])
        if (most := self._parsed.max_thinking_tokens) is None:
            return {} if held is None else {"logits_post_processor": held}
        from ..tool_calls.thinking import ThinkingBudget

        budget = ThinkingBudget(self._service.tokenizer, self._service.formats.reasoning, most,
                                self._parsed_output(prompt_ids))
        if held is None:
            return {"logits_post_processor": budget}

        def both(number: int, logits: Any, beams: list[list[int]]) -> Any:
            return budget(number, held(number, logits, beams), beams)
        return {"logits_post_processor": both}

    async def _whole_text(self, choice: _Choice) -> tuple[str | Collected, bytes]:
        """Read the stream of an output to its end or to a stop string. Return its text and log-probabilities.

        If the request asks for an echo, the text begins with that of the prompt.
        """
        pieces = [self._echoes[choice.index // self._parsed.count]]
        log_probs = None
        if self._parsed.sampling.log_probs:
            log_probs = WholeLogProbs()
            log_probs.add(self._shapes.log_probs((), (), (), choice.positions))
        output = Collected() if self._is_parsed else None
        async for delta in choice.stream:
            if output is not None:
                output.add(choice.add(delta))
            else:
                pieces.append(await self._piece(choice, delta))
            async for part in self._log_probs(choice, delta):
                log_probs.add(part)
            if choice.is_over:
                break
        if output is not None:
            output.finish()
        text = "".join(pieces) if output is None else output
        return text, b"null" if log_probs is None else log_probs.json()

    async def _events(self) -> AsyncIterator[bytes]:
        if len(self._choices) == 1:
            async for event in self._events_of(self._choices[0]):
                yield event
        else:
            async for event in _merged([self._events_of(choice) for choice in self._choices]):
                yield event
        if self._parsed.with_usage or self._parsed.with_timings:
            yield self._shapes.usage(self.usage(), self._timings())

    async def _events_of(self, choice: _Choice) -> AsyncIterator[bytes]:
        shapes, index, with_usage = self._shapes, choice.index, self._parsed.with_usage_in_every_chunk
        echo, has_begun = self._echoes[index // self._parsed.count], False
        async for delta in choice.stream:
            if not has_begun:
                has_begun, used = True, self.usage() if with_usage else None
                if self._parsed.is_chat:
                    yield shapes.role(index, used)
                elif echo:
                    yield shapes.chunk(index, echo, None, used)
            piece = choice.add(delta) if self._is_parsed else await self._piece(choice, delta)
            log_probs = None
            async for part in self._log_probs(choice, delta):
                if log_probs is not None:
                    yield shapes.chunk(index, "", log_probs, self.usage() if with_usage else None)
                log_probs = part
            used = self.usage() if with_usage else None
            if self._is_parsed:
                if chunks := shapes.events(index, piece, log_probs, used):
                    yield chunks
                if choice.is_over:
                    yield shapes.end(index, choice.reason, used)
                    return
                continue
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

    async def _log_probs(self, choice: _Choice, delta: Delta) -> AsyncIterator[dict[str, Any]]:
        """Yield the log-probabilities of the prompt, in parts, and then those of the new tokens, where requested."""
        shape = self._shapes.log_probs
        if choice.prompt is not None:        # sent before the first token of the output
            prompt, choice.prompt = choice.prompt, None
            spelled = await asyncio.to_thread(self._spelled, choice)
            if spelled is None:
                spelled = choice.positions = TokenPositions(self._service.token_names.bytes, (), 0)
            for start in range(0, len(prompt.tokens), PROMPT_TOKENS_AT_ONCE):
                place = slice(start, start + PROMPT_TOKENS_AT_ONCE)
                yield shape(prompt.tokens[place], prompt.log_probs[place], prompt.top_log_probs[place],
                            spelled)
                await asyncio.sleep(0)
        if self._parsed.sampling.log_probs and delta.tokens:
            yield shape(delta.tokens, delta.log_probs, delta.top_log_probs, choice.positions)

    def _spelled(self, choice: _Choice) -> SpelledPositions | None:
        """Return the positions of the prompt's tokens in its text; None: they follow from the tokens."""
        text = self._parsed.prompts[choice.index // self._parsed.count]
        return SpelledPositions.of(self._service.tokenizer, text) if isinstance(text, str) else None

    def usage(self) -> dict[str, Any]:
        """Return the usage object.

        `cached_tokens` is the sum over all prompts, from the metrics of each prompt's first output. It is omitted until
        all first outputs have metrics.
        """
        all_metrics = [choice.metrics for choice in self._choices[:: self._parsed.count]]
        cached = None if None in all_metrics else sum(metrics.cached_tokens for metrics in all_metrics)
        reasoning = sum(choice.text.reasoning_tokens for choice in self._choices) if self._is_parsed else None
        return usage(self._prompt_tokens, sum(len(choice.text.tokens) for choice in self._choices), cached, reasoning)

    def _timings(self) -> dict[str, float | None] | None:
        if not self._parsed.with_timings:
            return None
        first = min((choice.first_token for choice in self._choices if choice.first_token is not None), default=None)
        queued = [choice.metrics.queue_s for choice in self._choices if choice.metrics is not None]
        return {"queue_ms": _milliseconds(max(queued, default=None)),
                "time_to_first_token_ms": _milliseconds(None if first is None else first - self._arrived),
                "total_ms": _milliseconds(monotonic() - self._arrived)}

    def _text_of(self, prompt: str | list[int], tokens: list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(tokens, skip_special_tokens=True)


def with_pauses(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, and sleep briefly every few milliseconds, so that the event loop gets the interpreter lock.

    A thread that releases the lock often and at once takes it again, as NumPy does for more than 500 numbers, would
    keep it from waiting threads: each release starts their switch interval anew. Not for the event loop's own thread.
    """
    since = perf_counter()
    for item in items:
        yield item
        if perf_counter() - since > SECONDS_AT_ONCE:
            sleep(SECONDS_OF_A_PAUSE)
            since = perf_counter()


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
