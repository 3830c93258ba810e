"""Sources of `batch-manager watch`: a Prometheus endpoint, or a growing file of statistics."""

import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any, Protocol

import orjson

from ...errors import printable

MOST_BYTES = 16 << 20          # most bytes of an answer
TAIL_BYTES = 1 << 20           # bytes at the end of a file that are read first
CHUNK_BYTES = 1 << 20
SECONDS_BETWEEN_READINGS = 0.1     # of a file, which may get a thousand records per second
FLUSH_SECONDS = 1.5            # a record stays in the engine's memory for up to this long
SILENT_S = 10.0                # without a record; then the requests and blocks of a busy engine are unknown
IDLE_STEP_S = 60.0             # longest time between two readings of a file, so that the last minute stays a minute
MICROSECONDS = 1e-6

Bounds = dict[float, float]    # bound of a bucket in seconds -> cumulative count


class SourceError(Exception):
    """The source cannot be read now. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class Latency:
    """A histogram of all latencies of one kind since the engine's start, or since the first record read from a file.

    sum       sum of the latencies in seconds
    buckets   bound of a bucket -> cumulative count; empty if only sum and count are known
    """

    count: float = 0.0
    sum: float = 0.0
    buckets: Bounds = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of an engine at one moment. Unknown values are missing.

    at_s        time of a monotonic clock, in seconds
    gauges      active, max_active, queued, scheduled (requests), kv_used, kv_free, kv_cached, kv_max (blocks),
                oldest_wait (seconds)
    counters    new, finished, paused, refused, errors (requests), tokens, prompt_tokens (tokens), callback, iteration
                (seconds); a counter that falls was reset
    latencies   histograms by name. A Prometheus endpoint gives first_token, per_token and queue, of the requests
                that ended. A file gives only queue, of the requests that were in a step for the first time
    """

    at_s: float
    gauges: dict[str, float]
    counters: dict[str, float]
    latencies: dict[str, Latency]


class Source(Protocol):
    """A source of readings.

    name    name in messages
    age_s   age of the latest record in seconds; None: unknown
    """

    name: str
    age_s: float | None

    def poll(self) -> list[Reading]:
        """Return at least one reading: the readings since the last call, in order. Raises SourceError."""

    def close(self) -> None: ...


# ---------------------------------------------------------------------- Prometheus

REQUESTS, BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
# (sample, label or "", value of the label) -> (name in a Reading, factor)
GAUGE_SAMPLES = {
    (REQUESTS, "request_type", "active"): ("active", 1), (REQUESTS, "request_type", "max"): ("max_active", 1),
    (REQUESTS, "request_type", "waiting"): ("queued", 1), (REQUESTS, "request_type", "scheduled"): ("scheduled", 1),
    (BLOCKS, "kv_cache_block_type", "used"): ("kv_used", 1), (BLOCKS, "kv_cache_block_type", "free"): ("kv_free", 1),
    (BLOCKS, "kv_cache_block_type", "max"): ("kv_max", 1),
    ("batch_manager_cached_kv_blocks", "", ""): ("kv_cached", 1),
    ("batch_manager_oldest_wait_microseconds", "", ""): ("oldest_wait", MICROSECONDS),
}
COUNTER_SAMPLES = {
    "batch_manager_new_requests_total": "new", "vllm:request_success_total": "finished",
    "vllm:num_preemptions_total": "paused", "batch_manager_refused_requests_total": "refused",
    "batch_manager_errors_total": "errors", "vllm:generation_tokens_total": "tokens",
    "vllm:prompt_tokens_total": "prompt_tokens", "batch_manager_callback_seconds_total": "callback",
    "batch_manager_iteration_seconds_total": "iteration",
}
HISTOGRAMS = {"vllm:time_to_first_token_seconds": "first_token", "vllm:request_queue_time_seconds": "queue",
              "vllm:request_time_per_output_token_seconds": "per_token"}


