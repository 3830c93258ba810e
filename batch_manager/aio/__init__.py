"""The engine for asyncio: requests as async iterators, no callbacks.

Owns     AsyncEngine, the mailbox of each of its requests, and how a mailbox wakes its event loop
Not      anything about models, schedules or blocks: it is a host of GptManager like any other, on its public API
Yours    a front of another kind (threads, another event loop) is a file beside these, over the same Switchboard
"""

from .engine import AsyncEngine, Stream
from .mailbox import Delta, RequestFailed

__all__ = ["AsyncEngine", "Delta", "RequestFailed", "Stream"]
