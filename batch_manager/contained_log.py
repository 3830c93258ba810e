"""The package's log, which never raises.

A log handler or a log filter of the application may raise. Its exception could lose a final response, or end the
worker.
"""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .errors import where_raised

SECONDS_BETWEEN_RECORDS = 1.0


class ContainedLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods never raise. If a handler or a filter raises, the record and the exception are dropped."""

    def log(self, level: int, msg: object, *args: Any, stacklevel: int = 1, **options: Any) -> None:
        with suppress(BaseException):    # a handler may even call sys.exit
            # One more level, so that the record names our caller and not this line.
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **options)


log = ContainedLog(logging.getLogger("batch_manager"), None)


class RateLimitedLog:
    """Writes at most one record per second and drops the others, for events that may occur in every iteration.

    monotonic   () -> time of a clock in seconds
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = -math.inf

    def log(self, level: int, message: str, *arguments: Any, raised: BaseException | None = None) -> None:
        """Log a message, or drop it if a record was written less than a second ago.

        raised   an exception: its traceback lines follow the message, without its text
        """
        now = self._monotonic()
        if now - self._last < SECONDS_BETWEEN_RECORDS:
            return
        self._last = now
        if raised is not None:
            message, arguments = message + "\n%s", (*arguments, where_raised(raised))
        log.log(level, message, *arguments, stacklevel=2)
