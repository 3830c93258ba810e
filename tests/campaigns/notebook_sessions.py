"""The shipped notebook, and an IPython process at a terminal: Ctrl-C in each method, and ten engines in a row.

    python tests/campaigns/notebook_sessions.py [--repeat 3]

Needs ipython, pexpect, nbconvert and ipykernel. The program raises AssertionError at the first violation.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
NEEDED = ("IPython", "pexpect", "nbconvert", "ipykernel", "tokenizers")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "dumb", "OMP_NUM_THREADS": "1"}
INTERRUPTED = "Traceback (most recent call last)"      # printed for a cell; Ctrl-C at the prompt prints no traceback
MORE_MEMORY_MIB = 90           # the allocator returns memory in steps of about 60 MiB
SECONDS_TO_OBEY = 2.0

SETUP = f"""
import gc, os, threading, time
from batch_manager import KvCacheConfig
from batch_manager.extras.llm import LLM
MODEL, CACHE = {str(EXAMPLES / "models" / "austen-4m")!r}, KvCacheConfig(max_tokens=65536)
def made(): return LLM(MODEL, num_threads=1, kv_cache_config=CACHE)
def threads(): return sum(t.name.startswith("batch_manager") for t in threading.enumerate())
def files(): return len(os.listdir("/proc/self/fd"))
def memory(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
"""


class Session:
    """An IPython process in a terminal, which runs one line at a time as a cell."""

    def __init__(self) -> None:
        import pexpect
        self._ipython = pexpect.spawn(
            sys.executable, ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor",
                             "--HistoryManager.enabled=False"],
            env=ENVIRONMENT, encoding="utf-8", timeout=60, echo=False, dimensions=(50, 500))
        self._marks = 0
        self.run(f"exec({SETUP!r})")
        self.run("llm = made(); n = llm.generate('Emma', max_tokens=4); llm.close(); del llm, n; n = gc.collect()")

    def _wait(self) -> str:
        """Print a mark and return the output before the mark.

        The prompt cannot serve as the mark, because Ctrl-C may print two prompts.
        """
        self._marks += 1
        self._ipython.sendline(f"print('<' + 'mark {self._marks}>')")
        self._ipython.expect(f"<mark {self._marks}>", timeout=60)
        return self._ipython.before

    def run(self, line: str) -> str:
        """Run a cell and return its output."""
        self._ipython.sendline(line)
        return self._wait()

    def interrupt(self, line: str, after_s: float) -> tuple[str, float]:
        """Start `line` as a cell and press Ctrl-C `after_s` seconds later.

        Returns (output of the cell, seconds until the prompt is back).
        """
        self._ipython.sendline(line)
        time.sleep(after_s)
        began = time.monotonic()
        self._ipython.sendintr()
        time.sleep(0.1)                      # Ctrl-C makes the terminal drop unread input
        return self._wait(), time.monotonic() - began

    def number(self, expression: str) -> int:
        (found,) = re.findall(r"<(-?\d+)>", self.run(f"print('<' + str(int({expression})) + '>')"))
        return int(found)

    def numbers(self) -> tuple[int, int, int]:
        return self.number("threads()"), self.number("files()"), self.number("memory()")

    def numbers_like(self, before: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the numbers when threads and files are as `before`, or after 20 s: threads take a moment to end."""
        give_up = time.monotonic() + 20
        while (now := self.numbers())[:2] != before[:2] and time.monotonic() < give_up:
            time.sleep(0.1)
        return now

    def close(self) -> None:
        self._ipython.close(force=True)


def run_notebook(folder: Path) -> str:
    """Execute the notebook and return the output of its cells."""
    out = folder / "executed.ipynb"
    done = subprocess.run([sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output", out,
                           EXAMPLES / "notebook.ipynb"], env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = [cell for cell in json.loads(out.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"], outputs
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert printed.count("[LENGTH") + printed.count("[END_ID") == 3, printed
    return printed


def interrupt_everywhere(session: Session) -> str:
    """Press Ctrl-C during the engine's constructor, `generate` and `close`. Returns a line with the results.

    Raises AssertionError if the prompt is late or threads or files are left.
    """
    before, slowest, in_constructor = session.numbers(), 0.0, 0
    for after_s in (0.02, 0.05, 0.1, 0.2, 0.3):
        printed, took = session.interrupt("llm = None; llm = made()", after_s)
        slowest, in_constructor = max(slowest, took), in_constructor + (INTERRUPTED in printed)
        session.run("llm = None if llm is None else llm.close(drain=False)")
    assert in_constructor, "no constructor was interrupted"
    session.run("llm = made()")
    printed, took = session.interrupt("r = llm.generate(['Emma'] * 16, max_tokens=900, ignore_eos=True)", 0.3)
    assert INTERRUPTED in printed, printed
    slowest = max(slowest, took)
    assert session.number("len(llm.generate('Emma', max_tokens=4, ignore_eos=True)[0].tokens)") == 4
    session.run("kept = [llm.stream('Emma', max_tokens=900, ignore_eos=True) for i in range(16)]")
    printed, took = session.interrupt("llm.close(drain=True)", 0.3)
    assert INTERRUPTED in printed, printed
    slowest = max(slowest, took)
    assert session.number("llm.close(drain=False)") == 1
    session.run("del llm, kept; n = gc.collect(); time.sleep(0.2)")
    after = session.numbers_like(before)
    assert after[:2] == before[:2], (before, after)
    assert slowest <= SECONDS_TO_OBEY, slowest
    return f"{in_constructor} of 5 constructors, generate and close interrupted, prompt back after {slowest:.2f} s"


def engines_again(session: Session, is_closed: bool, count: int = 10) -> str:
    """Run a cell that makes an engine `count` times, after three times. Returns a line with the results.

    If `is_closed` is True, the cell closes its engine. Otherwise, each run replaces the variable of the last engine.
    Raises AssertionError if threads, files or memory are left.
    """
    for number in range(3 + count):               # the allocator keeps the memory of the first three
        if number == 3:
            if not is_closed:
                session.run("llm = None; n = gc.collect(); time.sleep(0.2)")
            before = session.numbers()
        session.run("llm = made(); n = len(llm.generate('Emma', max_tokens=8, ignore_eos=True)[0].tokens)"
                    + ("; llm.close(); del llm" if is_closed else ""))
        assert session.number("n") == 8
    if not is_closed:
        session.run("n = gc.collect(); time.sleep(0.2)")
        one = session.number("threads()")
        assert 0 < one <= 2, f"{one} threads of one engine"
        session.run("del llm")
    session.run("n = gc.collect(); time.sleep(0.2)")
    after = session.numbers_like(before)
    assert after[:2] == before[:2], (before, after)
    assert after[2] - before[2] <= MORE_MEMORY_MIB, (before, after)
    return f"{count} engines {'closed' if is_closed else 'in a cell run again'}: {after[2] - before[2]:+} MiB, " \
           "threads and files as before"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"notebooks were NOT tested: {', '.join(missing)} is not installed")
        return 0
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        print("the notebook ran:", len(run_notebook(Path(folder))), "characters printed")
    for _ in range(given.repeat):
        session = Session()
        print(interrupt_everywhere(session), engines_again(session, True), engines_again(session, False), sep="; ")
        session.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
