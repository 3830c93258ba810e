"""The C library of the CPU is compiled once for a processor, and then loaded from a cache folder.

If it cannot be compiled or cached, loading returns the reason as a string. Here its functions are empty: all of them
take seconds to compile.
"""

import errno
import os
import platform
import pwd
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from batch_manager.triton_kernels.cpu.native import build, library


def load():
    """Load the library as the first call in a process does. Return the library, or why it cannot be loaded: a str."""
    return library._load(lambda: None)


@pytest.fixture(autouse=True)
def source(tmp_path_factory, monkeypatch):
    """A source with an empty function of each name that the library must have."""
    with mock.patch.object(library, "built_library") as built:
        load()
    path = tmp_path_factory.mktemp("source") / "step.c"
    path.write_text("".join(f"void {name}(void) {{}}\n" for name in built.call_args.args[0]))
    monkeypatch.setattr(build, "STEP", path)
    monkeypatch.setattr(build, "PANEL_KERNELS", path.with_name("panel_kernels.c"))
    path.with_name("panel_kernels.c").write_text("void *panel_kernels_of(int type) { return 0; }\n")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batch_manager"


def test_it_is_compiled_once_and_found_again(cache, monkeypatch):
    assert not isinstance(load(), str)
    (built,) = cache.iterdir()
    assert built.suffix == ".so" and cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert not isinstance(load(), str)


def test_other_sources_flags_and_processors_have_files_of_their_own(cache, monkeypatch):
    load()
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    load()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))
    load()
    assert len(list(cache.iterdir())) == 3


def test_kernels_are_compiled_with_the_first_matrix_of_a_type(cache, monkeypatch):
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "_kernels", {})
    for kind, names in (("Q4_0", ["panel_kernels", "step"]), ("Q4_0", ["panel_kernels", "step"]),
                        ("INT8", ["panel_kernels", "panel_kernels", "step"])):
        library.load_panel_kernels(kind)
        assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == names
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    library.load_panel_kernels("INT8")
    with pytest.raises(library.CannotCompileError, match="found no C compiler"):
        library.load_panel_kernels("Q6_K")


def test_without_a_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert load() == ("found no C compiler: neither $CC nor cc, gcc, clang; "
                      "install one, for example with apt-get install gcc")


def test_a_compiler_that_fails_leaves_nothing_behind(cache, monkeypatch, tmp_path):
    compiler = tmp_path / "failing"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] || { echo 'no such instruction' >&2; exit 1; }\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert load() == f"compiling with {compiler} failed: no such instruction; name another C compiler in $CC"
    assert list(cache.iterdir()) == []


def test_what_killed_processes_left_is_deleted_when_it_is_old(cache):
    cache.mkdir(mode=0o700)
    old, young = cache / f"{build.UNFINISHED}old.so", cache / f"{build.UNFINISHED}young.so"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    assert not isinstance(load(), str)
    assert not old.exists() and young.exists()


@pytest.mark.parametrize("damage", [
    lambda content: b"damaged", lambda content: b"", lambda content: content[:4096], lambda content: content[:-1],
    lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:]], ids=[
    "other", "empty", "first page", "last byte missing", "one bit"])
def test_a_damaged_file_in_the_cache_is_replaced(cache, damage):
    """A damaged library file is compiled again. To load a truncated file would end the process with a bus error."""
    load()
    (built,) = cache.iterdir()
    content = built.read_bytes()
    built.unlink()                          # the mapping of this process stays whole
    built.write_bytes(damage(content))
    assert not isinstance(load(), str)
    assert list(cache.iterdir()) == [built] and len(built.read_bytes()) == len(content)


def _compiler(folder, script):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && exit 0\n{script}\n")
    path.chmod(0o755)
    return str(path)


WRITES = 'while [ "$1" != -o ]; do shift; done; '


