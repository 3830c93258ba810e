"""Parse request bodies. Unknown and unsupported fields are refused by name, at every level."""

from dataclasses import dataclass, field
from typing import Any

from ...names import RequestType
from ...requests.context_phase import ContextPhaseParams
from ..sampling import Sampling
from .errors import refused
from .json_object import JsonObject, parsed_json
from .messages import read_messages
from .tools import ToolChoice, read_tools
from .transfers import read_transfer
from .unread_fields import log_once

MOST_TEXTS = 1024
MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 4096    # characters
MOST_TOP_LOG_PROBS = 20
WORD = (1 << 64) - 1


@dataclass(slots=True)
class ParsedBody:
    """A parsed request body.

    prompts          strings or lists of token ids; for a chat, one list of messages
    count            outputs per prompt
    generates        whether to return generated tokens; False: only the prompt, because max_tokens is 0 and echo is set
    response_format  JSON schema that the output must match, or None
    tools            the tools that the output may call, or None
    has_reasoning    whether the answer has reasoning apart from the text
    max_thinking_tokens   most tokens of reasoning, or None
    prompt_end       the last characters of a chat's prompt, which may open the reasoning
    request_type, context_phase   what another server computes, and where its blocks wait
    form             what another form of the API needs for its answer
    has_events       whether the answer is made of events, whatever else the request asks for
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
    tools: ToolChoice | None = None
    has_reasoning: bool = True
    max_thinking_tokens: int | None = None
    prompt_end: str = ""
    has_events: bool = False
    request_type: RequestType = RequestType.CONTEXT_AND_GENERATION
    context_phase: ContextPhaseParams | None = None
    form: Any = None


def read_body(body: bytes, is_chat: bool) -> ParsedBody:
    """Parse and validate a request body. Raises OpenAIError."""
    return read_fields(JsonObject(parsed_json(body)), is_chat)


def read_fields(fields: JsonObject, is_chat: bool) -> ParsedBody:
    """Validate the fields of a body. Raises OpenAIError."""
    prompts = [read_messages(fields)] if is_chat else _prompts(fields)
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
        begins_answer, name = fields.take("add_generation_prompt", bool), "add_generation_prompt"
        if begins_answer is not None and parsed.template_options.get(name, begins_answer) is not begins_answer:
            raise refused(name, "chat_template_kwargs has another value of it; expected the same; omit one of them")
        if begins_answer is False:
            parsed.template_options = {**parsed.template_options, name: False}
        _tools_and_reasoning(fields, parsed)
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
    held = "response_format" if parsed.response_format is not None else "tools" if parsed.tools is not None else ""
    if min_tokens and held:
        raise refused("min_tokens", f"got {min_tokens}; expected 0 with {held}, whose output ends when the schema is "
                                    "complete")
    ignore_eos = fields.take("ignore_eos", bool, False)
    if ignore_eos and held:
        raise refused("ignore_eos", f"got true; expected false with {held}, whose output ends with an end token when "
                                    "the schema is complete")
    parsed.sampling = Sampling(
        max_tokens=max_tokens, temperature=fields.number("temperature", 1.0), top_p=fields.number("top_p", 1.0),
        top_k=fields.count("top_k", 0, least=-1), min_p=fields.number("min_p", 0.0), seed=_seed(fields),
        stop=_stop(fields), stop_token_ids=_token_ids("stop_token_ids", fields.take("stop_token_ids", list, [])),
        ignore_eos=ignore_eos, min_tokens=min_tokens,
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0), logit_bias=_logit_bias(fields),
        log_probs=log_probs, top_log_probs=top_log_probs or 0, raw_log_probs=log_probs, priority=_priority(fields))
    _transfer(fields, parsed)
    fields.check_rest(is_chat)
    return parsed


def _transfer(fields: JsonObject, parsed: ParsedBody) -> None:
    parsed.request_type, parsed.context_phase = read_transfer(fields)
    if parsed.request_type is not RequestType.CONTEXT_AND_GENERATION and parsed.count * len(parsed.prompts) > 1:
        raise refused("kv_transfer_params", f"got {parsed.count * len(parsed.prompts)} outputs; expected one prompt "
                                            "and n: 1")
    if parsed.request_type is RequestType.CONTEXT_ONLY and parsed.is_streaming:
        raise refused("kv_transfer_params", "do_remote_decode is true and stream is true; the answer has one token; "
                                            "expected stream: false")
    if parsed.request_type is not RequestType.CONTEXT_AND_GENERATION and parsed.echo and parsed.sampling.log_probs:
        raise refused("kv_transfer_params", "got echo: true with logprobs; the log-probabilities of a prompt are "
                                            "computed with it; expected one of the three")


def _prompts(fields: JsonObject) -> list[Any]:
    prompt = fields.take("prompt", (str, list))
    if prompt is None:
        raise refused("prompt", "it is missing; expected a string, a list of strings, a list of token ids, or a list "
                                "of such lists")
    if type(prompt) is str or (prompt and type(prompt[0]) is int):
        prompt = [prompt]
    if not prompt or len(prompt) > MOST_TEXTS:
        raise refused("prompt", f"got {len(prompt)} prompts; expected 1 to {MOST_TEXTS}")
    return [each if type(each) is str else _token_ids("prompt", each) for each in prompt]


def _tools_and_reasoning(fields: JsonObject, parsed: ParsedBody) -> None:
    parsed.tools = read_tools(fields)
    parsed.has_reasoning = fields.take("separate_reasoning", bool, True)
    if (form := fields.take("reasoning_format", str, "auto")) not in ("none", "auto", "deepseek"):
        raise refused("reasoning_format", f"got {form[:64]!r}; expected none, auto or deepseek")
    parsed.has_reasoning &= form != "none"
    parsed.max_thinking_tokens = fields.count("max_thinking_tokens", fields.count("thinking_token_budget", None))
    if (effort := fields.take("reasoning_effort", str)) is not None:
        parsed.template_options = {"reasoning_effort": effort, **parsed.template_options}


def _token_ids(name: str, tokens: Any) -> list[int]:
    if type(tokens) is not list or any(type(token) is not int for token in tokens):
        raise refused(name, "expected a list of integers as token ids")
    return tokens


def _stream_options(fields: JsonObject, parsed: ParsedBody) -> None:
    options = fields.object("stream_options")
    if options is None:
        return
    parsed.with_usage_in_every_chunk = options.take("continuous_usage_stats", bool, False)
    parsed.with_usage = options.take("include_usage", bool, False) or parsed.with_usage_in_every_chunk
    if options.take("include_obfuscation", bool, False):
        raise options.refused("include_obfuscation", "events are not padded; expected false")
    options.check_rest()
    if not parsed.is_streaming:
        raise refused("stream_options", "it requires stream: true")


def _log_probs_of_a_completion(fields: JsonObject) -> int | None:
    """Return the number of likeliest tokens to return per position, or None for no log-probabilities."""
    expected = f"an integer in 0..{MOST_TOP_LOG_PROBS}"
    most = fields.take("logprobs", (int, bool), integers=expected)
    if most is None or most is False:
        return None
    if most is True:
        raise refused("logprobs", f"got true, which is for chats; expected {expected}; 0 returns the log-probability "
                                  "of each token alone")
    if not 0 <= most <= MOST_TOP_LOG_PROBS:
        raise refused("logprobs", f"got {most}; expected {expected}")
    return most


def _response_format(fields: JsonObject) -> dict[str, Any] | bool | None:
    """Return the JSON schema of the output, or None.

    The schema is always enforced, so `strict` has no effect.
    """
    given = fields.object("response_format")
    if given is None:
        return None
    kind, schema = given.take("type", str), None
    if kind == "json_object":
        schema = given.take("schema", dict, {})         # as at llama.cpp, Together and Fireworks
        schema = schema if {"type", "$ref", "enum", "const"} & schema.keys() else {"type": "object", **schema}
    elif kind == "json_schema":
        described = given.object("json_schema")
        schema = None if described is None else described.take("schema", (dict, bool))
        if schema is None or described is None:
            raise refused("response_format", "expected a JSON schema in json_schema.schema")
        schema = {} if schema is True else schema
        described.take("name", str)
        described.take("strict", bool)
        if described.take("description", str):
            log_once("response_format.json_schema.description", "the model does not see it; put it into a message")
        described.check_rest()
    elif kind != "text":
        raise refused("response_format", "expected the type text, json_object or json_schema")
    given.check_rest()
    return schema


def _max_tokens(fields: JsonObject, is_chat: bool) -> int | None:
    """Return the maximum number of tokens to generate; None: as many as the model's context leaves.

    As at OpenAI, the default is 16 for a completion and None for a chat.
    """
    older = fields.count("max_tokens", None if is_chat else 16)
    return fields.count("max_completion_tokens", older) if is_chat else older


def _seed(fields: JsonObject) -> int | None:
    seed = fields.take("seed", int)
    return None if seed is None else seed & WORD


def _stop(fields: JsonObject) -> list[str]:
    stop = fields.take("stop", (str, list), [])
    stop = [stop] if type(stop) is str else stop
    if len(stop) > MOST_STOP_STRINGS or any(
            type(each) is not str or not 0 < len(each) <= LONGEST_STOP_STRING for each in stop):
        raise refused("stop", f"expected up to {MOST_STOP_STRINGS} strings of 1 to {LONGEST_STOP_STRING:,} characters")
    return stop


def _logit_bias(fields: JsonObject) -> dict[int, float] | None:
    given = fields.take("logit_bias", dict)
    if not given:
        return None
    if not all(token.isdecimal() and token.isascii() and len(token) < 12 for token in given):
        raise refused("logit_bias", "expected an object whose keys are token ids in decimal digits")
    if len(bias := {int(token): value for token, value in given.items()}) < len(given):
        raise refused("logit_bias", f"got {len(given)} keys for {len(bias)} token ids; expected each id once, "
                                    "without leading zeros")
    if not all(type(value) in (int, float) for value in given.values()):
        raise refused("logit_bias", "expected an object whose values are numbers")
    return bias


def _priority(fields: JsonObject) -> float:
    """Convert vLLM's priority (any integer, default 0, lower first) to the engine's (0..1, higher first)."""
    priority = fields.count("priority", 0, least=-(2**31))
    return 0.5 - priority / (2 * (1 + abs(priority)))
