"""The page of `batch-manager draw --html` has the right data and text, and works in a browser."""

import base64
import json
import os
import random
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest

from batch_manager import IterationTrace, SchedulerPolicy, Trace
from batch_manager.stats.trace import write_trace
from batch_manager.tools.draw import packing
from batch_manager.tools.draw.command_line import main
from batch_manager.tools.draw.html import SCRIPTS, summary, write_html
from batch_manager.tools.draw.packing import pack
from batch_manager.tools.draw.text import render_text
from batch_manager.tools.draw.timeline import COUNTERS, Timeline
from batch_manager.tools.request_spans import CONTEXT, lives

from .unpacking import unpack

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NODE = shutil.which("node")
PAGE = Path(packing.__file__).parent / "page"
VOID_ELEMENTS = {"meta", "input", "link", "br"}
HEADER = b'{"format":"batch_manager trace","version":1}\n'


def timeline_of(iterations):
    timeline = Timeline()
    for iteration in iterations:
        timeline.append(iteration)
    timeline.close()
    return timeline


def page_of(iterations, title="a run"):
    file = BytesIO()
    write_html(timeline_of(iterations), file, title=title)
    return file.getvalue().decode()


def data_of(page):
    return unpack(re.search(r'id="data">([^<]*)<', page).group(1).encode())


def rows_of(header, columns):
    """Return [(request id, spans, end, has ended)] of the rows of a page, from the page's data.

    A span is (kind, reason, first iteration, first position, number of tokens).
    """
    starts, kinds = iter(columns["span_start"]), iter(columns["span_kind"])
    chunks = iter(zip(columns["chunk_first"], columns["chunk_tokens"], strict=True))
    rows = []
    for request_id, spans, end, ended in zip(header["requests"].split(","), columns["row_spans"], columns["row_end"],
                                             columns["row_ended"], strict=True):
        found = []
        for _ in range(spans):
            kind = header["kinds"][next(kinds)]
            chunk = next(chunks) if kind["kind"] == CONTEXT else (0, 0)
            found.append((kind["kind"], kind["reason"], next(starts), *chunk))
        rows.append((int(request_id), found, end, bool(ended)))
    assert next(starts, None) is next(kinds, None) is next(chunks, None) is None
    return rows


@pytest.fixture
def traced(make_world, new_request):
    """Return the function `traced(seed)`.

    It returns the iterations of a random run in which requests wait, pause and are computed in chunks.
    """
    def run(seed):
        draw = random.Random(seed)
        trace = Trace()
        world = make_world(parts={"trace": trace.append}, policy=draw.choice(list(SchedulerPolicy)),
                           max_batch_size=draw.randint(2, 6), max_num_tokens=32, enable_chunked_context=True,
                           max_num_sequences=8, enable_trt_overlap=draw.random() < 0.4,
                           backend={"num_blocks": draw.randint(8, 14), "tokens_per_block": 8, "max_seq_len": 64})
        world.client.pending = [new_request(i, [draw.randrange(1, 90) for _ in range(draw.randint(1, 40))],
                                            draw.randint(1, 20)) for i in range(1, 25)]
        world.run()
        return trace.iterations

    return run


