"""Measures the memory, objects, threads and files of a process."""

import ctypes
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

OURS = ("batch_manager", "numpy", "torch")
CONTAINERS = (dict, list, set, frozenset, tuple, bytearray)


class _MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


try:
    _libc = ctypes.CDLL("libc.so.6")
    _libc.mallinfo2.restype = _MallInfo2
except (OSError, AttributeError):       # another C library, or an old glibc
    _libc = None


SMALL_ARRAY, KEPT_OF_EACH_SIZE = 1024, 7      # bytes, pieces: numpy/_core/src/multiarray/alloc.c


def fill_the_cache_of_numpy() -> None:
    """Fill numpy's cache of freed small arrays, which keeps some pieces of memory of each size.

    Otherwise, pieces of rare sizes would fill the cache during hundreds of thousands of requests and look like growth.
    """
    pieces = [np.empty(size, np.uint8) for size in range(1, SMALL_ARRAY) for _ in range(KEPT_OF_EACH_SIZE)]
    pieces.clear()


def resident_bytes(line: str = "VmRSS:") -> int:
    """Return the resident memory of the process in bytes, from a line of /proc/self/status.

    The line "RssAnon:" excludes the pages of programs and libraries.
    """
    with open("/proc/self/status") as status:
        return next(int(text.split()[1]) for text in status if text.startswith(line)) * 1024


def memory() -> dict[str, int]:
    """Return the memory of the process in bytes, and the number of blocks of Python's allocator.

    rss_untrimmed   resident memory before a garbage collection and before the C library returned its free pages
    rss             resident memory after both; how many pages are free still depends on the order of frees
    rss_anonymous   `rss` without the pages of programs and libraries, which are loaded when rare paths run
    malloc          bytes in use in the C library's allocator: large objects and arrays, exact
    blocks          blocks in use in Python's allocator: small objects, exact
    """
    untrimmed = resident_bytes()
    gc.collect()
    if _libc is not None:
        _libc.malloc_trim(0)
    malloc = 0
    if _libc is not None:
        info = _libc.mallinfo2()
        malloc = info.uordblks + info.hblkhd
    return {"rss_untrimmed": untrimmed, "rss": resident_bytes(),
            "rss_anonymous": resident_bytes("RssAnon:"), "malloc": malloc, "blocks": sys.getallocatedblocks()}


def handles() -> dict[str, int]:
    return {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}


def tracked_objects() -> Counter[str]:
    """Count the objects that the garbage collector tracks, by type: containers, and objects of packages in OURS."""
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        cls = type(thing)
        if cls in CONTAINERS or str(cls.__module__).split(".")[0] in OURS:
            counts[_name(cls)] += 1
    return counts


def reachable_objects(root: object, without: Collection[object]) -> tuple[Counter[str], int]:
    """Return (number of objects by type, number of entries of all containers) that `root` keeps alive.

    without   objects to skip, and with them all objects that only they keep alive. Modules, classes and frames are
              skipped too
    """
    counts: Counter[str] = Counter()
    entries = 0
    seen = {id(thing) for thing in without}
    waiting: list[Any] = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, ModuleType | type | FrameType):
            continue
        seen.add(id(thing))
        cls = type(thing)
        counts[_name(cls)] += 1
        if issubclass(cls, CONTAINERS):
            entries += len(thing)
        waiting += _referents(thing)
    return counts, entries


def _referents(thing: Any) -> list[Any]:
    if isinstance(thing, FunctionType):         # without its module's globals
        return [*(thing.__closure__ or ()), *(thing.__defaults__ or ())]
    if isinstance(thing, MethodType | BuiltinFunctionType):
        return [thing.__self__]
    return gc.get_referents(thing)


def _name(cls: type) -> str:
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
