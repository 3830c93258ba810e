"""Finds the compiled libraries in the package or in a cache folder, or builds them.

A wheel that was built where a compiler is has one library for each level of instruction sets. Everywhere else libraries
are compiled with `-march=native` and kept in a cache folder, under names with a digest of the processor, the compiler
and the sources: one of the step, and one for each type of quantised blocks, once a matrix has it. A file ends with a
checksum of its content, because loading a damaged library would crash the process.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
STEP, PANEL_KERNELS = HERE / "step.c", HERE / "panel_kernels.c"
HEADERS = tuple(sorted(path.name for path in HERE.glob("*.h")))
IN_WHEELS = HERE / "in_wheels"
_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# Machine -> (name, options of the compiler, instruction sets in /proc/cpuinfo) of the libraries in a wheel, best first.
LEVELS = {
    "x86_64": (("amx", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
                (*_V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")),
               ("avx512bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
                (*_V4, "avx512_vnni", "avx512_bf16")),
               ("v4", ("-march=x86-64-v4",), _V4), ("v3", ("-march=x86-64-v3",), _V3),
               ("v2", ("-march=x86-64-v2",), ("ssse3", "sse4_1", "sse4_2", "popcnt", "cx16"))),
    "aarch64": (("v8", ("-march=armv8-a",), ("asimd",)),)}
# Unswitched loops take a third of the time of a compilation, and steps are no faster. Clang does not know this option.
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-unswitch-loops", "-Wno-psabi",
         "-Wno-ignored-optimization-argument", "-shared", "-fPIC", "-pthread")
COMPILERS = ("cc", "gcc", "clang")
SECONDS_TO_COMPILE, SECONDS_TO_SAY_A_VERSION = 300.0, 60.0
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_WAIT_FOR_OTHERS = SECONDS_TO_COMPILE
LONGEST_MESSAGE = 300
UNFINISHED = "unfinished-"
DIGEST_BYTES = hashlib.sha256().digest_size
WRITABLE_BY_ALL = 0o002

Compiler = Sequence[str]


class CannotBuildError(Exception):
    """The library cannot be built. The message says why."""


class BuiltLibrary(ctypes.CDLL):
    """A library of compiled code.

    identity   of its sources, compiler, options and processor, on which its sums may depend; of a wheel's, its content
    """

    identity = ""


def built_library(functions: Sequence[str], check_interruption: Callable[[], None], kind: str | None = None
                  ) -> BuiltLibrary:
    """Return the library of the package, or else of the first usable cache folder, built if it is missing or damaged.

    functions            functions that the library must export
    check_interruption   called periodically while the compiler runs; if it raises, the compiler is killed
    kind                 None: the library of the step; else that of this type of quantised blocks, which a package that
                         has libraries has in that of the step

    Raises CannotBuildError.
    """
    library = _library_of_wheel(functions)
    if library is not None:
        return library
    compiler = _compiler()
    sources = [str(STEP)] if kind is None else [f"-DTYPE={kind}", str(PANEL_KERNELS)]
    try:
        name = _file_name(compiler, sources, check_interruption)
        library = _loaded(compiler, name, sources, functions, check_interruption)
        library.identity = name
        return library
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuildError(f"compiling with {shlex.join(compiler)} failed: {error}; name another C compiler in $CC"
                               ) from error


def build_for_wheel(folder: Path) -> None:
    """Compile the library for all levels of this machine's kind of processor, as a wheel has it, into `folder`.

    $CFLAGS is added to the options of the compiler. Raises CannotBuildError.
    """
    levels = LEVELS.get(platform.machine(), ()) if platform.system() == "Linux" else ()
    if not levels:
        raise CannotBuildError(f"no list of instruction sets for {platform.system()} on {platform.machine()}")
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    flags = [flag for flag in FLAGS if flag != "-march=native"] + shlex.split(os.environ.get("CFLAGS", ""))
    for name, options, _ in levels:
        path = str(folder / f"step-{name}.so")
        try:
            _run([*compiler, *flags, *options, "-o", path, str(STEP), str(PANEL_KERNELS), "-lm"],
                 SECONDS_TO_COMPILE, lambda: None)
            _append_digest(path)
        except (OSError, subprocess.SubprocessError) as error:
            raise CannotBuildError(f"compiling for {name} with {shlex.join(compiler)} failed: {error}") from error


def _library_of_wheel(functions: Sequence[str]) -> BuiltLibrary | None:
    """Return the library of the package for this processor; None if the package has none, or a damaged one."""
    if not IN_WHEELS.is_dir():
        return None
    found = set(_processor().split())
    for name, _, needed in LEVELS.get(platform.machine(), ()):
        if found.issuperset(needed):
            with contextlib.suppress(OSError):
                return _opened(IN_WHEELS / f"step-{name}.so", functions)
    return None


def _compiler() -> Compiler:
    """Return the command in $CC, with its options, or else the first installed compiler of the list COMPILERS.

    Raises CannotBuildError if there is no compiler.
    """
    with contextlib.suppress(ValueError):                  # unbalanced quotation marks
        wanted = shlex.split(os.environ.get("CC", ""))
        if wanted and (path := shutil.which(wanted[0])):
            return [path, *wanted[1:]]
    for path in filter(None, map(shutil.which, COMPILERS)):
        return [path]
    raise CannotBuildError(f"found no C compiler: neither $CC nor {', '.join(COMPILERS)}; install one, for example "
                           "with apt-get install gcc")


def _loaded(compiler: Compiler, name: str, sources: Sequence[str], functions: Sequence[str],
            check_interruption: Callable[[], None]) -> BuiltLibrary:
    """Return the library `name` from the first usable cache folder, built if it is missing or damaged.

    Raises CannotBuildError if no folder is usable, and OSError and SubprocessError if the compiler fails.
    """
    refusal: Exception = CannotBuildError("no cache folder for the compiled library is usable; "
                                          "set XDG_CACHE_HOME to a folder that only this user can write to")
    for folder in cache_folders():
        path = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & WRITABLE_BY_ALL or path.is_dir():
                continue                                   # others could plant code that this process runs
            with contextlib.suppress(OSError):             # missing or damaged: build it again
                return _opened(path, functions)
        except OSError:
            continue
        with _one_process_at_a_time(folder, check_interruption):
            with contextlib.suppress(OSError):             # another process has built it meanwhile
                return _opened(path, functions)
            try:
                _remove_unfinished(folder)
                handle, unfinished = tempfile.mkstemp(dir=folder, prefix=UNFINISHED, suffix=".so")
            except OSError:
                continue
            os.close(handle)
            try:
                _compile(compiler, sources, unfinished, check_interruption)
                _append_digest(unfinished)
                library = _opened(Path(unfinished), functions)
                os.replace(unfinished, path)               # atomic, because other processes may load or compile it
                return library
            except OSError as error:                       # such as a full disk: try the next folder
                refusal = error
            finally:
                Path(unfinished).unlink(missing_ok=True)
    raise refusal


@contextlib.contextmanager
def _one_process_at_a_time(folder: Path, check_interruption: Callable[[], None]) -> Iterator[None]:
    """Context manager: hold the lock of a folder, so that processes that start together compile once.

    The system releases the lock of a process that ends. Where there are no locks, as in some network file systems, and
    after SECONDS_TO_WAIT_FOR_OTHERS, the block runs without the lock: then several processes compile, which is slower
    and otherwise harmless.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    ends_at, is_said = time.monotonic() + SECONDS_TO_WAIT_FOR_OTHERS, False
    try:
        while time.monotonic() < ends_at:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_said:
                    logger.info("another process compiles the step; waiting for it")
                is_said = True
                check_interruption()
                time.sleep(SECONDS_BETWEEN_LOOKS)
            except OSError:
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)             # also if a forked child has a copy of the handle
        os.close(handle)