def read_metrics(text: str, at_s: float) -> Reading:
    """Parse text in the Prometheus exposition format. Samples of several models are added up. Raises SourceError."""
    from prometheus_client.parser import text_string_to_metric_families
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    found: dict[str, tuple[list[float], Bounds]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in COUNTER_SAMPLES:
                    name = COUNTER_SAMPLES[sample.name]
                    counters[name] = counters.get(name, 0.0) + sample.value
                elif family.name in HISTOGRAMS:
                    (sums, buckets), part = found.setdefault(HISTOGRAMS[family.name], ([0.0, 0.0], {})), sample.name
                    if part.endswith("_bucket"):
                        bound = float(sample.labels["le"])
                        buckets[bound] = buckets.get(bound, 0.0) + sample.value
                    else:
                        sums[part.endswith("_sum")] += sample.value
                else:
                    for label in (*sample.labels, ""):
                        name, factor = GAUGE_SAMPLES.get((sample.name, label, sample.labels.get(label, "")), ("", 0))
                        if name:
                            gauges[name] = gauges.get(name, 0.0) + sample.value * factor
    except (ValueError, KeyError) as error:
        raise SourceError(f"the answer is not in Prometheus format ({printable(str(error)[:80])})") from None
    if "tokens" not in counters:
        raise SourceError("the answer has no metrics of this package")
    for name in ("errors", "finished"):
        counters.setdefault(name, 0.0)           # these counters have no samples before the first event
    return Reading(at_s, gauges, counters, {name: Latency(count, total, buckets)
                                            for name, ((count, total), buckets) in found.items()})


class MetricsSource:
    """A Source that requests metrics in Prometheus text format from a URL, as PrometheusStatistics serves them."""

    age_s = None

    def __init__(self, url: str, timeout_s: float) -> None:
        self.name, self._timeout_s = url, timeout_s
        # Proxies from environment variables are not used.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def poll(self) -> list[Reading]:
        request = urllib.request.Request(self.name, headers={"Accept": "text/plain"})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                body = answer.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise SourceError(f"the address answers with status {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise SourceError(getattr(reason, "strerror", None) or str(reason) or type(error).__name__) from None
        if len(body) > MOST_BYTES:
            raise SourceError(f"the answer is longer than {MOST_BYTES >> 20} MiB")
        return [read_metrics(body.decode(errors="replace"), time.monotonic())]

    def close(self) -> None:
        """Do nothing, because each poll has its own connection."""


# ---------------------------------------------------------------------- a file

# name in a Reading -> (key, factor)
GAUGE_KEYS = {"active": ("Active Request Count", 1), "max_active": ("Max Request Count", 1),
              "queued": ("Queued Requests", 1), "scheduled": ("Scheduled Requests", 1),
              "kv_used": ("Used KV cache blocks", 1), "kv_free": ("Free KV cache blocks", 1),
              "kv_cached": ("Cached KV cache blocks", 1), "kv_max": ("Max KV cache blocks", 1),
              "oldest_wait": ("Oldest Wait Microseconds", MICROSECONDS)}
COUNTED_IN_ITERATIONS = {"new": "New Requests", "paused": "Paused Requests", "refused": "Refused Requests",
                         "tokens": "Generated Tokens", "callback": "Callback Time Microseconds",
                         "iteration": "Iteration Latency Microseconds", "queue": "Queue Time Microseconds",
                         "started": "Started Requests"}
COUNTED_SINCE_THE_START = {"prompt_tokens": ("Accepted Prompt Tokens",), "finished": (
    "Finals End ID", "Finals Stop Words", "Finals Length", "Finals Timed Out", "Finals Cancelled")}
SECONDS = ("callback", "iteration", "queue")
# Things that have no end, or no position to which a reader could return. A folder has its own message.
KINDS = ((stat.S_ISCHR, "a character device"), (stat.S_ISBLK, "a block device"), (stat.S_ISFIFO, "a pipe"),
         (stat.S_ISSOCK, "a socket"))


def other_kind(mode: int) -> str:
    """Return the kind of a path that cannot be read like a file, such as "a pipe". Return "" for any other path.

    mode   st_mode of the path
    """
    return next((words for is_kind, words in KINDS if is_kind(mode)), "")


def why_not_watchable(path: str) -> str:
    """Return why `path` cannot be a file that grows, or "" if it can.

    If there is no file at `path`, the result is "", because the file may appear later.
    """
    try:
        kind = other_kind(os.stat(path).st_mode)
    except (OSError, ValueError):
        return ""
    return kind and (f"{printable(path)} is {kind}; expected a regular file that JsonlStatistics writes; name one, or "
                     "watch the engine with --url")


class FileSource:
    """A Source that reads a file of JsonlStatistics, from near its end. The file may be replaced or truncated.

    Counters count from the first record that was read.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        self.age_s: float | None = None
        self._descriptor = -1
        self._rest = b""
        self._is_first = True
        self._sums = dict.fromkeys([*COUNTED_IN_ITERATIONS, *COUNTED_SINCE_THE_START, "errors"], 0.0)
        self._last: dict[str, Any] = {}
        self._clock_ahead_s = 0.0
        self._lines_without_record = 0

    def poll(self) -> list[Reading]:
        lines = list(self._lines())
        readings: list[Reading] = []
        for number, line in enumerate(lines, 1):
            try:
                record = orjson.loads(line)
                self._add(record)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue                      # the line is not a record
            at_s = self._at_s(record)
            if number == len(lines) or not readings or at_s - readings[-1].at_s >= SECONDS_BETWEEN_READINGS:
                readings.append(self._read(record, at_s))
        if self._last and (not readings or readings[-1].at_s < self._at_s(self._last)):
            readings.append(self._read(self._last, self._at_s(self._last)))
        if not readings:
            self._lines_without_record += len(lines)
            raise SourceError(f"none of the {self._lines_without_record} lines that were read is a record of "
                              "JsonlStatistics"
                              if self._lines_without_record else "the file has no records yet")
        self.age_s = max(time.time() - self._written_at_s, 0.0)
        latest, idle_s = readings[-1], self.age_s - FLUSH_SECONDS
        # Time passes even if nothing was written. An engine with active requests writes; if it does not, it has ended
        # or hangs, and the number of its requests is unknown.
        if idle_s > SILENT_S and latest.gauges.get("active"):
            latest = replace(latest, gauges={})
        return [*readings, *(replace(latest, at_s=latest.at_s + idle_s - back_s) for back_s in (IDLE_STEP_S, 0.0)
                             if idle_s > back_s)]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lines(self) -> Iterator[bytes]:
        """Yield complete unread lines. If the file was replaced, the rest of the old file comes first."""
        try:
            found = os.stat(self.name)
            if kind := other_kind(found.st_mode):
                raise SourceError(f"it is {kind}, not a regular file")
            if self._descriptor < 0:
                self._descriptor = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                if self._is_first and found.st_size > TAIL_BYTES:
                    os.lseek(self._descriptor, -TAIL_BYTES, os.SEEK_END)
                    self._rest = b"?"                # the first line is partial, and this character makes it invalid
                self._is_first = False
            yield from self._read_lines()
            opened = os.fstat(self._descriptor)
            if (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino):
                self.close()
                self._rest, self._lines_without_record = b"", 0
                self._descriptor = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                yield from self._read_lines()
            self._written_at_s = os.fstat(self._descriptor).st_mtime
        except OSError as error:
            raise SourceError(error.strerror or str(error)) from None

    def _read_lines(self) -> Iterator[bytes]:
        if os.lseek(self._descriptor, 0, os.SEEK_CUR) > os.fstat(self._descriptor).st_size:
            os.lseek(self._descriptor, 0, os.SEEK_SET)           # the file was truncated
            self._rest = b""
        while piece := os.read(self._descriptor, CHUNK_BYTES):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            yield from lines

    def _add(self, record: dict[str, Any]) -> None:
        """Add a record to the sums. Raises KeyError, TypeError or AttributeError for a value that is not a record."""
        since, last = self._sums, self._last
        added = {name: record.get(key, 0) + 0 for name, key in COUNTED_IN_ITERATIONS.items()}
        _ = record["Iteration Counter"] + record["Monotonic Microseconds"]
        errors = tuple(key for key in record if key.startswith("Errors "))
        for name, keys in (*COUNTED_SINCE_THE_START.items(), ("errors", errors)):
            if last:
                added[name] = sum(rise(last.get(key, 0), record.get(key, 0)) for key in keys)
        if last and record["Monotonic Microseconds"] < last["Monotonic Microseconds"]:      # clock of another machine
            self._clock_ahead_s += (last["Monotonic Microseconds"] - record["Monotonic Microseconds"]) * MICROSECONDS
        for name, value in added.items():
            since[name] += value * (MICROSECONDS if name in SECONDS else 1)
        self._last = record

    def _at_s(self, record: dict[str, Any]) -> float:
        return record["Monotonic Microseconds"] * MICROSECONDS + self._clock_ahead_s

    def _read(self, record: dict[str, Any], at_s: float) -> Reading:
        gauges = {name: record[key] * factor for name, (key, factor) in GAUGE_KEYS.items()
                  if isinstance(record.get(key), int)}
        counters = {name: value for name, value in self._sums.items() if name not in ("queue", "started")}
        return Reading(at_s, gauges, counters, {"queue": Latency(self._sums["started"], self._sums["queue"])})


def rise(then: float, now: float) -> float:
    """Return the increase of a counter from `then` to `now`. A counter that fell was reset to 0."""
    return now - then if now >= then else now
