"""Anthropic's Messages API, as a form of chats: the body becomes that of a chat, and its events become blocks."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import orjson

from ...errors import type_name
from ..template_messages import PartError, text_of_parts
from .answers import Answer
from .blocks import CALL, MORE, OPENS, Block, Blocks
from .errors import OpenAIError, refused
from .fields import ParsedBody, read_fields
from .json_object import JsonObject, parsed_json

_SAME = ("model", "temperature", "top_p", "top_k", "stream", "metadata", "priority", "chat_template_kwargs", "seed")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
           504: "timeout_error"}
_NO_THREADS = "thread_unsupported_request"
_NOT_BUILT = ("container", "context_management", "mcp_servers", "inference_geo", "diagnostics",
              "fallbacks", "compaction", "billing_policy")


def read_message(body: bytes, generates: bool = True) -> ParsedBody:
    """Parse the body of a POST to /v1/messages; without `generates`, to its `count_tokens`. Raises OpenAIError."""
    fields = JsonObject(parsed_json(body))
    if fields.take("thread", dict) is not None:      # Anthropic's client then passes the whole conversation
        raise OpenAIError(400, "thread: conversations are not stored; pass all messages", "thread", _NO_THREADS)
    for name in _NOT_BUILT:
        if fields.take(name, (str, dict, list)):
            raise refused(name, "not supported; leave it out")
    chat: dict[str, Any] = {name: value for name in _SAME
                            if (value := fields.take(name, (str, dict, bool, int, float))) is not None}
    fields.take("service_tier", str)
    fields.take("cache_control", dict)
    chat["max_completion_tokens"] = fields.take("max_tokens", int)
    if chat["max_completion_tokens"] is None and generates:
        raise refused("max_tokens", "missing; expected the most tokens to generate")
    chat["stop"] = fields.take("stop_sequences", list)
    _thinking(fields, chat)
    if (output := fields.object("output_config")) is not None:
        chat["reasoning_effort"] = output.take("effort", str)
        form = output.take("format", dict)
        if form is not None:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
        output.check_rest()
    chat["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(fields.take("tools", list, []))]
    if (choice := fields.object("tool_choice")) is not None:
        kind = choice.take("type", str)
        if kind not in (*_CHOICES, "tool"):
            raise choice.refused("type", f"got {kind!r:.64}; expected auto, any, tool or none")
        name = choice.take("name", str)
        chat["tool_choice"] = {"type": "function", "function": {"name": name}} if kind == "tool" else _CHOICES[kind]
        if choice.take("disable_parallel_tool_use", bool, False):
            chat["parallel_tool_calls"] = False
        choice.check_rest()
    system = fields.take("system", (str, list))
    chat["messages"] = [] if system is None else [{"role": "system", "content": _text(system, "system")}]
    messages = fields.take("messages", list, [])
    for number, message in enumerate(messages):
        chat["messages"] += _messages(message, f"messages[{number}]")
    if messages and type(messages[-1]) is dict and messages[-1].get("role") == "assistant":
        raise refused("messages", "the last message is of the assistant, and is not continued; expected one of the "
                                  "user")
    fields.check_rest()
    parsed = read_fields(JsonObject(chat), True)
    parsed.has_events = True
    return parsed


def _thinking(fields: JsonObject, chat: dict[str, Any]) -> None:
    thinking = fields.object("thinking")
    if thinking is None:
        return
    kind, budget = thinking.take("type", str), thinking.take("budget_tokens", int)
    thinking.take("display", str)
    thinking.check_rest()
    if kind not in ("enabled", "disabled", "adaptive"):
        raise thinking.refused("type", f"got {kind!r:.64}; expected enabled, disabled or adaptive")
    if kind == "enabled":
        chat["max_thinking_tokens"] = budget
    if type(given := chat.get("chat_template_kwargs", {})) is dict:      # others are refused later
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **given}


def _tool(given: Any, path: str) -> dict[str, Any]:
    if type(given) is not dict:
        raise refused(path, f"got {type_name(given)}; expected an object")
    tool = JsonObject(given, f"{path}.")
    if (kind := tool.take("type", str, "custom")) != "custom":
        raise tool.refused("type", f"got {kind[:64]!r}; expected custom; built-in tools are not supported")
    function = {"name": tool.take("name", str), "description": tool.take("description", str),
                "parameters": tool.take("input_schema", dict), "strict": tool.take("strict", bool)}
    for name in ("cache_control", "eager_input_streaming", "defer_loading", "input_examples", "allowed_callers"):
        tool.take(name, (dict, bool, list))
    tool.check_rest()
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _text(content: Any, path: str) -> Any:
    if type(content) is not list:
        return content
    try:
        return text_of_parts([{key: value for key, value in part.items() if key != "citations"}
                              if type(part) is dict else part for part in content], path)
    except PartError as error:
        raise refused(error.name, error.message) from None


def _messages(given: Any, path: str) -> list[dict[str, Any]]:
    """Return a message as those of a chat: results of tools are messages of their own, before the text."""
    if type(given) is not dict:
        raise refused(path, f"got {type_name(given)}; expected an object")
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise refused(f"{path}.role", f"got {role!r:.64}; expected user or assistant")
    if type(content) is not list:
        return [{"role": role, "content": content}]
    results, texts, calls, thoughts = [], [], [], []
    for number, part in enumerate(content):
        kind = part.get("type") if type(part) is dict else None
        if kind == "tool_result":
            text = _text(part.get("content"), f"{path}.content[{number}].content")
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text or ""})
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(part.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text([part], f"{path}.content"))
    message: dict[str, Any] = {"role": role, "content": "".join(texts) or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*results, *([message] if texts or calls or thoughts or not results else [])]


def error_body(error: OpenAIError) -> bytes:
    """Return the JSON of an error in Anthropic's form."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"error_code": _NO_THREADS, "unsupported": ["thread"]} if error.code == _NO_THREADS else None
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message,
                                                    **({} if details is None else {"details": details})}})


