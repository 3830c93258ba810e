"""Ranks in processes of their own, with scripted backends and real sockets: the start, steps, losses and the end.

C1, C14, C17, C21 hold for an engine of several ranks; no thread and no descriptor is left.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from unittest import mock

import pytest

from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.parallel import rank_program

PROCESSES = multiprocessing.get_context("forkserver")
SERVER = forkserver.ForkServer()              # ranks are without torch, which the server of conftest.py has
SERVER.set_forkserver_preload([rank_program.__name__])
TIMEOUT_S = 1.5      # rank_timeout_s of the engines


class Process:
    """One rank; see rank_program.py."""

    def __init__(self) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=rank_program.run, args=(theirs,))
        self.process.start()
        theirs.close()

    def tell(self, do: str, **arguments) -> None:
        self._pipe.send({"do": do, **arguments})

    def answer(self) -> dict:
        assert self._pipe.poll(60), "a rank does not answer"
        return self._pipe.recv()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ask(self, do: str, **arguments) -> dict:
        self.tell(do, **arguments)
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGCONT)
        self._pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(60)
            raise AssertionError("a rank does not end")
        self.process.close()


class Engine:
    """Processes of one engine. `construct` constructs on all ranks at the same time."""

    def __init__(self, folder) -> None:
        self.folder, self.processes = folder, []

    def construct(self, num_ranks: int = 2, of_rank: dict | None = None, absent: tuple = (), **options) -> list[dict]:
        self.processes = [Process() for _ in range(num_ranks)]
        present = [rank for rank in range(num_ranks) if rank not in absent]
        for rank in present:
            self[rank].tell("construct", **{"rank": rank, "num_ranks": num_ranks, "folder": str(self.folder),
                                            "rank_timeout_s": TIMEOUT_S, **options, **(of_rank or {}).get(rank, {})})
        return [self[rank].answer() for rank in present]

    def start(self, num_ranks: int, **options) -> None:
        """Construct on all ranks; each must succeed."""
        answers = self.construct(num_ranks, **options)
        assert {answer["error"] for answer in answers} == {""}, answers

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    def others(self, *but: int) -> list[Process]:
        return [process for rank, process in enumerate(self.processes) if rank not in but]

    def submit(self, count: int, new_tokens: int) -> list[int]:
        self[0].ask("submit", requests=[(number, [number + 1] * 4, new_tokens) for number in range(count)])
        return list(range(count))

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.processes) or 1) as threads:
            list(threads.map(Process.close, self.processes))


@pytest.fixture(scope="module", autouse=True)
def server_of_forks():
    """Start the server that forks the ranks before the check for open files of the first test."""
    with mock.patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
        process = PROCESSES.Process(target=int)
        process.start()
        process.join(60)
        process.close()
        yield


@pytest.fixture
def engine(tmp_path):
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def nothing_is_left(*processes: Process) -> None:
    for process in processes:
        assert process.ask("left") == {"threads": [], "files": 0, "torch": False}


def expected(number: int, count: int) -> list[int]:
    return ScriptedBackend.expected_tokens([number + 1] * 4, count)


# ---------------------------------------------------------------------- life


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_requests_get_their_tokens_and_all_ranks_end_with_rank_0(engine, num_ranks):
    engine.start(num_ranks)
    ids = engine.submit(5, 20)
    assert engine[0].ask("finals", ids=ids)["finals"] == {each: [["", expected(each, 20)]] for each in ids}
    health = engine[0].ask("health")
    assert health["state"] == "RUNNING" and list(health["ranks"]) == list(range(1, num_ranks))
    assert all(rank["state"] == "RUNNING" and rank["seconds_since_heard"] < TIMEOUT_S
               for rank in health["ranks"].values())
    assert engine[1].ask("health")["iterations"] == health["iterations"]
    assert engine[0].ask("shutdown")["ended"]
    for process in engine.others(0):
        answer = process.ask("wait")
        assert answer["ended"] and answer["state"] == "STOPPED" and answer["failure"] == ""
    nothing_is_left(*engine.processes)


@pytest.mark.parametrize("drain", [True, False])
def test_a_shutdown_of_another_rank_ends_all_drained_or_not_as_asked(engine, drain):
    engine.start(3, step_s=0.005)
    ids = engine.submit(3, 40)
    assert engine[2].ask("shutdown", drain=drain)["ended"]
    finals = engine[0].ask("finals", ids=ids)["finals"]
    if drain:
        assert finals == {each: [["", expected(each, 40)]] for each in ids}
    else:
        assert {code for ends in finals.values() for code, _ in ends} <= {"SHUTDOWN", ""}
        assert all(len(ends) == 1 for ends in finals.values())
    assert engine[0].ask("wait")["ended"] and engine[1].ask("wait")["ended"]
    nothing_is_left(*engine.processes)


def test_a_step_that_raises_on_another_rank_costs_the_request_at_fault_alone(engine):
    engine.start(3, of_rank={2: {"raises": {"slot": 1, "error": "MemoryError"}}})
    ids = engine.submit(4, 6)
    finals = engine[0].ask("finals", ids=ids)["finals"]
    assert finals.pop(1) == [["OUT_OF_MEMORY", []]]
    assert finals == {each: [["", expected(each, 6)]] for each in (0, 2, 3)}
    assert engine[0].ask("health")["state"] == "RUNNING"
    assert engine[0].ask("shutdown")["ended"]
    nothing_is_left(*engine.processes)


# ---------------------------------------------------------------------- losses


@pytest.mark.parametrize("number, lost, is_idle", [
    (signal.SIGKILL, 0, False), (signal.SIGKILL, 2, False), (signal.SIGKILL, 2, True), (signal.SIGSTOP, 0, False),
    (signal.SIGSTOP, 2, False)])
def test_a_rank_that_is_killed_or_stopped_ends_all(engine, number, lost, is_idle):
    """A killed rank is noticed at once, long before it counts as silent."""
    most_s = 10.0
    engine.start(4, step_s=0.002, rank_timeout_s=TIMEOUT_S if number == signal.SIGSTOP else 3 * most_s)
    ids = [] if is_idle else engine.submit(4, 100)
    if not is_idle and lost:
        engine[0].ask("responses")
    engine[lost].send_signal(number)
    began = time.monotonic()
    if lost:
        answer = engine[0].ask("until", state="FAILED")
        assert answer["state"] == "FAILED" and "rank 2 " in answer["failure"] and "[ENGINE_FAILED]" in answer["failure"]
        finals = engine[0].ask("finals", ids=ids)["finals"]
        assert time.monotonic() - began < most_s
        assert all(len(ends) == 1 and ends[0][0] in ("", "ENGINE_FAILED") for ends in finals.values())
        if not is_idle:
            assert "ENGINE_FAILED" in {code for ends in finals.values() for code, _ in ends}
        engine[0].ask("submit", requests=[(9, [1], 1)])
        assert engine[0].ask("finals", ids=[9])["finals"] == {9: [["ENGINE_FAILED", []]]}
    for process in engine.others(lost, 0):
        answer = process.ask("wait")
        assert answer["ended"] and f"rank {lost} " in answer["failure"]
        assert time.monotonic() - began < most_s + 2
        assert process.ask("shutdown")["seconds"] < 1
    nothing_is_left(*engine.others(lost, 0))
    if lost:
        assert engine[0].ask("shutdown", drain=False)["seconds"] < 3
        nothing_is_left(engine[0])
    elif number == signal.SIGSTOP:                    # when it goes on, it finds the others gone
        engine[0].send_signal(signal.SIGCONT)
        assert engine[0].ask("until", state="FAILED")["state"] == "FAILED"
        if not is_idle:
            finals = engine[0].ask("finals", ids=ids)["finals"]
            assert all(len(ends) == 1 for ends in finals.values())


# ---------------------------------------------------------------------- the start


def all_failed(answers: list[dict], *says: str) -> None:
    for answer in answers:
        assert answer["error"] in ("ConfigError", "OSError") and answer["seconds"] < 8
        assert any(text in answer["text"] for text in says), answer


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_in_its_constructor_fails_all(engine, rank):
    answers = engine.construct(3, of_rank={rank: {"fails": "after"}})
    all_failed(answers, "no disk")
    assert all(f"rank {rank}: " in answer["text"] for other, answer in enumerate(answers) if other != rank)
    nothing_is_left(*engine.processes)


def test_ranks_of_another_version_or_with_other_arguments_are_named(engine):
    answers = engine.construct(3, of_rank={1: {"version": "0.0.1"}})
    all_failed(answers, "the version of batch_manager is")
    assert all("0.0.1 on rank 1" in answer["text"] for answer in answers)
    nothing_is_left(*engine.processes)


@pytest.mark.parametrize("of_rank, says", [
    ({1: {"exclude_input": False}}, "exclude_input_in_output is True on ranks 0, 2 and False on rank 1; expected"),
    ({2: {"frames": 9}}, "speaks version 9"),
    ({0: {"callbacks": False}}, "rank 0 has no get"), ({1: {"rank": 2}}, "two processes have rank 2"),
    ({1: {"callbacks": True}}, "on ranks 0, 1 and None on rank 2")], ids=str)
def test_ranks_that_do_not_belong_together_all_raise(engine, of_rank, says):
    answers = engine.construct(3, of_rank=of_rank, connect_timeout_s=3.0)
    all_failed(answers, says, "rank 0", "speaks")
    assert says in answers[0]["text"]
    nothing_is_left(*engine.processes)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named_when_the_time_is_up(engine, absent):
    answers = engine.construct(3, absent=(absent,), connect_timeout_s=1.0)
    all_failed(answers, "rank 2 did not come within 1 s" if absent else "no rank 0")
    nothing_is_left(*engine.others(absent))


def test_a_stranger_with_another_key_stays_out(engine):
    """The ranks with the key start all the same, and the stranger raises."""
    answers = engine.construct(2, of_rank={1: {"key": False}}, connect_timeout_s=1.5)
    assert "rank 1 did not come within 1.5 s" in answers[0]["text"]
    assert "rank 0 has closed its connection" in answers[1]["text"] or "rank 0" in answers[1]["text"]
    nothing_is_left(*engine.processes)


def test_a_killed_rank_ends_the_start_of_the_others(engine):
    engine.processes = [Process() for _ in range(2)]
    engine[0].tell("construct", rank=0, num_ranks=2, folder=str(engine.folder))
    engine[1].process.kill()
    engine[0].tell("health")
    engine.processes.append(Process())
    answer = engine[2].ask("construct", rank=1, num_ranks=2, folder=str(engine.folder), fails="after")
    assert answer["error"] == "OSError"
    assert "no disk" in engine[0].answer()["text"]


# ---------------------------------------------------------------------- callbacks on every rank

STREAMS = [(5, [1, 2, 3], 9), (2**64 - 1, [4] * 6, 5), (7, [8, 9], 12)]


def ends_alike(engine: Engine, count: int) -> list[dict]:
    """Wait until every rank has a number of finals, end all, and return what each heard. Nothing is left."""
    for process in engine.processes:
        process.ask("wait_for_finals", count=count)
    assert engine[0].ask("shutdown")["ended"]
    for process in engine.others(0):
        assert process.ask("wait")["state"] == "STOPPED"
    heard = [process.ask("heard") for process in engine.processes]
    assert all(each["complaints"] == [] for each in heard)
    nothing_is_left(*engine.processes)
    return heard


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_callbacks_on_every_rank_get_identical_responses_in_one_order(engine, num_ranks):
    """C1 to C6: a server that broadcasts inside get, as that of the original, runs unchanged."""
    engine.start(num_ranks, callbacks=True, broadcasts=str(engine.folder))
    engine[0].ask("submit", requests=STREAMS + [(5, [1], 1), (8, [], 3)])
    first, *others = ends_alike(engine, 5)
    assert first["responses"][2**64 - 1][-1][1:] == [True, ""]
    assert sorted(response[2][:10] for response in first["responses"][5] if response[2]) == ["[DUPLICATE"]
    assert first["responses"][8][0][2].startswith("[INVALID_REQUEST]")
    for other in others:
        for what in ("responses", "sends", "stats", "asked"):
            assert other[what] == first[what], what


@pytest.mark.parametrize("raises", ["send", "poll"])
def test_c15_a_callback_that_raises_is_contained_on_its_own_rank(engine, raises):
    engine.start(2, callbacks=True, broadcasts=str(engine.folder), of_rank={1: {"client_raises": [raises]}})
    engine[0].ask("submit", requests=STREAMS)
    first, other = ends_alike(engine, 3)
    assert other["responses"] == first["responses"]
    assert other["failures"][raises] > 0 and first["failures"][raises] == 0


@pytest.mark.parametrize("of_rank_1, refused", [
    ([STREAMS[0], (7, [8, 8], 12)], {5: None, 7: "another one on rank 0: input_ids[1] is 9 on rank 0 and 8 on rank 1"}),
    ([STREAMS[0]], {5: None, 7: "missing on rank 1"}),
    ([STREAMS[0], STREAMS[2], (9, [1], 2)], {5: None, 7: None, 9: "missing on rank 0"}),
    ([STREAMS[2], STREAMS[0]], {5: "its place", 7: "its place"}),
    ([], {5: "missing on rank 1", 7: "missing on rank 1"}),
], ids=["another", "missing", "more", "reordered", "none"])
def test_items_that_are_not_the_same_on_every_rank_are_refused_where_they_were_handed_over(engine, of_rank_1, refused):
    of_rank_0 = [STREAMS[0], STREAMS[2]]
    later = [(11, [3, 3], 4)]
    engine.start(2, callbacks=True, has_stats=True, of_rank={rank: {"arrivals": {3: items, 6: later}}
                                                             for rank, items in enumerate((of_rank_0, of_rank_1))})
    for rank, items in enumerate((of_rank_0, of_rank_1)):
        engine[rank].ask("wait_for_finals", count=len(items) + 1)
        responses = engine[rank].ask("heard")["responses"]
        assert sorted(responses) == sorted([each for each, _, _ in items] + [11])
        for each, prompt, count in items:
            (*_, (tensors, final, error)) = responses[each]
            assert final
            if refused[each] is None:
                assert error == "" and dict(tensors)["output_ids"][0][0][:count] == ScriptedBackend.expected_tokens(
                    prompt, count)
            else:
                assert error.startswith(f"[INVALID_REQUEST] request {each}: ")
                assert refused[each] in error or refused[each].replace("0", "1", 1) in error
        assert responses[11][-1][1:] == [True, ""]
    assert engine[0].ask("health")["state"] == "RUNNING"
    newest = json.loads(engine[0].ask("heard")["stats"][-1])
    assert newest["Refused Rank Differences"] == sum(text is not None for text in refused.values())
    ends_alike(engine, 1)


@pytest.mark.parametrize("only_rank_0", [[], [(8, [1, 2], 9)] * 2], ids=["equal", "more on rank 0"])
def test_an_id_that_is_used_again_in_one_get_has_one_final_for_each_item_on_every_rank(engine, only_rank_0):
    items = [(8, [], 3), (8, [1, 2], 9), (8, [1, 2], 9), (7, [5], 4), (8, [4], 2)]
    engine.start(2, callbacks=True, of_rank={rank: {"arrivals": {3: items + only_rank_0 * (rank == 0), 20: STREAMS}}
                                             for rank in (0, 1)})
    engine[0].ask("wait_for_finals", count=8 + len(only_rank_0))
    first, other = ends_alike(engine, 8)
    finals = [[text for _, final, text in each["responses"][8] if final] for each in (first, other)]
    assert [text for text in finals[0] if "another one on rank 1" not in text] == finals[1]
    assert len(finals[0]) == len(finals[1]) + len(only_rank_0)
    assert [text[:10] for text in finals[1]] == ["[INVALID_R", "[DUPLICATE", "[DUPLICATE", ""]
    assert other["responses"][7] == first["responses"][7] and other["responses"][5] == first["responses"][5]


@pytest.mark.parametrize("ends", ["shutdown of rank 0", "abort of rank 1"])
def test_a_slow_rank_hands_out_all_that_rank_0_has_sent_before_it_ends(engine, ends):
    engine.start(2, callbacks=True, arrivals={3: [(7, [8, 9], 12)]}, of_rank={1: {"final_s": 0.6}})
    engine[0].ask("wait_until_alive", count=1)
    engine[0].ask("shutdown", drain=True)
    if ends == "abort of rank 1":
        assert engine[1].ask("shutdown", drain=False)["ended"]
    assert engine[1].ask("wait")["ended"]
    first, other = [process.ask("heard") for process in engine.processes]
    assert first["responses"][7][-1][1:] == [True, ""]
    assert [other[what] for what in ("responses", "sends", "stats")] == [
        first[what] for what in ("responses", "sends", "stats")]
    nothing_is_left(*engine.processes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_get_that_raises_on_one_rank_costs_the_items_of_that_call_alone(engine, rank):
    engine.start(2, callbacks=True, arrivals={2: STREAMS}, of_rank={rank: {"client_raises": ["get"]}})
    engine[1 - rank].ask("wait_for_finals", count=3)
    responses = engine[1 - rank].ask("heard")["responses"]
    assert all(f"missing on rank {rank}" in each[-1][2] for each in responses.values()) and len(responses) == 3
    assert engine[rank].ask("heard")["responses"] == {}
    ends_alike(engine, 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_costs_one_final_each_on_every_rank_with_callbacks(engine, lost):
    engine.start(3, callbacks=True, broadcasts=str(engine.folder), step_s=0.01)
    engine[0].ask("submit", requests=[(number, [number + 1], 100) for number in range(3)])
    for process in engine.processes:
        process.ask("wait_until_alive", count=3)
    engine[lost].send_signal(signal.SIGKILL)
    for process in engine.others(lost):
        finals = process.ask("finals", ids=[0, 1, 2])["finals"]
        assert all([code for code, _ in ends] == ["ENGINE_FAILED"] for ends in finals.values()), finals
    if lost:
        assert engine[0].ask("until", state="FAILED")["state"] == "FAILED"
        assert engine[0].ask("shutdown", drain=False)["ended"]
    nothing_is_left(*engine.others(lost))


def test_statistics_go_to_every_rank_with_a_callback_for_them(engine):
    engine.start(3, of_rank={2: {"has_stats": True}})
    ids = engine.submit(3, 5)
    engine[0].ask("finals", ids=ids)
    assert engine[0].ask("shutdown")["ended"] and engine[2].ask("wait")["ended"] and engine[1].ask("wait")["ended"]
    first, second, third = [process.ask("heard")["stats"] for process in engine.processes]
    assert third == first and len(first) > 3 and second == []
