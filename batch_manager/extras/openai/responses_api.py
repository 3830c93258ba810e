"""OpenAI's Responses API, as a form of chats: the body becomes that of a chat, and its events become items."""

from collections.abc import AsyncIterator
from time import time
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

# Fields that a chat has under the same name.
_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs", "metadata", "user", "store",
         "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "seed", "stop", "top_k",
         "min_p", "max_thinking_tokens", "chat_template_kwargs", "priority", "logit_bias", "repetition_penalty")
_TEXTS = ("input_text", "output_text", "reasoning_text", "text", "refusal")      # parts of a content
# Field -> (values that ask for what happens anyway, why others are refused).
_NOT_BUILT: dict[str, tuple[list[Any], str]] = {
    "previous_response_id": ([], "responses are not stored; pass the whole conversation in input"),
    "conversation": ([], "conversations are not stored; pass the whole conversation in input"),
    "background": ([False], "responses are not stored, so they cannot be fetched later"),
    "prompt": ([], "there are no stored prompts"), "max_tool_calls": ([], "built-in tools are not supported"),
    "truncation": (["disabled"], "the input is not cut"),
    "context_management": ([], "the input is not cut"),
}


def read_response(body: bytes) -> ParsedBody:
    """Parse the body of a POST to /v1/responses. Raises OpenAIError."""
    given = parsed_json(body)
    fields = JsonObject(given)
    for name, (harmless, why) in _NOT_BUILT.items():
        value = fields.take(name, (str, dict, list, bool, int, float))
        if value is not None and value not in harmless:
            raise refused(name, f"not supported; {why}")
    chat: dict[str, Any] = {name: value for name in _SAME
                            if (value := fields.take(name, (str, dict, list, bool, int, float))) is not None}
    if "top_logprobs" in chat:
        raise refused("top_logprobs", "log-probabilities are not supported here; use /v1/chat/completions")
    for each in fields.take("include", list, []):
        if each != "reasoning.encrypted_content":
            raise refused("include", f"got {each!r:.64}; expected nothing to include")
    fields.take("stream_options", dict)
    chat["max_completion_tokens"] = fields.take("max_output_tokens", int)
    if (text := fields.object("text")) is not None:
        chat["response_format"] = _response_format(text.take("format", dict, {"type": "text"}))
        chat["verbosity"] = text.take("verbosity", str)
        text.check_rest()
    if (reasoning := fields.object("reasoning")) is not None:
        chat["reasoning_effort"] = reasoning.take("effort", str)
        for name in ("summary", "generate_summary"):     # reasoning is not summed up; it is in the answer as it is
            reasoning.take(name, str)
        reasoning.check_rest()
    chat["tools"] = [_tool(tool, number) for number, tool in enumerate(fields.take("tools", list, []))]
    chat["tool_choice"] = _tool_choice(fields.take("tool_choice", (str, dict)))
    chat["messages"] = _messages(fields.take("instructions", str), fields.take("input", (str, list)))
    fields.check_rest()
    parsed = read_fields(JsonObject(chat), True)
    parsed.has_events = True
    parsed.form = {name: given.get(name) for name in (
        "instructions", "max_output_tokens", "metadata", "temperature", "top_p", "tools", "tool_choice", "user",
        "parallel_tool_calls", "reasoning", "text", "service_tier")}
    return parsed


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def _tool(tool: Any, number: int) -> Any:
    if type(tool) is dict and tool.get("type", "function") == "function" and "function" not in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items()
                                                 if key not in ("type", "defer_loading", "allowed_callers")}}
    if type(tool) is dict and "function" not in tool:
        raise refused(f"tools[{number}].type", f"got {tool.get('type')!r:.64}; expected function; built-in tools are "
                                               "not supported")
    return tool


def _tool_choice(choice: Any) -> Any:
    if type(choice) is not dict:
        return choice
    if choice.get("type") == "allowed_tools":
        if type(tools := choice.get("tools", [])) is not list:
            raise refused("tool_choice.tools", f"got {type_name(tools)}; expected a list")
        return {"type": "allowed_tools", "allowed_tools": {
            "mode": choice.get("mode", "auto"), "tools": [{"function": tool} for tool in tools]}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat. Reasoning, text and calls in a row are one message of the assistant."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if given is None:
        raise refused("input", "missing; expected a string or a list of items")
    for number, item in enumerate([{"role": "user", "content": given}] if type(given) is str else given):
        path = f"input[{number}]"
        if type(item) is not dict:
            raise refused(path, f"got {type_name(item)}; expected an object")
        kind = item.get("type", "message")
        if kind == "message":
            if type(role := item.get("role")) is not str:
                raise refused(f"{path}.role", f"got {type_name(role)}; expected a string")
            role = "system" if role == "developer" else role
            message = {"role": role, "content": _text(item.get("content"), f"{path}.content")}
            if role == "assistant" and _is_open(messages) and not messages[-1].get("content"):
                messages[-1]["content"] = message["content"]
            else:
                messages.append(message)
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function",
                    "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"),
                             "content": _text(item.get("output"), f"{path}.output")})
        elif kind == "reasoning":
            text = _text([] if item.get("content") is None else item["content"], f"{path}.content")
            if text:
                messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        else:
            raise refused(f"{path}.type", f"got {kind!r:.64}; expected message, function_call, function_call_output or "
                                          "reasoning; items are not stored, so pass them whole (store: false)")
    return messages


