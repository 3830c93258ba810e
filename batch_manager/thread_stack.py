"""Threads with room for what runs on them, whatever stack the host gives its own threads."""

import threading

LEAST_STACK_BYTES = 1 << 20     # torch's and a compiler's calls; on 64 KiB they end the process
SYSTEM_DEFAULT = 0
_one_at_a_time = threading.Lock()


def start_with_enough_stack(thread: threading.Thread) -> None:
    """Start a thread. Where the host set `threading.stack_size` to less than is needed, this one gets the system's.

    The setting is the process's: a thread that the host starts in the same moment gets that stack too.
    """
    with _one_at_a_time:
        host_bytes = threading.stack_size(SYSTEM_DEFAULT)    # to ask is to set
        try:
            if host_bytes >= LEAST_STACK_BYTES:
                threading.stack_size(host_bytes)
            thread.start()
        finally:
            threading.stack_size(host_bytes)
