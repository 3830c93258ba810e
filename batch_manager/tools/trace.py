"""Explain where the time of the requests of a trace went, and convert the trace for other viewers.

    batch-manager trace why 17 trace.jsonl            # where the time of request 17 went
    batch-manager trace slowest trace.jsonl           # the slowest requests, and where their time went
    batch-manager trace perfetto trace.jsonl out.json # for https://ui.perfetto.dev and chrome://tracing
    batch-manager trace csv trace.jsonl out.csv       # a row for each span of each request

To write a trace, use `batch-manager bench --trace FILE`, or `Parts(trace=TraceFile("trace.jsonl"))` in a program. OUT
may be -, the standard output.

Exit status: 0 done; 1 the trace does not have the request; 2 an argument or the file is wrong; 130 Ctrl-C.
"""

import argparse
import csv
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ..errors import counted
from ..scheduling import waiting
from ..stats.trace import IterationTrace, read_trace
from . import client_waits
from .__main__ import run_as
from .command_parser import CommandParser
from .output_file import OutputError, output_file, why_not_writable
from .request_spans import CLIENT, CONTEXT, GENERATION, NO_STEP, PAUSED, QUEUED, WAITING, Life, Span, lives
from .shared_options import add_shared
from .standard_output import discard_standard_output, print_flushed

SENTENCES = {
    waiting.COMPLETE: "waited: complete, but its static batch was not done",
    waiting.BATCH_SIZE: "waited: the steps had max_batch_size requests",
    waiting.BATCH_RUNS: "waited: the static batch before it had not ended",
    waiting.PREFIX: "waited: another request computed a prefix that it shares",
    waiting.BLOCKS: "waited: too few KV cache blocks were free",
    waiting.TOKENS: "waited: too few tokens of the steps were left (max_num_tokens)",
    waiting.ADAPTER_PAGES: "waited: too few pages for its adapter were free, or other adapters were loaded first",
    waiting.BEAM_WIDTH: "waited: the steps had requests of another beam width",
    waiting.ORDER: "waited: after other requests that waited",
    NO_STEP: "waited: no step was planned",
    QUEUED: "queued: max_num_sequences requests were active",
    PAUSED: "paused: its blocks were freed",
}
IN_CLIENT = {
    client_waits.UNKNOWN: "until the get callback returned it",
    client_waits.BEFORE: "before the first iteration of the trace",
    client_waits.IDLE: "the engine was idle, and the get callback had not returned it",
    client_waits.NEXT_GET: "for the next call of the get callback",
    client_waits.FREE_ROOM: "there was room, and the get callback returned fewer requests than asked for, or raised",
    client_waits.ADMISSIONS: "the iterations read max_admissions_per_iteration requests",
    client_waits.NO_ROOM: "max_num_sequences requests were active, and all ran",
}
CALLBACKS = {
    "trace": "the trace hook", "get": "the get callback", "respond": "sending responses, with the send callback",
    "poll": "polling stop signals, with the poll callback", "after_responses": "the hook after_responses",
    "stats": "the statistics callback",
}
AND_SOME = "max_num_sequences requests were active, and some of them "
MOST_NAMED = 5
BEFORE_S = 1e6          # eleven days
LEAST_IDLE_US = 10      # times are rounded
SLOW_CALLBACKS, LEAST_CALLBACK = 0.1, 0.01   # the callbacks are named if they take a larger share of the time
SLOW = 2.0            # a step is named if it lasts this many times as long as the mean


def why(life: Life) -> list[str]:
    """Return lines that say where the time of a request went.

    The first line has the time from the arrival to the end. The times of the other lines add up to this time. A refused
    request has one line, without a time. The lines state only what the trace records.
    """
    if life.was_refused:
        return [f"request {life.request_id}: refused in iteration {life.last_iteration} ({life.end_reason})"]
    reason = f" ({life.end_reason})" if life.end_reason else ""
    ended = f"to its end{reason}" if life.has_ended else "to the end of the trace, where it is still alive"
    arrived_before, first = life.arrived_before, life.first_iteration
    arrival = f"its arrival in iteration {first}" if arrived_before is None else (
        f"its arrival before iteration {arrived_before}"
        + ("" if arrived_before == first else f" (handed over in iteration {first})"))
    lines = [f"request {life.request_id}: {_time(life.seconds)} from "
             f"{arrival if life.has_arrived else f'iteration {first}, the first that names it,'} "
             f"{ended} in iteration {life.last_iteration}"]
    groups: dict[tuple[str, str, bool], list[Span]] = defaultdict(list)
    for span in life.spans:
        groups[span.kind, span.reason, span.kind == CONTEXT and span.pauses > 0].append(span)
    for spans in sorted(groups.values(), key=lambda spans: -sum(span.seconds for span in spans)):
        text = re.sub(r"max_\w+", lambda name: _with_value(name[0], life.settings), _sentence(spans))
        lines.append(f"  {_time(sum(span.seconds for span in spans)):>10}  {text}{_callbacks(spans)}")
    return lines


