"""C15, C19: all foreign code runs in guarded blocks, which contain its exceptions and write the heartbeat."""

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections import UserList

import pytest

from batch_manager import InferenceRequest, RequestScheduler, SchedulerOutput
from batch_manager.contained_log import RateLimitedLog
from batch_manager.guard import BETWEEN_BLOCKS, ForeignCodeError, Guard, Heartbeat
from batch_manager.scheduling.policies import make_scheduler
from tests.harness.clock import VirtualClock

RAISED = [ValueError("secret"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError()]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_c15_a_containing_block_counts_and_drops_whatever_is_raised(error):
    guard, failures = Guard(), []
    block = guard.containing("send", on_failure=lambda: failures.append(1))
    for _ in range(3):
        with block:
            raise error
    with block:
        pass
    assert guard.failures == {"send": 3} and len(failures) == 3


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_c15_a_raising_block_says_what_was_raised_and_not_what_it_says(error):
    guard = Guard()
    with pytest.raises(ForeignCodeError) as caught, guard.raising("scheduler"):
        raise error
    assert caught.value.error is error and caught.value.__cause__ is error
    assert str(caught.value) == f"scheduler raised {type(error).__name__}"
    assert guard.failures == {}


@pytest.mark.parametrize("passing", [LookupError, (OSError, LookupError)])
def test_a_raising_block_lets_exceptions_pass_by_class(passing):
    block = Guard().raising("scheduler", passing=passing)
    with pytest.raises(KeyError), block:
        raise KeyError
    with pytest.raises(ForeignCodeError), block:
        raise ValueError


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("kind", ["containing", "raising"])
def test_c19_a_block_writes_the_heartbeat_and_adds_up_its_seconds(kind, raises):
    clock, heartbeat = VirtualClock(10.0), Heartbeat(3.0)
    block = getattr(Guard(clock.monotonic, heartbeat), kind)("send")
    assert (heartbeat.activity, heartbeat.since) == (BETWEEN_BLOCKS, 3.0)

    def use(seconds):
        with block:
            assert (heartbeat.activity, heartbeat.since) == ("send", clock.now)
            clock.now += seconds
            if raises:
                raise ValueError
    for seconds in (2.0, 0.5, -5.0):    # at last the clock is set back
        if raises and kind == "raising":
            with pytest.raises(ForeignCodeError):
                use(seconds)
        else:
            use(seconds)
        assert (heartbeat.activity, heartbeat.since) == (BETWEEN_BLOCKS, clock.now)
    assert block.seconds == 2.5


def test_c15_each_name_is_logged_at_most_once_a_second_without_what_the_exception_says(caplog):
    clock = VirtualClock(10.0)
    guard = Guard(clock.monotonic)
    with caplog.at_level(logging.ERROR, "batch_manager"):
        for name in ("send", "get", "send"):
            with guard.containing(name):
                raise ValueError("sec" + "ret")
        assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
            f"the {name} callback raised ValueError (1 so far); the worker goes on" for name in ("send", "get")]
        clock.now += 1.0
        guard.note_failure("send", ValueError())
    assert "(3 so far)" in caplog.records[2].getMessage() and len(caplog.records) == 3
    assert "test_guard.py" in caplog.text and "secret" not in caplog.text


def test_a_rate_limited_log_names_the_line_that_wrote_it(caplog):
    clock = VirtualClock(10.0)
    limited = RateLimitedLog(clock.monotonic)
    with caplog.at_level(logging.WARNING, "batch_manager"):
        for seconds in (0.0, 0.999, 0.002, 0.5, 0.5):
            clock.now += seconds
            limited.log(logging.WARNING, "it is %d", 5)
    assert [record.getMessage() for record in caplog.records] == ["it is 5"] * 3
    assert {record.filename for record in caplog.records} == {os.path.basename(__file__)}


@pytest.mark.parametrize("kind", ["containing", "raising"])
@pytest.mark.parametrize(("ending", "status"), [("pass", 0), ("sys.exit(5)", 5), ("raise ValueError", 1)])
def test_c18_a_process_that_is_forked_in_a_block_ends_where_it_leaves_it(kind, ending, status):
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(f"""
        import os, sys
        from batch_manager.guard import Guard

        with Guard().{kind}("send"):
            child = os.fork()
            if child == 0:
                {ending}
        print("left by", "the child" if child == 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """)], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == [f"left by {status}"], result.stderr


