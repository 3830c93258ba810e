"""A rank that raises in a layer, runs out of memory or computes NaN costs the request at fault alone, and no request if
draft tokens are at fault.

Steps run in either form of several ranks: in `packed`, a rank fails before a product of a layer, and in `compiled`
before a call for the operations between two sums.

A callback that takes longer than rank_timeout_s costs none. A killed rank is named, wherever it was.
"""

import contextlib
import os
import signal
import time
from unittest import mock

import pytest

from batch_manager.layers.linear import Linear
from batch_manager.parallel.link import Link
from batch_manager.runtime.forms.compiled import forward as compiled
from batch_manager.runtime.ranks.staged_model import StagedModel
from batch_manager.triton_kernels.cpu.native.library import load_library
from tests.harness.client import Client
from tests.harness.requests import request
from tests.models.conftest import reference  # noqa: F401
from tests.models.test_ranks import HEADS

from .conftest import Processes, free_port
from .engines import SECONDS, Job, manager_of, run_rank

POISON = 96                         # the request at fault has this token before one of VICTIMS
PROMPTS = [[1, 2, 3], [5] * 20, [7, POISON, 9], [11, 12] * 9, [13]]
DRAFTED = 1000                      # and a token of VICTIMS: id of a request for prompt 0 whose drafts are at fault
NUM_LAYERS = 2
# token -> what a step with it does, after how many products or calls: every one of them raises in one. An exception at
# any other place of a step is that of test_exchange.py.
VICTIMS = {**{20 + after: ("raises", after) for after in range(4 * NUM_LAYERS)}, 30: ("memory", 0), 31: ("nan", 0)}
CODES = {"raises": "[MODEL_ERROR]", "memory": "[OUT_OF_MEMORY]", "nan": "[NON_FINITE_LOGITS]"}
# sizes, whether steps are compiled, rank at fault
FAULTS = [((2, 1), True, 0), ((2, 1), False, 1), ((1, 2), True, 1), ((2, 2), True, 2)]
TIMEOUT_S = 3.0
SLOW = (2, 2), True, 0, "is slow"
# (sizes, whether steps are compiled, rank that is killed, after how many products or calls of a step; None: before it
# tells rank 0 that a step is done)
LOSSES = [((2, 1), True, 1, 3), ((2, 1), True, 1, None), ((4, 1), True, 3, 2), ((2, 2), False, 1, 3),
          ((1, 2), True, 1, 0)]


def victims_of(sizes, is_compiled):
    """Return the tokens of VICTIMS that have an effect: a layer has four products, and two sums between ranks."""
    layers = NUM_LAYERS // sizes[1]
    count = (1 + 2 * layers * (sizes[0] > 1)) if is_compiled else 4 * layers
    return [token for token, (_, after) in VICTIMS.items() if after < count]


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


def fail(kind):
    if kind == "dies":
        kill_this()
    raise {"raises": RuntimeError, "memory": MemoryError}[kind]("planted")


@contextlib.contextmanager
def planted(victims):
    """A block in which this rank fails in each step that has a prompt at fault; see VICTIMS."""
    embed, due = StagedModel.embed, []                 # [products until then, what it does]

    def poisoned(self, token_ids):
        hidden, tokens = embed(self, token_ids), token_ids.tolist()
        due.clear()
        for row, (before, token) in enumerate(zip(tokens, tokens[1:])):
            if before == POISON and token in victims:
                kind, after = victims[token]
                if kind == "nan":
                    hidden[row] = float("nan")
                elif not due or after < due[0]:
                    due[:] = after, kind
        return hidden

    def count():
        if due:
            due[0] -= 1
            if due[0] < 0:
                fail(due[1])

    def counted(method):
        def call(self, *given):
            count()
            return method(self, *given)
        return call

    class Library:
        """The compiled code. Without memory, a call of it says so."""

        def __getattr__(self, name):
            return getattr(load_library(), name)

        def run_step(self, *given):
            try:
                count()
            except MemoryError:
                return 1
            return load_library().run_step(*given)

    with (mock.patch.object(compiled, "load_library", Library),
          mock.patch.object(StagedModel, "embed", poisoned),
          mock.patch.object(Linear, "__call__", counted(Linear.__call__)),
          mock.patch.object(Linear, "add_to", counted(Linear.add_to))):
        yield


