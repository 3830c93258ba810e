"""OpenAIService: answers OpenAI API requests with an AsyncEngine."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic, time
from typing import Any

import orjson

from ...aio import AsyncEngine
from ...contained_log import log
from ...errors import BatchManagerError, ConfigError
from ...responses.perf_metrics import PerfMetrics
from ..chat_template import chat_prompt, check_variables, compile_templates
from ..sampling import check_end_ids
from ..tokenizer import TooManyTokens, encode, load_tokenizer
from ..tool_calls.model_formats import AUTO, ModelFormats
from ..turn_end import log_unused_turn_ends
from .answers import Answer
from .errors import OpenAIError, refused, without_paths
from .fields import ParsedBody, read_body
from .held_calls import HeldCalls
from .pauses import with_pauses
from .token_names import TokenNames

LONG_BODY = 8192    # bytes; parsing a longer body may delay other requests' tokens
MANY_VALUES = 256   # of a body; a kilobyte has as many texts, and each has to be tokenized
FEW_OUTPUTS = 8     # preparing more may delay them, too
LONGEST_OPENING = 256            # characters of a prompt's end; the opening of reasoning is shorter


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
                     read: Callable[[bytes], ParsedBody] | None = None) -> Answer:
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
