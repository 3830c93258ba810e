"""examples/redis_worker.py answers each entry once, with a real Redis, although workers and Redis are killed.

python tests/campaigns/redis_workers.py causes more faults and counts the results.
"""

import importlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from argparse import Namespace
from importlib.util import find_spec
from uuid import uuid4

import numpy as np
import pytest

if find_spec("redis") is None:
    pytest.skip('The Redis worker was NOT tested: pip install redis', allow_module_level=True)
pytest.importorskip("torch")

import redis  # noqa: E402
from redis.backoff import NoBackoff  # noqa: E402
from redis.retry import Retry  # noqa: E402

from batch_manager import FinishReason  # noqa: E402
from tests.examples.redis_servers import (  # noqa: E402
    GROUP,
    REPOSITORY,
    STREAM,
    Server,
    WorkerProcess,
    add,
    answers,
    drawn,
    streamed,
    undisturbed,
    wait_for_answers,
    wait_until,
    what_is_missing,
    wrong,
)

if missing := what_is_missing():
    pytest.skip(f"The Redis worker was NOT tested: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("redis"))
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def no_connection_is_left(server):
    yield
    server.client.close()


# ---------------------------------------------------------------------- one worker, with the test as its engine


class Driven:
    """The example's Worker with its own Redis stream and without an engine. The test calls the Worker's callbacks."""

    def __init__(self, server: Server, stream: str, consumer: str = "a", lease: float = 60.0) -> None:
        if str(REPOSITORY) not in sys.path:
            sys.path.insert(0, str(REPOSITORY))
        self.module = importlib.import_module("examples.redis_worker")
        client = redis.Redis(port=server.port, protocol=2, retry=Retry(NoBackoff(), 0))       # as in the example
        self.worker = self.module.Worker(client, Namespace(stream=stream, consumer=consumer, lease=lease, drain=1.0))
        self.redis, self.stream = client, stream
        self.worker.call("make_group")

    def add(self, payload: bytes | str | dict, field: str = "request") -> str:
        payload = json.dumps(payload) if isinstance(payload, dict) else payload
        return self.redis.xadd(self.stream, {field: payload}).decode()

    def get(self, room: int) -> list:
        """Let the Worker fetch entries, with room for `room` requests, and return the requests of these entries."""
        assert self.worker.get_inference_requests(room) == []
        self.worker.fetch()
        return self.worker.get_inference_requests(room)

    def respond(self, request, tokens: list[int], reason: FinishReason = FinishReason.NOT_FINISHED, error: str = ""):
        tensors = [] if error else [Namespace(name="output_ids", array=np.array([[tokens]], np.int32)),
                                    Namespace(name="finish_reason", array=np.array([[reason]], np.int32))]
        is_final = bool(error) or reason is not FinishReason.NOT_FINISHED
        self.worker.send_response(request.request_id, tensors, is_final, error)

    def tokens(self, name: str) -> list[int]:
        return [int(token) for _, fields in self.redis.xrange(f"{self.stream}:tokens:{name}")
                for token in fields.get(b"tokens", b"").split()]

    def answers(self) -> dict[str, dict]:
        found = [(fields[b"entry"].decode(), json.loads(fields[b"answer"]))
                 for _, fields in self.redis.xrange(f"{self.stream}:answers")]
        assert len(dict(found)) == len(found)
        return dict(found)

    def num_pending(self) -> int:
        return self.redis.xpending(self.stream, GROUP)["pending"]


ASKED = {"input_ids": [5, 6], "request_output_len": 4}
GONE = "the stream flushed or its group is gone"


@pytest.mark.parametrize(("command", "words"), [
    (["FLUSHALL"], GONE), (["XGROUP", "DESTROY", "flushed", GROUP], GONE),
    (["ACL", "SETUSER", "default", "-xreadgroup", "-evalsha"], "Redis refuses a command"),
    ([], "Redis does not answer")], ids=str)
def test_what_happened_to_redis_is_said_once_and_the_worker_goes_on(command, words, server, caplog):
    driven = Driven(server, "flushed")

    def exchange():
        driven.worker.get_inference_requests(4)             # room, so that the worker fetches
        driven.worker.exchange(driven.worker.fetch)
        return driven.worker.trouble

    driven.add(ASKED)
    assert exchange() == "" and driven.worker.entries
    driven.worker.entries.clear()
    pool = driven.redis.connection_pool
    try:
        if command:
            server.client.execute_command(*command)
        else:
            pool.disconnect()
            pool.reset()
            pool.connection_kwargs["port"] = 1
        troubles = [exchange() for _ in range(1 if words is GONE else 3)]
    finally:
        pool.disconnect()
        pool.reset()
        pool.connection_kwargs["port"] = server.port
        server.client.execute_command("ACL", "SETUSER", "default", "+@all")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and words in warnings[0] and all(words in trouble for trouble in troubles)
    driven.add(ASKED)
    assert exchange() == "" and driven.worker.entries
    driven.redis.delete(driven.stream)
    pool.disconnect()


def test_no_more_is_fetched_than_the_engine_has_room_for(server):
    driven = Driven(server, "flow")
    for _ in range(9):
        driven.add(ASKED)
    assert len(driven.get(3)) == 3 and driven.num_pending() == 3
    driven.worker.fetch()                               # the three are active now, and get was not called again
    assert driven.num_pending() == 3
    driven.worker.get_inference_requests(2)             # two have ended
    driven.worker.fetch()
    driven.worker.fetch()                               # requests in the inbox take room too
    assert driven.num_pending() == 5
    driven.worker.get_inference_requests(0)
    driven.worker.fetch()
    assert driven.num_pending() == 5 and len(driven.worker.inbox) == 2


def test_another_worker_goes_on_after_what_was_streamed_and_the_first_one_is_refused(server):
    first = Driven(server, "fence")
    names = [first.add(ASKED) for _ in range(2)]
    requests = first.get(4)
    for request in requests:
        first.respond(request, [10, 11])
    first.worker.write()
    second = Driven(server, "fence", "b", lease=0.0)
    resumed = second.get(4)
    assert [(request.input_ids, request.request_output_len) for request in resumed] == [([5, 6, 10, 11], 2)] * 2
    seeds = [zlib.crc32(name.encode()) for name in names]        # the same in every worker
    assert [request.random_seed for request in requests] == [request.random_seed for request in resumed] == seeds
    first.respond(requests[0], [99])
    first.respond(requests[1], [98, 97], FinishReason.LENGTH)
    first.worker.keep()                                 # this does not take the entries back either
    first.worker.write()
    assert first.worker.entries == {} and first.worker.stopped == {requests[0].request_id}
    first.respond(requests[0], [], FinishReason.CANCELLED)
    first.worker.write()
    assert first.worker.stopped == set()
    for request in resumed:
        second.respond(request, [12, 13], FinishReason.LENGTH)
    second.worker.write()
    assert second.answers() == {name: {"tokens": [10, 11, 12, 13], "finish_reason": "LENGTH"} for name in names}
    assert [second.tokens(name) for name in names] == [[10, 11, 12, 13]] * 2
    assert second.num_pending() == second.redis.xlen("fence") == 0
    assert 0 < second.redis.ttl(f"fence:tokens:{names[0]}") <= 3600


def test_two_processes_of_one_name_are_told_apart(server):
    first, second = Driven(server, "name"), Driven(server, "name", lease=0.0)
    first.add(ASKED)
    (request,), (again,) = first.get(1), second.get(1)
    first.respond(request, [99])
    second.respond(again, [10])
    first.worker.write()
    second.worker.write()
    assert first.worker.entries == {}
    assert second.tokens(second.worker.entries[again.request_id].name) == [10]


def test_tokens_and_answers_whose_reply_was_lost_are_written_once(server):
    driven = Driven(server, "lost")
    name = driven.add(ASKED)
    (request,) = driven.get(1)
    entry = driven.worker.entries[request.request_id]
    driven.respond(request, [10, 11])
    driven.worker.write()
    entry.num_written = 0                               # as if the reply had not come
    driven.respond(request, [12])
    driven.worker.write()
    assert entry.num_written == 3 and driven.tokens(name) == [10, 11, 12]
    driven.respond(request, [13], FinishReason.LENGTH)
    driven.worker.write()
    driven.worker.entries[request.request_id] = entry
    driven.worker.write()
    assert driven.worker.entries == {} and driven.tokens(name) == [10, 11, 12, 13]
    assert list(driven.answers()) == [name]


def test_tokens_that_redis_lost_are_written_again_before_the_answer(server):
    driven = Driven(server, "rolled-back")
    name = driven.add(ASKED)
    (request,) = driven.get(1)
    driven.respond(request, [10, 11])
    driven.worker.write()
    driven.redis.delete(f"rolled-back:tokens:{name}")
    driven.respond(request, [12, 13], FinishReason.LENGTH)
    driven.worker.write()
    driven.worker.write()
    assert driven.tokens(name) == driven.answers()[name]["tokens"] == [10, 11, 12, 13]


def test_entries_are_kept_while_the_worker_lives_and_left_at_its_end(server, monkeypatch):
    driven, other, now = Driven(server, "kept"), Driven(server, "kept", "b"), 0.0
    monkeypatch.setattr(driven.module, "time", Namespace(monotonic=lambda: now))
    name = driven.add(ASKED)
    assert len(driven.get(1)) == 1
    for _ in range(3):
        now += driven.worker.options.lease / 4
        driven.worker.set_idle(driven.worker.lease_ms * 3 // 4)      # as if Redis had heard nothing so long
        driven.worker.keep()
        (entry,) = driven.redis.xpending_range(driven.stream, GROUP, name, name, 1)
        assert entry["time_since_delivered"] < driven.worker.lease_ms // 4 and other.get(1) == []
    driven.worker.set_idle(driven.worker.lease_ms)
    assert len(other.get(1)) == 1


@pytest.mark.parametrize("payload", [
    b"Emma smiled, and", b"", b"\xff\xfe", b"[1, 2]", b"null", b"3", b"[" * 100_000,
    b'{"input_ids": ' + b"9" * 5000 + b"}", b'{"input_idz": [1]}',
    b'{"input_ids": [5], "input_ids": [6], "request_output_len": 4}', b'{"\\ud800": 1}'])
def test_a_bad_payload_is_answered_with_an_error(server, payload):
    driven = Driven(server, f"bad-{uuid4().hex}")
    names = [driven.add(payload), driven.add(payload, field="else")]
    assert driven.get(4) == []
    driven.worker.write()
    found = driven.answers()
    assert set(found) == set(names) and driven.num_pending() == 0
    for answer in found.values():
        assert answer["tokens"] == [] and answer["error"].startswith("[INVALID_REQUEST] ") and "Emma" not in str(answer)


def test_what_cannot_be_resumed_is_answered_with_the_reason_and_the_tokens_so_far(server):
    first, second = Driven(server, "beams"), Driven(server, "beams", "b", lease=0.0)
    name = first.add({**ASKED, "runtime_top_p": 0.9, "runtime_top_p_decay": 0.9, "runtime_top_p_reset_ids": 3})
    (request,) = first.get(1)
    first.respond(request, [10])
    first.worker.write()
    assert second.get(1) == []
    second.worker.write()
    answer = second.answers()[name]
    assert answer["tokens"] == [10] and "top_p_reset_ids is 3" in answer["error"]


def test_an_entry_that_ends_every_worker_is_answered_with_an_error(server):
    driven = Driven(server, "killer", lease=0.0)
    name = driven.add(ASKED)
    assert [len(driven.get(1)) for _ in range(11)] == [1] * 10 + [0]
    driven.worker.write()
    assert driven.answers()[name]["error"].startswith("[MODEL_ERROR] 10 workers got the entry")
    assert driven.num_pending() == 0 and 11 not in driven.worker.entries


@pytest.mark.parametrize("error, is_answered", [
    ("[MODEL_ERROR] boom", True), ("[DEADLINE] late", True), ("[SHUTDOWN] it ends", False), ("[QUEUE_FULL] 9", False),
    ("[ENGINE_FAILED] gone", False)])
def test_an_error_of_the_request_is_its_answer_and_one_of_the_engine_is_not(server, error, is_answered):
    driven = Driven(server, f"error-{uuid4().hex}")
    name = driven.add(ASKED)
    (request,) = driven.get(1)
    driven.respond(request, [10])
    driven.respond(request, [], error=error)
    driven.worker.write()
    assert driven.worker.entries == {}
    assert driven.answers() == ({name: {"tokens": [10], "error": error}} if is_answered else {})
    assert driven.num_pending() == (0 if is_answered else 1)


def test_the_callbacks_do_without_redis():
    module = importlib.import_module("examples.redis_worker")
    worker = module.Worker(redis.Redis(port=1), Namespace(stream="s", consumer="a", lease=1.0, drain=1.0))
    assert worker.get_inference_requests(4) == []
    worker.send_response(1, [], True, "[SHUTDOWN] it ends")
    assert len(worker.outbox) == 1 and worker.stopped == set()


@pytest.mark.parametrize("health", [{"state": "FAILED", "is_hanging": False}, {"state": "RUNNING", "is_hanging": True}])
def test_a_worker_whose_engine_is_not_well_leaves_its_entries(server, health):
    driven = Driven(server, f"ill-{uuid4().hex}")
    driven.add(ASKED)
    assert len(driven.get(1)) == 1
    assert driven.worker.run(Namespace(health=lambda: health), threading.Event()) is False
    other = Driven(server, driven.stream, "b")
    assert len(other.get(1)) == 1


# ---------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def survivor(server):
    """A worker that is never disturbed. Its log is checked at the end."""
    worker = WorkerProcess(server, "survivor", start=subprocess.Popen)
    worker.wait_until_it_serves()
    yield worker
    assert worker.end() == 0
    check_log(worker)


def check_log(worker: WorkerProcess) -> None:
    log = worker.log()
    assert "Traceback" not in log and "Emma" not in log and "input_ids\"" not in log, log


@pytest.fixture(scope="module")
def cases():
    """Random requests, and the (tokens, finish reason) of each."""
    draw = random.Random(1)
    requests = [drawn(draw, 180, 220) for _ in range(8)]
    return requests, undisturbed(requests)


def freeze_in_the_middle(worker: WorkerProcess, cases):
    """Returns (names of all entries, their right answers, {name of an entry in the middle: its streamed tokens})."""
    requests, outcomes = cases
    names, before = worker.freeze_in_the_middle(requests, [len(tokens) for tokens, _ in outcomes])
    return list(names), [outcomes[index] for index in names.values()], before


def test_a_worker_is_killed(server, survivor, cases):
    victim = WorkerProcess(server, "killed").wait_until_it_serves()
    names, expected, before = freeze_in_the_middle(victim, cases)
    victim.end(signal.SIGKILL)
    wait_for_answers(server.client, names)
    assert wrong(server.client, names, expected, before) == []
    check_log(victim)


def test_a_worker_is_frozen_until_others_have_its_entries(server, survivor, cases):
    victim = WorkerProcess(server, "frozen").wait_until_it_serves()
    names, expected, before = freeze_in_the_middle(victim, cases)
    wait_until(lambda: not victim.pending(), 60)
    victim.send(signal.SIGCONT)
    wait_for_answers(server.client, names)
    assert wrong(server.client, names, expected, before) == []
    survivor.freeze()                                        # so that only the victim can answer
    try:
        names = add(server.client, cases[0][:3])
        wait_for_answers(server.client, names)
    finally:
        survivor.send(signal.SIGCONT)
    assert wrong(server.client, names, cases[1][:3], {}) == []
    assert victim.end() == 0
    check_log(victim)


def test_sigterm_with_work_left(server, survivor, cases):
    victim = WorkerProcess(server, "ended", "--drain", "0").wait_until_it_serves()
    survivor.freeze()                                        # so that no one takes what the victim leaves
    try:
        names, expected, before = freeze_in_the_middle(victim, cases)
        victim.send(signal.SIGTERM)                          # it arrives when the victim continues
        assert victim.end(signal.SIGCONT) == 0
        assert set(before) <= set(victim.pending()) - dict(answers(server.client)).keys()
    finally:
        survivor.send(signal.SIGCONT)
    wait_for_answers(server.client, names)
    assert wrong(server.client, names, expected, before) == []
    check_log(victim)


def test_redis_is_killed_and_comes_back(server, survivor, cases):
    names, expected, before = freeze_in_the_middle(survivor, cases)
    survivor.send(signal.SIGCONT)
    server.kill()
    time.sleep(0.7)                                          # the worker tries in vain several times
    server.start()
    wait_for_answers(server.client, names)
    assert wrong(server.client, names, expected, before) == []


def test_a_cancelled_entry_is_answered_with_what_it_had(server, survivor):
    request = {"input_ids": [5, 6, 7], "request_output_len": 1500, "random_seed": 1}
    names, before = survivor.freeze_in_the_middle([request], [1500], num_entries=1, margin=1000)
    name = next(iter(before))
    server.client.set(f"{STREAM}:cancel:{name}", 1, ex=3600)
    survivor.send(signal.SIGCONT)
    tokens = wait_for_answers(server.client, list(names))[name]["tokens"]
    assert 5 <= len(tokens) < 1500
    ((expected, _),) = undisturbed([{**request, "request_output_len": len(tokens)}])
    assert wrong(server.client, [name], [(expected, "CANCELLED")], before) == []
    assert not server.client.exists(f"{STREAM}:cancel:{name}")


def test_bad_entries_are_refused_and_acknowledged(server, survivor):
    names = add(server.client, [
        {"input_ids": [4096], "request_output_len": 4}, {"input_ids": [5]},
        {"input_ids": [5], "request_output_len": -1}, {"input_ids": "Emma smiled, and", "request_output_len": 4},
        {"input_ids": [5], "request_output_len": 4, "beam_width": 2}])
    names.append(server.client.xadd(STREAM, {"request": "Emma smiled, and"}).decode())
    found = wait_for_answers(server.client, names)
    for name in names:
        assert found[name]["error"].startswith("[INVALID_REQUEST] ") and found[name]["tokens"] == []
        assert streamed(server.client, name) == ([], found[name])
    assert set(names).isdisjoint(survivor.pending())
