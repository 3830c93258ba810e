"""OpenAI's HTTP API over an AsyncEngine, for any web framework. Needs tokenizers and jinja2: the extra `server`.

    service = OpenAIService(engine, folder, names=["my-model"])
    answer = await service.accept(body, is_chat=True)      # body of a POST as bytes; raises OpenAIError
    if answer.is_streaming:
        async for event in answer.events(): ...            # server-sent events as bytes
    else:
        body = await answer.whole()
    answer.cancel()                                        # when the client is gone

`application.py` and `server.py` are the complete server that `batch-manager serve` runs.

Owns     parsing request bodies; the JSON of answers, chunks and errors; the routes and the process of the server
Not      how a request is scheduled
Yours    a new route is a method of OpenAIService, and a line in `application.py`; a new field
         of the body is a line in `fields.py`
"""

from .answers import Answer
from .errors import OpenAIError
from .service import OpenAIService

__all__ = ["Answer", "OpenAIError", "OpenAIService"]
