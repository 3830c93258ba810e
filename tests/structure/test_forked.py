"""tests/harness/forked.py starts a program as subprocess does: each program here says the same in both ways."""

import os
import signal
import subprocess
import sys

import pytest

from tests.harness import forked

FACTS = """
import os, signal, sys
main = sys.modules["__main__"]
print([__name__, main.__dict__ is globals(), sys.argv, sys.orig_argv, main.__dict__.get("__file__"), __spec__ is None])
print([os.getcwd(), os.getppid(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), sys.flags])
print([sys.path[0], sys.path[1:3], sorted(os.environ.items()), os.sched_getaffinity(0)])
print([signal.getsignal(number) for number in sorted(signal.valid_signals())])
print(sorted(name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")))
print([[file.encoding, file.errors, file.line_buffering, file.isatty(), file.fileno()]
       for file in (sys.stdin, sys.stdout, sys.stderr)])
print(repr(sys.stdin.read()), file=sys.stderr)
"""
ENDS = """
import atexit, os, sys, threading, time
atexit.register(print, "at the exit")
def fail(): {}
print("before")
fail()
"""


def both(command, **options):
    """Return what the program says and how it ends, by a fork. An interpreter of its own does the same."""
    one, other = (start.run([sys.executable, *command], capture_output=True, text=True, timeout=300, **options)
                  for start in (subprocess, forked))
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    return other


@pytest.mark.parametrize("way, options", [
    ("script", {"cwd": "/"}), ("script", {"start_new_session": True}), ("-m", {"process_group": 0}),
    ("-c", {"env": {**os.environ, "PYTHONPATH": "/one:two", "PYTHONIOENCODING": "utf-8:replace"}})])
def test_a_program_finds_what_it_would_find(way, options, tmp_path):
    (tmp_path / "facts.py").write_text(FACTS)
    command = {"script": [tmp_path / "facts.py"], "-m": ["-m", "facts"], "-c": ["-c", FACTS]}[way]
    found = both([*command, "--more", "-c"], input="given\n", **{"cwd": tmp_path, "env": {**os.environ}, **options})
    assert found.stderr == "'given\\n'\n"


@pytest.mark.parametrize("ends, status", [
    ("threading.Thread(target=lambda: [time.sleep(0.1), print('in a thread')]).start()", 0), ("sys.exit(3)", 3),
    ("sys.stdout = open('/dev/full', 'w')", 120), ("sys.exit('words')", 1), ("1 / 0", 1),
    ("raise KeyboardInterrupt", -2),
    ("sys.excepthook = lambda *given: print(len(given)); 1 / 0", 1), ("os._exit(4)", 4)])
def test_a_program_ends_as_it_would_end(ends, status, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS.format(ends))
    assert both([tmp_path / "ends.py"]).returncode == status


def test_a_program_gets_descriptors_and_signals():
    reader, writer = os.pipe()
    for start in (subprocess.Popen, forked.Popen):
        code = f"import os, time; os.write({writer}, b'here'); time.sleep(60)"
        with start([sys.executable, "-c", code], pass_fds=[writer], stderr=subprocess.PIPE, text=True) as process:
            assert os.read(reader, 100) == b"here"
            process.send_signal(signal.SIGINT)
            assert process.stderr.read().endswith("KeyboardInterrupt\n") and process.wait(60) == -signal.SIGINT
    os.close(reader)
    os.close(writer)


def test_modules_are_there_and_their_variables_force_a_start():
    code = "import sys; print('torch' in sys.modules)"
    for environment, is_forked in (({}, True), ({"SAID": "1"}, True), ({"TRITON_INTERPRET": "1"}, False),
                                   ({"PYTHONBREAKPOINT": "a.b"}, True)):                     # Ray sets it
        found = forked.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
                           text=True, timeout=300)
        assert found.stdout == f"{is_forked}\n"
    for command in ([sys.executable, "-u", "-c", code], "echo False"):
        with forked.Popen(command, stdout=subprocess.PIPE, text=True, shell=isinstance(command, str)) as process:
            assert process.communicate(timeout=300)[0] == "False\n"
