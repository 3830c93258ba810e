"""An OpenAI server in front of servers that compute prompts and servers that continue them. See openai_server.md.

    python examples/disaggregated_proxy.py --prompts http://127.0.0.1:8001 --generation http://127.0.0.1:8002

A call goes to a server of the first kind for its prompt, and with the ticket of that answer to one of the second kind.
If a server falls away, the next one runs the call with the same seed, and a stream goes on where it had stopped.
"""

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

try:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    sys.exit(f'disaggregated_proxy: {error.name} is not installed; pip install -e ".[server,examples]"')

SECONDS_TO_CONNECT = 2.0
HEADERS = ("content-type", "retry-after", "x-request-id")
DONE = "[DONE]"
FALLEN = "no server can answer this call"


class Proxy:
    """Answers calls of completions and chats.

    prompts, generation   addresses of the servers of each kind
    prompt_seconds        for a prompt; after them, a server of the second kind computes it
    silent_seconds        between two events of a stream; after them, another server goes on
    """

    def __init__(self, prompts: list[str], generation: list[str], client: httpx.AsyncClient,
                 prompt_seconds: float = 60.0, silent_seconds: float = 60.0) -> None:
        self._prompts, self._generation, self._client = prompts, generation, client
        self._prompt_seconds, self._silent_seconds, self._turns = prompt_seconds, silent_seconds, count()

    async def call(self, request: Request) -> Response:
        return await while_connected(request, self._answer(request.url.path, await request.body()))

    async def look(self, request: Request) -> Response:
        """Pass a GET to the first server that answers it with 200."""
        for address in [*self._generation, *self._prompts]:
            try:
                answer = await self._client.get(address + request.url.path, timeout=SECONDS_TO_CONNECT)
                if answer.status_code == 200:
                    return passed_on(answer)
            except httpx.TransportError:
                continue
        return refused(503, FALLEN)

    async def _answer(self, path: str, data: bytes) -> Response:
        try:
            body = json.loads(data)
            if type(body) is not dict:
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            return refused(400, f"the body is no JSON object: {error}")
        if body.get("seed") is None:
            body["seed"] = secrets.randbits(31)            # each server draws the same tokens
        turn = next(self._turns)
        attempts = self._attempts(body, await self._ticket(path, body, turn), turn)
        answer = await self._send(path, attempts)
        if answer is None:
            return refused(503, FALLEN)
        if answer.is_stream_consumed:
            return passed_on(answer)
        return StreamingResponse(self._events(path, answer, attempts), media_type="text/event-stream")

    async def _ticket(self, path: str, body: dict[str, Any], turn: int) -> dict[str, Any] | None:
        """Have a prompt computed. Returns the `kv_transfer_params` of the answer, or None if no server could do it."""
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        asked["kv_transfer_params"] = {"do_remote_decode": True}
        for address in rotated(self._prompts, turn):
            try:
                answer = await self._client.post(address + path, json=asked, timeout=httpx.Timeout(
                    self._prompt_seconds, connect=SECONDS_TO_CONNECT))
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                return answer.json().get("kv_transfer_params")
            if answer.status_code != 503:
                return None            # wrong, several outputs, or too much to do: the other server answers or refuses
        return None

    def _attempts(self, body: dict[str, Any], ticket: dict[str, Any] | None, turn: int
                  ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each server that can run the call, with its body. A server for prompts can do without the others."""
        with_ticket = body if ticket is None else {**body, "kv_transfer_params": ticket}
        for address in rotated(self._generation, turn):
            yield address, with_ticket
        for address in rotated(self._prompts, turn):
            yield address, body

    async def _send(self, path: str, attempts: Iterator[tuple[str, dict[str, Any]]]) -> httpx.Response | None:
        """Return the answer of the next server that has one: a stream that begins, or a whole answer."""
        unable = None
        for address, body in attempts:
            answer = None
            try:
                answer = await self._client.send(self._client.build_request("POST", address + path, json=body),
                                                 stream=True)
                if answer.status_code == 200 and body.get("stream"):
                    return answer
                await answer.aread()
            except httpx.TransportError:
                continue
            finally:
                if answer is not None and not (answer.status_code == 200 and body.get("stream")):
                    await answer.aclose()
            if answer.status_code != 503:
                return answer
            unable = answer
        return unable

    async def _events(self, path: str, answer: httpx.Response, attempts: Iterator[tuple[str, dict[str, Any]]]
                      ) -> AsyncIterator[str]:
        told = Told()
        while True:
            try:
                async for line in self._lines(answer):
                    data = line.removeprefix("data: ")
                    if data == DONE:
                        yield f"data: {DONE}\n\n"
                        return
                    if line.startswith("data: ") and (event := told.news(json.loads(data))):
                        yield f"data: {json.dumps(event)}\n\n"
            except (httpx.TransportError, TimeoutError, DifferentText):
                pass
            finally:
                await answer.aclose()
            again = await self._send(path, attempts) if told.is_plain_text else None
            if again is None or again.status_code != 200:
                yield f"data: {json.dumps(error_of('the server fell away, and no other one can go on'))}\n\n"
                return
            answer = again
            told.begin_again()

    async def _lines(self, answer: httpx.Response) -> AsyncIterator[str]:
        """Yield the lines of a stream. Raises TimeoutError if the server is silent after the first one, which may wait
        for other calls.
        """
        lines, seconds = answer.aiter_lines(), None
        while (line := await asyncio.wait_for(anext(lines, None), seconds)) is not None:
            yield line
            seconds = self._silent_seconds


class DifferentText(Exception):
    """Another server goes on with another text than the client has."""


class Told:
    """What a client has been told by the events of a stream.

    is_plain_text   whether the events had nothing but text, so that another server can go on
    """

    def __init__(self) -> None:
        self.is_plain_text = True
        self._of: dict[int, str] = {}                      # index of the choice -> its text
        self._ended: set[int] = set()
        self._now: dict[int, str] = {}                     # likewise, by the server that answers now
        self._first: dict[str, Any] = {}
        self._is_again = False

    def begin_again(self) -> None:
        self._now, self._is_again = {}, True

    def news(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return an event without the text that the client has; None if nothing is left. Raises DifferentText."""
        self._first = self._first or {name: event.get(name) for name in ("id", "created")}
        choices = [choice for choice in event.get("choices", ()) if self._is_news(choice)]
        if self._is_again and event.get("choices") and not choices:
            return None
        return {**event, **self._first, "choices": choices} if "choices" in event else event

    def _is_news(self, choice: dict[str, Any]) -> bool:
        """Cut away the text of a choice that the client has. Returns whether anything is left."""
        index, holder = choice["index"], choice.get("delta", choice)
        name = "content" if "delta" in choice else "text"
        more = {*holder, *choice} - {"index", "delta", "role", "finish_reason", "stop_reason", name}
        if any(holder.get(each) or choice.get(each) for each in more):
            self.is_plain_text = False
        now = self._now[index] = self._now.get(index, "") + (holder.get(name) or "")
        told = self._of.get(index, "")
        if not (now.startswith(told) or told.startswith(now)):
            raise DifferentText
        new = now[len(told):]
        self._of[index] = told + new
        if self._is_again and holder.get(name):
            holder[name] = new
        is_end = bool(choice.get("finish_reason")) and index not in self._ended
        if is_end:
            self._ended.add(index)
        return not self._is_again or bool(new) or is_end


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the result of `work`, which is cancelled when the client goes away."""
    answered, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answered.result() if answered.done() else Response(status_code=499)
    finally:
        answered.cancel()
        gone.cancel()


def rotated(servers: list[str], turn: int) -> list[str]:
    return servers[turn % len(servers):] + servers[:turn % len(servers)]


def passed_on(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code,
                    {name: answer.headers[name] for name in HEADERS if name in answer.headers})


def error_of(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "server_error", "param": None, "code": None}}


def refused(status: int, text: str) -> Response:
    return Response(json.dumps(error_of(text)), status, media_type="application/json")


def make_app(prompts: list[str], generation: list[str], prompt_seconds: float = 60.0,
             silent_seconds: float = 60.0, transport: httpx.AsyncBaseTransport | None = None) -> Starlette:
    """Build the application; the other arguments as for Proxy.

    transport   of httpx; None: connections
    """
    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=SECONDS_TO_CONNECT), transport=transport,
                               limits=httpx.Limits(max_connections=None), trust_env=False)
    proxy = Proxy([address.rstrip("/") for address in prompts], [address.rstrip("/") for address in generation], client,
                  prompt_seconds, silent_seconds)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(lifespan=lifespan, routes=[
        *(Route(f"/v1/{name}", proxy.call, methods=["POST"]) for name in ("completions", "chat/completions")),
        *(Route(path, proxy.look) for path in ("/v1/models", "/v1/models/{name:path}", "/health"))])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", nargs="+", required=True, metavar="URL", help="servers that compute prompts")
    parser.add_argument("--generation", nargs="+", required=True, metavar="URL", help="servers that continue them")
    parser.add_argument("--prompt-seconds", type=float, default=60.0, metavar="S",
                        help="after so many seconds, a prompt is computed where it is continued (default: 60)")
    parser.add_argument("--silent-seconds", type=float, default=60.0, metavar="S",
                        help="after so many seconds without an event of a stream, another server goes on (60)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    uvicorn.run(make_app(options.prompts, options.generation, options.prompt_seconds, options.silent_seconds),
                host=options.host, port=options.port)


if __name__ == "__main__":
    main()