def _with_value(name: str, settings: Mapping[str, int | str]) -> str:
    value = settings.get(name)
    return name if value is None or value == -1 else f"{name} ({value:,})"


def _sentence(spans: list[Span]) -> str:
    kind, reason = spans[0].kind, spans[0].reason
    iterations, named, times = sum(span.iterations for span in spans), sum(span.named for span in spans), len(spans)
    counted = ("" if named == iterations else f"{named:,} of ") + _count(iterations, "iteration")
    if kind == CONTEXT:
        return f"{_computed(spans)}, in {counted}{_beside(spans)}"
    if kind == GENERATION:
        mean = sum(span.seconds for span in spans) / iterations
        return f"generated: {counted} of {_time(mean)} each{_beside(spans)}"
    if kind == CLIENT:
        if reason.startswith(client_waits.NO_ROOM_AND):
            obstacle = reason.removeprefix(client_waits.NO_ROOM_AND)
            return f"waited in the client: {AND_SOME}{SENTENCES.get(obstacle, f'waited: {obstacle}')}"
        return f"waited in the client: {IN_CLIENT[reason]}"
    others = sorted(set().union(*(span.running for span in spans)))
    beside = f"; meanwhile ran {_named(others)}" if others else ""
    sentence = SENTENCES.get(reason if kind == WAITING else kind, f"waited: {reason}")
    return f"{sentence}; {counted}, {_count(times, 'time')}{beside}"


def _computed(spans: list[Span]) -> str:
    """Say which tokens the CONTEXT spans computed: all before the first pause, or all after it."""
    computed, again, found = (sum(getattr(span, name) for span in spans) for name in ("tokens", "again", "found"))
    if spans[0].pauses:
        cached = f" and found {found:,} in the cache" if found else ""
        return (f"computed {_count(computed, 'token')}{cached} after it was paused {_count(spans[-1].pauses, 'time')}, "
                f"{again:,} of them again")
    cached = f", of which {found:,} were found in the cache" if found else ""
    repeated = f", {again:,} of them again" if again else ""
    return f"computed its prompt: {counted(computed + found, 'token')}{cached}{repeated}"


def _beside(spans: list[Span]) -> str:
    """Say what ran in the steps beside the request, and in its slowest step."""
    steps = sum(span.steps for span in spans)
    others = sum(span.others for span in spans)
    text = f", beside {others / steps:.1f} other requests in a step" if others else ""
    if with_prompts := sum(span.with_prompts for span in spans):
        prompts = sorted(set().union(*(span.prompts for span in spans)))
        text += (f"; {_count(with_prompts, 'step')}, {_time(sum(span.with_prompts_s for span in spans))}, also "
                 f"computed {sum(span.other_tokens for span in spans):,} prompt tokens of {_named(prompts)}")
    slowest = max((span.slowest for span in spans if span.slowest), key=lambda step: step.seconds, default=None)
    if slowest is not None and steps > 1 and slowest.seconds * steps > SLOW * sum(span.seconds for span in spans):
        prompts_of = f" and {slowest.other_tokens:,} prompt tokens of {_named(slowest.prompts)}"
        text += (f"; the slowest, {_time(slowest.seconds)} in iteration {slowest.iteration}, had "
                 f"{_count(slowest.others, 'other request')}{prompts_of if slowest.other_tokens else ''}")
    return text


