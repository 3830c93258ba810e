"""Starts Python programs by forks of a process that has imported torch, which takes most of a program's start.

    forked.run([sys.executable, "program.py", "--option"], timeout=60)          as subprocess.run
    forked.Popen([sys.executable, "-m", "batch_manager.tools", "serve"])        as subprocess.Popen

The program is a child of this process, and begins as a new interpreter would: with its own arguments, environment,
working directory, streams, process group, signal handlers, limits, `sys.path` and `__main__`. Modules that take long to
import are there already. If it returns, or exits with a number, it leaves without the end of the interpreter, which
would visit all objects of these modules. A command is started by subprocess if it is something else, or if its
environment differs in variables that are read while Python starts or modules are imported. Use subprocess in tests of
what a program imports, or of the end of an interpreter, and in one test of each program.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import os
import pickle
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from .waiting import until

IMPORTED = ("batch_manager.runtime.build_backend", "batch_manager.gpt_manager", "batch_manager.extras.async_llm",
            "torch.distributed", "tokenizers")
READ_EARLY = ("ATEN", "CUDA", "GOMP", "HF_", "HOME", "KMP", "LANG", "LC_", "LD_", "MALLOC", "MKL", "NVIDIA", "OMP",
              "OPENBLAS", "PYTHON", "PYTORCH", "TORCH", "TRANSFORMERS", "TRITON", "XDG")       # beginnings of names
LATER = ("PYTHONPATH", "PYTHONIOENCODING",                         # a fork puts them into effect
         "PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR")            # read when they are needed
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 120                   # until the process that forks has imported everything and answers

_environment: dict[str, str] = {}
_EXECUTE = subprocess.Popen._execute_child


def take_environment() -> None:
    """Begin forks with the variables of this process as they are now: when all tests are imported, which sets some."""
    _environment.update({name: value for name, value in os.environ.items() if name not in LATER})


def read_early(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that a forked program cannot have in other values."""
    return {name: value for name, value in environment.items() if name.startswith(READ_EARLY) and name not in LATER}


class _Server:
    """The process that forks. It ends when this process ends."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        self.lock = threading.Lock()
        self.process = subprocess.Popen([sys.executable, "-m", __name__, str(theirs.fileno())], cwd=REPOSITORY,
                                        env=_environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.connection.settimeout(SECONDS)

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Fork, and return the id of the new process, which is a child of this one."""
        message = pickle.dumps(request)
        with self.lock, _adopting():
            socket.send_fds(self.connection, [struct.pack("<q", len(message))], descriptors)
            self.connection.sendall(message)
            answer = self.connection.recv(8, socket.MSG_WAITALL)
        assert len(answer) == 8, "the process that forks has ended"
        return struct.unpack("<q", answer)[0]


@contextlib.contextmanager
def _adopting():
    """Make this process the parent of a descendant whose parent ends."""
    set_child_subreaper = 36                                    # of linux/prctl.h
    prctl = ctypes.CDLL(None).prctl
    prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0)


_server: _Server | None = None


def descriptor() -> int | None:
    """Return the open descriptor of this module in this process, which tests do not close."""
    return _server and _server.connection.fileno()


