"""A server for OpenAI clients. See openai_server.md.

    python examples/openai_server.py --model FOLDER --port 8000
    gunicorn -k uvicorn.workers.UvicornWorker -w 2 --chdir examples 'openai_server:make_app("models/austen-4m")'
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError:
    sys.exit('openai_server: starlette and uvicorn are not installed; pip install -e ".[server]"')

from batch_manager import BatchManagerError, KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine
from batch_manager.extras.openai import OpenAIError, OpenAIService
from batch_manager.extras.openai.responses import answer_to, error_response, json_response
from batch_manager.extras.prometheus import CONTENT_TYPE, PrometheusStatistics
from batch_manager.tools.command_parser import CommandParser

SECONDS_BETWEEN_LOOKS = 0.05


def make_app(model: str, *, served_model_name: str | None = None, block_reuse: bool = True, **params) -> Starlette:
    """Build the application. The model is loaded when the application starts, so a server may fork before the start.

    params   fields of TrtGptModelOptionalParams
    """
    names = [served_model_name or os.path.basename(os.path.abspath(model))]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        cache = KvCacheConfig(enable_block_reuse=block_reuse)
        statistics = app.state.statistics = PrometheusStatistics(names[0])
        engine = await AsyncEngine.start(
            model, return_batch_manager_stats_cb=statistics, takes_all=True,
            optional_params=TrtGptModelOptionalParams(kv_cache_config=cache, flush_stats_when_idle=True, **params))
        try:
            app.state.service = OpenAIService(engine, model, names, observe=statistics.observe)
            yield
        finally:
            await engine.close(drain=False)      # uvicorn has already waited for the connections

    return Starlette(lifespan=lifespan, routes=[
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models), Route("/health", health), Route("/metrics", metrics),
    ], exception_handlers={404: not_found, 405: not_found, 500: server_error},
        middleware=[Middleware(without_stack)])


def without_stack(app):
    """ASGI middleware for a start that fails with a BatchManagerError.

    The server logs the text of the error without a stack trace. The middleware sets `app.state.is_refused` to True.
    """
    async def asgi(scope, receive, send):
        async def send_text(message):
            if message["type"] == "lifespan.startup.failed" and isinstance(sys.exception(), BatchManagerError):
                message["message"] = str(sys.exception())
                scope["app"].state.is_refused = True
            await send(message)

        await app(scope, receive, send_text if scope["type"] == "lifespan" else send)
    return asgi


async def completions(request: Request) -> Response:
    return await answer_to(request, request.app.state.service, is_chat=False)


async def chat_completions(request: Request) -> Response:
    return await answer_to(request, request.app.state.service, is_chat=True)


async def models(request: Request) -> Response:
    return json_response(request.app.state.service.models())


async def health(request: Request) -> Response:
    status, body = request.app.state.service.health()
    return json_response(body, status, {"Retry-After": "5"} if status == 503 else {})


async def metrics(request: Request) -> Response:
    return Response(request.app.state.statistics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def not_found(request: Request, error: Exception) -> Response:
    routes = ", ".join(f"{' '.join(route.methods - {'HEAD'})} {route.path}" for route in request.app.routes)
    response = error_response(OpenAIError(
        error.status_code, f"there is no route {request.method} {request.url.path[:200]}; the routes are {routes}"))
    response.headers.update(error.headers or {})     # Allow, for 405
    return response


async def server_error(_: Request, __: Exception) -> Response:
    return error_response(OpenAIError(500, "the server failed; see its log"))


# ---------------------------------------------------------------------- the process


class DrainingServer(uvicorn.Server):
    """A server that drains on SIGTERM: it refuses new requests with 503 while running requests continue.

    The server ends when no request is running, at the latest `drain_s` seconds after the signal. The port stays open
    while the server drains, so that a load balancer can query /health. Ctrl-C ends running requests immediately, and
    so does a second signal. A third signal ends the process without waiting for connections.
    """

    def __init__(self, app: Starlette, host: str, port: int, drain_s: float) -> None:
        super().__init__(uvicorn.Config(app, host, port, access_log=False, timeout_graceful_shutdown=5))
        self.app, self.drain_s, self.draining, self.num_signals = app, drain_s, None, 0

    def handle_exit(self, sig: int, frame) -> None:
        self.num_signals += self.started
        if self.num_signals in (1, 2):
            if self.draining is not None:
                self.draining.cancel()
            is_patient = self.num_signals == 1 and sig == signal.SIGTERM
            self.draining = asyncio.ensure_future(self.drain(self.drain_s if is_patient else 0))
        else:
            self.force_exit = self.started
            super().handle_exit(sig, frame)

    async def drain(self, seconds: float) -> None:
        service, deadline = self.app.state.service, time.monotonic() + seconds
        service.is_draining = True
        while service.engine.health()["active_requests"] and time.monotonic() < deadline:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        await service.engine.close(drain=False)      # ends remaining requests with SHUTDOWN
        self.should_exit = True


def main() -> None:
    parser = CommandParser(description="OpenAI's HTTP API for one model. Exit status: 2 if an option or the model is "
                                       "refused, 1 if the start fails otherwise")
    parser.add_argument("--model", required=True, help="folder with a tokenizer, or .gguf file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (8000)")
    parser.add_argument("--served-model-name")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for running requests after SIGTERM (30)")
    parser.add_argument("--no-block-reuse", action="store_true")
    for name, kind in (("max-batch-size", int), ("max-queued-requests", int), ("max-seq-len", int),
                       ("num-threads", int), ("device", str), ("dtype", str)):
        parser.add_argument(f"--{name}", type=kind)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    host, port, drain_s = (given.pop(name) for name in ("host", "port", "drain_seconds"))
    if not 0 <= port <= 65535:
        parser.error(f"--port is {port}; expected 0 to 65535; 0 takes any free port")
    if not drain_s >= 0:                             # also refuses nan
        parser.error(f"--drain-seconds is {drain_s}; expected at least 0; 0 ends running requests at once")
    try:                                             # check the port before loading the model
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, UnicodeError) as error:
        wrong = "--port" if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES) else "--host"
        print(f"openai_server: cannot listen on {host}, port {port}: {error}; pass another {wrong}", file=sys.stderr)
        sys.exit(2)
    app = make_app(given.pop("model"), block_reuse=not given.pop("no_block_reuse"), **given)
    try:
        with contextlib.suppress(KeyboardInterrupt):     # raised by uvicorn after an orderly shutdown
            DrainingServer(app, host, port, drain_s).run()
    except SystemExit:                                   # uvicorn's status of a failed start is 3
        sys.exit(2 if getattr(app.state, "is_refused", False) else 1)


if __name__ == "__main__":
    main()
