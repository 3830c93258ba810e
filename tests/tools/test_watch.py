"""`batch-manager watch` reads its sources and shows the right figures in pipes and terminals."""

import contextlib
import errno
import fcntl
import http.server
import json
import math
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from batch_manager import (
    GptManager,
    InferenceRequest,
    Parts,
    PerfMetrics,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.extras.jsonl import JsonlStatistics
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.tools.watch import __main__ as watch
from batch_manager.tools.watch.figures import Figures, History, quantile
from batch_manager.tools.watch.sources import FileSource, Latency, Reading, SourceError, read_metrics
from tests.harness import forked

prometheus = pytest.importorskip("prometheus_client", reason="NOT RUN: prometheus-client is not installed")

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "batch_manager.tools", "watch"]
# Without COLUMNS and LINES, which would override the size of the terminal.
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
               "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8"}
LAST, NUM_REFUSED, NUM_REQUESTS, OUTPUT = 10_000, 3, 20, 15
FIELDS = ("time state age_s active queued scheduled new finished paused refused errors kv_used kv_free kv_cached "
          "tokens_per_s prompt_tokens_per_s iteration_percent callback_percent oldest_wait_ms "
          + " ".join(f"{name}_{part}_ms" for name in ("first_token", "per_token", "queue")
                     for part in ("p50", "p90", "p99", "mean")) + " latency_over").split()


@pytest.fixture
def source_of():
    with contextlib.ExitStack() as stack:
        yield lambda path: stack.enter_context(contextlib.closing(FileSource(str(path))))


@pytest.fixture(scope="module")
def served():
    """Return (statistics records, Prometheus exposition) of an engine that has served some requests and is idle."""
    from batch_manager.extras.prometheus import PrometheusStatistics
    records, statistics = [], PrometheusStatistics("m")
    waiting = [InferenceRequest(number, {"input_ids": [-1] if number < NUM_REFUSED else [1, 2, 3],
                                         "request_output_len": OUTPUT, "return_perf_metrics": True})
               for number in range(NUM_REFUSED + NUM_REQUESTS)] + [InferenceRequest(LAST)]

    def get(count):
        taken, waiting[:] = waiting[:count], waiting[count:]
        return taken

    def send(_, tensors, final, error):
        if not error:
            statistics.observe(PerfMetrics.of(tensors), OUTPUT)

    def stats(record):
        records.append(record)
        statistics(record)
    manager = GptManager(None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, get, send,
                         None, stats, TrtGptModelOptionalParams(max_batch_size=8, flush_stats_when_idle=True), LAST,
                         parts=Parts(backend=ScriptedBackend()))
    assert manager.wait_until_terminate(60)
    return records, statistics.exposition().decode()


def fields_of(line):
    return dict(part.split("=", 1) for part in line.split(" "))


# ---------------------------------------------------------------------- reading


def test_metrics_and_the_file_tell_the_same(served, tmp_path, source_of):
    records, exposition = served
    path = tmp_path / "s.jsonl"
    path.write_text("".join(f"{record}\n" for record in records[:1]))
    source = source_of(path)
    source.poll()
    with path.open("a") as file:
        file.writelines(f"{record}\n" for record in records[1:])
    of_file, of_metrics, last = source.poll()[-1], read_metrics(exposition, 5.0), json.loads(records[-1])
    first = json.loads(records[0])
    assert of_metrics.gauges == of_file.gauges
    assert of_metrics.gauges["kv_max"] == last["Max KV cache blocks"] > 0 == of_metrics.gauges["active"]
    assert of_metrics.counters["new"] == of_metrics.counters["finished"] == NUM_REQUESTS
    assert of_metrics.counters["tokens"] == of_file.counters["tokens"] == NUM_REQUESTS * OUTPUT
    assert of_metrics.counters["refused"] == of_metrics.counters["errors"] == NUM_REFUSED
    assert of_file.counters["refused"] == NUM_REFUSED
    assert of_file.counters["finished"] == NUM_REQUESTS      # all of them finished after the first record
    assert of_metrics.counters["prompt_tokens"] - first["Accepted Prompt Tokens"] == of_file.counters["prompt_tokens"]
    for name in ("callback", "iteration"):
        assert of_metrics.counters[name] == pytest.approx(of_file.counters[name], abs=1e-9) and of_file.counters[name]
    assert set(of_metrics.latencies) == {"first_token", "per_token", "queue"}
    queue = of_metrics.latencies["queue"]
    assert queue.count == queue.buckets[math.inf] == of_file.latencies["queue"].count == NUM_REQUESTS
    assert of_file.latencies["queue"].sum == pytest.approx(queue.sum, abs=2e-6 * NUM_REQUESTS)


