"""The log of the package, which cannot hurt its caller.

A handler or a filter of the host may raise. The caller would lose what it was about to do: a final response that was on
its way, or the worker.
"""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .errors import where_raised

SECONDS_BETWEEN_RECORDS = 1.0


class ContainedLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods never raise: what a handler or a filter raises is dropped, and with it the record."""

    def log(self, level: int, msg: object, *args: Any, stacklevel: int = 1, **options: Any) -> None:
        with suppress(BaseException):    # a handler may as well call sys.exit
            # One more: the record names our caller, not this line.
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **options)


log = ContainedLog(logging.getLogger("batch_manager"), None)


class RateLimitedLog:
    """Writes at most one record a second and drops the others: for what may happen in every iteration.

    monotonic   returns seconds of a clock
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = -math.inf

    def log(self, level: int, message: str, *arguments: Any, raised: BaseException | None = None) -> None:
        """raised   an exception; the lines it came through follow the message, and not what it says"""
        now = self._monotonic()
        if now - self._last < SECONDS_BETWEEN_RECORDS:
            return
        self._last = now
        if raised is not None:
            message, arguments = message + "\n%s", (*arguments, where_raised(raised))
        log.log(level, message, *arguments, stacklevel=2)
