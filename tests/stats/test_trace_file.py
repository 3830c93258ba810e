"""A trace on disk: the reader refuses wrong input, and the writer handles forks, locks and full disks."""

import json
import logging
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest

from batch_manager import IterationTrace, KvCacheConfig, Trace, TraceFile, read_trace, write_trace
from batch_manager.errors import ConfigError
from batch_manager.tools.request_spans import lives
from batch_manager.tools.trace import main, why

HEADER = b'{"format":"batch_manager trace","version":1}\n'


def record(number, **fields):
    return IterationTrace(number, ((7, 0, 4),), (8,), (), (), started_at_s=float(number), phases_us={"start": 5},
                          waiting={"order": (9,)}, **fields)


def lines_of(*iterations):
    file = BytesIO()
    write_trace(iterations, file)
    return file.getvalue().splitlines(keepends=True)


def read(content):
    return list(read_trace(BytesIO(content)))


@pytest.mark.parametrize("field, value, told", [
    ("iteration", "7", 'iteration is "7"; expected an integer'), ("iteration", -1, "iteration is -1"),
    ("iteration", 1.5, "iteration is 1.5"), ("iteration", True, "iteration is true"),
    ("context", {}, "context is {}"), ("context", [[7, 0, -5]], "context has [7,0,-5]"),
    ("context", [[7, 0, 2.5]], "context has [7,0,2.5]"), ("context", [[7, 0, 10**30]], "context has [7,0,1e+30]"),
    ("context", [[7, 0]], "context has [7,0]"), ("generation", [-1], "generation is [-1]"),
    ("generation", ["8"], 'generation is ["8"]'), ("paused", 3, "paused is 3"), ("arrived", None, "arrived is null"),
    ("phases_us", {"start": -5}, "phases_us.start is -5"), ("phases_us", [], "phases_us is []"),
    ("waiting", {"order": 4}, "waiting.order is 4"), ("queued_requests", -1, "queued_requests is -1"),
    ("live_blocks", -3, "live_blocks is -3"), ("free_blocks", None, "free_blocks is null"),
    ("started_at_s", "1", 'started_at_s is "1"'), ("started_at_s", -99.0, "started_at_s is -99.0, less than 0.0"),
    ("arrived_at_s", [1.0, "x"], 'arrived_at_s is [1.0,"x"]'),
    ("arrived_at_s", [1.0] * 9, "a finite number for each id"),
    ("end_reasons", {"LENGTH": [1.0]}, "end_reasons.LENGTH is [1.0]"),
    ("finished_at_s", [1.0], "a finite number for each id of finished"), ("room", -2, "room is -2"),
    ("room", "1", 'room is "1"'), ("settings", {"max_batch_size": 1.5}, "settings.max_batch_size is 1.5")])
def test_a_wrong_field_is_named_with_its_line(field, value, told):
    first, *_ = rest = [json.loads(line) for line in lines_of(record(0), record(1))[1:]]
    assert len(rest) == 2 and read(HEADER + b"".join(json.dumps(each).encode() + b"\n" for each in rest))
    damaged = json.dumps(rest[1] | {field: value}).encode()
    with pytest.raises(ValueError) as raised:
        read(HEADER + json.dumps(first).encode() + b"\n" + damaged + b"\n")
    assert str(raised.value).startswith("line 3: ") and told in str(raised.value)


@pytest.mark.parametrize("field", ["started_at_s", "phases_us", "waiting", "generation", "free_blocks"])
def test_a_missing_field_is_named(field):
    damaged = json.loads(lines_of(record(0))[1])
    del damaged[field]
    with pytest.raises(ValueError, match=f"line 2: the record has no {field}"):
        read(HEADER + json.dumps(damaged).encode() + b"\n")


def test_a_trace_of_an_older_version_is_read():
    old = json.loads(lines_of(record(3))[1])
    for name in ("end_reasons", "arrived_at_s", "finished_at_s", "room", "settings"):
        del old[name]
    assert read(HEADER + json.dumps(old).encode()) == [record(3)]


def test_two_runs_in_one_file_are_refused_where_the_second_begins():
    one = lines_of(record(0), record(1))
    with pytest.raises(ValueError, match="line 4: a second trace begins here; expected one trace per file; split"):
        read(b"".join(one + one))
    with pytest.raises(ValueError, match="line 4: iteration 0 follows iteration 1; .*a second run begins here"):
        read(b"".join(one + one[1:]))


@pytest.mark.parametrize("order", [(0, 0, 1), (1, 0), (0, 2, 1)])
def test_repeated_and_reordered_lines_are_refused(order):
    with pytest.raises(ValueError, match="rising numbers"):
        read(b"".join(lines_of(*(record(number) for number in order))))


