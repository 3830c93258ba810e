"""T7, quick: a process with six engines and thousands of requests does not grow, and planted leaks are found."""

import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.loop.callbacks import GuardedCallbacks
from batch_manager.responses.deliveries import Deliveries
from tests.campaigns import soak as campaign
from tests.campaigns.registry import Options, suite

from .engines import ENGINES
from .soak import soak
from .verdict import BOUNDS, MIB, Bounds, growth, judge, slope_per_million

REPOSITORY = Path(__file__).parents[2]
SECONDS_UNTIL_GIVEN_UP = 900


def test_nothing_grows_and_everybody_is_answered():
    command = [sys.executable, "-m", "tests.soak", "--items", "1800", "--items-a-round", "25"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS_UNTIL_GIVEN_UP)
    assert result.returncode == 0, f"{' '.join(command[1:])}\n{result.stdout}\n{result.stderr}"
    assert "descriptors" in result.stdout and "short: " not in result.stdout
    cancelled, faults = (int(re.search(pattern, result.stdout)[1]) for pattern in (
        r"of them (\d+) cancelled", r"(\d+) in callbacks"))
    assert cancelled > 100 and faults > 10


def samples_of(items=600, items_a_round=20):
    samples = []
    soak(3, items, items_a_round, samples.append, ENGINES[:1])
    return samples


OBJECTS_ONLY = Bounds(rss_per_million=None, malloc_per_million=None, items_per_object=20)


def keep_deliveries(monkeypatch):
    forget, numbers = Deliveries.forget, count()

    def hoarding(self, request_id):
        delivery = forget(self, request_id)
        self._deliveries[-1 - next(numbers)] = delivery
        return delivery
    monkeypatch.setattr(Deliveries, "forget", hoarding)


def keep_in_a_list_of_the_class(monkeypatch):
    release, kept = KvCacheManager.release, []

    def hoarding(self, request, *arguments):
        kept.append(request)
        return release(self, request, *arguments)
    monkeypatch.setattr(KvCacheManager, "release", hoarding)


@pytest.mark.parametrize(("leak", "says"), [
    (keep_deliveries, "Delivery grow"),
    (keep_in_a_list_of_the_class, "LlmRequest in the process grow"),
])
def test_a_planted_leak_is_seen(leak, says, monkeypatch):
    leak(monkeypatch)
    assert says in "\n".join(judge(samples_of(), OBJECTS_ONLY).wrong)


def test_a_final_that_is_not_sent_is_seen(monkeypatch):
    send_last = GuardedCallbacks.send_last

    def forgetful(self, listed, key, request_id, tensors, error_message, code):
        if code is not None and request_id % 2 == 0:
            del listed[key]
        else:
            send_last(self, listed, key, request_id, tensors, error_message, code)
    monkeypatch.setattr(GuardedCallbacks, "send_last", forgetful)
    monkeypatch.setitem(soak.__globals__, "SECONDS_UNTIL_A_ROUND_IS_GIVEN_UP", 1.0)
    wrong = "\n".join(judge(samples_of(items=200, items_a_round=100), OBJECTS_ONLY).wrong)
    assert "I1 " in wrong and "the round was not over" in wrong


def test_memory_that_grows_is_seen():
    def sample(handed, rss):
        return {"engine": "e", "items": 1000, "steps": 10, "worker_s": 1.0, "wrong": [], "handed": handed, "rss": rss,
                "rss_untrimmed": 0, "rss_anonymous": 0, "malloc": 0, "blocks": 0, "threads": 1, "descriptors": 7,
                "objects": {}, "entries": 0, "tracked": {}}

    handles = {"threads": 1, "descriptors": 7}
    summary = {"counts": {"items": 0, "cancelled": 0, "tokens": 0}, "virtual_hours": 0, "callback_faults": 0,
               "model_faults": 0, "handles_before": handles, "handles_after": handles}
    for bytes_a_request, is_wrong in ((0.5, False), (1.5, True)):
        samples = [sample(handed, 50 * MIB + int(bytes_a_request * handed) + handed % 7 * 4096)
                   for handed in range(1000, 400_000, 1000)]
        verdict = judge([*samples, summary], BOUNDS["F"])
        assert bool(verdict.wrong) == is_wrong, verdict.wrong
        assert judge([*samples[:90], summary], BOUNDS["F"]).short
    assert judge([*samples, summary | {"handles_after": {"threads": 2, "descriptors": 7}}], OBJECTS_ONLY).wrong


def test_growth_is_told_from_variation():
    varying = [50 + (7 * i) % 11 for i in range(30)]
    assert growth(varying) <= 0 and growth([7] * 30) == 0
    assert growth([value + 2 * place for place, value in enumerate(varying)]) > 0
    slope, error = slope_per_million(range(0, 1000, 10), [3 * MIB + 2 * i for i in range(0, 1000, 10)])
    assert slope == pytest.approx(2e6) and error == pytest.approx(0, abs=1)


def test_the_campaign_says_what_it_did_and_what_it_did_not(monkeypatch):
    monkeypatch.setattr(campaign.idle.measure, "__defaults__", (0.1, 5))
    monkeypatch.setitem(campaign.ENOUGH, "F", (1_000_000, 100))
    summary = suite("T7")(Options("F", seconds=0.5, jobs=1))
    assert summary.ran.startswith("T7: seeds 0..0")
    assert summary.short and summary.short[-1].endswith("of 1,000,000 requests")
    assert "too few to judge its memory" in summary.short[0] and not summary.failures
    assert set(BOUNDS) == {"Q", "F", "C"}