def _is_open(messages: list[dict[str, Any]]) -> bool:
    return bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def _text(content: Any, path: str) -> Any:
    """Return the content of an item as one string. What is neither a string nor a list stays, and is refused later."""
    if type(content) is not list:
        return content
    parts = []
    for part in content:
        if type(part) is dict and part.get("type") in _TEXTS:
            part = {"type": "text", "text": part.get("text", part.get("refusal"))}
        parts.append(part)
    try:
        return text_of_parts(parts, path)
    except PartError as error:
        raise refused(error.name, error.message) from None


class ResponseAnswer:
    """The answer to a POST to /v1/responses: an Answer in the form of the Responses API."""

    def __init__(self, answer: Answer, form: dict[str, Any]) -> None:
        self._answer, self._form = answer, form
        self.is_streaming, self.identity = answer.is_streaming, f"resp_{uuid4().hex}"
        self._created, self._blocks, self._number = int(time()), Blocks(), -1
        self._items: list[dict[str, Any]] = []

    def cancel(self) -> None:
        self._answer.cancel()

    async def whole(self) -> bytes:
        self._items = [_item(block, f"{_PREFIXES[block.kind]}_{uuid4().hex}")
                       for block in await self._blocks.read(self._answer.parts())]
        return orjson.dumps(self._response(self._status()))

    async def events(self) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async for events in self._answer.parts():
                if not has_begun:
                    has_begun = True
                    for name in ("created", "in_progress"):
                        yield self._event(f"response.{name}", response=self._response("in_progress"))
                for step in self._blocks.add(events):
                    for event in self._of(*step):
                        yield event
        except OpenAIError as error:
            if not has_begun:
                raise
            failure = {"code": error.code or "server_error", "message": error.message}
            yield self._event("response.failed", response={**self._response("failed"), "error": failure})
            return
        for step in self._blocks.close():
            for event in self._of(*step):
                yield event
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    def _of(self, step: str, block: Block, text: str) -> list[bytes]:
        if step == OPENS:
            self._items.append(_item(block, f"{_PREFIXES[block.kind]}_{uuid4().hex}", "in_progress"))
        item, place = self._items[-1], {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        name = {"text": "output_text", "reasoning": "reasoning_text", CALL: "function_call_arguments"}[block.kind]
        if block.kind != CALL:
            place["content_index"] = 0
        more = {"logprobs": []} if block.kind == "text" else {}
        at = place["output_index"]
        part = {} if block.kind == CALL else {"part": _part(block)}
        if step == OPENS:
            shown = {**item, "content": []} if part else item
            return [self._event("response.output_item.added", output_index=at, item=shown),
                    *([self._event("response.content_part.added", **place, **part)] if block.kind == "text" else [])]
        if step == MORE:
            return [self._event(f"response.{name}.delta", **place, delta=text, **more)]
        self._items[-1] = _item(block, item["id"])
        whole = {"arguments": block.text, "name": block.name} if block.kind == CALL else {"text": block.text}
        return [self._event(f"response.{name}.done", **place, **whole, **more),
                *([self._event("response.content_part.done", **place, **part)] if block.kind == "text" else []),
                self._event("response.output_item.done", output_index=at, item=self._items[-1])]

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        body = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)

    def _status(self) -> str:
        return "incomplete" if self._answer.reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        form, used = self._form, None
        if status in ("completed", "incomplete"):
            counts = self._answer.usage()
            used = {"input_tokens": counts["prompt_tokens"],
                    "input_tokens_details": {"cached_tokens": counts.get("prompt_tokens_details", {}).get(
                        "cached_tokens", 0)},
                    "output_tokens": counts["completion_tokens"],
                    "output_tokens_details": counts["completion_tokens_details"],
                    "total_tokens": counts["total_tokens"]}
        return {"id": self.identity, "object": "response", "created_at": self._created, "status": status,
                "error": None, "model": self._answer.model, "output": self._items if used else [],
                "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
                "instructions": form["instructions"], "max_output_tokens": form["max_output_tokens"],
                "metadata": form["metadata"] or {}, "previous_response_id": None, "store": False,
                "parallel_tool_calls": form["parallel_tool_calls"] is not False,
                "reasoning": form["reasoning"] or {"effort": None, "summary": None},
                "temperature": 1.0 if form["temperature"] is None else form["temperature"],
                "text": form["text"] or {"format": {"type": "text"}}, "tool_choice": form["tool_choice"] or "auto",
                "tools": form["tools"] or [], "top_p": 1.0 if form["top_p"] is None else form["top_p"],
                "truncation": "disabled", "background": False, "user": form["user"], "usage": used}


_PREFIXES = {"text": "msg", "reasoning": "rs", CALL: "fc"}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": block.text}


def _item(block: Block, identity: str, status: str = "") -> dict[str, Any]:
    status = status or ("completed" if block.kind != CALL or block.is_whole else "incomplete")
    if block.kind == CALL:
        return {"type": "function_call", "id": identity, "call_id": block.identity, "name": block.name,
                "arguments": block.text, "status": status}
    if block.kind == "reasoning":
        return {"type": "reasoning", "id": identity, "summary": [], "content": [_part(block)], "status": status}
    return {"type": "message", "id": identity, "role": "assistant", "content": [_part(block)], "status": status}
