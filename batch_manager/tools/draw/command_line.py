"""`batch-manager draw`: draw the schedule of a trace or of a demonstration.

    batch-manager draw trace.jsonl                          # as text
    batch-manager draw trace.jsonl --html run.html          # a page for a browser; runs of any size
    batch-manager draw --demo --policy guaranteed_no_evict --num-blocks 20 --svg schedule.svg

To write a trace, use `batch-manager bench --trace FILE`, or `Parts(trace=TraceFile("trace.jsonl"))` in a program. The
demonstration runs the real scheduler with a scripted model. `draw` prints text if no output file is named, or with
--text. The file of --html, --svg or --trace can be "-", the standard output.

Exit status: 0 drawn; 1 drawn, but requests of the demonstration cannot run; 2 an argument or a file is wrong, or the
run is too large for text or SVG; 130 Ctrl-C.
"""

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...config import KvCacheConfig, TrtGptModelOptionalParams
from ...errors import BatchManagerError, ConfigError, counted
from ...names import ContextChunkingPolicy
from ...stats.trace import IterationTrace, read_trace, write_trace
from ..command_parser import CommandParser, at_least
from ..output_file import STANDARD_OUTPUT, OutputError, OutputFiles, name_of, why_not_writable
from ..shared_options import POLICIES, add_shared
from ..standard_output import discard_standard_output, print_flushed
from .demo import parse_requests, run_demo
from .html import summary, write_html
from .small_run import FOR_SVG, FOR_TEXT, SmallRun
from .svg import render_svg
from .text import render_text
from .timeline import Timeline

DEMO_REQUESTS = "20+12,24+10,12+14@1,16+8@4,30+6@6"
# The scripted backend allocates a table of num_blocks x max_batch_size entries.
MOST_OF_DEMO = {"num_blocks": 100_000, "max_batch_size": 1_000, "max_num_tokens": 2**31 - 1}
OF_DEMO = ("requests", "policy", "chunked_context", "context_chunking_policy", "num_blocks",
           "tokens_per_block", "max_batch_size", "max_num_tokens")
NARROWEST = 20          # columns: the name of an iteration, and a cell
CHUNKING = {"first_come_first_served": ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
            "equal_progress": ContextChunkingPolicy.EQUAL_PROGRESS}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(OF_DEMO)))
    if bool(options.source) == options.demo:
        parser.error("expected either the name of a trace to draw or --demo; --trace names a file to write")
    given = [f"--{name.replace('_', '-')}" for name in OF_DEMO if getattr(options, name) is not None]
    if given and not options.demo:
        parser.error(f"a trace was given with {', '.join(given)}; expected such options only with --demo; leave them "
                     "out, or replace the trace with --demo")
    if options.context_chunking_policy is not None and not options.chunked_context:
        parser.error("--context-chunking-policy was given without --chunked-context, which alone uses it; add "
                     "--chunked-context, or leave it out")
    for name in OF_DEMO:
        if getattr(options, name) is None:
            setattr(options, name, parser.get_default(name))
    for name, path in _outputs(options).items():
        if why := why_not_writable(path):
            parser.error(f"--{name}: {why}")
    complaint = ""
    try:
        text, complaint = _draw(options)
        # A picture on the standard output (--svg -) must be its only content.
        if any(path == STANDARD_OUTPUT or path.exists() and not path.is_file() for path in _outputs(options).values()):
            print(text, file=sys.stderr)
        else:
            print_flushed(text)
    except BrokenPipeError:                                  # the reader of a picture has exited
        discard_standard_output()
    except (BatchManagerError, OSError, ValueError) as error:
        print(f"batch-manager draw: {_words(error, options.source)}", file=sys.stderr)
        return 2
    if complaint:
        print(f"batch-manager draw: {complaint}", file=sys.stderr)
    return 1 if complaint else 0


def _words(error: Exception, trace: Path | None) -> str:
    if isinstance(error, (BatchManagerError, OutputError)) or trace is None:
        return str(error)
    if isinstance(error, OSError):
        return f"{trace} cannot be read: {error.strerror}; expected a trace; a TraceFile writes one"
    return f"{trace}: {error}"


