"""Parse request bodies. Unknown and unsupported fields are refused by name."""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import orjson

from ...errors import type_name
from ..sampling import Sampling
from .errors import OpenAIError, refused

MOST_TEXTS = 1024
MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 4096    # characters
MOST_TOP_LOG_PROBS = 20
WORD = (1 << 64) - 1

# Fields without an effect on the output.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Field -> (values without an effect, why other values are refused).
NOT_BUILT = {
    "suffix": ([""], "insertion before a suffix is not supported; leave it out"),
    "tools": ([[]], "tool calls are not supported"),
    "tool_choice": (["none", "auto"], "tool calls are not supported"),
    "functions": ([[]], "tool calls are not supported"),
    "function_call": (["none", "auto"], "tool calls are not supported"),
    "modalities": ([["text"]], "this server generates text only"),
    "audio": ([], "this server generates text only"),
    "prediction": ([], "predicted outputs are not supported"),
    "use_beam_search": ([False], "beam search is not supported"),
    "reasoning_effort": ([], "pass it in chat_template_kwargs, if the model's template uses it"),
}


@dataclass(slots=True)
class ParsedBody:
    """A parsed request body.

    prompts          strings or lists of token ids; for a chat, one list of messages
    count            outputs per prompt
    generates        whether to return generated tokens; False: only the prompt, because max_tokens is 0 and echo is set
    response_format  JSON schema that the output must match, or None
    """

    is_chat: bool
    model: str | None
    prompts: list[Any]
    sampling: Sampling
    count: int = 1
    is_streaming: bool = False
    with_usage: bool = False
    with_usage_in_every_chunk: bool = False
    with_timings: bool = False
    echo: bool = False
    generates: bool = True
    response_format: dict[str, Any] | bool | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


class _Body:
    """The fields of a body, without fields that are null.

    Reading a field removes it, so that only fields without a reader are left for `check_rest`.
    """

    def __init__(self, body: bytes) -> None:
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise OpenAIError(400, f"the body is not JSON from line {error.lineno} column {error.colno} on; expected a "
                              "JSON object") from None
        if not isinstance(fields, dict):
            raise OpenAIError(400, f"the body is JSON of type {type_name(fields)}; expected a JSON object")
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._read: set[str] = set()

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None, *,
             integers: str = "an integer of at most 64 bits") -> Any:
        """Remove and return a field.

        integers   description of the valid integers, for the message of an error
        """
        self._read.add(name)
        value = self._fields.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds:
            if int in kinds and type(value) is float and not -(2**63) < value < 2**64:   # orjson's longer integers
                raise refused(name, f"got about {value:g}, which has more than 64 bits; expected {integers}")
            names = " or ".join(each.__name__ for each in kinds)
            raise refused(name, f"got {type_name(value)}; expected {names}")
        return value

    def number(self, name: str, default: float) -> float:
        return self.take(name, (int, float), default)

    def count(self, name: str, default: int | None, least: int = 0, most: int = 2**31 - 1) -> int | None:
        expected = f"an integer in {least}..{most}"
        value = self.take(name, int, default, integers=expected)
        if value is not None and not least <= value <= most:
            raise refused(name, f"got {value}; expected {expected}")
        return value

    def check_rest(self) -> None:
        """Refuse the remaining fields, unless they have no effect."""
        for name, value in self._fields.items():
            if name in NOT_BUILT:
                harmless, why = NOT_BUILT[name]
                if value not in harmless:
                    raise refused(name, why)
            elif name not in IGNORED:
                hint = f"; did you mean {near[0]}?" if (near := get_close_matches(name[:64], self._read, n=1)) else ""
                raise OpenAIError(400, f"unrecognized request argument: {name[:64]!r}{hint}", name[:64],
                                  "unknown_parameter")


def read_body(body: bytes, is_chat: bool) -> ParsedBody:
    """Parse and validate a request body. Raises OpenAIError."""
    fields = _Body(body)
    prompts = [_messages(fields)] if is_chat else _prompts(fields)
    parsed = ParsedBody(is_chat, fields.take("model", str), prompts, Sampling())
    parsed.count = fields.count("n", 1, least=1, most=MOST_TEXTS)
    if (best_of := fields.count("best_of", parsed.count)) != parsed.count:
        raise refused("best_of", f"got {best_of}; expected {parsed.count}, the value of n, because outputs are not "
                                 "ranked; omit best_of or set it to n")
    if parsed.count * len(prompts) > MOST_TEXTS:
        raise refused("n", f"got {parsed.count * len(prompts)} outputs, which is n times the number of prompts; "
                           f"expected at most {MOST_TEXTS}")
    parsed.is_streaming = fields.take("stream", bool, False)
    _stream_options(fields, parsed)
    parsed.with_timings = fields.take("return_timings", bool, False)
    if is_chat:
        log_probs = fields.take("logprobs", bool, False)
        top_log_probs = fields.count("top_logprobs", 0, most=MOST_TOP_LOG_PROBS)
        if top_log_probs and not log_probs:
            raise refused("top_logprobs", "it requires logprobs: true")
        parsed.template_options = fields.take("chat_template_kwargs", dict, {})
        if not fields.take("add_generation_prompt", bool, True):
            parsed.template_options = {**parsed.template_options, "add_generation_prompt": False}
    else:
        top_log_probs = _log_probs_of_a_completion(fields)
        log_probs = top_log_probs is not None
        parsed.echo = fields.take("echo", bool, False)
    parsed.response_format = _response_format(fields)
    max_tokens = _max_tokens(fields, is_chat)
    if max_tokens == 0:
        if not parsed.echo:
            raise refused("max_tokens", "got 0; expected at least 1" + ("" if is_chat else ", unless echo is set"))
        parsed.generates, max_tokens = False, 1
    min_tokens = fields.count("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens and parsed.generates:
        raise refused("min_tokens", f"got {min_tokens}; expected at most max_tokens, which is {max_tokens}")
    if min_tokens and parsed.response_format is not None:
        raise refused("min_tokens", f"got {min_tokens}; expected 0 with response_format, whose output ends when the "
                                    "schema is complete")
    parsed.sampling = Sampling(
        max_tokens=max_tokens, temperature=fields.number("temperature", 1.0), top_p=fields.number("top_p", 1.0),
        top_k=fields.count("top_k", 0, least=-1), min_p=fields.number("min_p", 0.0), seed=_seed(fields),
        stop=_stop(fields), stop_token_ids=_token_ids("stop_token_ids", fields.take("stop_token_ids", list, [])),
        ignore_eos=fields.take("ignore_eos", bool, False), min_tokens=min_tokens,
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0), logit_bias=_logit_bias(fields),
        log_probs=log_probs, top_log_probs=top_log_probs or 0, raw_log_probs=log_probs, priority=_priority(fields))
    fields.check_rest()
    return parsed