@pytest.mark.parametrize("seed", range(6))
def test_the_page_holds_exactly_the_spans_and_counters_of_the_trace(seed, traced):
    iterations = traced(seed)
    header, columns = data_of(page_of(iterations))
    found = rows_of(header, columns)
    index_of = {each.iteration: i for i, each in enumerate(iterations)}
    expected = {life.request_id: life for life in lives(iterations)}
    assert [row[0] for row in found] == [request_id for each in iterations for request_id in each.arrived]
    for request_id, spans, end, ended in found:
        life = expected[request_id]
        assert (index_of[life.last_iteration] + 1, life.has_ended) == (end, ended)
        assert spans[0][2] == index_of[life.first_iteration]
        merged = []           # consecutive chunks are one span of a life
        for (kind, reason, start, first, tokens), after in zip(spans, [*(span[2] for span in spans[1:]), end]):
            last = merged[-1] if merged else None
            if last and kind == CONTEXT == last[0] and first >= last[4] + last[3]:
                merged[-1] = (kind, reason, last[2] + after - start, last[3] + tokens, last[4])
            else:
                merged.append((kind, reason, after - start, tokens, first))
        assert [each[:4] for each in merged] == [(s.kind, s.reason, s.iterations, s.tokens) for s in life.spans]
    chunks = sorted((request_id, iterations[start].iteration, first, tokens) for request_id, spans, _, _ in found
                    for kind, _, start, first, tokens in spans if kind == CONTEXT)
    assert chunks == sorted((request_id, each.iteration, first, tokens) for each in iterations
                            for request_id, first, tokens in each.context)
    for name in COUNTERS[:4]:
        assert columns[name] == [getattr(each, name) for each in iterations]
    assert columns["context_tokens"] == [sum(chunk[2] for chunk in each.context) for each in iterations]
    assert columns["generation_tokens"] == [len(each.generation) for each in iterations]
    assert columns["iteration"] == [each.iteration for each in iterations]
    assert columns["begin_us"][:-1] == [round(1e6 * (each.started_at_s - iterations[0].started_at_s))
                                        for each in iterations]
    for phase in header["phases"]:
        assert columns[f"phase {phase}"] == [each.phases_us.get(phase, 0) for each in iterations]


def test_large_and_negative_numbers_survive():
    iterations = [IterationTrace(7, ((2**64 - 1, 0, 2**31),), (), (), (), (2**64 - 1,), 5.0, {"read": -3}),
                  IterationTrace(2**40, (), (2**64 - 1,), (), (2**64 - 1,), (), 4.0e6, {"read": 9, "poll": 1}, {}, 3)]
    header, columns = unpack(pack(timeline_of(iterations), {}))
    assert header["requests"] == str(2**64 - 1) and columns["iteration"] == [7, 2**40]
    assert columns["phase read"] == [-3, 9] and columns["phase poll"] == [0, 1]
    assert columns["chunk_tokens"] == [2**31] and columns["begin_us"] == [0, 3_999_995_000_000, 3_999_995_000_010]
    with pytest.raises(ValueError, match="so that a browser holds it exactly"):
        pack(timeline_of([IterationTrace(2**60, (), (), (), ())]), {})


def test_a_request_that_an_iteration_names_twice_has_one_span_there():
    iterations = [IterationTrace(0, ((1, 0, 5), (2, 0, 7)), (), (1,), (), (1, 2)),
                  IterationTrace(1, ((1, 3, 9),), (), (), (1,), ())]
    assert rows_of(*unpack(pack(timeline_of(iterations), {}))) == [
        (1, [("paused", "", 0, 0, 0), (CONTEXT, "", 1, 3, 9)], 2, True), (2, [(CONTEXT, "", 0, 0, 7)], 2, False)]


class Reader(HTMLParser):
    """Parses a page: checks that its elements are nested, and collects ids, texts and addresses."""

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.addresses, self.texts = [], [], [], {}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "action", "data", "srcset"):
                self.addresses.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def test_the_page_is_well_formed_and_needs_nothing_else(traced):
    page = page_of(traced(1))
    reader = Reader(page)
    assert reader.addresses == [] and len(reader.ids) == len(set(reader.ids))
    assert "://" not in page and "@import" not in page and "url(" not in page
    assert {"rows", "counters", "details", "data"} <= set(reader.ids) and "noscript" in page


def test_names_of_a_trace_and_titles_cannot_become_part_of_the_page():
    evil = "</script><script>document.title='evil'</script>{{SCRIPT}}"
    page = page_of([IterationTrace(0, (), (), (), (), (1,), waiting={evil: (1,)}, phases_us={evil: 5})], evil)
    reader = Reader(page)
    assert "evil" not in reader.texts["script"] and page.count("</script>") == 2
    assert reader.texts["title"] == reader.texts["h1"] == evil
    assert {"kind": "waiting", "reason": evil} in data_of(page)[0]["kinds"]


