"""The library is compiled once for a processor, and where it cannot be, everything runs in torch."""

import os

import pytest

from batch_manager.triton_kernels.cpu.native import library

load = library._load_once.__wrapped__


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", ("-O0", *library.FLAGS[1:]))            # a tenth of the time to compile
    return tmp_path / "batch_manager"


def test_it_is_compiled_once_and_found_again(cache, monkeypatch):
    assert not isinstance(load(), str)
    (built,) = cache.iterdir()
    assert built.suffix == ".so" and cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert not isinstance(load(), str)


def test_other_sources_flags_and_processors_have_files_of_their_own(cache, monkeypatch):
    load()
    monkeypatch.setattr(library, "_processor", lambda: "another one")
    load()
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-DANOTHER"))
    load()
    assert len(list(cache.iterdir())) == 3


def test_without_a_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert load() == "no C compiler was found: neither $CC nor cc, gcc, clang"


def test_a_compiler_that_fails_leaves_nothing_behind(cache, monkeypatch, tmp_path):
    compiler = tmp_path / "failing"
    compiler.write_text("#!/bin/sh\n[ \"$1\" = --version ] || { echo 'no such instruction' >&2; exit 1; }\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert load() == f"compiling with {compiler} failed: no such instruction"
    assert list(cache.iterdir()) == []


def test_what_killed_processes_left_is_deleted_when_it_is_old(cache):
    cache.mkdir(mode=0o700)
    old, young = cache / f"{library.UNFINISHED}old.so", cache / f"{library.UNFINISHED}young.so"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    assert not isinstance(load(), str)
    assert not old.exists() and young.exists()


def test_a_damaged_file_in_the_cache_is_no_reason_to_fail(cache):
    cache.mkdir(mode=0o700)
    built = cache / library._file_name(library.shutil.which("cc"))
    built.write_bytes(b"damaged")
    assert not isinstance(load(), str)
    assert built.stat().st_size > 1000


def test_a_cache_that_cannot_be_written(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path))
    assert not isinstance(load(), str)
    assert len(list((tmp_path / f"batch_manager-{os.getuid()}").iterdir())) == 1


def test_a_folder_of_somebody_elses_is_not_loaded_from(cache, monkeypatch, tmp_path):
    load()
    monkeypatch.setattr(library.os, "getuid", lambda: 12345)
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path / "other"))
    assert load().endswith("failed: no folder for the compiled file can be written")
