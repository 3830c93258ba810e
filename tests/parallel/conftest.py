"""Processes that are the ranks of the tests of this folder. A server forks them, because torch takes long to import."""

import multiprocessing
import os
import socket
import traceback
from functools import cache

import pytest

from batch_manager.parallel.mapping import Place

SECONDS = 120                      # for a rank that hangs; a test's own limits are in its assertions
PRELOADED = ["torch", "torch.distributed", "numpy", "batch_manager.runtime.build_backend", "batch_manager.gpt_manager"]


def _answer(connection, function, arguments):
    import torch

    torch.set_num_threads(1)
    try:
        answer = True, function(*arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    connection.send(answer)


class Processes:
    """Starts processes, and waits for what they return."""

    def __init__(self, context):
        self._context = context

    def run(self, function, arguments, may_end=()):
        """Call function(*arguments[i]) in a new process for each i, all at the same time, and return the results.

        may_end   indices of processes that may end without a result, which is None then
        """
        running, results, errors = [], [], []
        for given in arguments:
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_answer, args=(theirs, function, given), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        for index, (_process, connection) in enumerate(running):
            is_good, found = index in may_end, None
            try:
                if connection.poll(SECONDS):
                    is_good, found = connection.recv()
                elif not is_good:
                    found = f"process {index} hangs"
            except (EOFError, OSError):
                found = None if is_good else f"process {index} ended"
            results.append(found)
            if not is_good:
                errors.append(found)
        for process, connection in running:
            connection.close()
            if errors or process.exitcode is None:
                process.join(5 if not errors else 0)
                process.kill()
            process.join(60)
            process.close()
        assert not errors, "\n".join(errors)
        return results


@pytest.fixture(scope="session")
def fork_server():
    return fork_server_context()


@cache
def fork_server_context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=int)
    first.start()
    first.join(60)
    first.close()
    return context


@pytest.fixture
def processes(fork_server):
    return Processes(fork_server)


@pytest.fixture
def port():
    return free_port()


def free_port():
    """Return a port that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def place_among(port, rank, tensor_size, num_stages=1):
    """The place of a rank, all of them on this machine."""
    return Place(rank=rank, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages, local_rank=rank,
                 local_size=tensor_size * num_stages, host="127.0.0.1", port=port)


def end_here():
    """End this process at once, as SIGKILL does."""
    os._exit(9)
