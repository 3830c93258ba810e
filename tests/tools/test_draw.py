import json
import os
import re
import subprocess
import sys
from io import BytesIO
from xml.etree import ElementTree

import pytest

from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy
from batch_manager.stats.trace import IterationTrace, read_trace, write_trace
from batch_manager.tools.draw.command_line import main
from batch_manager.tools.draw.demo import parse_requests, run_demo
from batch_manager.tools.draw.svg import render_svg
from batch_manager.tools.draw.text import render_text


def record(iteration, context=(), generation=(), paused=(), finished=(), arrived=()):
    return IterationTrace(iteration, tuple(context), tuple(generation), tuple(paused), tuple(finished), tuple(arrived))


def picture(trace, **options):
    return render_text(trace, legend=False, **options)


def demo(requests, *, policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=100, **params):
    params = {"max_batch_size": 4, "max_num_tokens": 12, "max_num_sequences": 16} | params
    chunking = params.pop("chunking", None)
    if chunking is not None:
        params |= {"enable_chunked_context": True, "context_chunking_policy": chunking}
    return run_demo(parse_requests(requests), TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(tokens_per_block=8), **params), policy, num_blocks)


# text


def test_the_scheduler_picture_with_a_batch_of_four_and_twelve_tokens_a_step():
    assert picture(demo("5+2,5+4,5+4,5+4,5+4")) == """\
iteration   1   2   3   4   5    tokens
        0   C5  C5  .   .   .        10
        1   G*  G   C5  C5  .        12
        2       G   G   G   C5        8
        3       G*  G   G   G         4
        4           G*  G*  G         3
        5                   G*        1"""


def test_a_pause_is_drawn_and_the_generated_tokens_return_as_context():
    assert picture(demo("8+10,8+10", num_blocks=4, max_num_tokens=32)) == """\
iteration        1   2      tokens
        0        C8  C8         16
      1-8  x 8   G   G           2
        9        G*  P           1
       10            C17*       17"""


def test_without_eviction_the_same_requests_go_one_after_the_other():
    assert picture(demo("8+10,8+10", num_blocks=4, max_num_tokens=32,
                        policy=SchedulerPolicy.GUARANTEED_NO_EVICT)) == """\
iteration        1   2    tokens
        0        C8  .         8
      1-8  x 8   G   .         1
        9        G*  .         1
       10            C8        8
    11-18  x 8       G         1
       19            G*        1"""


def test_chunks_of_a_prompt_are_drawn_one_by_one():
    assert picture(demo("20+2,4+3", max_num_tokens=12, chunking=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED)) == """\
iteration   1   2    tokens
        0   C8  C4       12
        1   C8  G         9
        2   C4  G*        5
        3   G*            1"""


def test_blank_before_arrival_a_dot_while_waiting_blank_after_the_end():
    trace = [record(0, context=[(7, 0, 3)]),
             record(1, generation=[7], finished=[7], arrived=[9]),
             record(2, context=[(9, 0, 12)], finished=[9])]
    assert picture(trace) == """\
iteration   7   9      tokens
        0   C3              3
        1   G*  .           1
        2       C12*       12"""


def test_two_equal_rows_stay_and_three_fold():
    trace = [record(0, context=[(1, 0, 5)]), *(record(i, generation=[1]) for i in (1, 2, 3)),
             record(4, context=[(2, 0, 2)], generation=[1]), *(record(i, generation=[1, 2]) for i in (5, 6))]
    assert picture(trace) == """\
iteration        1   2    tokens
        0        C5            5
      1-3  x 3   G             1
        4        G   C2        3
        5        G   G         2
        6        G   G         2"""


def test_a_request_that_was_stopped_while_it_waited_ends_on_a_dot():
    trace = [record(0, context=[(1, 0, 4)], arrived=[1, 2]), record(1, generation=[1], finished=[2])]
    assert picture(trace) == """\
iteration   1   2    tokens
        0   C4  .         4
        1   G   .*        1"""


def test_an_id_that_is_used_again_starts_a_second_life_in_its_column():
    trace = [record(0, context=[(5, 0, 2)], finished=[5]), record(1, context=[(6, 0, 1)]),
             record(2, context=[(5, 0, 3)], generation=[6])]
    assert picture(trace) == """\
iteration   5    6    tokens
        0   C2*            2
        1        C1        1
        2   C3   G         4"""


