"""The notebook runs, and Ctrl-C interrupts engines in IPython. tests/campaigns/notebook_sessions.py runs more cases."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")
PROGRAM = Path(__file__).resolve().parents[1] / "campaigns" / "notebook_sessions.py"


@pytest.fixture(scope="module")
def notebooks():
    spec = importlib.util.spec_from_file_location("notebook_sessions", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    missing = [name for name in program.NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"notebooks were NOT tested: {', '.join(missing)} is not installed")
    return program


def test_the_notebook_runs(notebooks, tmp_path):
    assert notebooks.run_notebook(tmp_path)


def test_interrupts_and_a_cell_run_again(notebooks):
    session = notebooks.Session()
    try:
        notebooks.interrupt_everywhere(session)
        notebooks.engines_again(session, is_closed=False, count=6)
    finally:
        session.close()
