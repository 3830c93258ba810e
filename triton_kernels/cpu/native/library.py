"""The compiled library: found in the cache or built, loaded, and described to ctypes.

It is compiled with `-march=native`, so a built file is of one kind of processor, one compiler and one state of the
sources; all three are in its name. The cache is $XDG_CACHE_HOME/batch_manager, or ~/.cache/batch_manager, or where that
cannot be written a folder of this user's among the temporary files.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCE, HEADERS = HERE / "step.c", (
    "vectors.h", "tiles.h", "products.h", "rows.h", "attention.h", "attention_tiles.h")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
COMPILERS = ("cc", "gcc", "clang")
SECONDS_TO_COMPILE = 300
UNFINISHED = "unfinished-"
PANEL, INPUTS_ALIGNED = 16, 32
RMS_NORM, LAYER_NORM, PRODUCT, ACTIVATE, ROTATE_AND_KEEP, ATTEND, ADD_LOOKED_UP, ADD = range(8)    # kinds in step.c
OPERATION_NUMBERS = 24             # of one operation: its kind, and what that kind says in step.c
_holders: weakref.WeakSet[Any] = weakref.WeakSet()
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
    """Where the compiled code finds it, for as long as somebody holds it."""
    return ctypes.addressof(structure)


class CannotCompileError(Exception):
    """There is no library on this machine; the text says why."""


def load_library() -> ctypes.CDLL:
    """The library, compiled when no cached one fits. Raises CannotCompileError; asked again, at once."""
    library = _load_once()
    if isinstance(library, str):
        raise CannotCompileError(library)
    return library


def hold_helpers(owner: Any) -> None:
    """The threads that help with steps may stay until `owner` releases them, or is gone."""
    _holders.add(owner)


def release_helpers(owner: Any) -> None:
    """End the threads, unless somebody else holds them. Again, or by one that does not hold them: nothing happens."""
    if owner in _holders:
        _holders.discard(owner)
        if not _holders:
            load_library().stop_helpers()


@functools.cache
def _load_once() -> ctypes.CDLL | str:
    if platform.system() not in ("Linux", "Darwin"):
        return f"no compiled step on {platform.system()}"
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CC", ""), *COMPILERS])), None)
    if compiler is None:
        return f"no C compiler was found: neither $CC nor {', '.join(COMPILERS)}"
    try:
        library = _loaded(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return f"compiling with {compiler} failed: {error}"
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.stop_helpers.argtypes, library.stop_helpers.restype = [], None
    library.run_step.argtypes, library.run_step.restype = [pointer, pointer, number, ctypes.c_int], ctypes.c_int
    library.largest_outputs_of.argtypes = [pointer, pointer, number, number, pointer, pointer, ctypes.c_int]
    library.largest_outputs_of.restype = ctypes.c_int
    library.processor_nanoseconds.argtypes, library.processor_nanoseconds.restype = [], number
    library.pack_matrix.argtypes, library.pack_matrix.restype = [pointer, pointer, number, number], None
    return library


def _loaded(compiler: str) -> ctypes.CDLL:
    """From the first folder where that is possible. Raises OSError and SubprocessError."""
    name = _file_name(compiler)
    for folder in _folders():
        path = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():        # whoever owns the folder decides what runs in this process
                continue
            if path.exists():
                with contextlib.suppress(OSError):         # it may be damaged: it is replaced then
                    return ctypes.CDLL(str(path))
            _remove_unfinished(folder)
            handle, unfinished = tempfile.mkstemp(dir=folder, prefix=UNFINISHED, suffix=".so")
        except OSError:
            continue
        os.close(handle)
        try:
            _compile(compiler, unfinished)
            os.replace(unfinished, path)                   # at once: another process may look, or compile too
        finally:
            Path(unfinished).unlink(missing_ok=True)
        return ctypes.CDLL(str(path))
    raise OSError("no folder for the compiled file can be written")


def _remove_unfinished(folder: Path) -> None:
    """Delete what processes left that were killed while they compiled."""
    for path in folder.glob(f"{UNFINISHED}*.so"):
        with contextlib.suppress(OSError):                 # another process was faster
            if time.time() - path.stat().st_mtime > 2 * SECONDS_TO_COMPILE:
                path.unlink()


def _file_name(compiler: str) -> str:
    digest = hashlib.sha256()
    for part in (SOURCE, *(HERE / header for header in HEADERS)):
        digest.update(part.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    for text in (version, " ".join(FLAGS).encode(), _processor().encode()):
        digest.update(text)
    return f"step-{digest.hexdigest()[:24]}.so"


def _compile(compiler: str, path: str) -> None:
    logger.info("compiling the step for this processor, which is done once")
    result = subprocess.run([compiler, *FLAGS, "-o", path, str(SOURCE), "-lm"], capture_output=True, text=True,
                            timeout=SECONDS_TO_COMPILE)
    if result.returncode:
        raise OSError(result.stderr.strip().splitlines()[0] if result.stderr.strip() else "no message")


def _folders() -> list[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(home) / "batch_manager", Path(tempfile.gettempdir()) / f"batch_manager-{os.getuid()}"]


def _processor() -> str:
    """What `-march=native` looks at: the name and the instruction sets of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})) + platform.machine()
