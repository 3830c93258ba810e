"""A trace as a picture: who ran in which iteration, as text and as SVG.

    python -m batch_manager.tools.visualize --demo
    python -m batch_manager.tools.visualize --demo --policy GUARANTEED_NO_EVICT --num-blocks 20 --svg schedule.svg
    python -m batch_manager.tools.visualize --trace trace.jsonl

The demonstration runs the real scheduler and the real KV cache accounting over a scripted model: no weights, no torch.
A trace file is what a `batch_manager.TraceFile` wrote.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from ..build import build_loop
from ..config import KvCacheConfig, Parts, TrtGptModelOptionalParams
from ..errors import BatchManagerError, ConfigError
from ..names import ContextChunkingPolicy, SchedulerPolicy, TrtGptModelType
from ..requests.inference_request import InferenceRequest
from ..stats.trace import IterationTrace, Trace, read_trace, write_trace
from ..testing.scripted_backend import ScriptedBackend
from .svg import BLUE, FAINT, INK, ORANGE, document

LEGEND = "C12 context, 12 tokens   G generation, 1 token   P paused   . waiting   * ended in this iteration"
SHORTEST_FOLD = 3

ABSENT, WAITING, CONTEXT, GENERATION, PAUSED = "", ".", "C", "G", "P"


# ---------------------------------------------------------------------- what happened, cell by cell


@dataclass(frozen=True, slots=True)
class Cell:
    """One request in one iteration.

    kind     ABSENT, WAITING, CONTEXT, GENERATION or PAUSED
    tokens   run in this iteration
    ended    the request left in this iteration
    """

    kind: str = ABSENT
    tokens: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return self.kind + (str(self.tokens) if self.kind == CONTEXT else "") + ("*" if self.ended else "")


@dataclass(frozen=True, slots=True)
class Picture:
    """Iterations x requests. `rows[i][j]` is what `request_ids[j]` did in `iterations[i]`.

    A request waits from its arrival, or where that was not noted from its first step, until it ends; an id that is
    used again afterwards starts a second life in the same column.
    """

    iterations: list[int]
    request_ids: list[int]
    rows: list[list[Cell]]

    @staticmethod
    def of(trace: Iterable[IterationTrace]) -> "Picture":
        alive: dict[int, bool] = {}         # in order of first appearance
        numbers, cells_of = [], []
        for record in trace:
            ran = {request_id: Cell(PAUSED) for request_id in record.paused}
            for request_id, _, tokens in record.context:
                ran[request_id] = Cell(CONTEXT, tokens)
            ran |= {request_id: Cell(GENERATION, 1) for request_id in record.generation}
            alive |= dict.fromkeys((*record.arrived, *ran, *record.finished), True)
            cells = {}
            for request_id, is_alive in alive.items():
                if is_alive:
                    cell = ran.get(request_id, Cell(WAITING))
                    ended = request_id in record.finished
                    cells[request_id] = Cell(cell.kind, cell.tokens, ended)
                    alive[request_id] = not ended
            numbers.append(record.iteration)
            cells_of.append(cells)
        return Picture(numbers, list(alive), [[cells.get(i, Cell()) for i in alive] for cells in cells_of])

    def columns(self) -> list[list[Cell]]:
        """The same by request."""
        return [[row[j] for row in self.rows] for j in range(len(self.request_ids))]

    def folds(self) -> list[tuple[int, int]]:
        """(first row, rows) of each run of equal rows; runs too short to be worth folding come one by one."""
        folds = []
        for _, run in groupby(range(len(self.rows)), key=lambda i: self.rows[i]):
            indices = list(run)
            if len(indices) >= SHORTEST_FOLD:
                folds.append((indices[0], len(indices)))
            else:
                folds += [(i, 1) for i in indices]
        return folds


# ---------------------------------------------------------------------- text


def render_text(trace: Iterable[IterationTrace], *, width: int = 100, legend: bool = True) -> str:
    """The schedule as plain text in at most `width` columns.

    Time runs down, one column a request, as long as the columns fit: each request is then a line the eye can follow,
    and runs of equal iterations fold into one row ("x 14"). With more requests than fit, time runs to the right, one
    row a request, and wraps like staves of music; a stave shows only the requests that are alive in it.
    """
    picture = Picture.of(trace)
    if not picture.rows:
        return "(no iteration had an active request)"
    table = _time_down(picture)
    if max(map(len, table)) > width:
        table = _time_right(picture, width)
    return "\n".join([*table, "", LEGEND] if legend else table)


def _time_down(picture: Picture) -> list[str]:
    folds = picture.folds()
    heads = [str(request_id) for request_id in picture.request_ids]
    widths = [max(len(head), *(len(str(cell)) for cell in column))
              for head, column in zip(heads, picture.columns(), strict=True)]
    names = [_span(picture.iterations, start, count) for start, count in folds]
    times = ["" if count == 1 else f"x {count}" for _, count in folds]
    name_width, times_width = max(len("iteration"), *map(len, names)), max(map(len, times))

    def line(name: str, times: str, cells: Sequence[str], total: str) -> str:
        body = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        gap = f"  {times.ljust(times_width)}" if times_width else ""
        return f"{name.rjust(name_width)}{gap}   {body}   {total.rjust(6)}".rstrip()

    lines = [line("iteration", "", heads, "tokens")]
    for name, repeated, (start, _) in zip(names, times, folds, strict=True):
        row = picture.rows[start]
        lines.append(line(name, repeated, list(map(str, row)), str(sum(cell.tokens for cell in row))))
    return lines


def _time_right(picture: Picture, width: int) -> list[str]:
    folds = picture.folds()
    columns = []                            # (first row, its number, "x 14" or nothing, width of the column)
    for start, count in folds:
        times = "" if count == 1 else f"x{count}"
        columns.append((start, times, max(len(times), *(len(str(cell)) for cell in picture.rows[start]))))
    name_width = max(len("iteration"), *(len(str(request_id)) for request_id in picture.request_ids))

    staves: list[list[tuple[int, str, int]]] = [[]]
    room = width - name_width - 2
    for column in columns:
        if staves[-1] and sum(c[2] + 1 for c in staves[-1]) + column[2] > room:
            staves.append([])
        staves[-1].append(column)

    lines: list[str] = []
    for stave in staves:
        lines += [""] if lines else []
        lines.append(_line_of_numbers("iteration".rjust(name_width) + "  ", picture, stave, width))
        if any(times for _, times, _ in stave):
            lines.append((" " * (name_width + 2) + " ".join(times.ljust(w) for _, times, w in stave)).rstrip())
        for j, request_id in enumerate(picture.request_ids):
            cells = [picture.rows[start][j] for start, _, _ in stave]
            if any(cell.kind for cell in cells):
                body = " ".join(str(cell).ljust(w) for cell, (_, _, w) in zip(cells, stave, strict=True))
                lines.append(f"{str(request_id).rjust(name_width)}  {body}".rstrip())
    return lines


def _line_of_numbers(head: str, picture: Picture, stave: list[tuple[int, str, int]], width: int) -> str:
    """The number of an iteration over its column, wherever the one before it leaves room."""
    line, at = head, len(head)
    for start, _, column_width in stave:
        number = str(picture.iterations[start])
        if (len(line) < at or line == head) and at + len(number) <= width:
            line = line.ljust(at) + number
        at += column_width + 1
    return line


def _span(iterations: list[int], start: int, count: int) -> str:
    return str(iterations[start]) if count == 1 else f"{iterations[start]}-{iterations[start + count - 1]}"


# ---------------------------------------------------------------------- SVG

FILL = {WAITING: "#e3e6ea", CONTEXT: BLUE, GENERATION: "#8cc5a2", PAUSED: ORANGE}
WORDS = {CONTEXT: "context (prompt) tokens", GENERATION: "generation, one token", PAUSED: "paused",
         WAITING: "waiting"}
ENDED = "#14202b"
ROW_HEIGHT, BAR_HEIGHT, MARGIN = 24, 64, 16


def render_svg(trace: Iterable[IterationTrace]) -> str:
    """The schedule as an SVG document: time runs right, one row a request, tokens of each iteration as bars below."""
    picture = Picture.of(trace)
    count = max(len(picture.rows), 1)
    cell = min(30.0, max(3.0, round(1200 / count, 2)))
    left = MARGIN + 12 + 8 * max([len("request"), *(len(str(i)) for i in picture.request_ids)])
    top = 88
    rows_bottom = top + ROW_HEIGHT * len(picture.request_ids)
    bars_top = rows_bottom + 34
    width = round(max(left + cell * count + MARGIN, 640))
    height = bars_top + BAR_HEIGHT + 44
    out = [
        *_svg_legend(),
        f'<text x="{left - 10}" y="{top - 8}" text-anchor="end" fill="{FAINT}">request</text>',
    ]
    out += [f'<text x="{left + cell * (i + 0.5):.1f}" y="{top - 8}" text-anchor="middle" fill="{FAINT}">'
            f"{picture.iterations[i]}</text>" for i in range(0, len(picture.rows), _tick(count, cell))]
    for j, (request_id, column) in enumerate(zip(picture.request_ids, picture.columns(), strict=True)):
        y = top + ROW_HEIGHT * j
        out.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end" fill="{INK}">{request_id}</text>')
        out += _svg_row(picture, request_id, column, left, y, cell)
    out += _svg_bars(picture, left, bars_top, cell)
    return document(width, height, out)


def _svg_legend() -> list[str]:
    out, x = [], MARGIN
    out.append(f'<text x="{x}" y="26" font-size="15" font-weight="600" fill="{INK}">Schedule</text>')
    for kind, words in WORDS.items():
        out.append(f'<rect x="{x}" y="40" width="14" height="14" rx="2" fill="{FILL[kind]}"/>')
        out.append(f'<text x="{x + 20}" y="51.5" fill="{INK}">{words}</text>')
        x += 20 + round(6.6 * len(words)) + 18
    out.append(f'<rect x="{x + 5}" y="40" width="3" height="14" fill="{ENDED}"/>')
    out.append(f'<text x="{x + 14}" y="51.5" fill="{INK}">ended</text>')
    return out


def _svg_row(picture: Picture, request_id: int, column: list[Cell], left: float, y: float, cell: float) -> list[str]:
    """Runs of one kind are one rectangle; context chunks are told apart and numbered."""
    out, i = [], 0
    while i < len(column):
        kind, run = column[i].kind, 1
        while (kind != CONTEXT and not column[i + run - 1].ended
               and i + run < len(column) and column[i + run].kind == kind):
            run += 1
        if kind != ABSENT:
            x, gap = left + cell * i, min(1.0, cell / 6)
            tokens = sum(c.tokens for c in column[i: i + run])
            title = f"request {request_id}, iteration {_span(picture.iterations, i, run)}: {WORDS[kind]}"
            title += f", {tokens} in all" if tokens > 1 else ""
            out.append(f'<rect x="{x:.2f}" y="{y + 2}" width="{cell * run - gap:.2f}" height="{ROW_HEIGHT - 4}" rx="2" '
                       f'fill="{FILL[kind]}"><title>{escape(title)}</title></rect>')
            if kind == CONTEXT and 7 * len(str(tokens)) + 2 <= cell:
                out.append(f'<text x="{x + (cell - gap) / 2:.2f}" y="{y + 16}" text-anchor="middle" font-size="11" '
                           f'fill="#ffffff">{tokens}</text>')
            if column[i + run - 1].ended:
                out.append(f'<rect x="{x + cell * run - gap - 3:.2f}" y="{y + 2}" width="3" height="{ROW_HEIGHT - 4}" '
                           f'fill="{ENDED}"><title>request {request_id} ended</title></rect>')
        i += run
    return out


def _svg_bars(picture: Picture, left: float, top: float, cell: float) -> list[str]:
    totals = [sum(c.tokens for c in row) for row in picture.rows]
    most = max([*totals, 1])
    base = top + BAR_HEIGHT
    out = [f'<text x="{left}" y="{top - 8}" fill="{FAINT}">tokens in each iteration, at most {most}</text>']
    for i, row in enumerate(picture.rows):
        context = sum(c.tokens for c in row if c.kind == CONTEXT)
        y = float(base)
        for tokens, kind in ((totals[i] - context, GENERATION), (context, CONTEXT)):
            if tokens:
                height = BAR_HEIGHT * tokens / most
                y -= height
                out.append(f'<rect x="{left + cell * i:.2f}" y="{y:.2f}" width="{cell - min(1.0, cell / 6):.2f}" '
                           f'height="{height:.2f}" fill="{FILL[kind]}"/>')
    out.append(f'<rect x="{left}" y="{base}" width="{cell * len(picture.rows):.2f}" height="1" fill="{FAINT}"/>')
    out.append(f'<text x="{left}" y="{base + 22}" fill="{FAINT}">time runs right, one column an iteration</text>')
    return out


def _tick(count: int, cell: float) -> int:
    """Iterations between two numbers on the axis, so that they do not touch."""
    return next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if step * cell >= 34), count)


# ---------------------------------------------------------------------- the demonstration


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A prompt of so many tokens that asks for so many more, handed over at the start of an iteration."""

    prompt_tokens: int
    output_tokens: int
    iteration: int = 0


