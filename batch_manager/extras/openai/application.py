"""The application of the OpenAI server, for `batch-manager serve`, gunicorn and other ASGI servers.

Needs starlette and prometheus-client: the extra `server`.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from ...aio import AsyncEngine
from ...config import KvCacheConfig, Parts, TrtGptModelOptionalParams
from ...errors import BatchManagerError, ConfigError
from ..prometheus import CONTENT_TYPE, PrometheusStatistics
from ..tool_calls.model_formats import AUTO, check_format_names
from .adapters import AdapterOptions
from .errors import OpenAIError
from .responses import (
    CHATS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Form,
    answer_to,
    count_of,
    error_response,
    json_response,
)
from .service import OpenAIService
from .transfers import options_of_json

if TYPE_CHECKING:
    from ..kv_events import KvEventPublisher

# Routes of stored things in OpenAI's and Anthropic's API.
OF_STORED = ("/v1/chat/completions", "/v1/responses", "/v1/conversations", "/v1/messages/batches", "/v1/batches",
             "/v1/files")
SECONDS_BETWEEN_TRIMS = 1.0
FEW_OBJECTS = 20_000         # the garbage collector visits them in a few milliseconds
SWITCH_INTERVAL_S = 0.001    # a thread that computes keeps the event loop waiting so long, several times per event
M_ARENA_MAX = -8     # of glibc's malloc.h
# Scheme, host (a name, an IPv4 or a bracketed IPv6 address) and port.
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?", re.I)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def make_app(model: str, *, served_model_name: str | None = None, block_reuse: bool = True,
             allowed_origins: Sequence[str] = (), tool_call_parser: str = AUTO, reasoning_parser: str = AUTO,
             adapters: AdapterOptions | None = None, kv_events_config: str | None = None,
             kv_transfer_config: str | None = None, disk_cache_path: str | None = None,
             disk_cache_size: int | None = None, kv_cache_dtype: str = "auto", **params: Any) -> Starlette:
    """Build the application. The model is loaded when the application starts, so a server may fork before the start.

    model              folder with a tokenizer, or a `.gguf` file
    served_model_name  name that clients use; None: the name of the folder or file
    allowed_origins    origins such as `https://example.org` whose pages may call the server from a browser; `*`: all
    tool_call_parser, reasoning_parser   names of the formats in which the model writes tool calls and reasoning;
                       `auto`: those of its chat template; `none`: no calls, and reasoning in the text
    adapters           LoRA adapters, and whether clients may load further ones; None: there are none
    kv_events_config   JSON for KvEventPublisher.of_json; None: no events of the prefix cache
    kv_transfer_config   JSON for transfers.options_of_json; None: each prompt is computed here, and for this server
    disk_cache_path, disk_cache_size, kv_cache_dtype   see KvCacheConfig
    params             fields of TrtGptModelOptionalParams

    Raises ConfigError for an origin that is none, for an empty name, for the name of an unknown format, and for what
    KvCacheConfig refuses.
    """
    cache = {"block_reuse": block_reuse, "kv_events_config": kv_events_config, "disk_cache_path": disk_cache_path,
             "disk_cache_size": disk_cache_size, "kv_cache_dtype": kv_cache_dtype}
    engine_params(**cache)
    check_format_names(tool_call_parser, reasoning_parser)
    if served_model_name == "":
        raise ConfigError("served_model_name is empty", "expected the name that clients use",
                          "leave it out to use the name of the folder or file")
    params["kv_transfer_config"] = kv_transfer_config
    engine_params(block_reuse=block_reuse, **params)         # refuses what is wrong before the model is loaded
    names = [served_model_name or os.path.basename(os.path.abspath(model))]
    origins = [normal_origin(origin) for origin in allowed_origins]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        use_one_heap()
        if adapters is not None:
            params["peft_cache_config"] = await asyncio.to_thread(adapters.cache, model)
        statistics = app.state.statistics = PrometheusStatistics(names[0], adapters.most_on_device if adapters else 0)
        publisher = publisher_of(kv_events_config)
        with contextlib.nullcontext() if publisher is None else publisher:
            engine = await AsyncEngine.start(
                model, return_batch_manager_stats_cb=statistics, takes_all=True, parts=Parts(kv_events=publisher),
                optional_params=engine_params(**cache, **params))
            try:
                service = app.state.service = OpenAIService(
                    engine, model, names, observe=statistics.observe, tool_call_parser=tool_call_parser,
                    reasoning_parser=reasoning_parser)
                service.prepare()
                if adapters is not None:
                    statistics.adapter_name = engine.adapter_name
                    await adapters.load(service)
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
                gc.collect()                     # a later run of the garbage collector stops all streams, and need not
                gc.freeze()                      # visit what the libraries have made: 0.1 s
                trimming = asyncio.ensure_future(trim_after_large_calls(service))
                yield
                trimming.cancel()
            finally:
                await engine.close(drain=False)  # uvicorn has already waited for the connections

    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
                      allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"])
    app = Starlette(lifespan=lifespan, routes=[*ROUTES, *(adapters.routes() if adapters is not None else ())],
                    exception_handlers=HANDLERS,
                    middleware=[Middleware(without_stack), *([cors] if origins else [])])
    app.router.redirect_slashes = False      # a redirect is no error in OpenAI's format
    return app


def engine_params(*, block_reuse: bool, kv_events_config: str | None = None, kv_transfer_config: str | None = None,
                  disk_cache_path: str | None = None, disk_cache_size: int | None = None,
                  kv_cache_dtype: str = "auto", **params: Any) -> TrtGptModelOptionalParams:
    """Return the optional parameters of the application's engine, which all its ranks need."""
    transfer, host_cache_size = (None, 0) if kv_transfer_config is None else options_of_json(kv_transfer_config)
    cache = KvCacheConfig(enable_block_reuse=block_reuse, event_tokens=kv_events_config is not None,
                          host_cache_size=host_cache_size, disk_cache_path=disk_cache_path,
                          disk_cache_size=disk_cache_size, kv_cache_dtype=kv_cache_dtype)
    return TrtGptModelOptionalParams(kv_cache_config=cache, kv_transfer_config=transfer, flush_stats_when_idle=True,
                                     **params)