def test_the_program_of_the_page_is_all_there():
    assert sorted(SCRIPTS) == sorted(path.name for path in PAGE.glob("*.js"))


# the command


def write(path, iterations):
    with path.open("wb") as file:
        write_trace(iterations, file)


def test_the_command_writes_page_and_svg_of_one_reading(tmp_path, traced, capsys):
    trace, html, svg = (tmp_path / name for name in ("trace.jsonl", "run.html", "run.svg"))
    write(trace, traced(2))
    assert main([str(trace), "--html", str(html), "--svg", str(svg)]) == 0
    assert capsys.readouterr().out == (f"wrote {html}: {summary(timeline_of(traced(2)))}\nwrote {svg}\n")
    assert main([str(trace), "--svg", str(svg), "--text"]) == 0
    assert capsys.readouterr().out == f"{render_text(traced(2))}\n\nwrote {svg}\n"
    assert "trace.jsonl" in html.read_text() and svg.read_text().startswith("<svg")
    trace.write_bytes(trace.read_bytes()[:-20])
    assert main([str(trace), "--html", str(html)]) == 0
    assert len(data_of(html.read_text())[1]["iteration"]) == len(traced(2)) - 1


def test_a_damaged_trace_leaves_no_file_and_an_older_one_as_it_was(tmp_path, capsys):
    trace, html, svg = (tmp_path / name for name in ("trace.jsonl", "run.html", "run.svg"))
    html.write_text("older")
    trace.write_bytes(HEADER + b'{"iteration":0}\n')
    assert main([str(trace), "--html", str(html), "--svg", str(svg)]) == 2
    shown = capsys.readouterr().err
    assert "trace.jsonl: line 2: the record has no arrived, " in shown and shown.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "trace.jsonl"]
    assert html.read_text() == "older"


@pytest.mark.parametrize("option", ["--html", "--svg", "--trace"])
def test_the_trace_itself_is_never_overwritten(option, tmp_path, traced, capsys):
    trace = tmp_path / "trace.jsonl"
    write(trace, traced(3))
    content = trace.read_bytes()
    (tmp_path / "link").symlink_to(trace)
    for out in (trace, tmp_path / "link"):
        assert main([str(trace), option, str(out)]) == 2
        assert "would overwrite the input" in capsys.readouterr().err and trace.read_bytes() == content


def test_two_outputs_of_one_name_are_refused(tmp_path, capsys):
    assert main(["--demo", "--html", str(tmp_path / "a"), "--svg", str(tmp_path / "a")]) == 2
    assert "--html and --svg both name" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--demo", "a"]])
def test_one_source_is_expected(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "expected" in capsys.readouterr().err


def test_a_long_run_is_drawn_as_a_page_and_refused_as_svg_and_text(tmp_path, capsys):
    trace, html, svg = (tmp_path / name for name in ("trace.jsonl", "run.html", "run.svg"))
    write(trace, [IterationTrace(i, (), (1,), (), ()) for i in range(5001)])
    for arguments, bound in (([], "5,000"), (["--svg", str(svg), "--html", str(html)], "2,000")):
        assert main([str(trace), *arguments]) == 2
        assert f"more than {bound} iterations" in (told := capsys.readouterr().err) and "use --html FILE" in told
    assert not html.exists() and not svg.exists()
    assert main([str(trace), "--html", str(html)]) == 0
    assert "run.html: 1 request, 5,001 iterations" in capsys.readouterr().out and html.stat().st_size < 100_000
    assert main([str(trace), "--html", str(html), "--text"]) == 2
    assert "expected at most 5,000" in capsys.readouterr().err


def test_beside_a_picture_on_standard_output_nothing_else_is_printed(tmp_path, capsys):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["--demo", "--svg", str(pipe)]) == 0
    reader.join(10)
    told = capsys.readouterr()
    assert told.out == "" and f"wrote {pipe}" in told.err and read[0].startswith("<svg")