def test_c18_a_process_that_is_forked_between_blocks_enters_none():
    result = subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import os
        from batch_manager.guard import Guard

        block = Guard().containing("send")
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        with block:
            print("inside", "the parent" if child else "the child", flush=True)
        if child:
            with Guard().containing("send"):
                pass
        """)], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == ["inside the parent"], result.stderr


def test_c19_parts_run_in_blocks_that_name_them(make_world, new_request):
    seen: list[tuple[str, str]] = []

    def seeing(what, function):
        def run(*arguments):
            seen.append((what, world.loop.callbacks.guard.heartbeat.activity))
            return function(*arguments)
        return run

    class Named(list):
        def __iter__(self):
            return seeing("plan", super().__iter__)()

    class Mine(RequestScheduler):
        def __init__(self, limits, kv_cache_manager):
            self.whole = make_scheduler(limits, kv_cache_manager)

        def schedule_request(self, *arguments):
            plan = seeing("scheduler", self.whole.schedule_request)(*arguments)
            return SchedulerOutput(Named(plan.context_requests), Named(plan.generation_requests))

    world = make_world(parts={"scheduler": Mine, "trace": lambda trace: seeing("trace", len)(())})
    backend = world.backend
    backend.on_step = backend.on_finish = seeing("backend", lambda batch: None)
    backend.memory_usage = seeing("memory_usage", backend.memory_usage)
    world.client.pending = [new_request(1, [1], 3)]
    world.run()
    names = {"scheduler": "schedule_request", "plan": "schedule_request", "backend": "model step", "trace": "trace",
             "memory_usage": "memory_usage"}
    assert set(seen) == set(names.items())


def test_c19_the_heartbeat_says_since_when_each_streamed_callback_runs(make_world, new_request):
    world = make_world(max_batch_size=40)
    heartbeat, seen = world.loop.callbacks.guard.heartbeat, []

    def takes_a_second(request_id, response):
        seen.append((heartbeat.activity, heartbeat.since == world.clock.now))
        world.clock.now += 1.0
        if request_id == 2:
            raise ValueError

    world.client.on_send = takes_a_second
    world.client.pending = [new_request(i, [i], 9, streaming=True) for i in range(40)]
    world.step()
    assert seen == [("send", True)] * 40
    assert world.loop.callbacks.failures["send"] == 1 and heartbeat.activity == BETWEEN_BLOCKS
    assert json.loads(world.client.stats[0])["Callback Time Microseconds"] == 40_000_000


def test_c18_a_process_that_is_forked_in_a_streamed_callback_calls_no_other():
    result = subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import os, sys
        from batch_manager.guard import Guard
        from batch_manager.loop.callbacks import GuardedCallbacks

        def send(request_id, tensors, final_response, error_message):
            if request_id == 1 and (child := os.fork()):
                os.waitpid(child, 0)
            os.write(1, f"{request_id} in {'the parent' if os.getpid() == parent else 'a child'}\\n".encode())

        parent = os.getpid()
        GuardedCallbacks(lambda n: [], send, None, None, Guard(), 4096).send([(i, []) for i in range(3)])
        """)], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == ["0 in the parent", "1 in a child", "1 in the parent", "2 in the parent"]
    assert result.stderr == ""


def test_c15_c19_a_request_is_read_in_a_block(make_world, new_request):
    seen = []

    class Odd(InferenceRequest):
        @property
        def input_tensors(self):
            seen.append(world.loop.callbacks.guard.heartbeat.activity)
            raise SystemExit

    world = make_world()
    world.client.pending = [Odd(1, {"input_ids": [1], "request_output_len": 3}), new_request(2, [1], 3)]
    world.run()
    assert seen == ["reading a request"]
    assert world.client.final(1).code == "INVALID_REQUEST" and world.client.final(2).error == ""


def test_c19_foreign_code_runs_in_a_block_that_names_it(make_world, new_request):
    """While a callback or the code of an object that it returns runs, the heartbeat has the name of the callback."""
    seen: list[tuple[str, str]] = []

    def see(what: str) -> None:
        seen.append((what, world.loop.callbacks.guard.heartbeat.activity))

    class Items(UserList):
        def __iter__(self):
            see("items")
            for item in self.data:
                see("item")
                yield item
            see("end of items")

        def __len__(self):
            see("size")
            return len(self.data)

    class Stop:
        def __index__(self):
            see("stop")
            return 1

    class Stops(list):
        def __iter__(self):
            see("stops")
            return super().__iter__()

    world = make_world(max_admissions_per_iteration=1, max_num_sequences=-1)
    items = Items([new_request(i, [1], 3, streaming=True) for i in (1, 2, 3)])
    callbacks = world.loop.callbacks
    callbacks.fetched._get = lambda n: (see("get"), items)[1] if n else []
    callbacks._send = lambda *response: see("send")
    callbacks._poll = lambda: (see("poll"), Stops([Stop(), object()]))[1]
    callbacks._stats = lambda record: see("stats")
    callbacks.fetched.ask(3)
    world.step(3)
    names = {"get": "get", "items": "get", "item": "get", "end of items": "get", "size": "get", "stop": "poll",
             "stops": "poll", "poll": "poll", "send": "send", "stats": "stats"}
    assert dict(seen) == names
    assert all(names[what] == block for what, block in seen)
