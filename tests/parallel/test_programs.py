"""C27: programs of several ranks, started as users start them: the page's, and OpenAI's server."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"


def of_launchers(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


def test_the_program_of_the_page_starts_its_ranks(tmp_path):
    page = (REPOSITORY / "docs" / "ranks.md").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1])
    ran = subprocess.run([sys.executable, str(program)], cwd=REPOSITORY, env=of_launchers(), capture_output=True,
                         text=True, timeout=120)
    assert ran.returncode == 0 and len(ran.stdout) > 40, ran.stdout + ran.stderr


def processes_of_ranks(parent: int) -> dict[int, int]:
    """Return rank -> id of the process that torchrun, with the id `parent`, started for it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                rank = re.search(rb"(?:^|\0)RANK=(\d+)", (folder / "environ").read_bytes())
                found |= {int(rank[1]): int(folder.name)} if rank else {}
        except (OSError, IndexError):
            continue
    return found


def test_a_server_starts_its_ranks_and_ends_if_one_is_killed(tmp_path):
    httpx = pytest.importorskip("httpx", reason="httpx is not installed: the OpenAI server was not tried")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: the OpenAI server was not tried")
    log, deadline = tmp_path / "log", time.monotonic() + 120
    with log.open("wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "batch_manager.tools", "serve", str(MODEL), "--port", "0", "--num-threads", "1",
             "--tensor-parallel-size", "2"], stdout=file, stderr=file, env=of_launchers())
    try:
        while not (url := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        ranks, lines = processes_of_ranks(server.pid), []
        body = {"prompt": "Emma smiled, and", "max_tokens": 1500, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url[1]}/v1/completions", json=body, timeout=60) as stream:
            for line in stream.iter_lines():
                lines += [line] if line else []
                if len(lines) == 5:
                    os.kill(ranks[1], signal.SIGKILL)
        assert len(lines) > 6 and "rank 1 " in lines[-2] and '"engine_failed"' in lines[-2], lines[-2:]
        assert server.wait(60) == 1, log.read_text()
        assert not any(Path(f"/proc/{process}").exists() for process in ranks.values())
    finally:
        server.kill()
