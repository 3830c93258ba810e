"""OpenAI's HTTP interface over an AsyncEngine, for any web framework. Needs tokenizers and jinja2: the extra `server`.

    service = OpenAIService(engine, folder, names=["my-model"])
    answer = await service.accept(body, is_chat=True)      # bytes of a POST; raises OpenAIError
    if answer.is_streaming:
        async for event in answer.events(): ...            # bytes of server-sent events
    else:
        body = await answer.whole()
    answer.cancel()                                        # the client is gone

`examples/openai_server.py` is a server with it.

Owns     what a body asks for, the shapes of answers, chunks and errors
Not      sockets, routes, signals; how a request is scheduled
Yours    another route is a method of OpenAIService, another field of a body a line in `fields.py`
"""

from .errors import OpenAIError
from .service import Answer, OpenAIService

__all__ = ["Answer", "OpenAIError", "OpenAIService"]
