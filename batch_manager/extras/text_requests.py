"""What LLM and AsyncLLM share: a prompt becomes a request, and its output becomes a Completion."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ..aio.mailbox import Delta, RequestFailed
from ..config import PeftCacheConfig
from ..engine_info import EngineInfo
from ..errors import BatchManagerError, ConfigError, InvalidRequestError, type_name
from ..names import FinishReason
from ..option_values import exact_integer
from .chat_template import chat_prompt, check_variables
from .generated_text import GeneratedText
from .sampling import Sampling, in_names_of_options
from .template_messages import PartError, text_of_parts
from .text import TextStream
from .tokenizer import LONG_TEXT, encode, load_tokenizer
from .tool_calls.model_formats import ModelFormats
from .tool_calls.output import Collected, ParsedOutput, ToolCall
from .tool_calls.parser import TEXT, Event

LONG_LIST = 1024    # token ids; takes a few milliseconds to prepare
Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Timings:
    """Latencies of a request, in seconds since it was submitted, including its time in the queue.

    first_token_s   time until the first token arrived; None: no token arrived
    total_s         time until the request ended
    """

    first_token_s: float | None
    total_s: float


@dataclass(slots=True)
class Completion:
    """The output for one prompt.

    text            text without special tokens, up to a stop string
    tokens          tokens without the end id; the last one may be the token that completed a stop string
    finish_reason   END_ID, STOP_WORDS (also for a stop string), LENGTH, TIMED_OUT or CANCELLED; NOT_FINISHED after an
                    error
    log_probs       log-probability of each token, if requested; otherwise empty
    top_log_probs   for each token, the likeliest tokens and their log-probabilities, likeliest first, if requested;
                    otherwise empty
    error           why the request failed: code, message, is_retryable; None: the request did not fail
    timings         latencies of the request; None: the request never reached the engine
    prompt_tokens   number of prompt tokens
    cached_tokens   number of prompt tokens found in the KV cache; None: unknown, because the output ended with a stop
                    string, a cancellation or an error
    tool_calls      calls of tools, in a chat with tools whose template writes calls in a known format. They are not
                    part of the text
    reasoning       reasoning in such a chat, which is not part of the text either
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    error: RequestFailed | None = None
    timings: Timings | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """The prompt of a chat with tools.

    ids     its tokens
    text    its text
    tools   name of each tool -> JSON schema of its arguments
    """

    ids: list[int]
    text: str
    tools: dict[str, Any]

    def __len__(self) -> int:
        return len(self.ids)


