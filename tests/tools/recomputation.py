"""Runs of 50 random requests, whose times are measured in the callbacks and compared with what the tools say.

`measured` holds the times of the callbacks. `comparisons` yields each figure of `why`, the CSV, Perfetto, the HTML page
and the SVG beside the same figure from the callbacks or from the raw trace.
"""

import csv
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from typing import Any
from xml.etree import ElementTree

from batch_manager import IterationTrace, KvCacheConfig, SchedulerPolicy
from batch_manager.tools.draw.html import write_html
from batch_manager.tools.draw.svg import render_svg
from batch_manager.tools.draw.timeline import Timeline
from batch_manager.tools.request_spans import CLIENT, lives
from batch_manager.tools.trace import why, write_csv, write_perfetto
from tests.harness.client import Client
from tests.harness.requests import request
from tests.tools.unpacking import unpack

REQUESTS = 50
STEP_S, TOKEN_S = 0.004, 0.0001          # a step lasts STEP_S and TOKEN_S for each token
LEAST_ERROR_S, LARGEST_ERROR = 1e-3, 0.01
TITLE = re.compile(r"request (\d+), .*?: (client|[a-z]+).*, ([0-9.]+) ms")


@dataclass(frozen=True, slots=True)
class Setting:
    """How requests arrive, and the engine that they arrive at.

    seconds_between   mean time from one arrival to the next
    hold_s            get returns nothing for so long after the start
    callback_s        a call of get and of the statistics lasts so long; poll and send half as long
    """

    seconds_between: float = 0.0
    hold_s: float = 0.0
    callback_s: float = 0.0
    max_num_tokens: int = 512
    num_blocks: int = 200
    options: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "staggered": Setting(seconds_between=0.03),
    "all at once": Setting(),
    "chunks": Setting(seconds_between=0.01, max_num_tokens=32, options={"enable_chunked_context": True}),
    "pauses": Setting(num_blocks=16, options={"max_num_sequences": 12, "enable_chunked_context": True}),
    "first batch delay": Setting(seconds_between=0.005, hold_s=0.3),
    "slow callbacks": Setting(seconds_between=0.02, callback_s=0.006),
}


class MeasuringClient(Client):
    """Hands over requests when they are due, and notes the times of its callbacks.

    lengths     request id -> (prompt tokens, output tokens), in order of arrival
    arrived, returned, ended   request id -> seconds of the clock: due; get returned it; its final response came
    stats_seconds   seconds of each call of the statistics callback
    """

    def __init__(self, setting: Setting, seed: int, now: Callable[[], float], wait: Callable[[float], None]) -> None:
        super().__init__()
        draw = random.Random(seed)
        self._setting, self._now, self._wait = setting, now, wait
        self.started = now()
        self.arrived, at = {}, self.started
        self.lengths = {}
        for request_id in range(1, REQUESTS + 1):
            self.arrived[request_id] = at
            at += draw.expovariate(1 / setting.seconds_between) if setting.seconds_between else 0.0
            self.lengths[request_id] = draw.randint(1, 60), draw.randint(1, 30)
        self._due = list(self.arrived)
        self.returned: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.stats_seconds: list[float] = []

    def items(self, max_num_requests: int) -> list:
        began = self._now()
        due = [i for i in self._due if self.arrived[i] <= began and began >= self.started + self._setting.hold_s]
        due = due[:max_num_requests] if max_num_requests >= 0 else due
        self._due = [i for i in self._due if i not in due]
        self._last(self._setting.callback_s)
        requests = [request(i, [1 + (i * 7 + n) % 90 for n in range(self.lengths[i][0])], self.lengths[i][1],
                            arrival_time=self.arrived[i]) for i in due]
        self.returned |= dict.fromkeys(due, self._now())
        return requests

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> Any:
        assert not error, error
        if final:
            self.ended[request_id] = self._now()
        self._last(self._setting.callback_s / 2)
        return super().received(request_id, tensors, final, error)

    @property
    def is_done(self) -> bool:
        return len(self.ended) == REQUESTS

    def poll(self) -> Any:
        self._last(self._setting.callback_s / 2)
        return super().poll()

    def return_stats(self, record: str) -> None:
        began = self._now()
        super().return_stats(record)
        self._last(self._setting.callback_s)
        self.stats_seconds.append(self._now() - began)

    def _last(self, seconds: float) -> None:
        if seconds:
            self._wait(seconds)


def engine_options(setting: Setting) -> dict[str, Any]:
    """Return the arguments of `make_loop` and `make_manager` for a setting."""
    return {"policy": SchedulerPolicy.MAX_UTILIZATION, "max_batch_size": 8, "max_num_tokens": setting.max_num_tokens,
            "kv_cache_config": KvCacheConfig(tokens_per_block=8), **setting.options}


