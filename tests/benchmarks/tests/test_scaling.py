"""The growth of step times with batch and context is measured correctly. Plots and page show the measured values."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from batch_manager.tools.line_plot import BOTTOM, LEFT, RIGHT, TOP, Line, LinePlot, Point, ticks
from tests.benchmarks.scaling import __main__ as scaling
from tests.benchmarks.scaling import draw

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"
SMALL = ["--batches", "1", "3", "--batch-context", "9", "--contexts", "8", "70", "--context-batch", "2", "--steps", "4",
         "--waiting", "0", "7", "--generating", "3", "--host-iterations", "6", "--threads", "1"]
SVG = "{http://www.w3.org/2000/svg}"


def step(batch, context, mean_context, median, p10, p90):
    return {"batch": batch, "context": context, "mean_context": mean_context, "steps": 5,
            "ms": {"median": median, "min": p10, "p10": p10, "p90": p90},
            "tokens_per_second": round(1e3 * batch / median, 1), "compute_threads": 2.0, "foreign_cores": 0.01}


def host(where, waiting, median):
    return {"where": where, "waiting": waiting, "generating": 256, "iterations": 5, "undisturbed": 5, "ratio": 0.7,
            "us": {"median": median, "min": median, "p10": median - 10.0, "p90": median + 30.0, "p99": 900.0},
            "phases_us": {}}


RESULT = {
    "tool": "scaling", "date": "2026-01-02 03:04 UTC", "commit": "abc1234", "command": "python -m ...",
    "machine": {"cpu": "A CPU", "architecture": "x86_64", "cores": 2, "extensions": ["avx2"]},
    "versions": {"batch_manager": "0.1.0", "python": "3.11.7"},
    "model": {"architecture": "LlamaForCausalLM", "hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3,
              "head_size": 64, "vocab_size": 49152, "weights": 134500000},
    "dtype": "bfloat16", "threads": 2, "cpu_compile": None,
    "batch": [step(1, 256, 280.0, 10.0, 9.5, 12.0), step(2, 256, 280.0, 12.5, 12.0, 13.0),
              step(8, 256, 280.0, 25.0, 24.0, 37.0)],
    "context": [step(8, 128, 152.0, 20.0, 19.0, 21.0), step(8, 2048, 2072.0, 60.0, 58.0, 61.0)],
    "waiting": [host("active", 0, 150.0), host("queued", 0, 150.0), host("active", 4000, 400.0),
                host("queued", 4000, 160.0)],
}


@pytest.fixture
def result_file(tmp_path):
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps(RESULT))
    return path


def read_back(svg):
    """Return the points (x, y, ends of the range) of a plot in the units of its axes, by the labels of the axes."""
    root = ElementTree.fromstring(svg)

    def axis(name, place):
        return [(float(text.text.replace(",", "")), float(text.get(place)))
                for text in root.iter(f"{SVG}text") if text.get("class") == name]

    (x_low, left), *_, (x_high, right) = axis("x", "x")
    (y_low, bottom), *_, (y_high, top) = axis("y", "y")
    bottom, top = bottom - 4, top - 4                            # the text is 4 pixels below its tick

    def share(at, low, high):
        return (at - low) / (high - low)

    def value_of_x(at):
        if x_low:                                                # an axis without 0 is logarithmic
            return x_low * (x_high / x_low) ** share(at, left, right)
        return x_high * share(at, left, right)

    def value_of_y(at):
        return y_low + (y_high - y_low) * share(at, bottom, top)

    circles = [circle for circle in root.iter(f"{SVG}circle") if len(circle)]
    bars = [re.fullmatch(r"M([\d.]+) ([\d.]+)V([\d.]+)", bar.get("d"))
            for bar in root.iter(f"{SVG}path") if bar.get("class") == "range"]
    assert [bar[1] for bar in bars] == [circle.get("cx") for circle in circles]
    return [tuple(round(value, 1) for value in (
        value_of_x(float(circle.get("cx"))), value_of_y(float(circle.get("cy"))),
        value_of_y(float(bar[2])), value_of_y(float(bar[3])))) for circle, bar in zip(circles, bars)]


def close_to(points):
    return [pytest.approx(point, rel=0.02, abs=0.6) for point in points]


# ---------------------------------------------------------------------- plots


def test_the_points_lie_where_the_axes_say_that_they_are():
    drawn = {name: read_back(plot.render()) for name, plot in draw.plots(RESULT).items()}
    assert drawn["batch-time.svg"] == close_to([(1, 10, 9.5, 12), (2, 12.5, 12, 13), (8, 25, 24, 37)])
    assert drawn["batch-rate.svg"] == close_to([
        (1, 100, 83.3, 105.3), (2, 160, 153.8, 166.7), (8, 320, 216.2, 333.3)])
    assert drawn["context-time.svg"] == close_to([(152, 20, 19, 21), (2072, 60, 58, 61)])
    assert drawn["waiting-time.svg"] == close_to([
        (0, 150, 140, 180), (4000, 400, 390, 430), (0, 150, 140, 180), (4000, 160, 150, 190)])


def test_axes_have_units_and_nothing_is_drawn_outside_the_picture():
    for name, plot in draw.plots(RESULT).items():
        root = ElementTree.fromstring(plot.render())
        texts = {text.text for text in root.iter(f"{SVG}text")}
        assert {plot.title, plot.x_label, plot.y_label} <= texts, name
        assert re.search("requests|tokens", plot.x_label) and re.search("seconds|a second", plot.y_label)
        for circle in root.iter(f"{SVG}circle"):
            if len(circle):
                assert LEFT <= float(circle.get("cx")) <= RIGHT and TOP <= float(circle.get("cy")) <= BOTTOM
        background = root.find(f"{SVG}rect")
        assert background.get("fill") == "#ffffff", "a picture without a background is dark on dark pages"
        assert (background.get("width"), background.get("height")) == (root.get("width"), root.get("height"))


def test_two_lines_are_told_apart_by_colour_and_name():
    root = ElementTree.fromstring(draw.plots(RESULT)["waiting-time.svg"].render())
    colours = [line.get("stroke") for line in root.iter(f"{SVG}polyline")]
    assert len(set(colours)) == 2
    assert {circle.get("fill") for circle in root.iter(f"{SVG}circle") if not len(circle)} == set(colours)


@pytest.mark.parametrize("most, expected", [
    (37, [0, 10, 20, 30, 40]), (5, [0, 1, 2, 3, 4, 5]), (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, [0, 1]),
    (2072, [0, 500, 1000, 1500, 2000, 2500]), (11, [0, 2.5, 5, 7.5, 10, 12.5])])
def test_ticks_are_round_and_reach_the_largest_value(most, expected):
    assert ticks(most) == pytest.approx(expected)


@pytest.mark.parametrize("lines", [[], [Line("", [])], [Line("a", [Point(1, 1, 1, 1)])] * 7])
def test_a_plot_that_cannot_be_drawn_is_refused(lines):
    with pytest.raises(ValueError, match="at least one point and at most 6 lines"):
        LinePlot("t", "", "x", "y", lines).render()


# ---------------------------------------------------------------------- the program that draws


def test_drawing_twice_gives_the_same_files_and_page(result_file, tmp_path):
    page = tmp_path / "scaling.md"
    page.write_text(f"before\n{draw.BEGIN}\nold\n{draw.END}\nafter\n")
    arguments = [str(result_file), "--out", str(tmp_path / "plots"), "--page", str(page)]
    drawn = []
    for _ in range(2):
        assert draw.main(arguments) == 0
        drawn.append({path.name: path.read_bytes() for path in [page, *sorted((tmp_path / "plots").iterdir())]})
    assert drawn[0] == drawn[1] and len(drawn[0]) == 5
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "![Time of a decode step by context](plots/context-time.svg)" in text
    assert "| 8 | 280 | 25.00 | 24.00 to 37.00 | 24.00 | 320 | 2 | 0.01 |" in text
    assert "| 4,000 | 400 (390 to 430) | 160 (150 to 190) |" in text


@pytest.mark.parametrize("spoil, says", [
    (lambda result: result.update(tool="benchmark"), "is not a result of tests.benchmarks.scaling"),
    (lambda result: result.update(batch=[]), "has no measurements of the series batch; measure again"),
    (lambda result: result.pop("waiting"), "has no measurements of the series waiting; measure again"),
    (lambda result: result.pop("versions"), "KeyError: 'versions'")])
def test_a_file_without_measurements_is_named_and_nothing_is_written(result_file, tmp_path, capsys, spoil, says):
    result = json.loads(result_file.read_text())
    spoil(result)
    result_file.write_text(json.dumps(result))
    assert draw.main([str(result_file), "--out", str(tmp_path / "plots")]) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def test_a_page_without_its_two_lines_is_left_alone(result_file, tmp_path, capsys):
    page = tmp_path / "scaling.md"
    page.write_text("mine\n")
    assert draw.main([str(result_file), "--out", str(tmp_path), "--page", str(page)]) == 1
    assert "add them where the measurements belong" in capsys.readouterr().err
    assert page.read_text() == "mine\n"


def test_the_page_in_the_repository_is_what_is_drawn_from_the_measurements_beside_it():
    result = draw.read(Path(draw.__file__).with_name("epyc.json"))
    assert not result["commit"].endswith("+"), "it was measured on a tree that is no commit"
    text = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert draw.written_into(text, draw.page(result, "pictures")) == text
    for name, plot in draw.plots(result).items():
        assert (REPOSITORY / "docs" / "pictures" / name).read_text(encoding="utf-8") == plot.render()


# ---------------------------------------------------------------------- the program that measures


def test_every_setting_is_measured_and_can_be_drawn(tmp_path, capsys):
    out = tmp_path / "scaling.json"
    assert scaling.main(["--model", str(MODEL), "--out", str(out), *SMALL]) == 0
    result = json.loads(out.read_text())
    assert [(row["batch"], row["context"]) for row in result["batch"]] == [(1, 9), (3, 9)]
    assert [(row["batch"], row["context"]) for row in result["context"]] == [(2, 8), (2, 70)]
    for row in [*result["batch"], *result["context"]]:
        assert 0 < row["ms"]["min"] <= row["ms"]["p10"] <= row["ms"]["median"] <= row["ms"]["p90"]
        # The token of the prompt's step, the tokens of the warm-up, and half of the timed tokens.
        assert row["mean_context"] == row["context"] + 1 + scaling.WARM_UP_STEPS + 4 / 2
    assert [(row["where"], row["waiting"]) for row in result["waiting"]] == [
        ("active", 0), ("queued", 0), ("active", 7), ("queued", 7)]
    assert {"commit", "machine", "versions", "date"} <= result.keys() and result["model"]["vocab_size"] == 4096
    again = result["command"].replace("FOLDER", str(MODEL)).replace("FILE.json", str(out)).split()[3:]
    assert scaling.parse_options(again) == scaling.parse_options(["--model", str(MODEL), "--out", str(out), *SMALL])
    assert draw.main([str(out), "--out", str(tmp_path)]) == 0
    assert "| 3 | 17 |" in capsys.readouterr().out


def test_the_times_are_those_of_the_timed_iterations_alone(monkeypatch):
    options = scaling.parse_options(["--model", str(MODEL), "--out", "unused", *SMALL])
    engine = scaling.DecodeSteps(options, [(2, 8)])
    clock = iter([0.0, 0.010, 5.0, 5.030, 9.0, 9.020])
    monkeypatch.setattr(scaling, "perf_counter", lambda: next(clock))
    row = engine.measure(2, 8, 3)
    engine.close()
    assert row["ms"] == {"median": 20.0, "min": 10.0, "p10": 12.0, "p90": 28.0}
    assert row["tokens_per_second"] == 100.0
    assert next(clock, None) is None


def test_nothing_is_timed_before_every_prompt_is_computed():
    """No step is timed before all prompts are computed, even if the prompts take longer than the warm-up."""
    options = scaling.parse_options(["--model", str(MODEL), "--out", "unused", *SMALL, "--max-tokens-per-step", "21"])
    engine = scaling.DecodeSteps(options, [(12, 9)])
    row = engine.measure(12, 9, 4)
    engine.close()
    assert row["mean_context"] > 9 + 1 + scaling.WARM_UP_STEPS + 4 / 2, "the first ones generated meanwhile"


def test_a_model_without_so_many_positions_is_refused(tmp_path, capsys):
    assert scaling.main(["--model", str(MODEL), "--out", str(tmp_path / "x.json"), *SMALL, "--contexts", "9000"]) == 1
    assert "reduce --contexts" in capsys.readouterr().err