# the program of the page


def script_of(*names):
    return "\n".join((PAGE / name).read_text() for name in names)


COUNT = """
const load = async () => {
  const { header, columns } = await unpack(DATA);
  const run = new Run(header, columns), axes = { iteration: iterationAxis(run), time: timeAxis(run) };
  return ASKED.map(({ axis, ...window }) => {
    const { kind, share } = countTile(run, axes[axis], window);
    return { kind: [...kind], share: [...share] };
  });
};
load().then((answer) => process.stdout.write(JSON.stringify(answer)));
"""


def brute_force(rows, kinds, positions, ends, window):
    """Compute the result of the page's function countTile cell by cell.

    positions, ends   where each iteration begins and ends on the horizontal axis
    """
    kind, share = [], []
    width, group_rows = window["binWidth"], window["rowsPerGroup"]
    for group in range(window["groups"]):
        first = (window["firstGroup"] + group) * group_rows
        for bin_number in range(window["bins"]):
            begin = (window["firstBin"] + bin_number) * width
            counts = [0.0] * len(kinds)
            for _, spans, end, _ in rows[first: first + group_rows]:
                for span, after in zip(spans, [*(each[2] for each in spans[1:]), end]):
                    until = ends[after - 1] if after == end else positions[after]
                    overlap = min(until, begin + width) - max(positions[span[2]], begin)
                    counts[kinds.index(span[:2])] += max(0.0, overlap)
            whole = len(rows[first: first + group_rows]) * width
            kind.append(counts)
            share.append(sum(counts) / whole if whole else 0)
    return kind, share


def with_idle_times(iterations):
    """Return `iterations` with a duration of some milliseconds each, and with idle times after some of them."""
    draw, at, changed = random.Random(8), 3.0, []
    for each in iterations:
        milliseconds = draw.randint(1, 9)
        end = at + milliseconds / 1e3
        changed.append(replace(each, started_at_s=at, phases_us={"start": 1000 * milliseconds},
                               arrived_at_s=tuple(at for _ in each.arrived),
                               finished_at_s=tuple(end for _ in each.finished)))
        at += (milliseconds + draw.choice((0, 0, 0, 12))) / 1e3
    return changed


@pytest.mark.skipif(NODE is None, reason="the page's program runs outside a browser with node, and there is none")
def test_the_levels_of_detail_agree_with_a_count_of_the_cells(traced):
    packed = pack(timeline_of(with_idle_times(traced(4))), {})
    header, columns = unpack(packed)
    rows = rows_of(header, columns)
    kinds = [(each["kind"], each["reason"]) for each in header["kinds"]]
    axes = {"iteration": list(range(len(columns["iteration"]) + 1)),
            "time": [us / 1e6 for us in columns["begin_us"]]}
    ends = {"iteration": axes["iteration"][1:],
            "time": [(us + sum(columns[f"phase {phase}"][i] for phase in header["phases"])) / 1e6
                     for i, us in enumerate(columns["begin_us"][:-1])]}
    assert any(end < after for end, after in zip(ends["time"], axes["time"][1:], strict=True))
    asked = [{"axis": "iteration", "binWidth": width, "firstBin": first, "rowsPerGroup": group, "firstGroup": line,
              "bins": 16, "groups": 5}
             for width, first in ((1, 0), (1, 17), (2, 3), (8, 0)) for group, line in ((1, 0), (4, 1), (16, 0))]
    asked += [{**each, "axis": "time", "binWidth": axes["time"][-1] / 20} for each in asked[:6]]
    program = (f"const DATA = {json.dumps(packed.decode())}, ASKED = {json.dumps(asked)};\n"
               + script_of("unpack.js", "spans.js", "axis.js", "tiles.js") + COUNT)
    result = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for window, answer in zip(asked, json.loads(result.stdout), strict=True):
        counts, shares = brute_force(rows, kinds, axes[window["axis"]], ends[window["axis"]], window)
        for code, share, expected, whole in zip(answer["kind"], answer["share"], counts, shares, strict=True):
            assert (share == 0) == (whole < 1e-12) and abs(share / 255 - whole) < 0.005, window
            if share:
                assert expected[code] == pytest.approx(max(expected)), window