def _callbacks(spans: list[Span]) -> str:
    """Say how much of the time of spans went to callbacks, if it is much."""
    all_s = sum(span.seconds for span in spans)
    seconds = {phase: sum(span.callbacks_s.get(phase, 0.0) for span in spans) for phase in CALLBACKS}
    if sum(seconds.values()) <= SLOW_CALLBACKS * all_s:
        return ""
    told = [f"{_time(value)} in {CALLBACKS[phase]}" for phase, value in sorted(
        seconds.items(), key=lambda pair: -pair[1]) if value > LEAST_CALLBACK * all_s]
    return f"; of this time {', '.join(told)}"


def _named(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - MOST_NAMED:,} more" if len(ids) > MOST_NAMED else ""
    return ", ".join(map(str, ids[:MOST_NAMED])) + more


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"


def write_perfetto(iterations: Iterable[IterationTrace], file: IO[str]) -> None:
    """Write a trace in Chrome's JSON format, with tracks for the worker's phases and for each request, and counters.

    Times are whole microseconds. The first iteration begins at BEFORE_S, because the format has no negative times, and
    requests may arrive before the first iteration; viewers show times since the first event. Slices of a track never
    overlap, because Perfetto drops a slice that begins before the previous slice ends: if a request arrives before an
    earlier one with its id has ended, the two have separate tracks.
    """
    origin: list[float] = []
    tracks: dict[int, list[int]] = defaultdict(list)     # request id -> its tracks
    tracks_are_free_at: list[int] = [0]                  # track 0 is the worker's
    settings: Mapping[str, int | str] = {}

    def microseconds(seconds: float) -> int:
        return max(round(1e6 * (BEFORE_S + (seconds - origin[0]))), 0)

    def engine_events() -> Iterator[dict]:
        yield {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "engine"}}
        yield {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "worker"}}
        yield {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "requests"}}

    def events_of(iteration: IterationTrace) -> Iterator[dict]:
        at = microseconds(iteration.started_at_s)
        # Each time is rounded. The sum of the phases may therefore be a microsecond longer than the iteration.
        start = max(at, tracks_are_free_at[0])
        if iteration.room is not None and 0 < tracks_are_free_at[0] < at - LEAST_IDLE_US:
            # A viewer draws a counter up to its next event. Phases of older traces leave gaps while the engine runs.
            for name, parts in (("tokens of the step", ("context", "generation")),
                                ("requests of the step", ("in the step",))):
                yield {"ph": "C", "pid": 0, "name": name, "ts": tracks_are_free_at[0], "args": dict.fromkeys(parts, 0)}
        for phase, duration in iteration.phases_us.items():
            yield {"ph": "X", "pid": 0, "tid": 0, "name": phase, "ts": start, "dur": duration,
                   "args": {"iteration": iteration.iteration}}
            start += duration
        tracks_are_free_at[0] = start
        blocks = {"live": iteration.live_blocks, "cached": iteration.cached_blocks, "free": iteration.free_blocks}
        tokens = {"context": sum(size for _, _, size in iteration.context), "generation": len(iteration.generation)}
        requests = {"in the step": len(iteration.context) + len(iteration.generation)}
        for name, values, limit in (("KV cache blocks", blocks, ""), ("tokens of the step", tokens, "max_num_tokens"),
                                    ("requests of the step", requests, "max_batch_size"),
                                    ("queued requests", {"queued": iteration.queued_requests}, "")):
            limits = {limit: settings[limit]} if limit in settings else {}
            yield {"ph": "C", "pid": 0, "name": name, "ts": at, "args": values | limits}

    def track_of(request_id: int, begin: int) -> Iterator[dict]:
        """Append a track that is free at `begin` to the end of `tracks[request_id]`, after naming it if it is new."""
        known = tracks[request_id]
        free = next((track for track in known if tracks_are_free_at[track] <= begin), None)
        if free is None:
            free = len(tracks_are_free_at)
            tracks_are_free_at.append(0)
            yield {"ph": "M", "pid": 1, "tid": free, "name": "thread_name", "args": {"name": f"request {request_id}"}}
        else:
            known.remove(free)
        known.append(free)

    def events_of_life(life: Life) -> Iterator[dict]:
        if life.spans:
            yield from track_of(life.request_id, microseconds(life.spans[0].begin_s))
            track = tracks[life.request_id][-1]
        for span in life.spans:
            arguments = {"iterations": span.iterations} | ({"tokens": span.tokens} if span.kind == CONTEXT else {})
            begin, end = microseconds(span.begin_s), microseconds(span.end_s)
            tracks_are_free_at[track] = end
            yield {"ph": "X", "pid": 1, "tid": track, "ts": begin, "dur": end - begin, "args": arguments,
                   "name": f"{span.kind}: {span.reason}" if span.reason else span.kind}

    def write(events: Iterable[dict]) -> None:
        nonlocal separator
        for event in events:
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"

    def noted() -> Iterator[IterationTrace]:
        nonlocal settings
        for iteration in iterations:
            if not origin:
                origin.append(iteration.started_at_s)
            settings = iteration.settings or settings
            write(events_of(iteration))
            yield iteration

    separator = ""
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    write(engine_events())
    for life in lives(noted()):
        write(events_of_life(life))
    file.write("\n]}\n")