def backend_options(setting: Setting) -> dict[str, Any]:
    return {"num_blocks": setting.num_blocks, "tokens_per_block": 8, "max_seq_len": 96}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure that a tool gives, and the same figure recomputed, in seconds."""

    what: str
    told_s: float
    expected_s: float

    @property
    def is_right(self) -> bool:
        return abs(self.told_s - self.expected_s) <= max(LEAST_ERROR_S, LARGEST_ERROR * abs(self.expected_s))


def comparisons(iterations: list[IterationTrace], client: MeasuringClient) -> Iterator[Comparison]:
    """Yield each figure beside its recomputation."""
    sums = {"why": _why(iterations), "csv": _csv(iterations), "perfetto": _perfetto(iterations),
            "page": _page(iterations), "svg": _svg(iterations)}
    for tool, (whole, in_client) in sums.items():
        for request_id, arrived in client.arrived.items():
            yield Comparison(f"{tool}: end to end of request {request_id}", whole[request_id],
                             client.ended[request_id] - arrived)
            yield Comparison(f"{tool}: request {request_id} in the client", in_client[request_id],
                             client.returned[request_id] - arrived)
    for each, following in zip(iterations, iterations[1:]):
        if not _is_idle_after(each, client):
            yield Comparison(f"phases of iteration {each.iteration}", 1e-6 * sum(each.phases_us.values()),
                             following.started_at_s - each.started_at_s)
    for each, seconds in zip(iterations, client.stats_seconds, strict=True):
        yield Comparison(f"statistics callback of iteration {each.iteration}", 1e-6 * each.phases_us["stats"], seconds)


def _is_idle_after(iteration: IterationTrace, client: MeasuringClient) -> bool:
    """Whether every request that get had returned by then has ended."""
    end = max([client.ended[i] for i in iteration.finished], default=None)
    return end is not None and not any(client.returned[i] <= end < client.ended[i] for i in client.arrived)


Sums = tuple[dict[int, float], dict[int, float]]


def _added(rows: Iterator[tuple[int, str, float]]) -> Sums:
    """Add up (request id, kind, seconds): all of a request, and those of the kind CLIENT."""
    whole: dict[int, float] = defaultdict(float)
    in_client: dict[int, float] = defaultdict(float)
    for request_id, kind, seconds in rows:
        whole[request_id] += seconds
        if kind == CLIENT:
            in_client[request_id] += seconds
    return whole, in_client


def _why(iterations: list[IterationTrace]) -> Sums:
    def rows() -> Iterator[tuple[int, str, float]]:
        for life in lives(iterations):
            head, *parts = why(life)
            total = _seconds(head.split(": ")[1])
            assert abs(total - sum(map(_seconds, parts))) <= 1e-6 * len(parts) + 1e-3 * (total >= 1) * len(parts)
            for part in parts:
                yield life.request_id, CLIENT if "waited in the client" in part else "", _seconds(part)

    return _added(rows())


def _seconds(text: str) -> float:
    number, unit, *_ = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def _csv(iterations: list[IterationTrace]) -> Sums:
    file = StringIO(newline="")
    write_csv(iterations, file)
    return _added((int(row["request_id"]), row["kind"], float(row["end_s"]) - float(row["begin_s"]))
                  for row in csv.DictReader(StringIO(file.getvalue())))


def _perfetto(iterations: list[IterationTrace]) -> Sums:
    file = StringIO()
    write_perfetto(iterations, file)
    events = json.loads(file.getvalue())["traceEvents"]
    ids = {event["tid"]: int(event["args"]["name"].split()[1]) for event in events
           if event["ph"] == "M" and event["pid"] == 1 and event["name"] == "thread_name"}
    return _added((ids[event["tid"]], event["name"].split(":")[0], 1e-6 * event["dur"]) for event in events
                  if event["ph"] == "X" and event["pid"] == 1)


def _page(iterations: list[IterationTrace]) -> Sums:
    timeline, file = Timeline(), BytesIO()
    for iteration in iterations:
        timeline.append(iteration)
    write_html(timeline, file, title="")
    header, columns = unpack(re.search(rb'id="data">([^<]*)<', file.getvalue()).group(1))
    begin_us = columns["begin_us"]

    def rows() -> Iterator[tuple[int, str, float]]:
        first = 0
        for row, request_id in enumerate(map(int, header["requests"].split(","))):
            spans = range(first, first + columns["row_spans"][row])
            first = spans.stop
            begins = [begin_us[columns["span_start"][span]] + columns["span_late_us"][span] for span in spans]
            end = begin_us[columns["row_end"][row] - 1] + columns["row_late_us"][row]
            for span, begin, after in zip(spans, begins, [*begins[1:], end], strict=True):
                assert after >= begin
                yield request_id, header["kinds"][columns["span_kind"][span]]["kind"], 1e-6 * (after - begin)

    return _added(rows())


def _svg(iterations: list[IterationTrace]) -> Sums:
    titles = ElementTree.fromstring(render_svg(iterations)).iter("{http://www.w3.org/2000/svg}title")
    found = [TITLE.fullmatch(title.text or "") for title in titles]
    return _added((int(match[1]), match[2], 1e-3 * float(match[3])) for match in found if match)