def test_time_runs_right_when_the_requests_do_not_fit_and_wraps_like_staves():
    trace = demo("5+6,5+6,5+6@1,5+9@2", max_num_tokens=12)
    assert picture(trace, width=30) == """\
iteration  0  1  2  3 4 5  6
        1  C5 G  G  G G G*
        2  C5 G  G  G G G*
        3     C5 G  G G G  G*
        4        C5 G G G  G

iteration  7  10
           x3
        4  G  G*"""
    assert max(map(len, picture(demo("5+6,5+40@1,30+30@2,6+90@5", max_num_tokens=90), width=40).splitlines())) <= 40


def test_nothing_to_draw_is_said():
    assert picture([]) == "(no iteration had an active request)"
    assert ElementTree.fromstring(render_svg([])) is not None


def test_the_legend_names_every_mark():
    legend = render_text([record(0, context=[(1, 0, 5)])]).splitlines()[-1]
    assert [word[0] for word in legend.split("   ")] == ["C", "G", "P", ".", "-", "*"]


# traces


def test_a_trace_file_is_one_line_of_json_an_iteration_and_reads_back_the_same():
    trace = demo("8+10,8+10@3", num_blocks=4, max_num_tokens=32)
    file = BytesIO()
    write_trace(trace, file)
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + len(trace)
    assert json.loads(lines[0]) == {"format": "batch_manager trace", "version": 1}
    first = json.loads(lines[1])
    assert {name: first[name] for name in ("iteration", "context", "generation", "paused", "finished", "arrived",
                                           "waiting", "live_blocks", "cached_blocks", "free_blocks")} == {
        "iteration": 0, "context": [[1, 0, 8]], "generation": [], "paused": [], "finished": [], "arrived": [1],
        "waiting": {}, "live_blocks": 1, "cached_blocks": 0, "free_blocks": 3}
    file.seek(0)
    assert list(read_trace(file)) == trace


@pytest.mark.parametrize("line", [b"[]", b"{}", b"not json\n", b'{"iteration": 1, "context": [[1]]}'])
def test_a_line_that_is_no_iteration_is_named(line):
    file = BytesIO()
    write_trace([record(0)], file)
    file.write(line)
    file.seek(0)
    with pytest.raises(ValueError, match="line 3"):
        list(read_trace(file))


def test_a_line_that_a_crash_cut_off_is_left_out():
    file = BytesIO()
    write_trace([record(0), record(1)], file)
    for length in range(len(file.getvalue()) - 2, file.getvalue().rindex(b"\n", 0, -1), -1):
        assert [each.iteration for each in read_trace(BytesIO(file.getvalue()[:length]))] == [0]


@pytest.mark.parametrize("header, told", [
    (b"", "line 1 is not the header"), (b"{}\n", "line 1 is not the header"), (b"[1]\n", "line 1 is not the header"),
    (b'{"format":"batch_manager trace","version":2}\n', "version 2; expected 1")])
def test_what_is_no_trace_of_this_version_is_told_so(header, told):
    with pytest.raises(ValueError, match=told):
        list(read_trace(BytesIO(header)))


def test_a_request_arrives_in_the_iteration_that_accepted_it_and_a_refused_one_never_does():
    trace = demo("8+3,900+2,4+2@2", num_blocks=4, max_num_tokens=32)
    assert [r.arrived for r in trace if r.arrived] == [(1,), (3,)]


# SVG


def test_the_svg_is_one_well_formed_document_with_a_box_for_every_run():
    trace = demo("8+10,8+10", num_blocks=4, max_num_tokens=32)
    svg = ElementTree.fromstring(render_svg(trace))
    titles = [re.sub(r", [0-9.]+ ms$", "", title.text) for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "request 1, iteration 0: context, 8 tokens",
        "request 1, iterations 1-9: generation, 9 tokens",
        "request 1 ended",
        "request 2, iteration 0: context, 8 tokens",
        "request 2, iterations 1-8: generation, 8 tokens",
        "request 2, iteration 9: paused",
        "request 2, iteration 10: context, 17 tokens",
        "request 2 ended",
        "max_num_tokens: 32",
    ]


