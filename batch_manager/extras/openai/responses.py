"""Starlette and FastAPI responses to requests of OpenAI clients. Needs starlette: the extra `server`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from . import messages_api, responses_api
from .answers import Answer
from .errors import OpenAIError
from .fields import ParsedBody
from .service import OpenAIService

LARGEST_BODY = 4 * 1024 * 1024     # bytes; orjson holds the interpreter lock while it parses
LARGEST_PIECE = 256 * 1024         # bytes; the server would copy a longer one into its buffer of the connection


class Form(NamedTuple):
    """A form of the API.

    is_chat      whether its bodies are those of chats
    read         parses a body; None: as OpenAI's completions and chats
    answer       makes the answer of an Answer and its `form`; None: the Answer itself
    error_body   makes the JSON of an error
    read_prompt  parses a body whose prompt is counted; None: the form has no such route
    counted      makes the JSON of the number of its tokens
    """

    is_chat: bool = True
    read: Callable[[bytes], ParsedBody] | None = None
    answer: Callable[[Answer, Any], Any] | None = None
    error_body: Callable[[OpenAIError], bytes] = OpenAIError.body
    read_prompt: Callable[[bytes], ParsedBody] | None = None
    counted: Callable[[int], dict[str, Any]] = lambda count: {"input_tokens": count}


COMPLETIONS, CHATS = Form(is_chat=False), Form()
RESPONSES = Form(read=responses_api.read_response, answer=responses_api.ResponseAnswer,
                 read_prompt=responses_api.read_response,
                 counted=lambda count: {"object": "response.input_tokens", "input_tokens": count})
MESSAGES = Form(read=messages_api.read_message, answer=messages_api.MessageAnswer, error_body=messages_api.error_body,
                read_prompt=partial(messages_api.read_message, generates=False))


async def answer_to(request: Request, service: OpenAIService, form: Form) -> Response:
    """Return the response to a POST to one of the routes that generate.

    When the client disconnects, the answer's requests stop, streaming or not. For a failure before the first byte, the
    response is an error with its HTTP status.
    """
    watcher = None
    try:
        answer = await service.accept(await body_of(request, service), form.is_chat, form.read)
        if form.answer is not None:
            answer = form.answer(answer, answer.form)
        headers = {"X-Request-Id": request.headers.get("x-request-id", answer.identity)}
        watcher = asyncio.ensure_future(_cancel_when_gone(request, answer))
        if answer.is_streaming:
            events = answer.events()
            response = EventStream(await anext(events), events, answer, watcher, headers)
            watcher = None
            return response
        return WholeAnswer(await answer.whole(), answer, headers)
    except OpenAIError as error:
        return json_response(form.error_body(error), error.status, error.headers)
    except ClientDisconnect:
        return Response(status_code=499)
    finally:
        if watcher is not None:
            watcher.cancel()


async def count_of(request: Request, service: OpenAIService, form: Form) -> Response:
    """Return the response to a POST to one of the routes that count the tokens of a prompt."""
    try:
        count = await service.num_prompt_tokens(await body_of(request, service), form.read_prompt)
        return json_response(orjson.dumps(form.counted(count)))
    except OpenAIError as error:
        return json_response(form.error_body(error), error.status, error.headers)
    except ClientDisconnect:
        return Response(status_code=499)


class WholeAnswer(Response):
    """A JSON answer. It is sent in pieces, each when the client has read those before it."""

    def __init__(self, body: bytes, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(body, headers=headers, media_type="application/json")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for start in range(0, len(self.body), LARGEST_PIECE):
                piece = self.body[start:start + LARGEST_PIECE]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._answer.cancel()            # a large body is freed only now


class EventStream(Response):
    """A response of server-sent events. The first event is computed before the status is sent."""

    def __init__(self, first: bytes, events: AsyncIterator[bytes], answer: Answer, watcher: asyncio.Future,
                 headers: dict[str, str]) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._first, self._events, self._answer, self._watcher = first, events, answer, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._watcher.cancel()
            self._answer.cancel()


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


def error_response(error: OpenAIError) -> Response:
    """Return the error in OpenAI's format, with its status and headers."""
    return json_response(error.body(), error.status, error.headers)


async def body_of(request: Request, service: OpenAIService) -> bytes:
    """Return the body of a request. Raises OpenAIError if it is too large, and ClientDisconnect."""
    length, body = request.headers.get("content-length", ""), bytearray()
    too_large = OpenAIError(413, f"the body is larger than {LARGEST_BODY:,} bytes")
    if length.isdecimal() and int(length[:20]) > LARGEST_BODY:       # before the client has sent it
        raise too_large
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY:
            service.has_freed_much = True
            raise too_large
    return bytes(body)


async def _cancel_when_gone(request: Request, answer: Answer) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.cancel()
