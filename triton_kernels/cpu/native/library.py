"""The compiled libraries, loaded once per process, with ctypes declarations. build.py finds or builds them."""

import ctypes
import platform
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .build import BuiltLibrary, CannotBuildError, built_library

Library = ctypes.CDLL              # with the functions of step.c
PANEL, INPUTS_ALIGNED = 16, 32
(RMS_NORM, LAYER_NORM, PRODUCT, ACTIVATE, ROTATE_AND_APPEND, ATTEND, ADD_LOOKED_UP, ADD, SHRINK,
 EXPAND_ADD, PREPARE, ROUTE, GATHER, PRODUCT_OF_EXPERTS, COMBINE, GATE,
 CLAMP) = range(17)                # kinds in step.c
PROJECTIONS_AT_ONCE = 3            # that one operation shrinks or expands
OPERATION_NUMBERS = 24             # integers of an operation: its kind and the arguments listed in step.c
_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_loaded: list[BuiltLibrary | str] = []       # after the first load: the library, or why it is not available
_kernels: dict[tuple[ctypes.CDLL, str], ctypes.CDLL] = {}       # (library, type of blocks) -> where its kernels are
TYPES = {torch.float32: 0, torch.bfloat16: 1}                       # of rows
CACHE_TYPES = {**TYPES, torch.float8_e4m3fn: 3}
QUANTISED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS",
                   "INT4", "INT8")                # in the order of quantised.h
SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class QuantisedPart(ctypes.Structure):
    """The structure `QuantisedPart` of matrix.h."""

    _fields_ = [("first_panel", ctypes.c_int64), ("end_panel", ctypes.c_int64), ("type", ctypes.c_int64),
                ("group_blocks", ctypes.c_int64), ("scale_type", ctypes.c_int64), ("panels", ctypes.c_void_p)]


class Matrix(ctypes.Structure):
    """The structure `Matrix` of matrix.h."""

    _fields_ = [("inputs", ctypes.c_int64), ("outputs", ctypes.c_int64), ("panels", ctypes.c_void_p),
                ("bias", ctypes.c_void_p), ("type", ctypes.c_int), ("factor", ctypes.c_float),
                ("parts", ctypes.c_void_p), ("num_parts", ctypes.c_int64), ("is_uniform", ctypes.c_int64),
                ("has_byte_rows", ctypes.c_int64)]