def _parser() -> argparse.ArgumentParser:
    first, _, rest = __doc__.partition("\n\n")
    parser = CommandParser(prog="batch-manager draw", description=first, epilog=rest)
    parser.add_argument("source", nargs="?", type=Path, metavar="TRACE", help="a trace that a TraceFile wrote")
    parser.add_argument("--demo", action="store_true", help="run the scheduler with a scripted model and draw that run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser: zoom, search, counters")
    parser.add_argument("--svg", type=Path, metavar="FILE", help=f"write the picture as SVG: {FOR_SVG}")
    add_shared(parser.add_argument, "--trace", "of --demo, or the one that is read")
    parser.add_argument("--text", action="store_true", help=f"also print the text: {FOR_TEXT}")
    parser.add_argument("--width", type=at_least(NARROWEST), default=100,
                        help=f"columns of the text, at least {NARROWEST} (default %(default)s)")
    demo = parser.add_argument_group("the demonstration")
    demo.add_argument("--requests", default=DEMO_REQUESTS, metavar="LIST",
                      help="PROMPT+OUTPUT[@ITERATION], separated by commas (default %(default)s)")
    add_shared(demo.add_argument, "--policy", shown="max_utilization", default="max_utilization", type=str.lower)
    add_shared(demo.add_argument, "--chunked-context", shown="off", default=False)
    demo.add_argument("--context-chunking-policy", default="first_come_first_served", type=str.lower, choices=CHUNKING,
                      help="which contexts get the chunks (first_come_first_served)")
    demo.add_argument("--num-blocks", type=int, default=14, help="KV cache blocks (14)")
    add_shared(demo.add_argument, "--tokens-per-block", shown="8", choices=None, default=8)
    add_shared(demo.add_argument, "--max-batch-size", shown="4", type=int, default=4)
    add_shared(demo.add_argument, "--max-num-tokens", shown="48", type=int, default=48)
    return parser


def _outputs(options: argparse.Namespace) -> dict[str, Path]:
    return {name: path for name in ("html", "svg", "trace") if (path := getattr(options, name))}


def _draw(options: argparse.Namespace) -> tuple[str, str]:
    """Write the requested files, and return (the text to print, what is wrong with the demonstration's requests or "").

    Depending on the options, the text has a description of the demonstration, the picture as text, and the names of the
    written files.
    """
    _refuse_one_name_for_two(options)
    outputs = _outputs(options)
    shows_text = options.text or not outputs
    with OutputFiles(source=options.source) as files:
        # The files are opened before the trace is read, so that a file that cannot be written is reported at once.
        opened = {name: files.open(path, "wb") for name, path in outputs.items()}
        small = SmallRun(FOR_SVG if options.svg else FOR_TEXT) if options.svg or shows_text else None
        timeline = Timeline() if options.html else None
        heading, iterations, complaint = _demo(options) if options.demo else ([], _read(options.source), "")
        noted = _noted(iterations, small, timeline)
        if options.trace:
            write_trace(noted, opened["trace"])
        else:
            deque(noted, maxlen=0)
        if options.svg:
            opened["svg"].write(render_svg(small.iterations).encode())
        if timeline:
            write_html(timeline, opened["html"], title=_title(options))
    written = [f"wrote {name_of(path)}{f': {summary(timeline)}' if name == 'html' else ''}"
               for name, path in outputs.items()]
    shown = [render_text(small.iterations, width=options.width)] if shows_text else []
    return "\n\n".join([*heading, *shown, *(["\n".join(written)] if written else [])]), complaint


def _noted(iterations: Iterable[IterationTrace], *lists: SmallRun | Timeline | None) -> Iterator[IterationTrace]:
    """Yield the iterations of a trace. Each iteration is first appended to every object of `lists` that is not None.

    The trace is read only once, because it may not fit into memory.
    """
    for iteration in iterations:
        for each in lists:
            if each is not None:
                each.append(iteration)
        yield iteration


def _refuse_one_name_for_two(options: argparse.Namespace) -> None:
    named: dict[str, str] = {}
    for option, path in _outputs(options).items():
        if (other := named.setdefault(os.path.realpath(path), option)) != option:
            raise ConfigError(f"--{other} and --{option} both name {path}",
                              "expected a file for each", "name another one")


def _title(options: argparse.Namespace) -> str:
    return f"Demonstration, {options.policy.upper()}" if options.demo else options.source.name


def _demo(options: argparse.Namespace) -> tuple[list[str], list[IterationTrace], str]:
    """Run the demonstration. Returns (lines that describe it, its trace, complaint about requests that cannot run)."""
    for name, most in MOST_OF_DEMO.items():
        if not 1 <= (value := getattr(options, name)) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}", f"expected 1 to {most:,}")
    params = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(tokens_per_block=options.tokens_per_block),
        enable_chunked_context=options.chunked_context,
        context_chunking_policy=CHUNKING[options.context_chunking_policy],
        max_batch_size=options.max_batch_size, max_num_sequences=options.max_batch_size * 4,
        max_num_tokens=options.max_num_tokens)
    policy = POLICIES[options.policy]
    heading = [f"{policy.name}, {counted(options.num_blocks, 'block')} of "
               f"{counted(options.tokens_per_block, 'token')}, at most {counted(options.max_batch_size, 'request')} "
               f"and {counted(options.max_num_tokens, 'token')} a step, chunked context: "
               f"{options.context_chunking_policy if options.chunked_context else 'off'}"]
    requests, refusals = parse_requests(options.requests), []
    iterations = run_demo(requests, params, policy, options.num_blocks, say=refusals.append)
    complaint = ""
    if refusals:
        complaint = f"{len(refusals)} of {counted(len(requests), 'request')} cannot run; the first: {refusals[0]}"
    return [*heading, *(f"refused: {text}" for text in refusals)], iterations, complaint


def _read(path: Path) -> Iterator[IterationTrace]:
    with path.open("rb") as file:
        yield from read_trace(file)
