"""`batch-manager compare` of two sides with several runs each gives the differences, warns, and refuses wrong files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager import Parts
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.bench.__main__ import main as bench
from batch_manager.tools.bench.measurement import Measurement
from batch_manager.tools.bench.options import parse_options
from batch_manager.tools.compare.__main__ import ComparisonError, compare_results, main
from batch_manager.tools.compare.figures import FIGURES, Difference, differences
from batch_manager.tools.compare.results import compared
from batch_manager.tools.workload import Lengths, make_workload

RESULT = {"format": "batch-manager bench", "format_version": 1, "kind": "run", "peer": "batch_manager", "variant": "",
          "workload": "offline.json", "n": 64, "threads": 2, "precision": "bf16", "prompt_tokens": 100,
          "output_tokens": 50, "mode": "offline", "request_rate": None, "concurrency": None, "wrong_length": 0,
          "command": ["--model", "/models/tiny", "--workload", "offline.json"], "commit": "abc",
          "machine": {"cpu": "x", "cores": 2}, "packages": {"torch": "2.9"}, "cpu": {"foreign_cores": 0.0},
          "output_tok_s": 300.0, "itl_ms_p50": 20.0, "latency_ms": {"tpot": {"p50": 21.0}, "queue": None}}


@pytest.fixture
def write(tmp_path):
    def write(name, **changes):
        path = tmp_path / name
        path.write_text(json.dumps({**RESULT, **changes}))
        return path

    return write


def row(lines, figure):
    (line,) = [line for line in lines if line.startswith(f"{figure} ")]
    return line.split()


def words(text):
    return text.split()


def difference(name, a, b):
    return Difference(FIGURES[name], tuple(a), tuple(b))


@pytest.mark.parametrize("a, b, expected", [
    ((100, 101), (110, 111), True),
    ((110, 111), (100, 101), True),
    ((100, 115), (110, 111), False),
    ((100, 101), (110, 135), False),
    ((100, 100), (100, 100), False),
    ((100,), (200,), None),
    ((100, 101), (200,), None),
])
def test_a_difference_counts_when_it_is_larger_than_the_spread_of_both_sides(a, b, expected):
    assert difference("output_tok_s", a, b).exceeds_spread is expected


def test_which_side_is_better_follows_from_the_figure():
    assert difference("output_tok_s", (100,), (110,)).better == "B"
    assert difference("ttft_ms_p50", (100,), (110,)).better == "A"
    assert difference("ttft_ms_p50", (100,), (100,)).better == ""


def test_words_of_a_difference():
    assert difference("output_tok_s", (100, 101), (110, 111)).verdict() == "B is better: larger than the spread"
    assert difference("load_s", (100, 101), (110, 111)).verdict() == "A is better: larger than the spread"
    assert difference("load_s", (100, 120), (110, 111)).verdict() == "within the spread"
    assert difference("load_s", (100,), (110,)).verdict() == "one run each: no spread known"
    assert difference("load_s", (100, 110), (110,)).verdict() == "one run of B: no spread known"


SIDE = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=4)


@given(SIDE, SIDE)
def test_the_two_sides_can_be_exchanged(a, b):
    there, back = difference("load_s", a, b), difference("load_s", b, a)
    assert there.smallest_ratio <= there.ratio * (1 + 1e-12) and there.ratio <= there.largest_ratio * (1 + 1e-12)
    assert there.ratio * back.ratio == pytest.approx(1)
    assert {there.better, back.better} in ({"A", "B"}, {""})


def test_figures_that_a_run_lacks_or_that_are_zero_are_left_out():
    assert [one.figure.name for one in differences([RESULT], [RESULT])] == ["output_tok_s", "itl_ms_p50", "tpot_ms_p50"]
    for changed in ({"output_tok_s": 0}, {"output_tok_s": None}, {"output_tok_s": "300"}, {"output_tok_s": True}):
        assert "output_tok_s" not in [one.figure.name for one in differences([RESULT], [{**RESULT, **changed}])]


def test_one_file_each(write):
    lines = compare_results(write("a.json"), str(write("b.json", output_tok_s=330.0)))
    assert lines[0].startswith("A: 1 run of ") and lines[1].endswith("b.json")
    assert row(lines, "output_tok_s") == words(
        "output_tok_s higher 300 330 1.100 one run each: no spread known")
    assert row(lines, "itl_ms_p50")[1] == "lower"
    assert not any(line.startswith("warning") for line in lines)


def test_several_files_and_a_list_in_a_file(write, tmp_path):
    files_a = [write("a1.json"), write("a2.json", output_tok_s=303.0)]
    both = tmp_path / "b.json"
    both.write_text(json.dumps([{**RESULT, "output_tok_s": 330.0}, {**RESULT, "output_tok_s": 336.0}]))
    lines = compare_results(files_a, both)
    assert row(lines, "output_tok_s") == words(
        "output_tok_s higher 301.5 333 1.104 1.089 to 1.120 B is better: larger than the spread")
    assert row(lines, "itl_ms_p50")[-3:] == ["within", "the", "spread"]
    report = compared(files_a, both).record()
    assert report["b"] == [f"{both}[0]", f"{both}[1]"]
    assert report["loads"][0]["figures"][0] == {
        "figure": "output_tok_s", "higher_is_better": True, "a": [300.0, 303.0], "b": [330.0, 336.0], "ratio": 1.1045,
        "smallest_ratio": 1.0891, "largest_ratio": 1.12, "better": "B", "exceeds_spread": True}


@pytest.mark.parametrize("change, text", [
    ({"commit": "def"}, "commit differs: A abc, B def"),
    ({"machine": {"cpu": "y", "cores": 2}}, "machine.cpu differs: A x, B y"),
    ({"machine": None}, "machine.cores differs: A 2, B none"),
    ({"packages": {"torch": "2.10"}}, "packages.torch differs: A 2.9, B 2.10"),
    ({"scheduler": "max_utilization"}, "scheduler differs: A none, B max_utilization"),
    ({"threads": 4}, "threads differs: A 2, B 4"),
    ({"cpu": {"foreign_cores": 0.1, "steal_cores": 0.1}},
     "1 of 1 run of B was disturbed: other processes and the hypervisor used more than 0.12 cores"),
])
def test_other_differences_are_warnings(change, text, write):
    assert f"warning: {text}" in compare_results(write("a.json"), write("b.json", **change))


@pytest.mark.parametrize("change, text", [
    ({"workload": "online.json"}, "workload differs: A offline.json, B online.json"),
    ({"n": 65}, "n differs: A 64, B 65"),
    ({"output_tokens": 51}, "output_tokens differs: A 50, B 51"),
    ({"precision": "fp32"}, "precision differs: A bf16, B fp32"),
    ({"command": ["--model=/other"]}, "model differs: A tiny, B other"),
    ({"model": "large"}, "model differs: A tiny, B large"),
    ({"wrong_length": 3}, "B has 3 outputs of the wrong length in "),
    ({"request_rate": 2.0, "mode": "online"}, "the load differs: A all at once, B 2 requests/s"),
])
def test_what_is_refused_unless_anyway(change, text, write):
    a, b = write("a.json"), write("b.json", **change)
    with pytest.raises(ComparisonError, match=r"; expected runs of the same workload, .*; pass --anyway") as raised:
        compare_results(a, b)
    assert str(raised.value).startswith(text)
    lines = compare_results(a, b, anyway=True)
    assert any(line.startswith(f"warning: {text}") for line in lines) and row(lines, "output_tok_s")


def test_the_same_model_in_another_folder_is_the_same(write):
    assert compare_results(write("a.json"), write("b.json", command=["--model", "/elsewhere/tiny/"]))


def test_a_file_that_names_no_busy_neighbours_had_none(write):
    a, none, two = write("a.json"), write("b.json", busy_neighbours=0), write("c.json", busy_neighbours=2)
    assert not any("busy_neighbours" in line for line in compare_results(a, none))
    assert "warning: busy_neighbours differs: A 0, B 2" in compare_results(a, two)


def test_points_of_a_sweep_are_compared_by_load(write):
    def sweep(name, rates, factor):
        return write(name, kind="sweep", output_tok_s=None, itl_ms_p50=None, latency_ms=None, points=[
            {"request_rate": rate, "mode": "online", "output_tok_s": rate * factor} for rate in rates])

    lines = compare_results(sweep("a.json", (1.0, 2.0, 4.0), 10), sweep("b.json", (2.0, 4.0, 8.0), 11))
    assert "warning: only A has 1 requests/s" in lines and "warning: only B has 8 requests/s" in lines
    assert lines.count("2 requests/s:") == lines.count("4 requests/s:") == 1
    assert [line.split()[2:4] for line in lines if line.startswith("output_tok_s")] == [["20", "22"], ["40", "44"]]
    with pytest.raises(ComparisonError, match="the load differs: A 1 requests/s, .*; expected a load that both"):
        compare_results(sweep("a.json", (1.0, 2.0), 10), sweep("b.json", (3.0, 5.0), 10), anyway=True)


def test_saturations_are_compared_by_what_is_sustained(write):
    files = [write(name, kind="saturation", saturation={"sustained": rate}, points=[{"request_rate": 9.0}],
                   output_tok_s=None, itl_ms_p50=None, latency_ms=None)
             for name, rate in (("a.json", 4.0), ("b.json", 5.0))]
    lines = compare_results(*files)
    assert "saturation:" in lines and row(lines, "sustained_requests_s")[1:5] == ["higher", "4", "5", "1.250"]


@pytest.mark.parametrize("content, text", [
    ("no JSON", "cannot be read: Expecting value"),
    ('{"n": 1, "n": 2}', "cannot be read: the name 'n' occurs twice in one object"),
    ("3", "is of type int; expected an object"),
    ("[3]", "[0] is of type int"),
    ("{}", "has no figures; expected a result of batch-manager bench"),
    ("[]", "is an empty list; expected at least one result"),
    (json.dumps({**RESULT, "format_version": 9}), "has format_version 9; this program reads version 1"),
    (json.dumps({**RESULT, "points": [], "kind": "sweep"}), "has no figures"),
    ("[" * 100000, "cannot be read: "),
])
def test_files_that_are_no_results(content, text, write, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    assert main([str(write("a.json")), str(bad)]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_the_command(write, tmp_path, capsys):
    a, b, c = (str(write(f"{name}.json", output_tok_s=speed)) for name, speed in (("a", 1.0), ("b", 1.1), ("c", 2.0)))
    out = tmp_path / "out.json"
    assert main([a, b, "--out", str(out), "--figure", "output_tok_s", "--", c, c]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert row(lines, "output_tok_s")[-7:] == words("B is better: larger than the spread")
    assert not any(line.startswith("itl") for line in lines)
    assert json.loads(out.read_text())["a"] == [a, b]
    for wrong in ([], [a], [a, b, c], [a, "--"], ["--", a], [a, str(tmp_path / "none")]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.startswith("batch-manager compare: ")
    with pytest.raises(SystemExit, match="2"):
        main(["--first", a, "--second", b, "--", c])


def test_bench_compares_too(write, capsys):
    a, b = (str(write(name, output_tok_s=speed)) for name, speed in (("a.json", 1.0), ("b.json", 2.0)))
    assert bench(["--compare", a, b]) == 0
    told = capsys.readouterr().out
    assert main([a, b]) == 0 and capsys.readouterr().out == told
    with pytest.raises(SystemExit, match="2"):
        bench(["--model", "m", "--workload", "w", "--compare", a, b])
    assert "--compare was given after other options" in capsys.readouterr().err


def test_it_reads_what_bench_writes(tmp_path):
    workload = make_workload(count=2, vocab_size=500, prompts=Lengths(8, 0.1, 4, 9), outputs=Lengths(4, 0.1, 3, 5))
    options = parse_options(["--model", "none", "--workload", "w.json", "--out", "o.json", "--max-batch-size", "2",
                             "--tokens-per-block", "8", "--warm-up", "0"])
    for name in "ab":
        run = Measurement(options, workload, Parts(backend=ScriptedBackend(num_blocks=64, tokens_per_block=8))).run()
        (tmp_path / name).write_text(json.dumps(run))
    found = {one.figure.name for one in compared(tmp_path / "a", tmp_path / "b").differences["all at once"]}
    assert {"output_tok_s", "total_tok_s", "requests_s", "ttft_ms_p50", "tpot_ms_p99", "e2e_ms_p99"} <= found


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_result_with_anything_in_it_is_compared_or_refused_in_one_line(tmp_path_factory, data):
    names = [*RESULT, "points", "saturation", "goodput", "model", "load_s"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), ANYTHING, max_size=4))
    folder = tmp_path_factory.mktemp("changed")
    (folder / "a").write_text(json.dumps(RESULT))
    (folder / "b").write_text(json.dumps({**RESULT, **changes}))
    for anyway in (False, True):
        try:
            assert compare_results(folder / "a", folder / "b", anyway=anyway)
        except ComparisonError as error:
            assert "; expected " in str(error) or "; this program reads " in str(error)


@pytest.mark.parametrize("change, fault", [
    ({"output_tok_s": "x"}, "output_tok_s is 'x'"), ({"output_tok_s": -1}, "output_tok_s is -1"),
    ({"itl_ms_p50": float("nan")}, "itl_ms_p50 is nan"), ({"output_tok_s": True}, "output_tok_s is True"),
    ({"latency_ms": {"tpot": {"p50": "fast"}}}, "latency_ms.tpot.p50 is 'fast'"),
    ({"latency_ms": 3}, "latency_ms is 3; expected an object or null")])
def test_a_figure_that_is_no_number_is_refused_with_its_name(change, fault, write, capsys):
    good, bad = write("a.json", peer="x"), write("b.json", **{"peer": "y", **change})
    assert main([str(good), str(bad)]) == 2
    assert f"{bad}: {fault}; " in capsys.readouterr().err
    if not change.get("latency_ms"):
        assert main(["--first", str(good), "--second", str(bad)]) == 2
        assert f"{bad}: {fault}; " in capsys.readouterr().err


def test_a_figure_that_only_some_runs_have_is_a_warning(write, capsys):
    assert main([str(write("a.json")), str(write("b.json", itl_ms_p50=None))]) == 0
    assert "warning: left out, because not every run has a value above 0: itl_ms_p50" in capsys.readouterr().out


@pytest.mark.parametrize("is_link", [False, True])
def test_an_output_that_is_an_input_is_refused(is_link, write, tmp_path, capsys):
    result = write("r.json")
    before, out = result.read_text(), result
    if is_link:
        out = tmp_path / "link.json"
        out.symlink_to(result)
    for inputs in ([result, result], [result, "--", result], ["--first", result, "--second", result]):
        arguments = [*map(str, inputs)]
        assert main(["--out", str(out), *arguments]) == 2
        assert f"both name {out}; expected a file for each" in capsys.readouterr().err
    assert result.read_text() == before