class Cache(ctypes.Structure):
    """The structure `Cache` of attention.h."""

    _fields_ = [("pool", ctypes.c_void_p), ("num_layers", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
                ("block_tokens", ctypes.c_int64), ("head_size", ctypes.c_int64), ("query_heads", ctypes.c_int64),
                ("type", ctypes.c_int), ("is_uniform", ctypes.c_int)]


class Step(ctypes.Structure):
    """The structure `Step` of step.c."""

    _fields_ = [("rows", ctypes.c_int64), ("registers", ctypes.c_void_p),
                ("cache", ctypes.c_void_p), ("positions", ctypes.c_void_p), ("pool_slots", ctypes.c_void_p),
                ("query_starts", ctypes.c_void_p), ("block_tables", ctypes.c_void_p), ("num_sequences", ctypes.c_int64),
                ("table_stride", ctypes.c_int64), ("type", ctypes.c_int64), ("adapters", ctypes.c_void_p)]


class Adapters(ctypes.Structure):
    """The structure `Adapters` of adapters.h."""

    _fields_ = [("pages", ctypes.c_void_p), ("page_entries", ctypes.c_int64), ("tiles", ctypes.c_void_p),
                ("num_tiles", ctypes.c_int64), ("shrunk", ctypes.c_void_p), ("most_ranks", ctypes.c_int64)]


# The structure `AdapterTile` of adapters.h.
ADAPTER_TILE = np.dtype([("first_row", np.int32), ("end_row", np.int32), ("pages", np.uint64), ("ranks", np.uint64)])
ROWS_PER_TILE = 32


def routing_words(experts: int, chosen: int) -> int:
    """Return the number of 32-bit words for each row that the structure `Routing` of experts.h takes."""
    return 3 * experts + 2 + 3 * chosen


def address(structure: ctypes.Structure | ctypes.Array[Any]) -> int:
    """Return the address of a structure or an array of structures, which is valid while the structure is alive."""
    return ctypes.addressof(structure)


class CannotCompileError(Exception):
    """The compiled library is not available on this machine. The message says why."""


def load_library(check_interruption: Callable[[], None] = lambda: None) -> BuiltLibrary:
    """Return the library. The first call compiles it, unless the package or the cache has it; later calls return the
    same result.

    check_interruption   called periodically while the compiler runs; if it raises, the compiler is killed and the
                         exception propagates

    Raises CannotCompileError if the library cannot be built.
    """
    if not _loaded:
        _loaded.append(_load(check_interruption))
    if isinstance(_loaded[0], str):
        raise CannotCompileError(_loaded[0])
    return _loaded[0]


def load_panel_kernels(kind: str) -> None:
    """Load the kernels for matrices of a type of QUANTISED_TYPES. The first call compiles them, unless the package or
    the cache has them. Call it before a matrix of the type is multiplied.

    Raises CannotCompileError if they cannot be built.
    """
    library = load_library()
    if (library, kind) in _kernels:
        return
    try:
        kernels = library if hasattr(library, "panel_kernels_of") else built_library(
            ["panel_kernels_of"], lambda: None, kind)
    except CannotBuildError as error:
        raise CannotCompileError(str(error)) from error
    number = QUANTISED_TYPES.index(kind)
    kernels.panel_kernels_of.argtypes, kernels.panel_kernels_of.restype = [ctypes.c_int], ctypes.c_void_p
    library.use_panel_kernels(number, kernels.panel_kernels_of(number))
    _kernels[library, kind] = kernels


def loaded_library() -> BuiltLibrary | None:
    """Return the library if `load_library` has loaded it; never compiles it."""
    return _loaded[0] if _loaded and isinstance(_loaded[0], BuiltLibrary) else None


def hold_helpers(owner: Any) -> None:
    """Keep the threads of the compiled code alive between steps, until `owner` releases them or is garbage-collected.
    """
    _holders.add(owner)


def release_helpers(owner: Any) -> None:
    """Stop the threads of the compiled code, unless another owner holds them. No effect if `owner` does not hold them.
    """
    if owner in _holders:
        _holders.discard(owner)
        if not _holders:
            load_library().stop_helpers()


def _load(check_interruption: Callable[[], None]) -> BuiltLibrary | str:
    """Return the library, or the reason why it is not available."""
    if platform.system() not in ("Linux", "Darwin"):
        return f"compiled steps are not supported on {platform.system()}"
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions = {
        "stop_helpers": ([], None),
        "run_step": ([pointer, pointer, number, ctypes.c_int], ctypes.c_int),
        "largest_outputs_of": ([pointer, pointer, number, number, pointer, pointer, ctypes.c_int], ctypes.c_int),
        "processor_nanoseconds": ([], number),
        "pack_matrix": ([pointer, pointer, number, number], None),
        "philox_words": ([pointer, pointer, pointer, pointer, number, number, number, pointer], None),
        "weights_of_rows": ([pointer, number, number, number, *[pointer] * 6], None),
        "quantised_panel_bytes": ([pointer, number], number),
        "quantised_row_bytes": ([ctypes.c_int, number], number),
        "use_panel_kernels": ([ctypes.c_int, pointer], None),
        "pack_quantised_rows": ([pointer, number, pointer, number, pointer, number], None),
        "quantise_rows": ([ctypes.c_int, pointer, ctypes.c_int, number, number, number, pointer], None),
        "decode_quantised_rows": ([pointer, pointer, number, pointer], ctypes.c_int),
    }
    try:
        library = built_library(list(functions), check_interruption)
    except CannotBuildError as error:
        return str(error)
    for name, (arguments, result) in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