def write_csv(iterations: Iterable[IterationTrace], file: IO[str]) -> None:
    """Write CSV with a row for each span of each request. Requests are in the order of `request_spans.lives`."""
    writer = csv.writer(file)
    writer.writerow(["request_id", "kind", "reason", "begin_s", "end_s", "iterations", "first_position", "tokens"])
    for life in lives(iterations):
        for span in life.spans:
            writer.writerow([life.request_id, span.kind, span.reason, f"{span.begin_s:.6f}", f"{span.end_s:.6f}",
                             span.iterations, span.first, span.tokens])


def main(argv: Sequence[str] | None = None) -> int:
    first, _, rest = __doc__.partition("\n\n")
    statuses = rest.strip().rpartition("\n\n")[2]
    parser = CommandParser(prog="batch-manager trace", description=first, epilog=rest)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = commands.add_parser("why", help="where the time of one request went", epilog=statuses)
    asked.add_argument("request_id", type=int)
    slowest = commands.add_parser("slowest", help="the slowest requests", epilog=statuses)
    add_shared(slowest.add_argument, "--num-requests", "the slowest", "5", default=5)
    perfetto = commands.add_parser("perfetto", help="write JSON for Perfetto and chrome://tracing", epilog=statuses)
    table = commands.add_parser("csv", help="write a table of spans", epilog=statuses)
    for command in (asked, slowest, perfetto, table):
        command.add_argument("trace", type=Path, metavar="TRACE", help="a trace that a TraceFile wrote")
    for command in (perfetto, table):
        command.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    options = parser.parse_args(argv)
    if "out" in options and (reason := why_not_writable(options.out)):
        parser.error(f"OUT: {reason}")
    try:
        with options.trace.open("rb") as file:
            return _run(options, read_trace(file))
    except BrokenPipeError:                                  # the reader of OUT has exited
        discard_standard_output()
        return 0
    except (OSError, ValueError) as error:
        print(f"batch-manager trace: {_words(error, options.trace)}", file=sys.stderr)
        return 2


def _words(error: Exception, trace: Path) -> str:
    if isinstance(error, OutputError):
        return str(error)
    if isinstance(error, OSError):
        return f"{trace} cannot be read: {error.strerror}; expected a trace; a TraceFile writes one"
    return f"{trace}: {error}"


def _run(options: argparse.Namespace, iterations: Iterator[IterationTrace]) -> int:
    if options.command == "why":
        found = [life for life in lives(iterations) if life.request_id == options.request_id]
        if found:
            print_flushed("\n".join(line for life in found for line in why(life)))
        else:
            print(f"batch-manager trace: {options.trace} has no request {options.request_id}; expected the "
                  "id of a request of the run; `batch-manager trace slowest` lists some", file=sys.stderr)
        return 0 if found else 1
    if options.command == "slowest":
        ran = [life for life in lives(iterations) if not life.was_refused]
        slowest = sorted(ran, key=lambda life: -life.seconds)[:options.num_requests]
        lines = [line for life in slowest for line in why(life)]
        print_flushed("\n".join(lines or ["(no iteration had an active request)"]))
        return 0
    write = write_perfetto if options.command == "perfetto" else write_csv
    # Read first, so that what is no trace is refused before anything is on the standard output.
    iterations = itertools.chain(list(itertools.islice(iterations, 1)), iterations)
    with output_file(options.out, source=options.trace) as file:
        write(iterations, file)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as("trace"))