DESCRIBE = """
const load = async () => {
  const { header, columns } = await unpack(DATA);
  const run = new Run(header, columns), theme = { kinds: run.kinds.map(() => "") };
  const axis = timeAxis(run);
  return [axis, ASKED.map(({ row, at }) => describe(run, theme, {
    row, index: axis.indexAt(at), span: axis.spanAt(run, row, at) }))];
};
load().then((answer) => process.stdout.write(JSON.stringify(answer)));
"""


@pytest.mark.skipif(NODE is None, reason="the page's program runs outside a browser with node, and there is none")
def test_idle_time_is_no_time_of_the_last_request():
    iterations = [
        IterationTrace(1, ((7, 0, 12),), (), (), (), (7,), 1.0, {"start": 9000}),
        IterationTrace(2, (), (7,), (), (7,), (), 1.01, {"start": 4000, "read": 5000}),
        IterationTrace(3, ((8, 0, 12),), (), (), (8,), (8,), 3.0, {"start": 9000})]
    asked = [{"row": 0, "at": 0.011}, {"row": 0, "at": 1.0}, {"row": 1, "at": 2.001}]
    program = (f"const DATA = {json.dumps(pack(timeline_of(iterations), {}).decode())}, ASKED = {json.dumps(asked)};\n"
               + script_of("unpack.js", "spans.js", "axis.js", "details.js") + DESCRIBE)
    result = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    axis, (second, idle, other) = json.loads(result.stdout)
    assert [*axis["positions"].values()] == pytest.approx([0, 0.01, 2.0, 2.009])
    assert [*axis["ends"].values()] == pytest.approx([0.009, 0.019, 2.009])
    assert second["title"] == "request 7: generation" and dict(second["facts"])["for"] == "9.00 ms"
    assert idle["title"] == "request 7: ended" and "for" not in dict(idle["facts"])
    assert other["title"] == "request 8: context" and dict(other["facts"])["for"] == "9.00 ms"


@pytest.mark.skipif(NODE is None, reason="the page's program runs outside a browser with node, and there is none")
def test_the_form_of_a_step_and_what_kept_it_out_of_earlier_ones_is_told_if_the_trace_has_it():
    passed = {"graph": "stages", "fixed": "stages"}
    iterations = [IterationTrace(1, ((7, 0, 12),), (), (), (), (7,), form="packed", obstacles=passed),
                  IterationTrace(2, (), (7,), (), (), form="graph"), IterationTrace(3, (), (7,), (), (7,))]
    program = (f"const DATA = {json.dumps(pack(timeline_of(iterations), {}).decode())};\n"
               + script_of("unpack.js", "spans.js", "axis.js", "details.js") + """
unpack(DATA).then(({ header, columns }) => {
  const run = new Run(header, columns);
  process.stdout.write(JSON.stringify([0, 1, 2].map((index) => factsOfIteration(run, index))));
});
""")
    result = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert [dict(facts).get("form of the step") for facts in json.loads(result.stdout)] == [
        "packed; not graph: stages; not fixed: stages", "graph", None]


