"""`batch-manager trace` shows how a request spent its time, and writes traces in the formats of other viewers."""

import csv
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from batch_manager import IterationTrace, SchedulerPolicy, Trace
from batch_manager.scheduling import waiting
from batch_manager.stats.trace import write_trace
from batch_manager.tools.request_spans import CLIENT, CONTEXT, GENERATION, PAUSED, QUEUED, WAITING, lives
from batch_manager.tools.trace import CALLBACKS, main, why, write_csv, write_perfetto
from tests.tools.chrome_trace import faults

STEP_S = 0.01
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def traced(make_world):
    """Return the function `traced(requests, **options)`, which returns the iterations of a run with steps of STEP_S s.

    options   passed to make_world
    """
    def run(requests, **options):
        trace = Trace()
        world = make_world(parts={"trace": trace.append}, **options)
        launch = world.loop.backend.start

        def start(*given):
            world.clock.now += STEP_S
            return launch(*given)

        world.loop.backend.start = start
        world.client.pending = requests
        world.run()
        return trace.iterations

    return run


def kinds(life):
    return [(span.kind, span.reason, span.iterations) for span in life.spans]


def test_a_life_in_spans(traced, new_request):
    requests = [new_request(i, [i] * 20, 8) for i in (1, 2, 3)]
    found = {life.request_id: life for life in lives(traced(
        requests, max_batch_size=1, max_num_sequences=3, policy=SchedulerPolicy.GUARANTEED_NO_EVICT))}
    assert kinds(found[1]) == [(CONTEXT, "", 1), (GENERATION, "", 7)]
    assert kinds(found[2]) == [(WAITING, waiting.BATCH_SIZE, 8), (CONTEXT, "", 1), (GENERATION, "", 7)]
    assert kinds(found[3]) == [(WAITING, waiting.BATCH_SIZE, 16), (CONTEXT, "", 1), (GENERATION, "", 7)]
    assert [round(life.seconds / STEP_S) for life in found.values()] == [8, 16, 24]
    assert found[3].spans[0].running == {1, 2} and all(life.has_ended for life in found.values())


def test_the_queue_and_an_id_that_comes_again():
    iterations = [
        IterationTrace(0, ((7, 0, 4),), (), (), (), (7, 8), 1.0, {"start": 5}, queued_requests=1),
        IterationTrace(1, (), (7,), (), (7,), (), 2.0, {"start": 5}, queued_requests=1),
        IterationTrace(2, ((8, 0, 4),), (), (), (8,), (7,), 4.0, {"start": 5}),
        IterationTrace(3, ((7, 0, 4),), (), (), (7,), (), 8.0, {"start": 500_000, "poll": 250_000})]
    assert [(life.request_id, kinds(life), life.seconds) for life in lives(iterations)] == [
        (7, [(CONTEXT, "", 1), (GENERATION, "", 1)], 3.0), (8, [(QUEUED, "", 2), (CONTEXT, "", 1)], 7.0),
        (7, [(QUEUED, "", 1), (CONTEXT, "", 1)], 4.75)]


def test_the_time_in_which_the_engine_is_idle_is_nobodys():
    iterations = [
        IterationTrace(0, ((7, 0, 4),), (), (), (), (7,), 1.0, {"start": 9000}),
        IterationTrace(1, (), (7,), (), (7,), (), 1.01, {"start": 5000, "advance": 1000}),
        IterationTrace(2, ((8, 0, 4),), (), (), (8,), (8,), 9.0, {"start": 2000})]
    first, second = lives(iterations)
    assert first.seconds == pytest.approx(0.016) and second.seconds == pytest.approx(0.002)
    assert "16.000 ms from its arrival" in why(first)[0]


@pytest.mark.parametrize("arrived_at_s, told", [
    (0.5, "before iteration 4 (handed over in iteration 9)"), (1.0, "before iteration 4 (handed over in iteration 9)"),
    (1.5, "before iteration 5 (handed over in iteration 9)"), (4.5, "before iteration 9 to"),
    (9.5, "in iteration 9 to")])