def test_a_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "trace.jsonl"
    script = f"""
import os, sys
from batch_manager import IterationTrace, TraceFile
trace = TraceFile({str(path)!r}, seconds_between_flushes=1000)
for number in range(100):
    trace(IterationTrace(number, (), (1,), (), ()))
child = os.fork()
if child == 0:
    trace(IterationTrace(100, (), (1,), (), ()))
    sys.exit(0)
os.waitpid(child, 0)
for number in range(100, 200):
    trace(IterationTrace(number, (), (1,), (), ()))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=Path(__file__).parents[2])
    with path.open("rb") as file:        # all lines are written at exit, although the file was never closed
        assert [each.iteration for each in read_trace(file)] == [*range(200)]


def test_two_trace_files_do_not_share_a_path(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as trace:
        trace(record(0))
        with pytest.raises(ConfigError, match="is being written by another TraceFile"):
            TraceFile(path)
        trace(record(1))
    with path.open("rb") as file:
        assert len(list(read_trace(file))) == 2
    with TraceFile(path):
        pass
    assert path.read_bytes() == HEADER


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_wrong_interval_is_refused_before_the_file_is_touched(seconds, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("older")
    with pytest.raises(ConfigError, match="seconds_between_flushes is "):
        TraceFile(path, seconds_between_flushes=seconds)
    assert path.read_text() == "older"


def test_a_full_disk_is_logged_once_and_told_at_the_end(tmp_path, monkeypatch, caplog):
    path, writes = tmp_path / "trace.jsonl", []
    trace = TraceFile(path, seconds_between_flushes=0)
    trace(record(0))

    def full(*_):
        writes.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.ERROR, "batch_manager"):
        for number in range(1, 5):
            trace(record(number))
    monkeypatch.undo()
    trace(record(5))
    assert len(writes) == len(caplog.records) == 1
    assert f"{path} cannot be written: No space left on device" in caplog.text and "Traceback" not in caplog.text
    with pytest.raises(OSError, match="No space left on device.*trace.jsonl"):
        trace.close()
    trace.close()
    assert read(path.read_bytes()) == [record(0)]


def test_a_closed_file_takes_no_record_and_leaves_a_descriptor_of_the_same_number_alone(tmp_path):
    trace = TraceFile(tmp_path / "trace.jsonl", seconds_between_flushes=0)
    trace.close()
    with (tmp_path / "other").open("wb"):                   # gets the number of the closed descriptor
        for _ in range(2):
            with pytest.raises(ValueError, match="trace.jsonl is closed; expected no iteration after `close`"):
                trace(record(0))
    assert (tmp_path / "other").read_bytes() == b"" and (tmp_path / "trace.jsonl").read_bytes() == HEADER


def test_a_record_larger_than_the_buffer(tmp_path):
    path = tmp_path / "trace.jsonl"
    large = IterationTrace(1, (), tuple(range(10**6, 10**6 + 200_000)), (), (), started_at_s=1.0)
    with TraceFile(path, seconds_between_flushes=1000) as trace:
        for each in (record(0), large, record(2)):
            trace(each)
    with path.open("rb") as file:
        assert [each.iteration for each in read_trace(file)] == [0, 1, 2]


def test_the_trace_tells_why_each_request_ended(make_world, new_request):
    trace = Trace()
    world = make_world(parts={"trace": trace.append}, max_batch_size=1, max_num_sequences=4,
                       backend={"num_blocks": 4, "tokens_per_block": 8, "max_seq_len": 32},
                       kv_cache_config=KvCacheConfig(tokens_per_block=8))
    world.client.pending = [new_request(9, [1] * 500, 2)]
    world.step()
    world.client.pending = [new_request(1, [1] * 3, 2), new_request(2, [1] * 3, 20), new_request(1, [1] * 3, 2)]
    world.step(4)
    world.client.pending = [new_request(3, [1] * 3, 20)]
    world.step()
    world.client.stops = {2, 3}
    world.run()
    found = {(life.request_id, life.end_reason): life for life in lives(trace.iterations)}
    assert sorted(found) == [(1, "DUPLICATE_REQUEST_ID"), (1, "LENGTH"), (2, "CANCELLED"), (3, "CANCELLED"),
                             (9, "INVALID_REQUEST")]
    assert all(life.has_ended for life in found.values())
    assert "to its end (LENGTH) in iteration" in why(found[1, "LENGTH"])[0]
    assert why(found[9, "INVALID_REQUEST"]) == ["request 9: refused in iteration 0 (INVALID_REQUEST)"]


def test_a_refused_request_is_found_by_the_command(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as trace:
        trace(IterationTrace(4, (), (), (), (), end_reasons={"QUEUE_FULL": (100,)}))
    assert main(["why", "100", str(path)]) == 0
    assert capsys.readouterr().out == "request 100: refused in iteration 4 (QUEUE_FULL)\n"
    assert main(["slowest", str(path)]) == 0
    assert capsys.readouterr().out == "(no iteration had an active request)\n"
