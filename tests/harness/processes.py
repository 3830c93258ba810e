"""A pytest plugin for tests in several processes, and for tests that hang or end their process.

A test that takes longer than `faulthandler_timeout` of pyproject.toml prints the stacks of all threads and ends its
process. In several processes (`-n`) this costs that one test: it is reported as failed, a new process runs what is left
of its file, and processes that the dead one had started are killed.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

try:
    from xdist.scheduler import LoadFileScheduling
except ImportError:                                             # tests then run in one process only
    LoadFileScheduling = object

MARK = "BATCH_MANAGER_TEST_RUN"                                 # environment variable: process id of the whole run
STDERR = pytest.StashKey[int]()                                 # a descriptor of it, which tests do not capture


class WholeFiles(LoadFileScheduling):
    """Gives each process whole files, in the order of collection, until it has three tests or more.

    LoadFileScheduling of pytest-xdist 3.8 runs a test that ended its process again, gives out finished files as work,
    and gives a new process less than the two tests without which it does not start, so that the run never ends.
    """

    def mark_test_complete(self, node, item_index, duration=0):
        test = self.registered_collections[node][item_index]
        self._remove(self.assigned_work[node], test)
        self._reschedule(node)

    def remove_node(self, node):
        """Return the test that `node` was running, or None. The tests after it come next in the queue."""
        files = self.assigned_work.pop(node)
        running = next((test for tests in files.values() for test in tests), None)
        if running is not None:
            self._remove(files, running)
            for file in reversed(files):
                self.workqueue[file] = files[file]
                self.workqueue.move_to_end(file, last=False)
            for other in self.nodes:
                self._reschedule(other)
        return running

    def _remove(self, files, test):
        file = self._split_scope(test)
        del files[file][test]
        if not files[file]:
            del files[file]

    def _reschedule(self, node):
        if node.shutting_down or node not in self.registered_collections:      # or it still collects
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


def is_controller(config) -> bool:
    return not hasattr(config, "workerinput") and bool(config.getoption("numprocesses", None))


def pytest_configure(config):
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())
    if is_controller(config):
        os.environ[MARK] = str(os.getpid())                     # all processes of the tests inherit it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False                      # it would put the files with the most tests first
    return WholeFiles(config, log) if config.getoption("dist") in ("load", "loadfile") else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if error:
        kill_orphans()


def pytest_unconfigure(config):
    os.close(config.stash[STDERR])
    if is_controller(config):
        deadline = time.monotonic() + 2
        while any(orphans()) and time.monotonic() < deadline:
            time.sleep(0.02)
        kill_orphans()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """Watch a failed test until its end too: pytest itself stops watching when the failure is reported."""
    config = node.config
    seconds = float(config.getini("faulthandler_timeout") or 0)
    if isinstance(node, pytest.Item) and seconds and not config.getoption("usepdb"):
        faulthandler.dump_traceback_later(seconds, exit=config.getini("faulthandler_exit_on_timeout"),
                                          file=config.stash[STDERR])


def orphans() -> Iterator[tuple[int, str]]:
    """Yield (process id, command) of each process of this run whose parent, or an ancestor, has ended."""
    parents, marked = {}, {}
    mark = f"{MARK}={os.getpid()}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):                      # it has ended, or belongs to someone else
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            parents[int(name)] = int(parent)
            if state != b"Z":
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        with open(f"/proc/{name}/cmdline", "rb") as command:
                            marked[int(name)] = command.read().replace(b"\0", b" ").decode(errors="replace")
    for process, command in marked.items():
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor != os.getpid():
            yield process, command


def kill_orphans() -> None:
    for process, command in orphans():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            print(f"killed process {process}, which a test left behind: {command[:200]}", file=sys.__stderr__)