def test_the_first_line_names_the_iterations_of_the_arrival_and_of_the_handover(arrived_at_s, told):
    iterations = [
        IterationTrace(4, ((7, 0, 4),), (), (), (), (7,), 1.0, {"start": 9000}, arrived_at_s=(1.0,), room=0),
        IterationTrace(5, (), (7,), (), (7,), (), 2.0, {"start": 5000}, room=0),
        IterationTrace(9, ((8, 0, 4),), (), (), (8,), (8,), 9.0, {"get": 1_000_000}, arrived_at_s=(arrived_at_s,),
                       room=1)]
    first, second = lives(iterations)
    assert " from its arrival before iteration 4 to its end in iteration 5" in why(first)[0]
    assert f" from its arrival {told}" in why(second)[0]


@pytest.mark.parametrize("phase", CALLBACKS)
def test_slow_callbacks_are_named_for_the_part_of_the_time_that_was_theirs(phase):
    def slow(number, finished=(), ends=()):
        return IterationTrace(
            number, ((7, 0, 4),) if number == 0 else (), (7,) if number else (), (), finished, () if number else (7,),
            0.01 * number, {"start": 2000, phase: 8000}, finished_at_s=ends)
    (life,) = lives([*map(slow, range(4)), slow(4, (7,), (0.045,))])
    context, generation = life.spans
    assert [round(1e3 * span.callbacks_s[phase], 6) for span in (context, generation)] == [8, 3 * 8 + 3]
    lines = why(life)
    assert [line.partition("; of this time ")[2] for line in lines if "generated" in line or "prompt" in line] == [
        f"27.000 ms in {CALLBACKS[phase]}", f"8.000 ms in {CALLBACKS[phase]}"]
    (life,) = lives([IterationTrace(0, ((7, 0, 4),), (), (), (7,), (7,), 0.0, {"start": 9000, phase: 1000})])
    assert "of this time" not in why(life)[1]


def test_a_pause_and_what_is_computed_again(traced, new_request):
    iterations = traced([new_request(1, [1] * 6, 20), new_request(2, [2] * 6, 20)],
                        backend={"num_blocks": 5, "tokens_per_block": 8, "max_seq_len": 32})
    life = next(life for life in lives(iterations) if life.request_id == 2)
    assert PAUSED in {span.kind for span in life.spans} and any(each.paused == (2,) for each in iterations)
    computed = [span.tokens for span in life.spans if span.kind == CONTEXT]
    assert computed[0] == 6 and len(computed) > 1
    told = "\n".join(why(life))
    again = sum(min(span.first + span.tokens, 6 + 10) - span.first for span in life.spans[1:] if span.kind == CONTEXT)
    assert f"computed {sum(computed[1:])} tokens after it was paused 1 time, {again} of them again" in told
    assert "too few KV cache blocks were free" in told and "meanwhile ran 1" in told


@pytest.mark.parametrize("seed", range(12))
def test_spans_leave_no_gap_and_times_add_up(seed, traced, new_request):
    draw = random.Random(seed)
    prompts = {i: draw.randint(1, 40) for i in range(1, 30)}
    requests = [new_request(i, [draw.randrange(1, 90) for _ in range(length)], draw.randint(1, 12))
                for i, length in prompts.items()]
    iterations = traced(requests, policy=draw.choice(list(SchedulerPolicy)), max_batch_size=draw.randint(1, 6),
                        max_num_tokens=64, enable_trt_overlap=draw.random() < 0.4, enable_chunked_context=True,
                        backend={"num_blocks": draw.randint(7, 20), "tokens_per_block": 8, "max_seq_len": 56})
    found = list(lives(iterations))
    assert sorted(life.request_id for life in found) == [*range(1, 30)] and all(life.has_ended for life in found)
    for life in found:
        assert all(one.end_s == other.begin_s for one, other in zip(life.spans, life.spans[1:]))
        assert sum(span.iterations for span in life.spans) == life.last_iteration - life.first_iteration + 1
        first = next(span for span in life.spans if span.kind == CONTEXT)
        assert first.first == 0 and first.tokens <= prompts[life.request_id] <= sum(
            span.tokens for span in life.spans if span.kind == CONTEXT)
        times = [float(line.split()[0]) * (1 if line.split()[1] == "s" else 1e-3) for line in why(life)[1:]]
        assert sum(times) == pytest.approx(life.seconds, abs=1e-5)
    assert sum(each.iteration in range(life.first_iteration, life.last_iteration + 1)
               for each in iterations for life in found) == sum(
                   span.iterations for life in found for span in life.spans)