def _opened(path: Path, functions: Sequence[str]) -> BuiltLibrary:
    """Load the library after verifying its checksum.

    Raises OSError for a wrong checksum, or if the library lacks one of `functions`.
    """
    content = path.read_bytes()
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        raise OSError(f"{path} is damaged")
    library = BuiltLibrary(str(path))
    library.identity = content[-DIGEST_BYTES:].hex()
    for function in functions:
        if not hasattr(library, function):
            raise OSError(f"the built library has no function {function}")
    return library


def _append_digest(path: str) -> None:
    """Append the checksum of a library to its file. Loaders ignore data after the end of a library."""
    with open(path, "rb+") as file:
        content = file.read()
        if not content:
            raise OSError("the compiler wrote no output and no error message")
        file.write(hashlib.sha256(content).digest())


def _remove_unfinished(folder: Path) -> None:
    """Delete the old, unfinished files in `folder` of processes that were killed while they compiled."""
    for path in folder.glob(f"{UNFINISHED}*.so"):
        with contextlib.suppress(OSError):                 # another process has deleted it
            if time.time() - path.stat().st_mtime > 2 * SECONDS_TO_COMPILE:
                path.unlink()


def _file_name(compiler: Compiler, sources: Sequence[str], check_interruption: Callable[[], None]) -> str:
    digest = hashlib.sha256(" ".join(sources[:-1]).encode())
    for part in (Path(sources[-1]), *(HERE / header for header in HEADERS)):
        digest.update(part.read_bytes())
    version = _run([*compiler, "--version"], SECONDS_TO_SAY_A_VERSION, check_interruption)
    for text in (version, " ".join([*compiler[1:], *FLAGS]).encode(), _processor().encode()):
        digest.update(text)
    return f"{Path(sources[-1]).stem}-{digest.hexdigest()[:24]}.so"


