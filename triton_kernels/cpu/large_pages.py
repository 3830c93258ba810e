"""Memory in large pages, where the system has them, for what steps read whole: a large page needs one translation of an
address where small ones need 512, and a processor keeps few translations at hand.

What is allocated is given back when the last array of it is gone.
"""

import contextlib
import mmap
import threading

import numpy as np

LARGE_PAGE_BYTES, ALIGNMENT_BYTES = 2 << 20, 4096
SHARED_BYTES = 64 << 20

_lock = threading.Lock()
_shared = np.zeros(0, np.uint8)        # what is left of the memory that small arrays share


def allocate(num_bytes: int) -> np.ndarray:
    """[num_bytes] uint8, zeros, which take no memory before they are touched; it begins a large page.

    Raises   MemoryError
    """
    try:
        memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system does not give {num_bytes:,} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):                 # a system without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % LARGE_PAGE_BYTES
    return array[start : start + num_bytes]


def allocate_shared(num_bytes: int) -> np.ndarray:
    """The same for arrays that are smaller than large pages: side by side, each from a multiple of 4,096 on."""
    global _shared
    if num_bytes >= SHARED_BYTES:
        return allocate(num_bytes)
    with _lock:
        if num_bytes > len(_shared):
            _shared = allocate(SHARED_BYTES)
        part, _shared = _shared[:num_bytes], _shared[-(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]
        return part
