"""The plots of a benchmark show the right iterations at the right positions."""

import re
from xml.etree import ElementTree

import pytest

from batch_manager import Parts
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.bench.composition import (
    FEWEST_STEPS,
    MOST_SPANS,
    Iteration,
    iterations_of,
    over_time,
    times_by_batch,
    with_idle_times,
)
from batch_manager.tools.bench.measurement import Measurement
from batch_manager.tools.bench.options import parse_options
from batch_manager.tools.bench.plots import file_words, plots, write_plots
from batch_manager.tools.line_plot import Line, LinePlot, Point
from batch_manager.tools.output_file import OutputFiles
from batch_manager.tools.plot_frame import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, number, ticks
from batch_manager.tools.stacked_plot import Panels, Span, StackedPlot
from batch_manager.tools.workload import Lengths, make_workload

SVG = "{http://www.w3.org/2000/svg}"
TEN = make_workload(count=10, vocab_size=1000, prompts=Lengths(20, 0.5, 4, 60), outputs=Lengths(12, 0.5, 4, 24))


def measured(*more):
    options = parse_options(["--model", "none", "--workload", "ten.json", "--tokens-per-block", "8", "--quiet",
                             "--max-batch-size", "4", "--plot", "unused", *more])
    measurement = Measurement(options, TEN, Parts(backend=ScriptedBackend(num_blocks=64, tokens_per_block=8,
                                                                          step_seconds=0.001)))
    result = measurement.run()
    return result, measurement


def iteration(number, *, generating=2, context=0, since_s=0.5, used=3):
    return Iteration(float(number), number + 1.0, context, generating, used, 1, 64, since_s)


def test_iterations_are_those_of_the_records():
    _, measurement = measured()
    (served,) = measurement.served
    found = iterations_of(served.records)
    assert len(found) == served.steps
    assert sum(one.context for one in found) == TEN["prompt_tokens"]
    assert found[0].begin_s == 0.0 and found[0].since_s is None
    assert all(one.begin_s >= before.end_s and one.end_s >= one.begin_s for before, one in zip(found, found[1:]))
    # A request generates from its second token on. The first token comes from its context.
    assert sum(one.generating for one in found) == TEN["output_tokens"] - len(TEN["requests"])
    assert all(one.since_s >= 0.0009 for one in found if one.generating)


def test_a_serving_has_three_pictures_and_a_sweep_its_latencies_too(tmp_path):
    result, measurement = measured()
    drawn = plots(result, measurement.points, measurement.served)
    assert drawn.keys() == {"batch.svg", "kv-cache.svg", "between-tokens-by-batch.svg"}
    result, measurement = measured("--sweep", "concurrency=1,4")
    drawn = plots(result, measurement.points, measurement.served)
    assert {"throughput-time-to-first-token.svg", "throughput-between-tokens.svg", "throughput-end-to-end.svg",
            "batch-concurrency-1.svg", "kv-cache-concurrency-4.svg"} < drawn.keys() and len(drawn) == 9
    with OutputFiles() as files:
        write_plots(tmp_path / "a" / "b", drawn, files)
    for path in (tmp_path / "a" / "b").iterdir():
        root = ElementTree.fromstring(path.read_text())
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert any(re.search("tokens|blocks|requests", text) for text in texts), path.name
        assert any(re.search("seconds", text) for text in texts), path.name


def test_the_points_of_a_sweep_lie_where_its_figures_are():
    points = [{"request_rate": rate, "concurrency": None, "output_tok_s": x,
               **{f"{name}_ms_p{percent}": y * percent for name in ("ttft", "itl", "e2e") for percent in (50, 99)}}
              for rate, x, y in ((0.0, 400.0, 1.0), (2.0, 200.0, 0.5), (1.0, 100.0, 0.25))]
    from batch_manager.tools.bench.plots import latency_plots

    plot = latency_plots("request_rate", points)["throughput-end-to-end.svg"]
    median, p99 = plot.lines
    assert [(point.label, point.x, point.y) for point in median.points] == [
        ("1", 100.0, 12.5), ("2", 200.0, 25.0), ("at once", 400.0, 50.0)]
    assert p99.points[-1].y == pytest.approx(99.0) and plot.y_label == "milliseconds"
    for point in points:
        point["ttft_ms_p50"] = None
    assert "throughput-time-to-first-token.svg" not in latency_plots("request_rate", points)


