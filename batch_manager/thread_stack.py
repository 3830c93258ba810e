"""Starts threads with a large enough stack, even if the host program has set a small `threading.stack_size`."""

import threading

LEAST_STACK_BYTES = 1 << 20     # calls of torch and of compilers crash the process on 64 KiB
SYSTEM_DEFAULT = 0
_one_at_a_time = threading.Lock()


def start_with_enough_stack(thread: threading.Thread) -> None:
    """Start a thread, with the system's default stack size if the host program set a small `threading.stack_size`.

    The setting is global: a thread that the host program starts at the same moment gets the same stack size.
    """
    with _one_at_a_time:
        host_bytes = threading.stack_size(SYSTEM_DEFAULT)    # returns the old size and sets the new one
        try:
            if host_bytes >= LEAST_STACK_BYTES:
                threading.stack_size(host_bytes)
            thread.start()
        finally:
            threading.stack_size(host_bytes)