def _compile(compiler: Compiler, sources: Sequence[str], path: str, check_interruption: Callable[[], None]) -> None:
    logger.info("compiling %s for this processor; the result is cached",
                "the step" if len(sources) == 1 else f"products with weights ({sources[0].removeprefix('-DTYPE=')})")
    _run([*compiler, *FLAGS, "-o", path, *sources, "-lm"], SECONDS_TO_COMPILE, check_interruption)


def _run(command: Sequence[str], seconds: float, check_interruption: Callable[[], None]) -> bytes:
    """Run a command and return its standard output. Raises OSError if it fails, TimeoutExpired after `seconds`."""
    ends_at = time.monotonic() + seconds
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True, env=_environment()) as process:
        try:
            while True:
                try:
                    output, messages = process.communicate(timeout=SECONDS_BETWEEN_LOOKS)
                    break
                except subprocess.TimeoutExpired:
                    check_interruption()
                    if time.monotonic() > ends_at:
                        raise subprocess.TimeoutExpired(list(command), seconds) from None
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)     # with the child processes of the compiler
            raise
    if process.returncode:
        lines = messages.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise OSError("".join(filter(str.isprintable, lines[0]))[:LONGEST_MESSAGE])
    return output


def _environment() -> dict[str, str]:
    """Return the environment for a compiler. A program frozen with PyInstaller has its own path of libraries."""
    environment = dict(os.environ)
    if getattr(sys, "frozen", False):
        environment["LD_LIBRARY_PATH"] = environment.get("LD_LIBRARY_PATH_ORIG", "")
    return environment


def cache_folders() -> list[Path]:
    """Return the folders in which this package may keep files, absolute, the preferred one first.

    By the XDG Base Directory specification, it is `batch_manager` in $XDG_CACHE_HOME or else in ~/.cache, and a
    relative $XDG_CACHE_HOME is ignored. The last one is a folder of this user in the directory for temporary files; it
    is the only one if no home directory is known.
    """
    folders = [Path(tempfile.gettempdir()) / f"batch_manager-{os.getuid()}"]
    try:
        home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:                                       # no entry in the password database
        home = ""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(home, ".cache")):
        if os.path.isabs(base):
            return [Path(base) / "batch_manager", *folders]
    return folders


def _processor() -> str:
    """Return the name and the instruction sets of the processor. The effect of `-march=native` depends on both."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)})) + platform.machine()
