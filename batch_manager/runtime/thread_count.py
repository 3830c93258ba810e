"""On how many threads a step on a CPU computes, without changing the number for the host's threads.

torch keeps one number for the process, with which a thread begins when it first computes. OpenMP and MKL keep one for
each thread that has begun, and those are the ones that torch computes with. `torch.set_num_threads` writes all three.
Here the two of the calling thread alone are written, by OpenMP's and MKL's own functions in the libraries that torch
has loaded, so that no other thread ever sees another number.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..errors import ConfigError


@contextlib.contextmanager
def compute_threads(device: torch.device, count: int | None,
                    is_own: Callable[[threading.Thread], bool] = lambda thread: False) -> Iterator[None]:
    """Compute on `count` threads if the device is a CPU. None: on as many as the thread does anyhow.

    The thread has its own number back afterwards, except where `is_own` says that it is the engine's: there the number
    stays, and the next step finds it set.

    Raises   ConfigError, see `require_own_count`
    """
    before = None if device.type != "cpu" or count is None else torch.get_num_threads()
    if before in (None, count):
        yield
        return
    kept = _set_for_this_thread(count)
    if is_own(threading.current_thread()):
        yield
        return
    try:
        yield
    finally:
        _set_for_this_thread(before, kept)


def require_own_count() -> None:
    """Raises ConfigError where a thread cannot have a number of its own: this torch computes without OpenMP."""
    _libraries()


def has_own_count() -> bool:
    """Whether a thread can have a number of its own."""
    try:
        return bool(_libraries())
    except ConfigError:
        return False


def _set_for_this_thread(count: int, mkl_count: int | None = None) -> int:
    """MKL's number may be apart from OpenMP's; 0 is OpenMP's. -> MKL's before."""
    openmp, mkl = _libraries()
    openmp.omp_set_num_threads(count)
    return mkl.MKL_Set_Num_Threads_Local(count if mkl_count is None else mkl_count) if mkl else 0


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL | None]:
    """OpenMP's, and MKL's if torch has it."""
    try:
        openmp, count = ctypes.CDLL(None), torch.get_num_threads()     # which sets OpenMP's on a thread that is new
        if openmp.omp_get_max_threads() != count:
            raise AttributeError
    except (AttributeError, TypeError, OSError):
        raise ConfigError(f"num_threads was given, and torch {torch.__version__} has no OpenMP that can be "
                          "called", "a torch that computes with OpenMP",
                          "leave num_threads out, and call torch.set_num_threads for the process") from None
    if not torch.backends.mkl.is_available():
        return openmp, None
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with contextlib.suppress(OSError, AttributeError):
            mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return openmp, mkl if mkl.MKL_Set_Num_Threads_Local else None
    return openmp, None