def test_a_trace_that_ends_before_its_requests_do(traced, new_request):
    iterations = traced([new_request(1, [1] * 5, 6)])[:3]
    (life,) = lives(iterations)
    assert not life.has_ended and "still alive" in why(life)[0]
    assert list(lives([])) == []


def test_perfetto(traced, new_request):
    iterations = traced([new_request(i, [i] * 12, 4) for i in range(1, 6)] + [new_request(2**64 - 1, [1], 2)],
                        max_batch_size=2, max_num_sequences=8)
    file = StringIO()
    write_perfetto(iterations, file)
    document = json.loads(file.getvalue())
    events = document["traceEvents"]
    assert faults(document) == []
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    names = {event["tid"]: event["args"]["name"] for event in events
             if event["ph"] == "M" and event["pid"] == 1 and event["name"] == "thread_name"}
    assert sorted(names.values()) == sorted([*(f"request {i}" for i in range(1, 6)), f"request {2**64 - 1}"])
    assert all(0 < tid < 2**31 for tid in names)
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    by_track = {tid: [event for event in spans if event["pid"] == 1 and event["tid"] == tid] for tid in names}
    for track in by_track.values():
        assert all(one["ts"] + one["dur"] == pytest.approx(other["ts"]) for one, other in zip(track, track[1:]))
    launches = [event["dur"] for event in spans if event["name"] == "start" and event["pid"] == 0]
    assert launches == [round(1e6 * STEP_S)] * len(iterations)
    blocks = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "KV cache blocks"]
    assert len(blocks) == len(iterations) and len({sum(each.values()) for each in blocks}) == 1


def test_perfetto_takes_every_event(traced, new_request):
    rng, file = random.Random(3), StringIO()
    ran = traced([new_request(i, [i] * rng.randint(1, 30), rng.randint(1, 9)) for i in range(1, 30)],
                 max_batch_size=3, max_num_sequences=5)
    # The iterations follow each other without a gap, and their phases are rounded up.
    at, iterations = 5.0, []
    for each in ran:
        phases = {phase: rng.randint(1, 400) for phase in each.phases_us}
        iterations.append(replace(each, started_at_s=at, phases_us=phases))
        at += 1e-6 * (sum(phases.values()) - 0.5 * len(phases))
    write_perfetto(iterations, file)
    assert faults(json.loads(file.getvalue())) == []


@pytest.mark.parametrize("change", [
    {"ph": "B"}, {"name": ""}, {"name": None}, {"pid": "0"}, {"tid": 2**63}, {"tid": -1}, {"ts": "1"}, {"ts": -1},
    {"ts": math.nan}, {"dur": -1}, {"dur": None}, {"args": []}, {"dur": 11}])
def test_faults_of_a_slice_are_found(change):
    event = {"ph": "X", "pid": 0, "tid": 0, "name": "start", "ts": 5, "dur": 10, "args": {}}
    assert faults({"traceEvents": [event, event | {"ts": 10, "dur": 5}, event | {"ts": 15}]}) == []
    assert faults({"traceEvents": [event | change, event | {"ts": 15}]})


@pytest.mark.parametrize("event", [
    {"ph": "C", "pid": 0, "name": "blocks", "ts": 1, "args": {}}, 7,
    {"ph": "C", "pid": 0, "name": "blocks", "ts": 1, "args": {"live": "1"}},
    {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {}},
    {"ph": "M", "pid": 0, "tid": 0, "name": "colour", "args": {"name": "red"}}])
def test_faults_of_other_events_are_found(event):
    assert faults({"traceEvents": [event]}) and faults({}) and faults({"traceEvents": [], "displayTimeUnit": "h"})