def parse_requests(text: str) -> list[DemoRequest]:
    """`PROMPT+OUTPUT[@ITERATION]`, separated by commas: `20+12,8+30@4`."""
    requests = []
    for item in text.split(","):
        lengths, _, iteration = item.strip().partition("@")
        prompt, _, output = lengths.partition("+")
        digits = (prompt, output, iteration or "0")
        if not all(number.isdecimal() for number in digits) or 0 in (int(prompt), int(output)):
            raise ValueError(f"{item.strip()!r} is no request; write PROMPT+OUTPUT or PROMPT+OUTPUT@ITERATION, "
                             "as in 20+12@3")
        requests.append(DemoRequest(*map(int, digits)))
    return requests


def run_demo(requests: Sequence[DemoRequest], params: TrtGptModelOptionalParams, policy: SchedulerPolicy,
             num_blocks: int, say: Callable[[str], None] = lambda text: None) -> list[IterationTrace]:
    """Run requests, numbered from 1, to their end over a scripted model, and return what every iteration did.

    say   hears about requests that were refused
    Raises ConfigError for a configuration that cannot run.
    """
    trace = Trace()
    waiting = sorted(enumerate(requests, 1), key=lambda pair: pair[1].iteration)

    def get(max_num_requests: int) -> list[InferenceRequest]:
        """Whoever is due. When nothing is alive iterations do not count, so the next one is due at once."""
        items = []
        while waiting and len(items) < max_num_requests:
            request_id, request = waiting[0]
            idle = not items and loop.is_empty
            if request.iteration > loop.iteration and not idle:
                break
            del waiting[0]
            prompt = [1 + (request_id + i) % 99 for i in range(request.prompt_tokens)]
            items.append(InferenceRequest(
                request_id, {"input_ids": prompt, "request_output_len": request.output_tokens}))
        return items

    def send(request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        if error_message:
            say(error_message)

    tokens_per_block = params.kv_cache_config.tokens_per_block
    backend = ScriptedBackend(num_blocks=num_blocks, tokens_per_block=tokens_per_block,
                              max_seq_len=num_blocks * tokens_per_block, num_slots=params.max_batch_size)
    loop = build_loop(
        model_path=None, model_type=TrtGptModelType.InflightFusedBatching, max_beam_width=1, scheduler_policy=policy,
        get_inference_requests_cb=get, send_response_cb=send, poll_stop_signal_cb=None,
        return_batch_manager_stats_cb=None, optional_params=params, terminate_req_id=None,
        exclude_input_in_output=True, parts=Parts(backend=backend, trace=trace.append))
    while loop.step(accept_new=True) or waiting:
        pass
    return trace.iterations


# ---------------------------------------------------------------------- the command line

DEMO_REQUESTS = "20+12,24+10,12+14@1,16+8@4,30+6@6"
CHUNKING = {"off": None, "first_come_first_served": ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
            "equal_progress": ContextChunkingPolicy.EQUAL_PROGRESS}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m batch_manager.tools.visualize",
                                     description="Draw a schedule: who ran in which iteration.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--demo", action="store_true", help="run the scheduler over a scripted model and draw that")
    source.add_argument("--trace", type=Path, metavar="FILE", help="draw a trace file (JSON lines)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG as well")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the trace as JSON lines")
    parser.add_argument("--width", type=int, default=100, help="columns of the text (default %(default)s)")
    demo = parser.add_argument_group("the demonstration")
    demo.add_argument("--requests", default=DEMO_REQUESTS, metavar="LIST",
                      help="PROMPT+OUTPUT[@ITERATION], separated by commas (default %(default)s)")
    demo.add_argument("--policy", default="MAX_UTILIZATION", type=str.upper, choices=SchedulerPolicy.__members__)
    demo.add_argument("--chunking", default="off", type=str.lower, choices=CHUNKING, help="chunked context")
    demo.add_argument("--num-blocks", type=int, default=14, help="KV cache blocks (default %(default)s)")
    demo.add_argument("--tokens-per-block", type=int, default=8, help="tokens in a block (default %(default)s)")
    demo.add_argument("--max-batch-size", type=int, default=4, help="requests in a step (default %(default)s)")
    demo.add_argument("--max-num-tokens", type=int, default=48, help="tokens in a step (default %(default)s)")
    options = parser.parse_args(argv)

    try:
        heading, iterations = _demo(options) if options.demo else ([], _read(options.trace))
        if options.save:
            with options.save.open("wb") as file:
                write_trace(iterations, file)
        if options.svg:
            options.svg.write_text(render_svg(iterations), encoding="utf-8")
    except (BatchManagerError, OSError, ValueError) as error:
        print(f"visualize: {error}", file=sys.stderr)
        return 2
    try:
        print("\n\n".join([*heading, render_text(iterations, width=options.width)]), flush=True)
    except BrokenPipeError:                                  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _demo(options: argparse.Namespace) -> tuple[list[str], list[IterationTrace]]:
    """What was run, in words, and its trace."""
    if options.num_blocks < 1:
        raise ConfigError(f"--num-blocks is {options.num_blocks}", "at least 1", "leave it out for the default")
    chunking = CHUNKING[options.chunking]
    params = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(tokens_per_block=options.tokens_per_block),
        enable_chunked_context=chunking is not None,
        context_chunking_policy=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED if chunking is None else chunking,
        max_batch_size=options.max_batch_size, max_num_sequences=options.max_batch_size * 4,
        max_num_tokens=options.max_num_tokens)
    policy = SchedulerPolicy[options.policy]
    heading = [f"{policy.name}, {options.num_blocks} blocks of {options.tokens_per_block} tokens, at most "
               f"{options.max_batch_size} requests and {options.max_num_tokens} tokens a step, chunked context: "
               f"{options.chunking}"]
    iterations = run_demo(parse_requests(options.requests), params, policy, options.num_blocks,
                          say=lambda text: heading.append(f"refused: {text}"))
    return heading, iterations


def _read(path: Path) -> list[IterationTrace]:
    with path.open("rb") as file:
        return list(read_trace(file))


if __name__ == "__main__":
    sys.exit(main())
