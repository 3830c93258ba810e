"""Sets the number of threads with which a step computes on a CPU, without changing this number for other callers.

torch has one thread count for the process. A thread adopts this count when it first computes. OpenMP and MKL have a
count for each calling thread, and torch computes with these counts. `torch.set_num_threads` writes all three. This
module writes only the two counts of the calling thread, with functions of the OpenMP and MKL that torch has loaded.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..errors import ConfigError


@contextlib.contextmanager
def compute_threads(device: torch.device, count: int | None,
                    is_engine_thread: Callable[[threading.Thread], bool] = lambda thread: False) -> Iterator[None]:
    """Context manager: compute on `count` threads if the device is a CPU.

    Restores the count afterwards, except on threads of the engine, where the count stays set for the next step.

    count              number of threads; None: leave the count of the calling thread unchanged
    is_engine_thread   function that returns whether a given thread belongs to the engine

    Raises   ConfigError if torch computes without OpenMP
    """
    before = None if device.type != "cpu" or count is None else torch.get_num_threads()
    if before in (None, count):
        yield
        return
    kept = _set_for_this_thread(count)
    if is_engine_thread(threading.current_thread()):
        yield
        return
    try:
        yield
    finally:
        _set_for_this_thread(before, kept)


def step_threads(device: torch.device, count: int | None, is_engine_thread: Callable[[threading.Thread], bool],
                 ) -> Callable[[int | None], Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return the function (own number of a form, or None) -> maker of a context manager for a step.

    The context manager sets the form's own number of threads, or else `count`. On a thread of the engine, `count` stays
    set between steps; a form's own number does not. If there is no number to set, it does nothing, at no cost.
    """

    def inside(own: int | None) -> Callable[[], contextlib.AbstractContextManager[None]]:
        if device.type != "cpu" or own is count is None:
            return contextlib.nullcontext
        if own is None:
            return functools.partial(compute_threads, device, count, is_engine_thread)
        return functools.partial(compute_threads, device, own)
    return inside


def require_openmp() -> None:
    """Raise ConfigError if this torch has no OpenMP.

    Without OpenMP, the thread count cannot be set for one calling thread alone.
    """
    _libraries()


def has_openmp() -> bool:
    """Whether this torch computes with OpenMP, which is needed to set the thread count for a single caller."""
    try:
        return bool(_libraries())
    except ConfigError:
        return False


def _set_for_this_thread(count: int, mkl_count: int | None = None) -> int:
    """Set the numbers of threads with which OpenMP and MKL compute for the calling thread.

    Returns the previous `mkl_count` of the thread; 0 without MKL.

    count       number for OpenMP
    mkl_count   number for MKL; None: the same as `count`; 0: MKL uses its number for the process
    """
    openmp, mkl = _libraries()
    openmp.omp_set_num_threads(count)
    return mkl.MKL_Set_Num_Threads_Local(count if mkl_count is None else mkl_count) if mkl else 0


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL | None]:
    """Return the OpenMP library, and the MKL library or None. Raises ConfigError if torch has no OpenMP."""
    try:
        openmp, count = ctypes.CDLL(None), torch.get_num_threads()     # get_num_threads sets the count of a new thread
        if openmp.omp_get_max_threads() != count:
            raise AttributeError
    except (AttributeError, TypeError, OSError):
        raise ConfigError(f"num_threads was given, but torch {torch.__version__} has no OpenMP library that can "
                          "be called", "num_threads needs a torch with OpenMP",
                          "leave num_threads unset and call torch.set_num_threads for the process") from None
    if not torch.backends.mkl.is_available():
        return openmp, None
    # Only the library that torch has loaded: a frozen program can have a second copy, which must not be loaded too.
    for name in ("libtorch_cpu.so", str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.dylib")):
        with contextlib.suppress(OSError, AttributeError):
            mkl = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
            return openmp, mkl if mkl.MKL_Set_Num_Threads_Local else None
    return openmp, None
