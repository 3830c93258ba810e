"""The log of the package, which cannot hurt who writes to it.

A handler or a filter of the host's may raise. That would end what was only to be told of: a final response that was on
its way, or the worker.
"""

import logging
from contextlib import suppress
from typing import Any


class ContainedLog(logging.LoggerAdapter):
    """A logger whose methods never raise: what a handler or a filter raises is dropped, and with it the record."""

    def log(self, level: int, msg: object, *args: Any, **options: Any) -> None:
        with suppress(BaseException):    # a handler may as well call sys.exit
            super().log(level, msg, *args, stacklevel=2, **options)    # 2: the record names our caller, not this line


log = ContainedLog(logging.getLogger("batch_manager"), None)
