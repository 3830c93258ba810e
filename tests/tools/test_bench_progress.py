"""The progress display of a benchmark shows the right numbers."""

import io
import time
from types import SimpleNamespace

import pytest

from batch_manager.tools.bench import client, progress
from batch_manager.tools.bench.client import Client, Receipt
from batch_manager.tools.bench.progress import Progress, duration

REQUESTS = [{"id": number, "max_tokens": 10, "arrival_s": arrival} for number, arrival in enumerate((0.0, 0.0, 60.0))]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def made(file=None, label="", started=None):
    client = Client()
    client._receipts = {0: Receipt([7] * 10, [1.0] * 10), 1: Receipt([7] * 2, [1.0] * 2), 2: Receipt(arrival_s=60.0)}
    client._num_open, client._started = 2, time.perf_counter() - 2.0 if started is None else started
    manager = SimpleNamespace(health=lambda: {"active_requests": 1})
    return Progress(client, manager, REQUESTS, label, file=file)


def wait_for(text, file):
    give_up = time.monotonic() + 20
    while text not in file.getvalue():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_the_state_follows_from_the_receipts(monkeypatch):
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: 102.0))
    state = made(started=100.0).state()
    assert (state.done, state.total, state.active, state.queued) == (1, 3, 1, 0)
    assert (state.tokens_per_s, state.left_s) == (6.0, 58.0)        # the last request has yet to arrive
    assert state.words().startswith("1 of 3 requests, 6 tokens/s, 1 active, 0 queued, 58 s left")


def test_without_a_terminal_there_are_lines(monkeypatch):
    monkeypatch.setattr(progress, "LINE_PERIOD_S", 0.02)
    file = io.StringIO()
    with made(file, "concurrency 2, 1 of 3"):
        wait_for("\n", file)
    lines = file.getvalue().splitlines()
    assert lines and all(line.startswith("concurrency 2, 1 of 3: 1 of 3 requests, ") for line in lines)


def test_in_a_terminal_there_is_a_bar_and_nothing_of_it_stays(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(progress, "BAR_PERIOD_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with made(file, "a label"):
        wait_for("1 of 3 requests", file)
    drawn = file.getvalue()
    assert "a label" in drawn and "1 of 3 requests" in drawn and drawn.endswith("\x1b[2K")


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    monkeypatch.setattr(progress, "LINE_PERIOD_S", 0.02)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    file = Terminal()
    with made(file):
        wait_for("\n", file)
    assert file.getvalue().startswith("1 of 3 requests, ") and "\x1b" not in file.getvalue()


@pytest.mark.parametrize("seconds, told", [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (4320, "1 h 12 min")])
def test_durations_in_words(seconds, told):
    assert duration(seconds) == told
