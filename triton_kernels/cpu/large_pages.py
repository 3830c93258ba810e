"""Allocates memory in large pages, if the system supports them, for data that each step reads in full.

A large page needs one address translation instead of 512, and a processor caches few translations.

Memory is freed when the last array that uses it is deleted.
"""

import contextlib
import mmap
import threading

import numpy as np

LARGE_PAGE_BYTES, ALIGNMENT_BYTES = 2 << 20, 4096
SHARED_BYTES = 64 << 20

_lock = threading.Lock()
_shared = np.zeros(0, np.uint8)        # the unused rest of the memory that small arrays share


def allocate(num_bytes: int) -> np.ndarray:
    """Return zeros [num_bytes] uint8, aligned to a large page. Pages take up memory only once they are written.

    Raises   MemoryError if the system does not provide the memory
    """
    try:
        memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system cannot allocate {num_bytes:,} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):                 # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % LARGE_PAGE_BYTES
    return array[start : start + num_bytes]


def allocate_shared(num_bytes: int) -> np.ndarray:
    """Return zeros [num_bytes] uint8, aligned to 4,096 bytes. Arrays smaller than SHARED_BYTES share large pages.

    Raises   MemoryError if the system does not provide the memory
    """
    global _shared
    if num_bytes >= SHARED_BYTES:
        return allocate(num_bytes)
    with _lock:
        if num_bytes > len(_shared):
            _shared = allocate(SHARED_BYTES)
        part, _shared = _shared[:num_bytes], _shared[-(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]
        return part
