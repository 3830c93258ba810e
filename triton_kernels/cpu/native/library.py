"""The compiled library, loaded once a process and described to ctypes; build.py finds or builds it."""

import ctypes
import platform
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .build import CannotBuildError, built_library

PANEL, INPUTS_ALIGNED = 16, 32
RMS_NORM, LAYER_NORM, PRODUCT, ACTIVATE, ROTATE_AND_KEEP, ATTEND, ADD_LOOKED_UP, ADD = range(8)    # kinds in step.c
OPERATION_NUMBERS = 24             # of one operation: its kind, and what that kind says in step.c
_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_answers: list[ctypes.CDLL | str] = []      # the first one counts: the library, or why there is none
TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Matrix(ctypes.Structure):
    """`Matrix` of products.h."""

    _fields_ = [("inputs", ctypes.c_int64), ("outputs", ctypes.c_int64), ("panels", ctypes.c_void_p),
                ("bias", ctypes.c_void_p), ("type", ctypes.c_int)]


class Cache(ctypes.Structure):
    """`Cache` of attention.h."""

    _fields_ = [("pool", ctypes.c_void_p), ("num_layers", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
                ("block_tokens", ctypes.c_int64), ("head_size", ctypes.c_int64), ("query_heads", ctypes.c_int64),
                ("type", ctypes.c_int)]


class Step(ctypes.Structure):
    """`Step` of step.c."""

    _fields_ = [("rows", ctypes.c_int64), ("registers", ctypes.c_void_p),
                ("cache", ctypes.c_void_p), ("positions", ctypes.c_void_p), ("pool_slots", ctypes.c_void_p),
                ("query_starts", ctypes.c_void_p), ("block_tables", ctypes.c_void_p), ("num_sequences", ctypes.c_int64),
                ("table_stride", ctypes.c_int64), ("type", ctypes.c_int64)]


def address(structure: ctypes.Structure) -> int:
    """Where the compiled code finds it, for as long as it is held."""
    return ctypes.addressof(structure)


class CannotCompileError(Exception):
    """There is no library on this machine; the text says why."""


def load_library(check_interruption: Callable[[], None] = lambda: None) -> ctypes.CDLL:
    """The library, compiled when no cached one fits. Asked again, the answer comes at once.

    check_interruption   called now and then while a compiler runs; what it raises ends the compiler, and passes

    Raises CannotCompileError.
    """
    if not _answers:
        _answers.append(_load(check_interruption))
    if isinstance(_answers[0], str):
        raise CannotCompileError(_answers[0])
    return _answers[0]


def hold_helpers(owner: Any) -> None:
    """The threads that help with steps may stay until `owner` releases them, or is gone."""
    _holders.add(owner)


def release_helpers(owner: Any) -> None:
    """End the threads, unless another owner holds them. Again, or by one that does not hold them: nothing happens."""
    if owner in _holders:
        _holders.discard(owner)
        if not _holders:
            load_library().stop_helpers()


def _load(check_interruption: Callable[[], None]) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if platform.system() not in ("Linux", "Darwin"):
        return f"no compiled step on {platform.system()}"
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions = {
        "stop_helpers": ([], None),
        "run_step": ([pointer, pointer, number, ctypes.c_int], ctypes.c_int),
        "largest_outputs_of": ([pointer, pointer, number, number, pointer, pointer, ctypes.c_int], ctypes.c_int),
        "processor_nanoseconds": ([], number),
        "pack_matrix": ([pointer, pointer, number, number], None),
    }
    try:
        library = built_library(list(functions), check_interruption)
    except CannotBuildError as error:
        return str(error)
    for name, (arguments, result) in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