@pytest.mark.skipif(NODE is None, reason="the page's program runs outside a browser with node, and there is none")
def test_a_pixel_column_of_a_counter_shows_the_mean_and_the_largest_of_its_iterations():
    draw = random.Random(5)
    values = [draw.randrange(1000) for _ in range(77)]
    ranges = sorted(sorted(draw.sample(range(78), 2)) for _ in range(200))
    program = script_of("counters.js") + f"""
const values = Float64Array.from({values}), largest = new Largest(values), series = new Series("", "", values);
process.stdout.write(JSON.stringify({ranges}.map(([from, to]) => [largest.of(from, to), series.mean(from, to)])));
"""
    result = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [[max(values[a:b]), pytest.approx(sum(values[a:b]) / (b - a))]
                                         for a, b in ranges]


# Chromium draws no frames while it only dumps a page.
FRAMES = "<script>window.requestAnimationFrame = (draw) => setTimeout(draw);</script></head>"
LOOK = """<script>
const wait = setInterval(async () => {
  if (!document.documentElement.dataset.openedMs) return;
  clearInterval(wait);
  const box = document.getElementById("rows").getBoundingClientRect(), said = [];
  for (const [x, row] of POINTS) {
    document.getElementById("charts").dispatchEvent(new PointerEvent("pointermove", {
      bubbles: true, clientX: box.left + x * box.width, clientY: box.top + 24 + (row + 0.5) * 24 }));
    said.push(document.getElementById("details").innerText);
  }
  for (const key of ["+", "+", "ArrowLeft", "ArrowLeft", "ArrowLeft", "0", "Escape"]) {      // the pointer rests
    document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await new Promise((done) => setTimeout(done, 60));
    said.push(document.getElementById("details").innerText);
  }
  document.getElementById("request").value = "77";
  document.getElementById("search").requestSubmit();
  said.push(document.getElementById("found").textContent, document.getElementById("legend").innerText,
            document.getElementById("message").textContent);
  document.body.innerHTML = `<pre id="said">${btoa(unescape(encodeURIComponent(JSON.stringify(said))))}</pre>`;
}, 20);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="looking at the page takes chromium, and there is none")
def test_a_browser_shows_what_the_pointer_is_on(tmp_path):
    reason = "<b>blocks & more"
    iterations = [
        IterationTrace(5, ((41, 0, 12),), (), (), (), (41, 42), 1.0, {"start": 9000}, {reason: (42,)}),
        IterationTrace(6, (), (41,), (), (), (), 1.01, {"start": 9000}, {reason: (42,)}),
        IterationTrace(7, ((42, 8, 20),), (), (41,), (), (), 1.02, {"start": 9000}, live_blocks=3, free_blocks=4),
        IterationTrace(8, (), (42,), (), (41, 42), (), 1.03, {"start": 9000})]
    page = tmp_path / "page.html"
    points = [[0.2, 0], [0.2, 1], [0.7, 1], [0.7, 0]]
    page.write_text(page_of(iterations).replace("</head>", FRAMES).replace(
        "</body>", LOOK.replace("POINTS", json.dumps(points))))
    result = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1000,800", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60)
    found = re.search(r'<pre id="said">([^<]*)</pre>', result.stdout)
    assert found, result.stdout[-2000:] + result.stderr[-2000:]
    chunk, waits, second, paused, *moved, search, legend, message = json.loads(base64.b64decode(found.group(1)))
    words = [re.sub(r"\s+", " ", each) for each in (chunk, waits, second, paused)]
    assert words[0].startswith("request 41: context iteration 5 time 0.000000 s tokens 12 first position 0")
    assert words[1].startswith(f"request 42: waiting: {reason}") and "5 to 6, 2 iterations" in words[1]
    assert words[2].startswith("request 42: context iteration 7") and "tokens 20 first position 8" in words[2]
    assert "3 live, 0 cached, 4 free" in words[2] and words[3].startswith("request 41: paused iteration 7")
    assert paused == moved[-2] == moved[-1] and "iteration\n7" in paused and len({*moved}) > 1
    assert search == "there is no request 77" and f"waiting: {reason}" in legend and message == ""