def test_few_iterations_are_drawn_as_they_are_and_many_as_means_over_time():
    few = [Iteration(0.0, 1.0, 5, 0, 3, 0, 64, None), Iteration(2.0, 4.0, 0, 2, 4, 0, 64, None)]
    assert over_time(few, [5, 0]) == [(0.0, 1.0, 5), (2.0, 4.0, 0)]
    assert [(one.begin_s, one.end_s, one.used) for one in with_idle_times(few)] == [
        (0.0, 1.0, 3), (1.0, 2.0, 0), (2.0, 4.0, 4)]
    many = [iteration(number) for number in range(2 * MOST_SPANS)]
    spans = over_time(many, [float(number % 2) for number in range(len(many))])
    assert len(spans) == MOST_SPANS and all(amount == pytest.approx(0.5) for *_, amount in spans)
    assert spans[0][0] == 0.0 and spans[-1][1] == 2.0 * MOST_SPANS
    # One long iteration fills all the spans that it covers.
    long = [*many, Iteration(2.0 * MOST_SPANS, 4.0 * MOST_SPANS, 0, 1, 3, 0, 64, None)]
    assert {round(amount, 9) for *_, amount in over_time(long, [1.0] * len(long))} == {1.0}


def test_times_are_put_together_by_batch_size():
    rows = [iteration(number, generating=1 + number // 10, since_s=0.1 * (1 + number // 10)) for number in range(30)]
    assert times_by_batch(rows, with_contexts=True) == []
    found = times_by_batch(rows, with_contexts=False)
    assert [size for size, *_ in found] == [1.0, 2.0, 3.0]
    assert [middle for _, _, middle, _ in found] == pytest.approx([0.1, 0.2, 0.3])
    assert len(times_by_batch(rows[:23], with_contexts=False)) == 2          # the last three are too few for a group
    every_size = [iteration(number, generating=number + 1) for number in range(200)]
    sizes = [size for size, *_ in times_by_batch(every_size, with_contexts=False)]
    assert len(sizes) <= 17 and sizes == sorted(sizes) and 200 / len(sizes) >= FEWEST_STEPS


def test_layers_lie_on_each_other_below_their_limit():
    text = StackedPlot("t", "n", "x", "y", ["a", "b"], [Span(0.0, 2.0, (1.0, 3.0)), Span(2.0, 4.0, (2.0, 0.0))],
                       limit=(5.0, "all")).render()
    below, above = (path.get("d") for path in ElementTree.fromstring(text).iter(f"{SVG}path")
                    if path.get("class") == "layer")
    height = (BOTTOM - TOP) / 5
    assert below.startswith(f"M{LEFT:.2f} {BOTTOM:.2f}V{BOTTOM - height:.2f}H")
    assert above == (f"M{LEFT:.2f} {BOTTOM - height:.2f}V{BOTTOM - 4 * height:.2f}H{(LEFT + RIGHT) / 2:.2f}"
                     f"V{BOTTOM - height:.2f}Z")
    assert "all: 5" in text
    both = Panels([StackedPlot("t", "n", "x", "y", [""], [Span(0.0, 1.0, (1.0,))])] * 2).render()
    assert f'height="{2 * HEIGHT}"' in both and f"translate(0 {HEIGHT})" in both
    with pytest.raises(ValueError, match="0 spans"):
        StackedPlot("t", "n", "x", "y", ["a"], []).render()


def test_labels_keep_off_points_and_each_other():
    points = [Point(x, 1.0, 1.0, 1.0, label) for x, label in ((1.0, "first"), (1.01, "second"), (1.02, "third"),
                                                              (1.03, "fourth"), (1.04, "fifth"), (9.0, "last"))]
    root = ElementTree.fromstring(LinePlot("t", "n", "x", "y", [Line("", points)]).render())
    boxes = []
    for text in root.iter(f"{SVG}text"):
        if text.get("class") == "label":
            x, y, width = float(text.get("x")), float(text.get("y")), 6.0 * len(text.text)
            boxes.append((x - width / 2, y - 9, x + width / 2, y))
    circles = [(float(one.get("cx")), float(one.get("cy"))) for one in root.iter(f"{SVG}circle")]
    assert 2 <= len(boxes) < len(points)            # the plot has no room for all labels
    assert not any(left < x < right and top < y < bottom for left, top, right, bottom in boxes for x, y in circles)
    assert all(one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
               for number, one in enumerate(boxes) for other in boxes[:number])


@pytest.mark.parametrize("value, told", [(0, "0"), (0.05, "0.05"), (0.0025, "0.0025"), (0.25, "0.25"), (2.5, "2.50"),
                                         (25.5, "25.5"), (2500.0, "2,500")])
def test_small_numbers_keep_their_digits(value, told):
    assert number(value) == told


def test_ticks_end_at_or_above_the_largest_value():
    for most in (0.003, 0.9, 1.0, 7, 12345):
        assert ticks(most)[-1] >= most and len(ticks(most)) <= 6


def test_file_names_are_plain():
    assert file_words("2.5 requests/s") == "2.5-requests-s"
