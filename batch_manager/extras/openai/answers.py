"""Answer: the answer to one HTTP request, whole or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from time import monotonic, time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...aio import RequestFailed, Stream
from ...aio.mailbox import Delta
from ...names import FinishReason
from ...requests.context_phase import ContextPhaseParams
from ...responses.perf_metrics import PerfMetrics
from ...responses.tensors import RESPONSE_TENSORS
from ..generated_text import GeneratedText
from ..token_bytes import SpelledPositions, TokenPositions
from ..tool_calls.output import Collected, ParsedOutput
from ..tool_calls.parser import Event
from .errors import OpenAIError
from .fields import WORD, ParsedBody
from .pauses import with_pauses
from .prompt_log_probs import prompt_log_probs
from .shapes import DONE, Shapes, WholeLogProbs, finish_reason, message_of, usage
from .transfers import answered

if TYPE_CHECKING:
    from .service import OpenAIService

MANY_TOKENS = 1000  # of an answer, whose log-probabilities may have taken megabytes
PROMPT_TOKENS_AT_ONCE = 256      # in an event with log-probabilities; more would take milliseconds to serialize
CONTEXT_LOGITS = RESPONSE_TENSORS.index("context_logits")


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

    def __init__(self, service: "OpenAIService", parsed: ParsedBody, prompts: list[list[int]], grammar: Any,
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
        options |= {**sampling.request_options, "arrival_time": self._arrived, "adapter": self._adapter,
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