@pytest.mark.parametrize("text, told", [
    ("", "no metrics of this package"), ("<html>\n", "not in Prometheus"), ("up 1\n", "no metrics of this package"),
    ('vllm:generation_tokens_total{model_name="m"} much\n', "not in Prometheus")])
def test_what_is_no_exposition_is_told(text, told):
    with pytest.raises(SourceError, match=told):
        read_metrics(text, 0.0)


def test_several_models_are_added_up():
    text = ('# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{model_name="a"} 3\n'
            'vllm:generation_tokens_total{model_name="b"} 4\n# TYPE vllm:request_queue_time_seconds histogram\n'
            + "".join(f'vllm:request_queue_time_seconds_bucket{{le="{le}",model_name="{model}"}} {count}\n'
                      for model, counts in (("a", (1, 2)), ("b", (0, 5))) for le, count in zip(("1.0", "+Inf"), counts))
            + "".join(f'vllm:request_queue_time_seconds_{part}{{model_name="{model}"}} 2\n'
                      for part in ("count", "sum") for model in "ab"))
    reading = read_metrics(text, 0.0)
    assert reading.counters == {"tokens": 7, "errors": 0, "finished": 0}
    assert reading.latencies == {"queue": Latency(4.0, 4.0, {1.0: 1.0, math.inf: 7.0})}


def record_of(number, tokens=1, **others):
    return json.dumps({"Iteration Counter": number, "Monotonic Microseconds": number * 1_000_000,
                       "Generated Tokens": tokens, "Active Request Count": 1, **others}) + "\n"


def test_a_file_is_followed_over_rotation_truncation_and_rubbish(tmp_path, source_of):
    path, number, written = tmp_path / "s.jsonl", 0, 0
    path.write_text(record_of(0, 0))
    source, draw = source_of(path), random.Random(3)
    source.poll()
    for _ in range(300):
        action = draw.choice(["write", "write", "half", "rotate", "truncate", "rubbish"])
        if action in ("rotate", "truncate"):
            source.poll()                                # after the action, the earlier text cannot be read
        if action == "rotate":
            path.rename(f"{path}.1")
            path.touch()
        elif action == "truncate":
            os.truncate(path, 0)
            with contextlib.suppress(SourceError):
                source.poll()
        elif action == "rubbish":
            with path.open("a") as file:
                file.write(draw.choice(["\n", "{\n", "[1]\n", '{"a": 1}\n', '"\xff"\n', "7\n",
                                        '{"Iteration Counter": "x", "Monotonic Microseconds": []}\n']))
        else:
            number, tokens = number + 1, draw.randrange(9)
            whole, written = record_of(number, tokens), written + tokens
            with path.open("a") as file:
                if action == "half":
                    file.write(whole[:10])
                    file.flush()
                    source.poll()
                    file.write(whole[10:])
                else:
                    file.write(whole)
        assert source.poll()[-1].counters["tokens"] == written, action
    assert written > 200


def test_a_file_that_its_hook_rotates_is_followed(tmp_path, source_of):
    path = tmp_path / "s.jsonl"
    with JsonlStatistics(path, max_bytes=400, num_kept=1) as statistics:
        statistics(record_of(0, 0).strip())
        statistics.flush()
        source = source_of(path)
        source.poll()
        for number in range(1, 60):
            statistics(record_of(number, 2).strip())
            statistics.flush()
            assert source.poll()[-1].counters["tokens"] == 2 * number
    assert Path(f"{path}.1").exists()
    path.unlink()
    with pytest.raises(SourceError, match="No such file"):
        source.poll()