def test_nothing_of_the_svg_lies_outside_it():
    svg = ElementTree.fromstring(render_svg(demo("30+90,20+300@7,9+200@50", max_num_tokens=64)))
    width, height = float(svg.get("width")), float(svg.get("height"))
    boxes = [{name: float(box.get(name, 0)) for name in ("x", "y", "width", "height")}
             for box in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert all(box["x"] + box["width"] <= width and box["y"] + box["height"] <= height for box in boxes)


# the command line


def test_the_demonstration_runs_without_torch(tmp_path):
    code = ("import sys; from batch_manager.tools.draw.command_line import main; status = main(['--demo']);"
            "assert not {'torch', 'triton'} & set(sys.modules); sys.exit(status)")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert result.returncode == 0, result.stderr
    assert " P " in result.stdout, "the default demonstration shows a pause"


@pytest.mark.parametrize("arguments, status", [
    (["--requests", "5+3,5+3@10"], 0), (["--requests", "1+1,1+1@2"], 0), (["--num-blocks", "1"], 1)])
def test_a_request_that_arrives_after_the_others_ended_runs(arguments, status, tmp_path):
    done = subprocess.run([sys.executable, "-m", "batch_manager.tools", "draw", "--demo", *arguments],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr


def test_a_saved_demonstration_draws_the_same_from_its_file(tmp_path, capsys):
    saved, svg = tmp_path / "trace.jsonl", tmp_path / "picture.svg"
    assert main(["--demo", "--policy", "guaranteed_no_evict", "--trace", str(saved), "--svg", str(svg),
                 "--text"]) == 0
    drawn = capsys.readouterr().out
    assert main([str(saved)]) == 0
    assert capsys.readouterr().out.strip() in drawn
    assert drawn.endswith(f"wrote {svg}\nwrote {saved}\n")
    assert drawn.startswith("GUARANTEED_NO_EVICT, 14 blocks of 8 tokens")
    assert " P " not in drawn.split("\n\n")[1]
    assert svg.read_text(encoding="utf-8").startswith("<svg ")


def test_a_dash_is_the_standard_output(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["--demo", "--svg", "-"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("<svg ") and "wrote the standard output" in shown.err
    assert not list(tmp_path.iterdir())


def test_a_full_standard_output_is_one_line_and_status_2():
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-m", "batch_manager.tools", "draw", "--demo"], stdout=full,
                             stderr=subprocess.PIPE, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("batch-manager draw: the standard output cannot be written: No space left on device; ")
    assert run.stderr.count("\n") == 1


def test_a_picture_whose_reader_has_exited_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, "-m", "batch_manager.tools", "draw", "--demo", "--svg", "-"], stdout=writer,
                         stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("name, message", [
    (".", "the name is empty or '.'"), ("", "the name is empty"), ("/nodir/x", "is in a folder that does not exist"),
    ("loop", "is a link that leads back to itself")])
def test_a_file_that_cannot_be_written_is_refused_with_its_reason(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SystemExit, match="2"):
        main(["--demo", "--html", name])
    assert f"--html: {'' if 'name' in message else name + ' '}{message}" in capsys.readouterr().err
    assert (tmp_path / "loop").is_symlink()


def test_a_request_that_cannot_run_is_reported_and_not_drawn(capsys):
    assert main(["--demo", "--requests", "5+5,500+5,5+5,501+5"]) == 1
    out, error = capsys.readouterr()
    assert "refused: [INVALID_REQUEST] request 2" in out
    assert "iteration        1   3    tokens" in out
    assert error.startswith("batch-manager draw: 2 of 4 requests cannot run; the first: [INVALID_REQUEST] request 2: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments, message", [
    (["--demo", "--width", "-3"], "--width: -3 is too small; expected at least 20"),
    (["run.trace", "--requests", "1+1", "--num-blocks", "3"],
     "a trace was given with --requests, --num-blocks; expected such options only with --demo; leave"),
    (["run.trace", "--policy", "max_utilization"], "a trace was given with --policy; expected such options"),
])
def test_a_wrong_command_line_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments, message", [
    (["--demo", "--requests", "20x4"], "'20x4' is not a request"),
    (["--demo", "--requests", "1000000000000+1"], "'1000000000000+1' is not a request"),
    (["--demo", "--num-blocks", "1000000000000"], "--num-blocks is 1000000000000; expected 1 to 100,000"),
    (["--demo", "--max-batch-size", "1000000000000"], "--max-batch-size is 1000000000000"),
    (["--demo", "--num-blocks", "0"], "--num-blocks is 0"),
    (["--demo", "--tokens-per-block", "7"], "tokens_per_block is 7"),
    (["no/such/file"], "no/such/file"),
])
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1