@contextlib.contextmanager
def slow_once():
    received, seconds = Client.received, [TIMEOUT_S + 1]

    def slow(self, *given):
        if seconds:                                    # another step is launched, and not read
            time.sleep(seconds.pop())
        return received(self, *given)
    with mock.patch.object(Client, "received", slow):
        yield


def run_with_faults(port, rank, jobs):
    """Run each job, with the fault of each on the rank at fault. Rank 0 returns the answers."""
    answers = []
    for job, fault in jobs:
        at_fault = fault is not None and fault[2] == rank
        with contextlib.nullcontext() if not at_fault else slow_once() if fault is SLOW else planted(VICTIMS):
            found = run_rank(port, rank, [job])
        answers.append(found and found[0][0])
    return answers


@pytest.fixture(scope="module")
def answers(reference, fork_server):  # noqa: F811
    """Return fault -> answers; None: without a fault. The id of a request at fault is its token of VICTIMS."""
    folder = reference("Llama", **HEADS)[1]
    requests = [((number, prompt, 6), {}) for number, prompt in enumerate(PROMPTS)]
    at_fault = {fault: [((token, [7, POISON, token], 6), {}) for token in victims_of(*fault[:2])] + [
        ((DRAFTED + token, PROMPTS[0], 6), {"draft_input_ids": [POISON, token, 1], "return_context_logits": True})
        for token in victims_of(*fault[:2])] for fault in FAULTS}
    jobs = [(Job(folder, requests + at_fault.get(fault, []), {
        "max_draft_tokens": 3, "tensor": sizes[0], "stages": sizes[1], "max_batch_size": 3, "cpu_compile": is_compiled,
        "rank_timeout_s": TIMEOUT_S if fault is SLOW else 30}), fault)
        for sizes, is_compiled, fault in [((2, 1), True, None), *((*fault[:2], fault) for fault in [*FAULTS, SLOW])]]
    port = free_port()
    found = Processes(fork_server).run(run_with_faults, [(port, rank, jobs) for rank in range(4)])[0]
    return {fault: answer for (_, fault), answer in zip(jobs, found)}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_in_any_layer_costs_the_request_at_fault_alone(fault, answers):
    expected, got = answers[None], answers[fault]
    assert not any(answer.error for answer in expected.values())
    for number, answer in expected.items():
        assert got[number].tokens == answer.tokens and not got[number].error
    for token in victims_of(*fault[:2]):
        assert got[token].error.startswith(CODES[VICTIMS[token][0]]), (token, got[token].error)
        assert got[DRAFTED + token].tokens == expected[0].tokens, (token, got[DRAFTED + token].error)


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
    dies = (mock.patch.object(Link, "done", lambda *given: kill_this()) if after is None
            else planted({9: ("dies", after)}))
    with dies if rank == lost else contextlib.nullcontext():
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


@pytest.mark.parametrize("sizes, is_compiled, lost, after", LOSSES)
def test_a_killed_rank_is_named_wherever_it_was(reference, processes, port, sizes, is_compiled, lost, after):  # noqa: F811
    folder = reference("Llama", **HEADS)[1]
    job = Job(folder, [((number, prompt, 40), {}) for number, prompt in enumerate(PROMPTS)],
              {"tensor": sizes[0], "stages": sizes[1], "max_batch_size": 3, "cpu_compile": is_compiled})
    (health, errors), *others = processes.run(
        run_until_lost, [(port, rank, job, lost, after) for rank in range(sizes[0] * sizes[1])], may_end=(lost,))
    assert health["state"] == "FAILED" and health["ranks"][lost]["state"] == "LOST"
    for text in [health["failure"], *filter(None, errors), *[other["failure"] for other in others if other]]:
        assert text.startswith("[ENGINE_FAILED]") and f"rank {lost} " in text
    assert errors.count("") < len(PROMPTS) and errors[-1]