def test_csv(traced, new_request):
    file = StringIO(newline="")
    write_csv(traced([new_request(1, [1] * 12, 3)]), file)
    rows = list(csv.DictReader(StringIO(file.getvalue())))
    assert [(row["request_id"], row["kind"], row["iterations"], row["tokens"]) for row in rows] == [
        ("1", "context", "1", "12"), ("1", "generation", "2", "0")]


@pytest.fixture
def file_of(tmp_path, traced, new_request):
    path = tmp_path / "trace.jsonl"
    with path.open("wb") as file:
        write_trace(traced([new_request(i, [i] * 12, i) for i in (1, 2, 3)]), file)
    return path


def test_the_command(file_of, tmp_path, capsys):
    assert main(["why", "3", str(file_of)]) == 0
    assert capsys.readouterr().out.startswith("request 3: ")
    assert main(["slowest", str(file_of), "--num-requests", "2"]) == 0
    told = capsys.readouterr().out
    assert told.index("request 3: ") < told.index("request 2: ") and "request 1: " not in told
    assert main(["why", "9", str(file_of)]) == 1
    assert "has no request 9" in capsys.readouterr().err
    assert main(["perfetto", str(file_of), str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


@pytest.mark.parametrize("command", ["csv", "perfetto"])
def test_the_trace_itself_is_never_overwritten(command, file_of, tmp_path, capsys):
    content = file_of.read_bytes()
    (tmp_path / "link").symlink_to(file_of)
    (tmp_path / "out.part").hardlink_to(file_of)
    for out in (file_of, tmp_path / "link"):
        assert main([command, str(file_of), str(out)]) == 2
        assert "would overwrite the input" in capsys.readouterr().err
        assert file_of.read_bytes() == content
    assert main([command, str(file_of), str(tmp_path / "out")]) == 0
    assert file_of.read_bytes() == content and (tmp_path / "out.part").samefile(file_of)


def test_links_and_pipes_stay_what_they_are(file_of, tmp_path, capsys):
    target, link, pipe, read = tmp_path / "target", tmp_path / "link", tmp_path / "pipe", []
    target.write_text("old")
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["csv", str(file_of), str(link)]) == 0
    assert link.is_symlink() and target.read_text().startswith("request_id,")
    assert main(["csv", str(file_of), str(pipe)]) == 0 and pipe.is_fifo()
    reader.join(10)
    assert [text.splitlines() for text in read] == [target.read_text().splitlines()]
    with pytest.raises(SystemExit, match="2"):
        main(["csv", str(file_of), str(tmp_path)])
    assert f"OUT: {tmp_path} is a folder; expected a file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["csv", "trace.jsonl", "-"], ["perfetto", "trace.jsonl", "-"]])
def test_a_dash_is_the_standard_output(command, file_of, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 0
    assert capfd.readouterr().out.startswith(("request_id,", "{")) and not (tmp_path / "-").exists()


@pytest.mark.parametrize("command", ["csv", "perfetto"])
def test_a_file_that_is_no_trace_leaves_the_standard_output_empty(command, tmp_path, capfd):
    (tmp_path / "bad").write_text("no trace\n")
    assert main([command, str(tmp_path / "bad"), "-"]) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and "line 1 is not the header of a trace" in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("command, way_out", [
    (["why", "3", "trace.jsonl"], "direct it elsewhere"),
    (["csv", "trace.jsonl", "-"], "direct it elsewhere"),
    (["csv", "trace.jsonl", "/dev/full"], "expected a file in a folder that exists, with room on its disk")])
def test_a_full_disk_is_one_line_and_status_2(command, way_out, file_of, tmp_path):
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-m", "batch_manager.tools.trace", *command], stdout=full, cwd=tmp_path,
                             stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ROOT}, timeout=300)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert f" cannot be written: No space left on device; {way_out}" in run.stderr


def test_slowest_none_is_refused(file_of, capsys):
    for count in ("0", "-1"):
        with pytest.raises(SystemExit, match="2"):
            main(["slowest", str(file_of), "--num-requests", count])
        assert f"--num-requests: {count} is too small; expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("content, told", [
    (b"", "line 1 is not the header"), (b'{"format":"batch_manager trace","version":1}\n{"iteration":0}\n', "line 2"),
    (None, "No such file")])