class MessageAnswer:
    """The answer to a POST to /v1/messages: an Answer in the form of the Messages API."""

    def __init__(self, answer: Answer, _: Any) -> None:
        self._answer, self._blocks, self._index = answer, Blocks(), -1
        self.is_streaming, self.identity = answer.is_streaming, f"msg_{uuid4().hex}"

    def cancel(self) -> None:
        self._answer.cancel()

    async def whole(self) -> bytes:
        content = [_block(block) for block in await self._blocks.read(self._answer.parts())]
        return orjson.dumps({**self._message(), "content": content, **self._end(), "usage": self._usage()})

    async def events(self) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async for events in self._answer.parts():
                if not has_begun:
                    has_begun = True
                    yield _event("message_start", message=self._message())
                for step in self._blocks.add(events):
                    yield self._of(*step)
        except OpenAIError as error:
            if not has_begun:
                raise
            yield b"event: error\ndata: %s\n\n" % error_body(error)
            return
        for step in self._blocks.close():
            yield self._of(*step)
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def _of(self, step: str, block: Block, text: str) -> bytes:
        if step == OPENS:
            self._index += 1
            return _event("content_block_start", index=self._index, content_block=_block(block))
        if step == MORE:
            kind, name = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
                          CALL: ("input_json_delta", "partial_json")}[block.kind]
            return _event("content_block_delta", index=self._index, delta={"type": kind, name: text})
        signature = b""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            signature = _event("content_block_delta", index=self._index, delta=delta)
        return signature + _event("content_block_stop", index=self._index)

    def _message(self) -> dict[str, Any]:
        return {"id": self.identity, "type": "message", "role": "assistant", "model": self._answer.model, "content": [],
                "stop_reason": None, "stop_sequence": None, "usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        reason, stop = self._answer.reason, self._answer.stopped_by
        name = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")
        return {"stop_reason": "stop_sequence" if stop is not None else name, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        counts = self._answer.usage()
        cached = counts.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {"input_tokens": counts["prompt_tokens"] - cached, "output_tokens": counts["completion_tokens"],
                "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        given = orjson.loads(block.text)
    except orjson.JSONDecodeError:               # not begun, or cut off; the reason of the end says so
        given = {}
    return {"type": "tool_use", "id": block.identity, "name": block.name,
            "input": given if isinstance(given, dict) else {}}
