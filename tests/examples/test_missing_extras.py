"""An example whose extra is not installed names the extra in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
WITHOUT = "import runpy, sys; sys.modules[sys.argv[2]] = None; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.parametrize(("example", "library", "extra"), [
    ("quickstart", "tokenizers", "examples"), ("redis_worker", "redis", "examples"),
    ("openai_server", "uvicorn", "server"), ("disaggregated_proxy", "httpx", "server,examples")])
def test_it_names_the_extra_without_a_stack(example, library, extra):
    command = [sys.executable, "-c", WITHOUT, REPOSITORY / "examples" / f"{example}.py", library]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.startswith(f"{example}: ") and ended.stderr.count("\n") == 1
    assert f'pip install -e ".[{extra}]"' in ended.stderr and ended.stdout == ""