def test_a_file_that_is_no_trace(content, told, tmp_path, capsys):
    path, out = tmp_path / "trace.jsonl", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    for command in (["slowest", str(path)], ["csv", str(path), str(out)], ["perfetto", str(path), str(out)]):
        assert main(command) == 2
        shown = capsys.readouterr().err
        assert told in shown and str(path) in shown and "Traceback" not in shown
    assert sorted(each.name for each in tmp_path.iterdir()) == (["trace.jsonl"] if content is not None else [])


def test_the_wait_in_the_client_is_a_part(traced, new_request):
    requests = [new_request(i, [i] * 4, 2) for i in (1, 2)]
    iterations = traced(requests, max_batch_size=1, max_num_sequences=1, max_queued_requests=0)
    arrived = iterations[0].started_at_s - 0.25
    iterations = [replace(each, arrived_at_s=tuple(arrived for _ in each.arrived)) for each in iterations]
    for life in lives(iterations):
        assert life.spans[0].kind == CLIENT and life.spans[0].begin_s == arrived
        assert why(life)[0].startswith(f"request {life.request_id}: ") and "arrival before iteration" in why(life)[0]
        assert any("waited in the client" in line for line in why(life)[1:])
        times = [float(line.split()[0]) * (1 if line.split()[1] == "s" else 1e-3) for line in why(life)[1:]]
        assert sum(times) == pytest.approx(life.seconds, abs=1e-5)
    file = StringIO()
    write_perfetto(iterations, file)
    assert not faults(json.loads(file.getvalue()))


def test_the_engine_records_when_requests_arrived(traced, new_request):
    late = new_request(1, [1] * 4, 2)
    late.arrival_time = 0.0
    (first, *_) = [each for each in traced([late, new_request(2, [2] * 4, 2)]) if each.arrived]
    assert first.arrived == (1, 2) and first.arrived_at_s == (0.0, first.started_at_s)


def test_counters_of_perfetto_are_zero_while_the_engine_is_idle():
    file = StringIO()
    write_perfetto([IterationTrace(0, ((7, 0, 4),), (), (), (7,), (7,), 1.0, {"start": 5000}, room=1),
                    IterationTrace(1, ((8, 0, 6),), (), (), (8,), (8,), 2.0, {"start": 5000}, room=1)], file)
    events = json.loads(file.getvalue())["traceEvents"]
    begin = min(event["ts"] for event in events if event["ph"] == "X")
    for name, part, values in (("tokens of the step", "context", (4, 0, 6)),
                               ("requests of the step", "in the step", (1, 0, 1))):
        assert [(event["ts"] - begin, event["args"][part]) for event in events if event["name"] == name] == [
            (0, values[0]), (5000, values[1]), (1_000_000, values[2])]


def test_a_wait_with_many_causes_is_short_and_its_sums_are_right():
    """The reason alternates between "all ran" (1 ms) and "blocks" (2 ms) 500 times while 300 requests wait."""
    iterations, at = [], 0.0
    for number in range(1000):
        waits = {waiting.BLOCKS: (1,)} if number % 2 else {}
        iterations.append(IterationTrace(number, (), (1,), (), (), (1,) if number == 0 else (), at, {}, waits, room=0,
                                         arrived_at_s=(0.0,) if number == 0 else ()))
        at += 0.002 if number % 2 else 0.001
    late = tuple(range(2, 302))
    iterations.append(IterationTrace(1000, (), (), (), (1, *late), late, at, {"get": 1000}, room=0,
                                     arrived_at_s=tuple(0.3 for _ in late)))
    for life in lives(iterations):
        if life.request_id != 1:
            seconds = Counter()
            for span in life.spans:
                seconds[span.reason if span.kind == CLIENT else ""] += span.seconds
            assert len(life.spans) < 20 and sum(seconds.values()) == pytest.approx(at - 0.3 + 0.001)
            assert all(one.end_s == pytest.approx(other.begin_s) for one, other in zip(life.spans, life.spans[1:]))
            assert seconds["no room"] == pytest.approx(0.4, abs=0.003)
            assert seconds[f"no room: {waiting.BLOCKS}"] == pytest.approx(0.8, abs=0.003)
