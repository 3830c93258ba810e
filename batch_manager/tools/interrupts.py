"""Ctrl-C in programs that run an engine's loop on the main thread."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Within the context, defer Ctrl-C until the program calls the function that the context manager yields.

    The engine contains the exceptions of callbacks, and reruns steps that raise. It would treat a KeyboardInterrupt
    in a callback or a step in the same way. The yielded function raises KeyboardInterrupt if Ctrl-C came since the
    start of the context. The end of the context does the same. The context manager does nothing on a thread other
    than the main thread. It also does nothing if the process handles or ignores SIGINT itself.
    """
    if (threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield lambda: None
        return
    has_come = False

    def note(*_: object) -> None:
        nonlocal has_come
        has_come = True

    def check() -> None:
        if has_come:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