def publisher_of(config: str | None) -> "KvEventPublisher | None":
    """Return the publisher of events of the prefix cache. Raises ConfigError, also if the extra is not installed."""
    if config is None:
        return None
    try:
        from ..kv_events import KvEventPublisher
    except ImportError as error:
        raise ConfigError("KV events are configured", f"{error.name} is not installed; it is part of the extra events",
                          'pip install "batch-manager[events]"') from error
    return KvEventPublisher.of_json(config)


def normal_origin(origin: str) -> str:
    """Return an origin as browsers send it: in lower case, without the scheme's default port. Raises ConfigError."""
    if origin == "*":
        return origin
    found = _ORIGIN.fullmatch(origin)
    if found is None or int(found[3] or 0) > 65535:
        raise ConfigError(f"the allowed origin is {origin!r:.200}",
                          "expected a scheme and a host, such as https://example.org, with a port if it is not the "
                          "scheme's own, or *", "leave out the path and the final slash, and name each host")
    scheme, host, port = found[1].lower(), found[2].lower(), int(found[3] or 0)
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")


def use_one_heap() -> None:
    """Have all threads allocate from the first heap of the C library, the only one whose end malloc_trim returns.

    A heap that another thread already has stays.
    """
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(M_ARENA_MAX, 1)


async def trim_after_large_calls(service: OpenAIService) -> None:
    """Return freed memory to the system after calls with large bodies or many outputs. The C library would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)       # of glibc
    while trim is not None:
        await asyncio.sleep(SECONDS_BETWEEN_TRIMS)
        if service.has_freed_much and len(gc.get_objects()) < FEW_OBJECTS:
            service.has_freed_much = False
            gc.collect()                     # also frees the interpreter's unused objects, which keep their arenas
            await asyncio.to_thread(trim, 0)


def without_stack(app: ASGIApp) -> ASGIApp:
    """ASGI middleware for a start that fails with a BatchManagerError.

    The server logs the text of the error without a stack trace. The middleware sets `app.state.is_refused` to True.
    """
    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_text(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and isinstance(sys.exception(), BatchManagerError):
                message["message"] = str(sys.exception())
                scope["app"].state.is_refused = True
            await send(message)

        await app(scope, receive, send_text if scope["type"] == "lifespan" else send)
    return asgi


def generation(form: Form) -> Callable[[Request], Awaitable[Response]]:
    async def generate(request: Request) -> Response:
        return await answer_to(request, request.app.state.service, form)
    return generate


def count(form: Form) -> Callable[[Request], Awaitable[Response]]:
    async def count_tokens(request: Request) -> Response:
        return await count_of(request, request.app.state.service, form)
    return count_tokens


async def models(request: Request) -> Response:
    return json_response(request.app.state.service.models())


async def model_of_a_name(request: Request) -> Response:
    try:
        return json_response(request.app.state.service.model(request.path_params["name"]))
    except OpenAIError as error:
        return error_response(error)


async def health(request: Request) -> Response:
    status, body = request.app.state.service.health()
    return json_response(body, status, {"Retry-After": "5"} if status == 503 else {})


async def metrics(request: Request) -> Response:
    return Response(request.app.state.statistics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def not_found(request: Request, error: Any) -> Response:
    method, path = request.method, request.url.path[:200]
    why = "nothing is stored here, so it cannot be fetched or changed later; " if path.startswith(OF_STORED) else ""
    if request.headers.get("upgrade", "").lower() == "websocket":     # uvicorn without a library for WebSockets
        return no_socket(path)
    routes = ", ".join(f"{' '.join(route.methods - {'HEAD'})} {route.path_format}" for route in request.app.routes
                       if isinstance(route, Route))
    form = MESSAGES if path.startswith("/v1/messages") else CHATS
    told = OpenAIError(error.status_code, f"there is no route {method} {path}; {why}the routes are {routes}")
    response = json_response(form.error_body(told), told.status, told.headers)
    response.headers.update(error.headers or {})     # Allow, for 405
    return response


async def refuse_socket(socket: WebSocket) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", ()):
        await socket.send_denial_response(no_socket(socket.url.path[:200]))
    else:
        await socket.close()


def no_socket(path: str) -> Response:
    return error_response(OpenAIError(404, f"{path} is no WebSocket, and there is none here; "
                                           'POST /v1/responses with "stream": true has the same events'))


async def server_error(_: Request, __: Exception) -> Response:
    return error_response(OpenAIError(500, "the server failed; see its log"))


ROUTES: list[BaseRoute] = [
    Route("/v1/completions", generation(COMPLETIONS), methods=["POST"]),
    Route("/v1/chat/completions", generation(CHATS), methods=["POST"]),
    Route("/v1/responses", generation(RESPONSES), methods=["POST"]),
    Route("/v1/responses/input_tokens", count(RESPONSES), methods=["POST"]),
    Route("/v1/messages", generation(MESSAGES), methods=["POST"]),
    Route("/v1/messages/count_tokens", count(MESSAGES), methods=["POST"]),
    Route("/v1/models", models), Route("/v1/models/{name:path}", model_of_a_name),
    Route("/health", health), Route("/metrics", metrics), WebSocketRoute("/{path:path}", refuse_socket),
]
HANDLERS: dict[Any, Any] = {404: not_found, 405: not_found, 500: server_error}
