"""C27: programs of several ranks, started as users start them: the example, the page's, a ported server, OpenAI's."""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch")

from batch_manager import KvCacheConfig  # noqa: E402
from tests.harness import forked  # noqa: E402
from tests.parallel.conftest import Processes, free_port  # noqa: E402
from tests.parallel.ported_server import MODEL, PROMPTS  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]


def of_launchers(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


def run_here(programs: list[tuple[str, list[str], dict[str, str]]]) -> list[str]:
    """Run programs one after the other, each with arguments and variables of a launcher. Return what each prints."""
    printed = []
    for path, arguments, variables in programs:
        with (mock.patch.dict(os.environ, variables), mock.patch.object(sys, "argv", [path, *arguments]),
              mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]),
              contextlib.redirect_stdout(io.StringIO()) as stdout):
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as ended:
                assert not ended.code, ended.code
        printed.append(stdout.getvalue())
    return printed


@pytest.fixture(scope="module")
def printed(fork_server, tmp_path_factory):
    """What the example, the program of the page and the ported server print on each rank, as launchers start them."""
    page = (REPOSITORY / "docs" / "ranks.md").read_text(encoding="utf-8")
    program = tmp_path_factory.mktemp("page") / "program.py"
    program.write_text(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1].replace(
        '"examples/', f'"{REPOSITORY}/examples/'))
    ports = [str(free_port()) for _ in range(3)]

    def torchrun(rank: int, port: str) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def open_mpi(rank: int) -> dict[str, str]:
        return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}

    of_ranks = Processes(fork_server).run(run_here, [([
        (str(REPOSITORY / "examples" / "two_ranks.py"), [], torchrun(rank, ports[0])),
        (str(program), [], torchrun(rank, ports[1])),
        (str(REPOSITORY / "tests" / "parallel" / "ported_server.py"), [ports[2]], open_mpi(rank))],)
        for rank in range(2)])
    return dict(zip(["example", "page", "ported server"], zip(*of_ranks)))


def test_the_example_prints_the_same_text_on_both_ranks(printed):
    lines = [text.splitlines() for text in printed["example"]]
    assert [len(of_rank) for of_rank in lines] == [2, 2]
    assert [line.removeprefix("rank 0 ") for line in lines[0]] == [line.removeprefix("rank 1 ") for line in lines[1]]
    assert all(re.match(r"rank \d \[\d\] '.{40,}'", line) for of_rank in lines for line in of_rank)


def test_the_program_of_the_page_prints_on_rank_0(printed):
    assert len(printed["page"][0]) > 40 and not printed["page"][1]


def test_a_ported_server_with_a_broadcast_of_its_own_inside_get_runs_unchanged(
        printed, make_manager, new_client, new_request):
    answers = [[json.loads(line) for line in text.splitlines()] for text in printed["ported server"]]
    assert [line[1:] for line in answers[0]] == [line[1:] for line in answers[1]] and answers[1][0][0] == 1
    client = new_client()
    client.pending += [new_request(number, prompt, 12) for number, prompt in enumerate(PROMPTS)]
    make_manager(client, model_path=MODEL, device="cpu", num_threads=1, kv_cache_config=KvCacheConfig(max_tokens=1024))
    client.wait_for_finals(*range(len(PROMPTS)))
    assert {number: tokens for _, number, tokens, _ in answers[0]} == {
        number: client.final(number).tokens() for number in range(len(PROMPTS))}


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
        server = forked.Popen(
            [sys.executable, "-m", "batch_manager.tools", "serve", str(MODEL), "--port", "0", "--num-threads", "1",
             "--tensor-parallel-size", "2", "--max-loras", "2",
             "--lora-modules", f"plays={MODEL.parents[1] / 'adapters' / 'plays'}"], stdout=file, stderr=file,
            env=of_launchers())
    try:
        while not (url := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        body = {"prompt": "Emma smiled, and", "max_tokens": 12, "temperature": 0}
        answers = [httpx.post(f"{url[1]}/v1/completions", json={"model": name, **body}, timeout=60).json()
                   for name in (MODEL.name, "plays")]
        assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]
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