def test_an_engine_that_was_started_again_counts_from_nothing(tmp_path, source_of):
    path = tmp_path / "s.jsonl"
    path.write_text(record_of(100, 5, **{"Finals Length": 40}) + record_of(1, 5, **{"Finals Length": 2})
                    + record_of(2, 5, **{"Finals Length": 3}))
    readings = source_of(path).poll()
    assert [reading.counters["finished"] for reading in readings] == [0, 3]      # two records have the same time
    assert readings[-1].counters["tokens"] == 15
    times = [reading.at_s for reading in readings]
    assert times == sorted(times)


def test_an_idle_record_reaches_the_file_at_once(tmp_path, served):
    records, _ = served
    path = tmp_path / "s.jsonl"
    with JsonlStatistics(path) as statistics:
        for record in records:
            statistics(record)
        assert path.read_text().splitlines() == records
    assert json.loads(records[-1])["Active Request Count"] == 0


# ---------------------------------------------------------------------- figures


def test_quantiles_lie_where_a_straight_line_in_the_bucket_puts_them():
    buckets = {1.0: 10.0, 2.0: 30.0, 4.0: 40.0, math.inf: 40.0}
    assert [quantile(buckets, share) for share in (0.125, 0.25, 0.5, 1.0)] == [0.5, 1.0, 1.5, 4.0]
    assert quantile({1.0: 1.0, math.inf: 2.0}, 0.99) == math.inf
    bounds, draw = [0.01 * 1.2 ** n for n in range(40)], random.Random(1)
    values = sorted(draw.lognormvariate(-1, 1) for _ in range(5000))
    counted = {bound: float(sum(value <= bound for value in values)) for bound in [*bounds, math.inf]}
    for share in (0.5, 0.9, 0.99):
        assert quantile(counted, share) == pytest.approx(values[int(share * len(values))], rel=0.1)


def reading(at_s, latency=None, **counters):
    return Reading(at_s, {"active": at_s}, counters, {} if latency is None else {"queue": latency})


def test_rates_are_of_a_period_and_counts_of_a_minute():
    history = History()
    assert history.figures(1.0) == Figures()
    for second in range(200):
        history.add(reading(float(second), tokens=7.0 * second + (93 if second == 199 else 0), new=second,
                            iteration=0.5 * second, callback=0.25 * second))
        if second in (150, 196):
            history.figures(1.0)
    figures = history.figures(1.0)
    assert figures.tokens_per_s == (21 + 93) / 3 and figures.counts["new"] == 3      # of the same three seconds
    again = history.figures(1.0)
    assert (again.counts["new"], again.tokens_per_s, again.callback_share) == (0, None, None)
    assert figures.gauges == {"active": 199}
    assert (figures.window_s, figures.recent["new"]) == (60, 60)
    assert (figures.iteration_share, figures.callback_share) == (0.5, 0.25)
    history.add(reading(200.0, tokens=5.0, new=2))           # the engine was restarted
    figures = history.figures(1.0)
    assert figures.tokens_per_s == 5 and figures.counts["new"] == 2
    first = History()
    for second in range(20):
        first.add(reading(float(second), tokens=7.0 * second))
    assert first.figures(10.0).tokens_per_s == 7


def test_latencies_are_of_the_minute_and_of_all_where_none_ended():
    history = History()
    history.add(reading(0.0, Latency(10, 100.0, {1.0: 0.0, math.inf: 10.0})))
    assert (history.figures(1.0).latency_over, history.figures(1.0).latencies["queue"].count) == ("start", 10)
    history.add(reading(2.0, Latency(12, 101.0, {1.0: 2.0, math.inf: 12.0})))
    figures = history.figures(1.0)
    assert (figures.latency_over, figures.latencies["queue"].mean) == ("2s", 0.5)
    assert figures.latencies["queue"].quantiles == (0.5, 0.9, 0.99)
    for second in range(3, 80):
        history.add(reading(float(second), Latency(12, 101.0, {1.0: 2.0, math.inf: 12.0})))
    assert (history.figures(1.0).latency_over, history.figures(1.0).latencies["queue"].count) == ("start", 12)
    history.add(reading(81.0, Latency(1, 3.0, {1.0: 0.0, math.inf: 1.0})))
    figures = history.figures(1.0)                           # the engine was restarted
    assert (figures.latencies["queue"].count, figures.latencies["queue"].mean) == (1, 3.0)
    assert figures.latency_over == "60s"