@pytest.mark.parametrize(("script", "reason"), [
    ("printf 'na\\357ve \\033[31m failure' >&2; exit 1", "na\N{REPLACEMENT CHARACTER}ve [31m failure"),
    ("exit 3", "exit status 3"), ("kill -9 $$", "exit status -9"),
    ("exit 0", "the compiler wrote no output and no error message"),
    (WRITES + "echo 'int other;' | cc -shared -o $2 -xc -", "the built library has no function stop_helpers"),
])
def test_what_a_broken_compiler_says_or_writes(cache, monkeypatch, tmp_path, script, reason):
    compiler = _compiler(tmp_path, script)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    assert load() == f"compiling with {compiler} failed: {reason}; name another C compiler in $CC"
    assert list(cache.iterdir()) == []


def test_a_compiler_with_options(cache, monkeypatch):
    monkeypatch.setenv("CC", "cc -DOPTION='of two words'")
    commands, run = [], build._run
    monkeypatch.setattr(build, "_run", lambda command, *more: commands.append(command) or run(command, *more))
    assert not isinstance(load(), str)
    assert [command[1] for command in commands] == ["-DOPTION=of two words"] * 2


@pytest.mark.parametrize("when", ["--version", "compiling"])
def test_an_interruption_ends_the_compiler_and_what_it_started(cache, monkeypatch, tmp_path, when):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n[ {when} = compiling ] && [ \"$1\" = --version ] && exit 0\n"
                        f"sleep 60 & echo $! > {tmp_path}/child; wait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    def check():
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library._load(check)
    child, ends_at = int((tmp_path / "child").read_text()), time.monotonic() + 30
    while _runs(child) and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert not _runs(child)
    assert not cache.exists() or list(cache.iterdir()) == []


def _runs(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_compiler_that_never_ends(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SECONDS_TO_COMPILE", 0.3)
    compiler = _compiler(tmp_path, "sleep 60")
    monkeypatch.setenv("CC", compiler)
    assert "timed out after 0.3 seconds" in load()
    assert list(cache.iterdir()) == []


def test_a_full_folder_is_no_reason_not_to_use_the_other_one(cache, monkeypatch, tmp_path):
    compile_to = build._compile

    def compile_where_there_is_room(compiler, sources, path, check):
        if str(cache) in path:
            raise OSError("No space left on device")
        compile_to(compiler, sources, path, check)

    monkeypatch.setattr(build, "_compile", compile_where_there_is_room)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    assert not isinstance(load(), str)
    assert list(cache.iterdir()) == [] and len(list((tmp_path / "other").glob("*/*.so"))) == 1


def test_a_folder_that_everybody_can_write_to_is_not_loaded_from(cache, monkeypatch, tmp_path):
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    assert not isinstance(load(), str)
    assert list(cache.iterdir()) == [] and len(list((tmp_path / "other").glob("*/*.so"))) == 1


def test_a_cache_that_cannot_be_written(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert not isinstance(load(), str)
    assert len(list((tmp_path / f"batch_manager-{os.getuid()}").iterdir())) == 1


LOAD = """
import pathlib, sys
from batch_manager.triton_kernels.cpu.native import build
build.STEP = pathlib.Path(sys.argv[1])
print(type(build.built_library(["run_step"], lambda: None)).__name__)
"""


def test_four_processes_that_start_together_compile_once(cache, source, tmp_path, monkeypatch):
    compiler, counted = tmp_path / "counting", tmp_path / "counted"
    compiler.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] || {{ echo >> {counted}; sleep 0.5; }}\nexec cc \"$@\"\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    processes = [subprocess.Popen([sys.executable, "-c", LOAD, source], stdout=subprocess.PIPE, text=True)
                 for _ in range(4)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["BuiltLibrary\n"] * 4
    assert counted.read_text() == "\n"
    assert [path.suffix for path in cache.iterdir()] == [".so"]           # no lock file is left


HOLD = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(cache):
    """A process that holds the lock of the cache folder."""
    cache.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", HOLD, cache], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_lock_of_a_killed_process_is_free(holder, monkeypatch):
    looks = []

    def kill_at_the_third_look():
        looks.append(holder.poll())
        if len(looks) == 3:
            holder.kill()
            holder.wait(60)

    monkeypatch.setattr(build, "_compiler", lambda find=build._compiler: [*find()])
    assert not isinstance(library._load(kill_at_the_third_look), str)
    assert looks[:3] == [None] * 3


def test_nobody_waits_for_ever_for_the_lock(holder, monkeypatch):
    monkeypatch.setattr(build, "SECONDS_TO_WAIT_FOR_OTHERS", 0.2)
    assert not isinstance(load(), str) and holder.poll() is None


def test_an_interruption_ends_the_wait_for_the_lock(holder):
    with pytest.raises(KeyboardInterrupt):
        library._load(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_file_system_without_locks(cache, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(build.fcntl, "flock", refuse)
    assert not isinstance(load(), str)
    assert len(list(cache.iterdir())) == 1


def test_a_library_of_a_wheel_is_chosen_by_the_processor(tmp_path, monkeypatch):
    """The best level that the processor has; a damaged file is passed over, and without any the library is compiled."""
    levels = build.LEVELS[platform.machine()]
    here = set(build._processor().split())
    possible = [name for name, _, needed in levels if here.issuperset(needed)]
    monkeypatch.setattr(build, "LEVELS", {platform.machine(): tuple(one for one in levels if one[0] in possible[-2:])})
    monkeypatch.setattr(build, "IN_WHEELS", tmp_path)
    monkeypatch.setattr(build, "_compiler", lambda: pytest.fail("a compiler is looked for"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_compiler", lambda: ["cc"])
        build.build_for_wheel(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{name}.so" for name in possible[-2:]}
    monkeypatch.setattr(library, "_loaded", [])
    library.load_panel_kernels("Q4_0")                # they are in the library of the step
    for name in possible[-2:]:
        assert load()._name == str(tmp_path / f"step-{name}.so")
        (tmp_path / f"step-{name}.so").unlink()       # the mapping of this process stays whole
        (tmp_path / f"step-{name}.so").write_bytes(b"damaged")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="compiling"):
        patch.setattr(build, "_compiler", lambda: (_ for _ in ()).throw(RuntimeError("compiling")))
        load()


HOME = pwd.getpwuid(os.getuid()).pw_dir


@pytest.mark.parametrize(("variables", "is_known", "expected"), [
    ({"XDG_CACHE_HOME": "/a/b"}, True, "/a/b/batch_manager"),
    ({"HOME": "/h"}, True, "/h/.cache/batch_manager"),
    ({"XDG_CACHE_HOME": "a/b", "HOME": "/h"}, True, "/h/.cache/batch_manager"),       # relative: ignored, by XDG
    ({"XDG_CACHE_HOME": "~/b", "HOME": "/h"}, True, "/h/.cache/batch_manager"),
    ({"XDG_CACHE_HOME": "", "HOME": ""}, True, f"{HOME}/.cache/batch_manager"),
    ({}, True, f"{HOME}/.cache/batch_manager"),
    ({}, False, None), ({"HOME": ""}, False, None), ({"HOME": "h"}, False, None),
    ({"HOME": "~", "XDG_CACHE_HOME": "."}, False, None)], ids=str)
def test_where_the_cache_is(variables, is_known, expected, monkeypatch, tmp_path):
    """By the XDG Base Directory specification; without a home directory, in the folder for temporary files."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not is_known:
        monkeypatch.setattr(build.pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    temporary = tmp_path / f"batch_manager-{os.getuid()}"
    assert build.cache_folders() == [*([Path(expected)] if expected else []), temporary]
    if expected is None:                                       # and nothing is left in the working directory
        monkeypatch.chdir(tmp_path)
        assert not isinstance(load(), str)
        assert list(tmp_path.iterdir()) == [temporary] and len(list(temporary.glob("*.so"))) == 1


def test_a_folder_of_somebody_elses_is_not_loaded_from(cache, monkeypatch, tmp_path):
    load()
    monkeypatch.setattr(build.os, "getuid", lambda: 12345)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    assert load() == ("no cache folder for the compiled library is usable; "
                      "set XDG_CACHE_HOME to a folder that only this user can write to")
