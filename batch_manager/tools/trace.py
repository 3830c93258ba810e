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
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ..scheduling import waiting
from ..stats.trace import IterationTrace, read_trace
from .__main__ import run_as
from .command_parser import CommandParser
from .output_file import OutputError, output_file, why_not_writable
from .request_spans import CLIENT, CONTEXT, GENERATION, PAUSED, QUEUED, WAITING, Life, Span, lives
from .standard_output import discard_standard_output, print_flushed

SENTENCES = {
    waiting.BATCH_SIZE: "waited: the steps had max_batch_size requests",
    waiting.BATCH_RUNS: "waited: the static batch before it had not ended",
    waiting.PREFIX: "waited: another request computed a prefix that it shares",
    waiting.BLOCKS: "waited: too few KV cache blocks were free",
    waiting.TOKENS: "waited: too few tokens of the steps were left (max_num_tokens)",
    waiting.BEAM_WIDTH: "waited: the steps had requests of another beam width",
    waiting.ORDER: "waited: after other requests that waited",
    QUEUED: "queued: max_num_sequences requests were active",
    PAUSED: "paused: its blocks went to requests before it",
}
MOST_NAMED = 5


def why(life: Life) -> list[str]:
    """Return lines that say where the time of a request went.

    The first line has the time from the arrival to the end. The times of the other lines add up to this time. A refused
    request has one line, without a time.
    """
    if life.was_refused:
        return [f"request {life.request_id}: refused in iteration {life.last_iteration} ({life.end_reason})"]
    reason = f" ({life.end_reason})" if life.end_reason else ""
    ended = f"to its end{reason}" if life.has_ended else "to the end of the trace, where it is still alive"
    arrival = "before" if life.spans[0].kind == CLIENT else "in"
    lines = [f"request {life.request_id}: {_time(life.seconds)} from its arrival {arrival} iteration "
             f"{life.first_iteration} {ended} in iteration {life.last_iteration}"]
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in life.spans:
        groups[span.reason if span.kind == WAITING else span.kind].append(span)
    for key, spans in sorted(groups.items(), key=lambda pair: -sum(span.seconds for span in pair[1])):
        lines.append(f"  {_time(sum(span.seconds for span in spans)):>10}  {_sentence(key, spans)}")
    return lines


def _sentence(key: str, spans: list[Span]) -> str:
    iterations, times = sum(span.iterations for span in spans), len(spans)
    if key == CONTEXT:
        computed, again = sum(span.tokens for span in spans), sum(span.tokens for span in spans[1:])
        found = f", of which {spans[0].first:,} were found in the cache" if spans[0].first else ""
        repeated = f"; {again:,} of them again, after it was paused" if again else ""
        return (f"computed its prompt: {computed + spans[0].first:,} tokens{found}, in "
                f"{_count(iterations, 'iteration')}{repeated}")
    if key == GENERATION:
        step = statistics.median(span.seconds / span.iterations for span in spans)
        return f"generated: {_count(iterations, 'iteration')} of {_time(step)} each"
    if key == CLIENT:
        return "waited in the client, until the get callback returned it"
    others = sorted(set().union(*(span.running for span in spans)))
    named = ", ".join(map(str, others[:MOST_NAMED])) + (f" and {len(others) - MOST_NAMED} more" if
                                                         others[MOST_NAMED:] else "")
    beside = f"; meanwhile ran {named}" if others else ""
    return f"{SENTENCES.get(key, f'waited: {key}')}; {_count(iterations, 'iteration')}, {_count(times, 'time')}{beside}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"


def write_perfetto(iterations: Iterable[IterationTrace], file: IO[str]) -> None:
    """Write a trace in Chrome's JSON format, with tracks for the worker's phases and for each request, and counters.

    Times are whole microseconds since the first iteration. Slices of a track never overlap, because Perfetto drops a
    slice that begins before the previous slice ends.
    """
    origin: list[float] = []
    tracks: dict[int, int] = {}
    track_is_free_at: dict[int, int] = {}
    worker_is_free_at = 0

    def microseconds(seconds: float) -> int:
        return round(1e6 * (seconds - origin[0]))

    def engine_events() -> Iterator[dict]:
        yield {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "engine"}}
        yield {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "worker"}}
        yield {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "requests"}}

    def events_of(iteration: IterationTrace) -> Iterator[dict]:
        nonlocal worker_is_free_at
        at = microseconds(iteration.started_at_s)
        # Each phase is rounded. The sum of the phases may therefore be longer than the iteration.
        start = max(at, worker_is_free_at)
        for phase, duration in iteration.phases_us.items():
            yield {"ph": "X", "pid": 0, "tid": 0, "name": phase, "ts": start, "dur": duration,
                   "args": {"iteration": iteration.iteration}}
            start += duration
        worker_is_free_at = start
        blocks = {"live": iteration.live_blocks, "cached": iteration.cached_blocks, "free": iteration.free_blocks}
        tokens = {"context": sum(size for _, _, size in iteration.context), "generation": len(iteration.generation)}
        yield {"ph": "C", "pid": 0, "name": "KV cache blocks", "ts": at, "args": blocks}
        yield {"ph": "C", "pid": 0, "name": "tokens of the step", "ts": at, "args": tokens}
        yield {"ph": "C", "pid": 0, "name": "queued requests", "ts": at, "args": {"queued": iteration.queued_requests}}

    def events_of_life(life: Life) -> Iterator[dict]:
        if life.request_id not in tracks:
            tracks[life.request_id] = len(tracks) + 1
            yield {"ph": "M", "pid": 1, "tid": tracks[life.request_id], "name": "thread_name",
                   "args": {"name": f"request {life.request_id}"}}
        for span in life.spans:
            arguments = {"iterations": span.iterations} | ({"tokens": span.tokens} if span.kind == CONTEXT else {})
            # A request may arrive before the trace begins, or before a request with the same id ends.
            begin = max(microseconds(span.begin_s), track_is_free_at.get(life.request_id, 0))
            end = track_is_free_at[life.request_id] = max(microseconds(span.end_s), begin)
            yield {"ph": "X", "pid": 1, "tid": tracks[life.request_id], "ts": begin,
                   "dur": end - begin, "args": arguments,
                   "name": f"{span.kind}: {span.reason}" if span.reason else span.kind}

    def write(events: Iterable[dict]) -> None:
        nonlocal separator
        for event in events:
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"

    def noted() -> Iterator[IterationTrace]:
        for iteration in iterations:
            if not origin:
                origin.append(iteration.started_at_s)
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
    slowest.add_argument("--count", type=int, default=5, help="how many (%(default)s)")
    perfetto = commands.add_parser("perfetto", help="write JSON for Perfetto and chrome://tracing", epilog=statuses)
    table = commands.add_parser("csv", help="write a table of spans", epilog=statuses)
    for command in (asked, slowest, perfetto, table):
        command.add_argument("trace", type=Path, metavar="TRACE", help="a trace that a TraceFile wrote")
    for command in (perfetto, table):
        command.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    options = parser.parse_args(argv)
    if options.command == "slowest" and options.count < 1:
        slowest.error(f"--count is {options.count}; expected 1 or more")
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
        slowest = sorted(ran, key=lambda life: -life.seconds)[:options.count]
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