def test_time_goes_on_where_nothing_is_written(tmp_path, source_of):
    path, history = tmp_path / "s.jsonl", History()
    path.write_text("".join(record_of(number, 10) for number in range(100)))
    os.utime(path, (time.time() - 4000,) * 2)
    source = source_of(path)
    for each in source.poll():
        history.add(each)
    figures = history.figures(1.0)
    assert (figures.tokens_per_s, round(figures.window_s)) == (0, 60) and source.age_s == pytest.approx(4000, abs=5)


# ---------------------------------------------------------------------- the program


class Metrics(http.server.BaseHTTPRequestHandler):
    """A metrics server that replies with the next of its `answers`: a text, or status 503 if the answer is no text.

    The last answer is repeated.
    """

    def do_GET(self):
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(200 if isinstance(answer, str) and self.path == "/metrics" else 503)
        self.end_headers()
        if isinstance(answer, str):
            self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def watched(*arguments, **options):
    return forked.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, **options)


def test_lines_have_the_same_fields_whatever_is_known(server, served, tmp_path):
    _, exposition = served
    more = re.sub(r"(vllm:generation_tokens_total\S+) \S+", r"\1 1000", exposition)
    server.answers = [exposition, more]
    result = watched("--url", server.url, "--count", "2", "--interval", "0.2")
    assert (result.returncode, result.stderr) == (0, "")
    of_url = [fields_of(line) for line in result.stdout.splitlines()]
    (tmp_path / "s.jsonl").write_text(served[0][0] + "\n")
    result = watched(str(tmp_path / "s.jsonl"), "--count", "1", "--interval", "0.2")
    assert (result.returncode, result.stderr) == (0, "")
    of_file = [fields_of(line) for line in result.stdout.splitlines()]
    assert [list(each) for each in [*of_url, *of_file]] == [FIELDS] * 3
    assert of_url[0]["state"] == "ok" and of_url[0]["active"] == "0"
    assert float(of_url[0]["tokens_per_s"]) > 0
    assert of_url[1]["latency_over"] == "start" and float(of_url[1]["queue_p99_ms"]) > 0
    assert of_file[0]["queue_p99_ms"] == "-" and of_file[0]["age_s"] != "-"


def test_a_source_that_is_away_is_told_and_given_up(server, served, tmp_path):
    _, exposition = served
    server.answers = [exposition, 503, exposition, exposition, 503]
    result = watched("--url", f"{server.url}/metrics", "--interval", "0.2", "--timeout", "1.5")
    assert result.returncode == 1
    assert re.fullmatch(r"watch: \S+/metrics was not readable for \S+ s: the address answers with status 503; "
                        r"expected the statistics of an engine; start the engine, .*\n", result.stderr)
    lines = [fields_of(line) for line in result.stdout.splitlines()]
    states = [fields["state"] for fields in lines]
    assert states[:4] == ["unreachable", "ok", "ok", "unreachable"] and set(states[4:]) <= {"unreachable"}
    assert lines[0]["active"] == "-" and list(lines[0]) == FIELDS

    for source, told in ((["--url", "127.0.0.1:9"], "Connection refused"),
                         ([str(tmp_path / "none")], "No such file"), ([str(tmp_path)], "Is a directory")):
        result = watched(*source, "--timeout", "0", "--interval", "0.1")
        assert result.returncode == 1 and told in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [
    [], ["a", "--url", "http://x"], ["--url", "ftp://x"], ["--url", "file:///etc/passwd"], ["--url", "http://"],
    ["a", "--interval", "0"], ["a", "--interval", "nan"], ["a", "--interval", "1e300"], ["a", "--timeout", "inf"],
    ["a", "--timeout", "-1"], ["a", "--count", "-1"],
    ["a", "--no-such"]])
def test_a_wrong_command_line_is_status_two(arguments, capsys):
    with pytest.raises(SystemExit) as told:
        watch.parse_options(arguments)
    assert told.value.code == 2 and "batch-manager watch: " in capsys.readouterr().err


@pytest.mark.parametrize("address", ["http://[", "http://127.0.0.1:99999999/metrics", "127.0.0.1:x"])
def test_what_is_no_address_is_refused_with_the_form_of_one(address, capsys):
    with pytest.raises(SystemExit, match="2"):
        watch.parse_options(["--url", address])
    assert f"{address!r} is not an address; expected http://HOST:PORT/metrics" in capsys.readouterr().err