def _messages(fields: _Body) -> list[dict[str, Any]]:
    messages = fields.take("messages", list)
    if not messages:
        raise refused("messages", "missing or empty; expected a list of at least one message")
    if not all(type(message) is dict for message in messages):
        raise refused("messages", "an item is not a JSON object; expected an object for each message")
    return [{**message, "content": _content(message["content"])} if type(message.get("content")) is list else message
            for message in messages]


def _content(parts: list[Any]) -> str:
    for part in parts:
        if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
            raise refused("messages", "expected content parts of type text; others are not supported")
    return "".join(part["text"] for part in parts)


def _prompts(fields: _Body) -> list[Any]:
    prompt = fields.take("prompt", (str, list))
    if prompt is None:
        raise refused("prompt", "it is missing; expected a string, a list of strings, a list of token ids, or a list "
                                "of such lists")
    if type(prompt) is str or (prompt and type(prompt[0]) is int):
        prompt = [prompt]
    if not prompt or len(prompt) > MOST_TEXTS:
        raise refused("prompt", f"got {len(prompt)} prompts; expected 1 to {MOST_TEXTS}")
    return [each if type(each) is str else _token_ids("prompt", each) for each in prompt]


def _token_ids(name: str, tokens: Any) -> list[int]:
    if type(tokens) is not list or any(type(token) is not int for token in tokens):
        raise refused(name, "expected a list of integers as token ids")
    return tokens


def _stream_options(fields: _Body, parsed: ParsedBody) -> None:
    options = fields.take("stream_options", dict, {})
    if options and not parsed.is_streaming:
        raise refused("stream_options", "it requires stream: true")
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    for name, value in options.items():
        if name not in known:
            raise refused(f"stream_options.{name[:64]}", f"unknown name; expected {', '.join(sorted(known))}")
        if type(value) not in (bool, type(None)):
            raise refused(f"stream_options.{name}", f"got {type_name(value)}; expected true or false")
    parsed.with_usage_in_every_chunk = bool(options.get("continuous_usage_stats"))
    parsed.with_usage = bool(options.get("include_usage")) or parsed.with_usage_in_every_chunk


def _log_probs_of_a_completion(fields: _Body) -> int | None:
    """Return the number of likeliest tokens to return per position, or None for no log-probabilities."""
    expected = f"an integer in 0..{MOST_TOP_LOG_PROBS}"
    most = fields.take("logprobs", (int, bool), integers=expected)
    if most is None or most is False:
        return None
    if most is True:
        return 0
    if not 0 <= most <= MOST_TOP_LOG_PROBS:
        raise refused("logprobs", f"got {most}; expected {expected}")
    return most


def _response_format(fields: _Body) -> dict[str, Any] | None:
    given = fields.take("response_format", dict, {"type": "text"})
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema = given.get("json_schema")
        schema = schema.get("schema") if type(schema) is dict else None
        if type(schema) not in (dict, bool):
            raise refused("response_format", "expected a JSON schema in json_schema.schema")
        return schema
    raise refused("response_format", "expected the type text, json_object or json_schema")


def _max_tokens(fields: _Body, is_chat: bool) -> int | None:
    """Return the maximum number of tokens to generate; None: as many as the model's context leaves.

    As at OpenAI, the default is 16 for a completion and None for a chat.
    """
    older = fields.count("max_tokens", None if is_chat else 16)
    return fields.count("max_completion_tokens", older) if is_chat else older


def _seed(fields: _Body) -> int | None:
    seed = fields.take("seed", int)
    return None if seed is None else seed & WORD


def _stop(fields: _Body) -> list[str]:
    stop = fields.take("stop", (str, list), [])
    stop = [stop] if type(stop) is str else stop
    if len(stop) > MOST_STOP_STRINGS or any(
            type(each) is not str or not 0 < len(each) <= LONGEST_STOP_STRING for each in stop):
        raise refused("stop", f"expected up to {MOST_STOP_STRINGS} strings of 1 to {LONGEST_STOP_STRING:,} characters")
    return stop


def _logit_bias(fields: _Body) -> dict[int, float] | None:
    given = fields.take("logit_bias", dict)
    if not given:
        return None
    if not all(token.isdecimal() and len(token) < 12 for token in given):
        raise refused("logit_bias", "expected an object whose keys are token ids")
    return {int(token): value for token, value in given.items()}


def _priority(fields: _Body) -> float:
    """Convert vLLM's priority (any integer, default 0, lower first) to the engine's (0..1, higher first)."""
    priority = fields.count("priority", 0, least=-(2**31))
    return 0.5 - priority / (2 * (1 + abs(priority)))