class Popen(subprocess.Popen):
    """Starts a program as subprocess.Popen does, by a fork if that is possible."""

    def _execute_child(self, *given: Any) -> None:
        options = inspect.signature(_EXECUTE).bind(self, *given).arguments
        arguments, environment = options["args"], options["env"]
        arguments = [os.fspath(item) for item in arguments] if not isinstance(arguments, str | bytes) else []
        environment = dict(os.environ if environment is None else environment)
        program, rest = arguments[1:2], arguments[2:]
        takes = {"-m": 1, "-c": 1}.get(*program, 0) if program else 0
        if (arguments[:1] != [sys.executable] or not program or len(rest) < takes
                or program[0].startswith("-") > takes or options["shell"] or options["preexec_fn"]
                or not all(isinstance(item, str) for pair in environment.items() for item in pair)
                or options["umask"] >= 0 or any(options[name] is not None for name in ("gid", "gids", "uid"))
                or read_early(environment) != read_early(_environment)):
            super()._execute_child(*given)
            return

        global _server
        _server = _server or _Server()
        ends = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
        passed = sorted(options["pass_fds"])
        self.pid = _server.start({
            "arguments": arguments, "environment": environment, "directory": os.path.abspath(options["cwd"] or "."),
            "passed": passed, "session": options["start_new_session"], "group": options["process_group"],
            "limits": [resource.getrlimit(limit) for limit in LIMITS], "cores": os.sched_getaffinity(0),
        }, [end if end >= 0 else number for number, end in enumerate(ends)] + passed)
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in (
            "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))


def run(command: list, *, input: Any = None, capture_output: bool = False, timeout: float, check: bool = False,
        **options: Any) -> subprocess.CompletedProcess:
    """Run a program as subprocess.run does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


# ---------------------------------------------------------------------- in the process that forks


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each request until the connection ends. Return the request in each process that is to run it."""
    while True:
        header, descriptors, *_ = socket.recv_fds(connection, 8, 64)
        if not header:
            os._exit(0)
        request = pickle.loads(connection.recv(struct.unpack("<q", header)[0], socket.MSG_WAITALL))
        reader, writer = os.pipe()
        between = os.fork()                    # ends at once, so that the program gets another parent
        if not between:
            between = os.getpid()
            if program := os.fork():
                os.write(writer, struct.pack("<q", program))
                os._exit(0)
            until(lambda parent=between: os.getppid() != parent)
            connection.detach()                # its descriptor is closed
            return {**request, "descriptors": descriptors}
        os.waitpid(between, 0)
        for number in descriptors:
            os.close(number)
        connection.sendall(os.read(reader, 8))
        os.close(reader)
        os.close(writer)


def begin(request: dict[str, Any]) -> None:
    """Make this process one that runs the program of a request."""
    if request["session"]:
        os.setsid()
    if request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    place(request["descriptors"], [0, 1, 2, *request["passed"]])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for limit, values in zip(LIMITS, request["limits"]):
        resource.setrlimit(limit, values)
    os.sched_setaffinity(0, request["cores"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()
    sys.modules["numpy"].random.seed()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
        is_raw = before.write_through                          # with PYTHONUNBUFFERED
        file = io.TextIOWrapper(
            open(number, "wb" if number else "rb", 0 if is_raw else -1, closefd=False),
            encoding or before.encoding, errors if errors and number < 2 else before.errors,
            line_buffering=not is_raw and (number == 2 or os.isatty(number)), write_through=is_raw)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def place(descriptors: list[int], numbers: list[int]) -> None:
    """Give each of the open descriptors its number, and close all others."""
    above = max([*descriptors, *numbers]) + 1
    for index, number in enumerate(descriptors):
        os.dup2(number, above + index)
    for index, number in enumerate(numbers):
        os.dup2(above + index, number, inheritable=True)
    kept = sorted(numbers)
    for first, last in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")]):
        os.closerange(first + 1, last)


def execute(arguments: list[str], environment: dict[str, str]) -> None:
    """Run a program as `python` does, in this process."""
    sys.orig_argv[:] = arguments
    _, program, *rest = arguments
    paths = [os.path.abspath(path or ".") for path in environment.get("PYTHONPATH", "").split(":")
             if "PYTHONPATH" in environment]
    first = {"-m": os.getcwd(), "-c": ""}.get(program, os.path.dirname(os.path.realpath(program)))
    sys.path[:] = [first, *dict.fromkeys([*paths, *sys.path[1:]])]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    if program == "-m":
        sys.argv[:] = program, *rest[1:]
        runpy._run_module_as_main(rest[0])
        return
    if program == "-c":
        sys.argv[:] = program, *rest[1:]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv[:] = program, *rest
        main.__file__, main.__cached__ = os.path.abspath(program), None
        main.__loader__ = SourceFileLoader("__main__", program)
        code = compile(Path(program).read_bytes(), program, "exec")
    exec(code, vars(main))


def without_these_frames(hook):
    """Return a hook that prints an error of the program without the frames of this file."""
    def show(kind, error, trace):
        while trace and trace.tb_frame.f_code.co_filename != __file__:
            trace = trace.tb_next
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return show


def leave(status: list[int]) -> None:
    """Leave at once with a status, if there is one. The interpreter tries a flush that failed again, and reports it."""
    if status:
        with contextlib.suppress(OSError, ValueError, AttributeError):          # full, closed, or none
            for file in (sys.stdout, sys.stderr):
                file.flush()
            os._exit(status[0])


def main() -> None:
    status: list[int] = []
    atexit.register(leave, status)                             # before all other functions, so that it runs last
    signal.signal(signal.SIGINT, signal.SIG_IGN)               # Ctrl-C is for the tests
    for name in (*IMPORTED, "multiprocessing.process", "numpy"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    begin(request)
    try:
        execute(request["arguments"], request["environment"])
        status.append(0)
    except SystemExit as end:
        status += [end.code or 0] if isinstance(end.code, int | None) else []
        raise
    except BaseException:
        sys.excepthook = without_these_frames(sys.excepthook)
        raise


if __name__ == "__main__":
    main()
