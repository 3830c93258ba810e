"""An asyncio interface to the engine: the responses of a request come from an async iterator, not a callback.

Owns     AsyncEngine, the mailbox of each request, and waking event loops
Not      models, schedules or blocks: this package uses the public API of GptManager, as any host does
Yours    an interface of another kind (threads, another event loop) is a new file here, over the same Switchboard
"""

from .engine import AsyncEngine, Stream
from .mailbox import Delta, RequestFailed

__all__ = ["AsyncEngine", "Delta", "RequestFailed", "Stream"]