def test_what_has_no_end_or_no_place_to_return_to_is_refused(tmp_path, capsys):
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    for path, kind in (("/dev/zero", "a character device"), (pipe, "a pipe")):
        with pytest.raises(SystemExit, match="2"):
            watch.parse_options([str(path)])
        assert f"{path} is {kind}; expected a regular file that JsonlStatistics writes; " in capsys.readouterr().err
    assert watch.parse_options([str(file)]).file == str(file)         # it may appear later
    source = FileSource(str(file))
    file.symlink_to("/dev/zero")
    with pytest.raises(SourceError, match="it is a character device, not a regular file"):
        source.poll()


def test_an_address_may_be_short():
    for text in ("127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000/"):
        assert watch.parse_options(["--url", text]).url == "http://127.0.0.1:8000/metrics"
    assert watch.parse_options(["--url", "https://a.example/b?c=d"]).url == "https://a.example/b?c=d"


def test_whoever_reads_the_lines_may_leave(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(record_of(1))
    process = forked.Popen([*COMMAND, str(path), "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env=ENVIRONMENT)
    assert process.stdout.readline().startswith(b"time=")
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_ctrl_c_is_quiet_in_a_pipe(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(record_of(1))
    process = forked.Popen([*COMMAND, str(path), "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env=ENVIRONMENT)
    assert process.stdout.readline().startswith(b"time=")
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == (b"", 130)


# ---------------------------------------------------------------------- in a terminal


class Terminal:
    """A `batch-manager watch` process in its own terminal, with the output that it wrote."""

    def __init__(self, *arguments, width=90, **environment):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**ENVIRONMENT, "TERM": "xterm-256color", **environment})
        os.close(slave)
        self.written = b""

    def until(self, *texts):
        """Wait until the terminal shows all of `texts`. Return the terminal's content without colours."""
        deadline = time.monotonic() + 30
        while not all(text in self.text for text in texts):
            assert time.monotonic() < deadline and self._read(), self.text
        return self.text

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written.decode(errors="replace"))

    def _read(self):
        if not select.select([self.master], [], [], 30)[0]:
            return False
        try:
            piece = os.read(self.master, 65536)
        except OSError as error:             # the other end is closed
            assert error.errno == errno.EIO
            return False
        self.written += piece
        return bool(piece)

    def end(self):
        while self._read():
            pass
        os.close(self.master)
        return self.process.wait(60)


def has_cursor(written):
    return written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l") >= 0


def test_the_picture_shows_what_is_known_and_ends_with_ctrl_c(server, served):
    pytest.importorskip("rich", reason="NOT RUN: rich is not installed")
    _, exposition = served
    server.answers = [re.sub(rf"({name}\S+) \S+", rf"\1 {value}", exposition) for name, value in (
        ("vllm:generation_tokens_total", 1000), ("vllm:generation_tokens_total", 2000))]
    terminal = Terminal("--url", server.url, "--interval", "0.2")
    shown = terminal.until("batch-manager", "requests", "0 of 8 active", "KV blocks", "tokens/s", "peak", "▁",
                           "in callbacks", "refused", "since start", "first token",
                           "in the queue")
    assert f"0 of {re.search('kv_cache_block_type=.max.*} (.*)', exposition)[1].split('.')[0]}" in shown
    *lines, _ = re.split("\r\n?", shown)                        # the last line may be incomplete
    assert all("━" * 10 in line for line in lines if "KV blocks" in line)
    assert {len(line) for line in lines if line.startswith(("╭", "│", "╰"))} == {80}
    os.write(terminal.master, b"\x03")
    assert terminal.end() == 130
    assert has_cursor(terminal.written) and "Traceback" not in terminal.text and "Keyboard" not in terminal.text


def test_the_picture_says_that_its_source_is_away(server, served):
    pytest.importorskip("rich", reason="NOT RUN: rich is not installed")
    server.answers = [served[1], served[1], 503]
    terminal = Terminal("--url", server.url, "--interval", "0.1", "--timeout", "0.5")
    terminal.until("the address answers with status 503")
    assert terminal.end() == 1
    assert has_cursor(terminal.written) and "was not readable for" in terminal.text


@pytest.mark.parametrize("width", [30, 60, 200])
def test_the_picture_fits_the_terminal_and_ends_after_its_count(width, tmp_path, served):
    pytest.importorskip("rich", reason="NOT RUN: rich is not installed")
    path = tmp_path / "s.jsonl"
    path.write_text("".join(f"{record}\n" for record in served[0]))
    os.utime(path, (time.time() - 100,) * 2)
    terminal = Terminal(str(path), "--interval", "0.1", "--count", "2", width=width)
    assert terminal.end() == 0
    lines = [line.rstrip() for line in terminal.text.splitlines() if line.startswith(("╭", "│", "╰"))]
    assert {len(line) for line in lines} == {min(width, 80)}
    assert width == 30 or "the latest record is" in terminal.text


def test_a_terminal_without_unicode_gets_ascii(tmp_path, served):
    pytest.importorskip("rich", reason="NOT RUN: rich is not installed")
    path = tmp_path / "s.jsonl"
    path.write_text("".join(f"{record}\n" for record in served[0]))
    terminal = Terminal(str(path), "--interval", "0.1", "--count", "2", PYTHONIOENCODING="ascii")
    assert terminal.end() == 0
    assert terminal.text.isascii() and "KV blocks" in terminal.text and "....." in terminal.text


def test_sigterm_gives_the_cursor_back(tmp_path):
    pytest.importorskip("rich", reason="NOT RUN: rich is not installed")
    path = tmp_path / "s.jsonl"
    path.write_text(record_of(1))
    terminal = Terminal(str(path), "--interval", "0.1")
    terminal.until("KV blocks")
    terminal.process.terminate()
    assert terminal.end() == 128 + signal.SIGTERM and has_cursor(terminal.written)


@pytest.mark.parametrize("how", ["no rich", "dumb", "--plain"])
def test_without_a_picture_a_terminal_gets_lines(how, tmp_path):
    path, arguments, environment = tmp_path / "s.jsonl", [], {}
    path.write_text(record_of(1))
    if how == "no rich":
        (tmp_path / "rich.py").write_text("raise ImportError('no rich')\n")
        environment["PYTHONPATH"] = f"{tmp_path}:{REPOSITORY}"
    elif how == "dumb":
        environment["TERM"] = "dumb"
    else:
        arguments.append("--plain")
    terminal = Terminal(str(path), "--interval", "0.1", "--count", "2", *arguments, **environment)
    assert terminal.end() == 0
    lines = terminal.text.splitlines()
    assert len(lines) == 2 and all(list(fields_of(line)) == FIELDS for line in lines)


def test_without_prometheus_client_an_address_cannot_be_watched(tmp_path):
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('none')\n")
    result = subprocess.run([*COMMAND, "--url", "127.0.0.1:9"], capture_output=True, text=True, timeout=60,
                            env={**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})
    assert result.returncode == 2 and 'pip install "batch-manager[tools]"' in result.stderr


def test_a_file_of_another_kind_is_told_so_again_and_again(tmp_path):
    path = tmp_path / "az.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,12,3\n")
    source = FileSource(str(path))
    for _ in range(2):
        with pytest.raises(SourceError, match="none of the 2 lines that were read is a record of JsonlStatistics"):
            source.poll()
    source.close()


@pytest.mark.parametrize("active, shown", [(5, None), (0, 0)])
def test_after_the_end_of_a_file_nothing_is_active(active, shown, tmp_path, source_of):
    path = tmp_path / "statistics.jsonl"
    path.write_text("".join(json.dumps({
        "Iteration Counter": number, "Monotonic Microseconds": 20_000 * number, "Active Request Count": active,
        "Queued Requests": 2, "Used KV cache blocks": 9}) + "\n" for number in range(50)))
    now = time.time()
    history = History()
    source = source_of(path)
    for age_s, known in ((5, active), (30, shown)):
        os.utime(path, (now - age_s, now - age_s))
        for reading in source.poll():
            history.add(reading)
        figures = history.figures(1.0)
        assert figures.gauges.get("active") == known and figures.tokens_per_s == 0
    assert ("kv_used" in figures.gauges) is (shown is not None)