class Prompts:
    """Converts prompts to token ids, with the tokenizer and the chat template of a model.

    model       folder of a checkpoint, or a .gguf file
    tokenizer   a tokenizer, or the path of its folder or .gguf file; None: the model's tokenizer

    Raises ConfigError if there is no tokenizer.
    """

    def __init__(self, model: str | os.PathLike, tokenizer: Any = None) -> None:
        is_folder = tokenizer is None or isinstance(tokenizer, str | os.PathLike)
        self.source = model if tokenizer is None or not is_folder else tokenizer
        self.tokenizer = load_tokenizer(self.source) if is_folder else tokenizer
        TextStream(self.tokenizer)             # raises ConfigError if it is not a tokenizer
        self._formats = ModelFormats(self.source, self.tokenizer)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises InvalidRequestError for an invalid prompt."""
        if isinstance(prompt, str):
            return encode(self.tokenizer, prompt)
        if _is_conversation(prompt):
            return self.chat_ids(prompt)
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, list | tuple):
            if all(type(token) is int for token in prompt):         # a long prompt must not keep the worker waiting
                return list(prompt)
            token_ids = [exact_integer(token) for token in prompt]
            if None not in token_ids:
                return token_ids
        raise InvalidRequestError(f"a prompt is of type {type_name(prompt)}",
                                  "expected a string, a list of token ids, or a list of messages",
                                  "pass one prompt to stream(), a list of prompts to generate() ([[5, 6]] is one "
                                  "prompt of token ids), and a conversation to chat()")

    def chat_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
                 template_options: dict[str, Any] | None = None) -> list[int]:
        """Return the token ids of a conversation. Contents that are lists of parts of type text are joined.

        Raises the errors of `chat_prompt`, also for no message and for a part that cannot be joined.
        """
        return self._chat(messages, tools, template_options)[0]

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
             template_options: dict[str, Any] | None = None) -> "list[int] | ToolPrompt":
        """Return the prompt of a conversation. Raises the errors of `chat_ids`."""
        ids, text = self._chat(messages, tools, template_options)
        if not tools or self._formats.calls is None:
            return ids
        functions = [tool.get("function", tool) for tool in tools]
        return ToolPrompt(ids, text, {each["name"]: each.get("parameters") for each in functions
                                      if isinstance(each, Mapping) and isinstance(each.get("name"), str)})

    def _chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None,
              template_options: dict[str, Any] | None) -> tuple[list[int], str]:
        if isinstance(messages, list) and not messages:
            raise InvalidRequestError("messages is empty", "expected at least one message",
                                      'pass [{"role": "user", "content": "..."}]')
        check_variables(template_options or {})
        for wrong in [] if tools is None else [tools] if not isinstance(tools, list) else tools:
            if not isinstance(wrong, Mapping):
                raise InvalidRequestError(f"tools is, or has, an object of type {type_name(wrong)}",
                                          "expected a list of dicts, each the JSON schema of a function",
                                          'pass [{"type": "function", "function": {"name": "..."}}]')
        prompt = chat_prompt(self.source, _with_texts(messages), tools, **(template_options or {}))
        return encode(self.tokenizer, prompt, add_special_tokens=False), prompt

    def warm_up(self) -> None:
        """Compile the chat template, if there is one."""
        with suppress(BatchManagerError):
            self.chat_ids([{"role": "user", "content": "."}])

    @staticmethod
    def are_long(prompt: Prompt) -> bool:
        """Whether preparing a prompt, or a conversation, may take more than a few milliseconds."""
        if isinstance(prompt, str):
            return len(prompt) > LONG_TEXT
        if _is_conversation(prompt):
            return len(prompt) > LONG_LIST or sum(len(str(message)) for message in prompt) > LONG_TEXT
        return hasattr(prompt, "__len__") and len(prompt) > LONG_LIST

    def request(self, prompt: "Prompt | ToolPrompt", sampling: Sampling, info: EngineInfo,
                completion: Completion) -> tuple[dict[str, Any], GeneratedText | ParsedOutput]:
        """Return the tensors of a request, and the object that collects its output.

        Sets `prompt_tokens` of the completion. Raises InvalidRequestError for an invalid prompt or option.
        """
        sampling.check()
        prompt_ids = prompt.ids if isinstance(prompt, ToolPrompt) else self.ids(prompt)
        completion.prompt_tokens = len(prompt_ids)
        tensors = {**sampling.tensors(prompt_ids, info), "return_perf_metrics": True}
        if isinstance(prompt, ToolPrompt):
            return tensors, self._formats.output(prompt.text, prompt_ids, sampling.stop, prompt.tools)
        return tensors, GeneratedText(self.tokenizer, prompt_ids, sampling.stop)


class Output:
    """The output of one request as it arrives, and the `Completion` that it fills in.

    failure   exception that the iterator over the output raises once; None: the request did not fail
    """

    def __init__(self, text: GeneratedText | ParsedOutput, completion: Completion) -> None:
        self.completion, self.is_over = completion, False
        self.failure: RequestFailed | None = None
        self._text = text
        self._parsed = Collected() if isinstance(text, ParsedOutput) else None
        self._submitted_at = monotonic()
        self._first_token: float | None = None

    def add(self, delta: Delta) -> str:
        """Add new output to the completion, and return its text."""
        if self._first_token is None:
            self._first_token = monotonic()
        if delta.metrics is not None:
            self.completion.cached_tokens = delta.metrics.cached_tokens
        piece = self._shown(self._text.add(delta))
        self.completion.text += piece
        if self._text.finish_reason is not FinishReason.NOT_FINISHED:
            self._fill_in(self._text.finish_reason)
        return piece

    def fail(self, error: RequestFailed) -> str:
        """End the output with an error. Sets `failure`, and returns the text that was held back."""
        self.failure = self.completion.error = RequestFailed(error.code, in_names_of_options(error.message),
                                                             self._text.tokens)
        return self.end(FinishReason.NOT_FINISHED)

    def end(self, reason: FinishReason) -> str:
        """End an output that gets no further delta, and return the text that was held back."""
        if self.is_over:
            return ""
        piece = self._shown(self._text.rest())
        self.completion.text += piece
        self._fill_in(reason)
        return piece

    def _shown(self, piece: str | list[Event]) -> str:
        """Return the visible text of a piece of output, and keep its calls and reasoning."""
        if self._parsed is None or isinstance(piece, str):
            return piece
        self._parsed.add(piece)
        return "".join(event.text for event in piece if event.kind == TEXT)

    def _fill_in(self, reason: FinishReason) -> None:
        self.is_over = True
        if self._parsed is not None:
            self._parsed.finish()
            self.completion.tool_calls, self.completion.reasoning = self._parsed.calls, self._parsed.reasoning
        completion, text, since = self.completion, self._text, self._submitted_at
        completion.tokens, completion.finish_reason = text.tokens, reason
        completion.log_probs, completion.top_log_probs = text.log_probs, text.top_log_probs
        first = None if self._first_token is None else self._first_token - since
        completion.timings = Timings(first, monotonic() - since)


def cache_of(adapters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of TrtGptModelOptionalParams for these adapters, in the default sizes."""
    if adapters is not None and not isinstance(adapters, Mapping):
        raise ConfigError(f"adapters is of type {type_name(adapters)}", "expected a mapping of names to folders",
                          "pass adapters={name: folder}")
    return {"peft_cache_config": PeftCacheConfig()} if adapters else {}


def check_adapter(known: Mapping[str, Any], name: str | None) -> None:
    """Raise InvalidRequestError unless `name` is None or one of the `known` adapters."""
    if name is not None and not (isinstance(name, str) and name in known):
        raise InvalidRequestError(f"adapter is {name!r}"[:200],
                                  f"expected one of {', '.join(known) or 'none: no adapters are loaded'}",
                                  "pass adapters={name: folder} when the model is loaded")


def each_prompt(prompts: Any) -> Iterator[Any]:
    """Return an iterator over the prompts that `generate` got.

    Raises TypeError for an object that is neither a string nor an iterable of prompts.
    """
    if isinstance(prompts, str):
        return iter([prompts])
    if isinstance(prompts, Iterable) and not isinstance(prompts, Mapping | bytes | bytearray):
        return iter(prompts)
    raise TypeError(f"prompts is of type {type_name(prompts)}; expected a string, or a list of prompts; "
                    "put the prompts into a list, or pass a conversation to chat()")


def _with_texts(messages: Any) -> Any:
    """Return the messages with each content as one string. What is no list of messages stays as it is."""
    if not isinstance(messages, list):
        return messages
    joined = []
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), list | tuple):
            try:
                message = {**message, "content": text_of_parts(content, f"messages[{number}].content")}
            except PartError as error:
                raise InvalidRequestError(f"{error.name}: {error.message.partition('; ')[0]}",
                                          error.message.partition("; ")[2],
                                          'pass parts such as {"type": "text", "text": "..."}, or a string') from None
        joined.append(message)
    return joined


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
