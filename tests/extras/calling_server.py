"""The OpenAI server over HTTP in front of a scripted model that calls the first tool, and then tells its result."""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from batch_manager import Parts, TrtGptModelOptionalParams
from batch_manager.aio import AsyncEngine
from batch_manager.extras.openai import OpenAIService
from batch_manager.extras.openai.application import HANDLERS, ROUTES
from tests.extras.calling_model import Caller, backend_of, folder_of
from tests.harness.waiting import until


def example(schema, root=None):
    """Return a value of a JSON schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "enum" in schema or "const" in schema:
        return schema["enum"][0] if "enum" in schema else schema["const"]
    if "anyOf" in schema:
        return example(schema["anyOf"][0], root)
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: example(each, root) for name, each in schema.get("properties", {}).items()}
    return {"string": "Bath", "integer": 7, "number": 2.5, "boolean": True, "null": None, "array": []}[kind]


def says(prompt):
    """Call the first tool with an example of its arguments; after its result, tell the result.

    Agents of smolagents pass a result as a message of the user, and call the tool `final_answer` to tell it.
    """
    lines = prompt.split("\n")
    tools = [json.loads(line)["function"] for line in lines if line.startswith('{"type": "function"')]
    results = [line.removeprefix("tool: ") for line in lines if line.startswith("tool: ")]
    results += [line for before, line in itertools.pairwise(lines) if before.endswith("Observation:")]
    if results and any(tool["name"] == "final_answer" for tool in tools):
        call = {"name": "final_answer", "arguments": {"answer": f"It is {results[-1]}."}}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    if results or not tools:
        return f"<think>So.</think>It is {results[-1] if results else 'fine'}."
    call = {"name": tools[0]["name"], "arguments": example(tools[0].get("parameters", {"type": "object"}))}
    return f"<think>I call.</think><tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def app_of(service):
    """Return the application of a service that runs already."""
    app = Starlette(routes=ROUTES, exception_handlers=HANDLERS)
    app.state.service = service
    return app


@contextlib.contextmanager
def serving(folder, script=says):
    """Run the server in a thread. Yields its address."""
    @contextlib.asynccontextmanager
    async def lifespan(app):
        backend = backend_of(Caller(folder, script), max_seq_len=8000)
        params = TrtGptModelOptionalParams(max_batch_size=8, max_queued_requests=64)
        async with await AsyncEngine.start(parts=Parts(backend=backend), optional_params=params,
                                           takes_all=True) as engine:
            app.state.service = OpenAIService(engine, folder, ["caller"])
            yield

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = Starlette(routes=ROUTES, exception_handlers=HANDLERS, lifespan=lifespan)
    config = uvicorn.Config(app, port=port, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert server.started, "the server did not start"
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


if __name__ == "__main__":       # for clients in other languages; ends with its standard input
    with serving(folder_of(Path(sys.argv[1]))) as url:
        print(url, flush=True)
        sys.stdin.read()
