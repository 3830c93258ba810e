"""A rank that raises in a layer, runs out of memory or computes NaN costs the request at fault alone.

A callback that takes longer than rank_timeout_s costs none. A killed rank is named, wherever it was.
"""

import contextlib
import os
import signal
import time
from unittest import mock

import pytest

from batch_manager.layers.linear import Linear
from batch_manager.parallel.ranks import Link
from batch_manager.runtime.ranks.staged_model import StagedModel
from tests.harness.client import Client
from tests.harness.requests import request
from tests.models.conftest import reference  # noqa: F401
from tests.models.test_ranks import HEADS

from .conftest import Processes, free_port
from .engines import SECONDS, Job, manager_of, run_rank

POISON, VICTIM = 96, 2              # the request at fault has this token before 9
PROMPTS = [[1, 2, 3], [5] * 20, [7, POISON, 9], [11, 12] * 9, [13]]
ERRORS = {"raises": RuntimeError("planted"), "memory": MemoryError("planted")}
CODES = {"raises": "[MODEL_ERROR]", "memory": "[OUT_OF_MEMORY]", "nan": "[NON_FINITE_LOGITS]"}
# (sizes, rank at fault, what it does, after how many products of the step). An exception at any other place of a step
# is that of test_exchange.py.
FAULTS = [(sizes, rank, kind, after) for sizes in ((2, 1), (1, 2)) for rank in (0, 1)
          for kind, after in (("raises", 3), ("memory", 1), ("nan", 0)) if (kind, rank) != ("memory", 0)
          ] + [((2, 2), 3, "raises", 2)]
TIMEOUT_S = 4.0
SLOW = (2, 2), 0, "sleeps", TIMEOUT_S + 1


# (sizes, rank that is killed, after how many products of a step; None: before it tells rank 0 that a step is done)
LOSSES = [((2, 1), 1, 0), ((2, 1), 1, 6), ((2, 1), 1, None), ((4, 1), 3, 3), ((2, 2), 1, 1), ((2, 2), 3, 3),
          ((1, 2), 1, 2), ((1, 2), 1, None)]


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def planted(kind, after):
    """A block in which this rank fails in each step that has the prompt at fault."""
    embed, left = StagedModel.embed, None
    if kind == "sleeps":
        received, seconds = Client.received, [after]

        def slow(self, *given):
            if seconds:                                # another step is launched, and not read
                time.sleep(seconds.pop())
            return received(self, *given)
        with mock.patch.object(Client, "received", slow):
            yield
        return

    def poisoned(self, token_ids):
        nonlocal left
        hidden, is_there = embed(self, token_ids), (token_ids[:-1] == POISON) & (token_ids[1:] == 9)
        if kind == "nan":
            hidden[:-1][is_there] = float("nan")
        else:
            left = after if is_there.any() else None
        return hidden

    def counted(method):
        def call(self, *given):
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0 and kind == "dies":
                    kill_this()
                if left < 0:
                    raise ERRORS[kind]
            return method(self, *given)
        return call

    if kind == "dies" and after is None:
        with mock.patch.object(Link, "done", lambda *given: kill_this()):
            yield
        return
    with (mock.patch.object(StagedModel, "embed", poisoned),
          mock.patch.object(Linear, "__call__", counted(Linear.__call__)),
          mock.patch.object(Linear, "add_to", counted(Linear.add_to))):
        yield


def run_with_faults(port, rank, jobs):
    """Run each job, with the fault of each on the rank at fault. Rank 0 returns the answers."""
    answers = []
    for job, fault in jobs:
        at_fault = fault is not None and fault[1] == rank
        with planted(*fault[2:]) if at_fault else contextlib.nullcontext():
            found = run_rank(port, rank, [job])
        answers.append(found and found[0][0])
    return answers


@pytest.fixture(scope="module")
def answers(reference, fork_server):  # noqa: F811
    """Return fault -> answers; None: without a fault."""
    folder = reference("Llama", **HEADS)[1]
    requests = [((number, prompt, 6), {}) for number, prompt in enumerate(PROMPTS)]
    jobs = [(Job(folder, requests, {"tensor": sizes[0], "stages": sizes[1], "max_batch_size": 3,
                                    "rank_timeout_s": TIMEOUT_S if fault is SLOW else 30}), fault)
            for sizes, fault in [((2, 1), None), *((fault[0], fault) for fault in [*FAULTS, SLOW])]]
    port = free_port()
    found = Processes(fork_server).run(run_with_faults, [(port, rank, jobs) for rank in range(4)])[0]
    return {fault: answer for (_, fault), answer in zip(jobs, found)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_step_costs_the_request_at_fault_alone(fault, answers):
    expected, got = answers[None], answers[fault]
    assert not any(answer.error for answer in expected.values())
    for number, answer in got.items():
        if number == VICTIM:
            assert answer.error.startswith(CODES[fault[2]]), answer.error
        else:
            assert answer.tokens == expected[number].tokens and not answer.error


def test_a_callback_longer_than_rank_timeout_s_costs_nothing(answers):
    """While rank 0 is in it, the ranks of its stage do not wait for it inside an exchange of the next step."""
    assert {number: (answer.tokens, answer.error) for number, answer in answers[SLOW].items()} == {
        number: (answer.tokens, "") for number, answer in answers[None].items()}


def connections():
    """Return the descriptors that connections need. libuv keeps a pipe of its own."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.startswith(("socket:", "anon_inode:"))]


def run_until_lost(port, rank, job, lost, after):
    """Return the health of this rank once the engine has failed, and on rank 0 the errors of all requests."""
    files, client = len(connections()), Client() if rank == 0 else None
    with planted("dies", after) if rank == lost else contextlib.nullcontext():
        manager = manager_of(port, rank, job, client)
        if client is None:
            assert manager.wait_until_terminate(SECONDS)
            return manager.health()
        client.pending = [request(*given, **more) for given, more in job.requests]
        client.wait_for_finals(*range(len(job.requests)))
        health, deadline = manager.health(), time.monotonic() + 10
        assert health["state"] == "FAILED"
        while len(connections()) > files:
            assert time.monotonic() < deadline, f"left before the shutdown: {connections()}"
            time.sleep(0.01)
        client.pending = [request(99, [1], 1)]          # rank 0 refuses until it is shut down, as with one process
        client.wait_for_finals(99)
        assert not manager.wait_until_terminate(0) and manager.shutdown(timeout=SECONDS) and not client.complaints
        return health, [client.final(number).error for number in client.responses]


@pytest.mark.parametrize("sizes, lost, after", LOSSES)
def test_a_killed_rank_is_named_wherever_it_was(reference, processes, port, sizes, lost, after):  # noqa: F811
    folder = reference("Llama", **HEADS)[1]
    job = Job(folder, [((number, prompt, 40), {}) for number, prompt in enumerate(PROMPTS)],
              {"tensor": sizes[0], "stages": sizes[1], "max_batch_size": 3})
    (health, errors), *others = processes.run(
        run_until_lost, [(port, rank, job, lost, after) for rank in range(sizes[0] * sizes[1])], may_end=(lost,))
    assert health["state"] == "FAILED" and health["ranks"][lost]["state"] == "LOST"
    for text in [health["failure"], *filter(None, errors), *[other["failure"] for other in others if other]]:
        assert text.startswith("[ENGINE_FAILED]") and f"rank {lost} " in text
    assert errors.count("") < len(PROMPTS) and errors[-1]
