"""A schedule as an SVG document, for small runs."""

from collections.abc import Iterable
from html import escape

from ...stats.trace import IterationTrace
from ..request_spans import CLIENT, CONTEXT, GENERATION, QUEUED
from ..svg import FAINT, INK, document
from . import colours
from .timeline import Kind, Row, Timeline

WORDS = {CONTEXT: "context, number of tokens", GENERATION: "generation, one token"}
ALWAYS = (CONTEXT, GENERATION)      # in the legend of each picture; other kinds if the picture has them
ENDED, OUTLINE = colours.ENDED.light, "#c9ced4"
ROW_HEIGHT, BAR_HEIGHT, MARGIN = 24, 64, 16
LEAST_WIDTH = 640
FARTHEST_LIMIT = 2      # a limit is drawn if it is at most this many times the largest value


def render_svg(trace: Iterable[IterationTrace]) -> str:
    """Return the schedule as an SVG document: a column per iteration, and a row per request.

    If requests arrived before the first iteration, the first column is the time before it. The title of a box has what
    the request did, in which iterations, and for how long; the times of a row add up to the time from its arrival to
    its final response. Below the rows, a bar shows the tokens of each iteration.
    """
    timeline, iterations = Timeline(), list(trace)
    for iteration in iterations:
        timeline.append(iteration)
    timeline.close()
    count = max(len(timeline.numbers), 1)
    cell = min(30.0, max(3.0, round(1200 / count, 2)))
    left = MARGIN + 12 + 8 * max([len("request"), *(len(str(row.request_id)) for row in timeline.rows)])
    width = round(max(left + cell * count + MARGIN, LEAST_WIDTH))
    legend, lines = _svg_legend(timeline, width)
    top = 104 + 22 * (lines - 1)
    bars_top = top + ROW_HEIGHT * len(timeline.rows) + 34
    out = [
        *legend,
        f'<text x="{left - 10}" y="{top - 8}" text-anchor="end" fill="{FAINT}">request</text>',
        f'<text x="{left}" y="{top - 26}" fill="{FAINT}">iteration</text>',
    ]
    out += [f'<text x="{left + cell * (i + 0.5):.1f}" y="{top - 8}" text-anchor="middle" fill="{FAINT}">'
            f"{_number(timeline, i)}</text>" for i in range(timeline.has_before, len(timeline.numbers),
                                                            _tick(count, cell))]
    for j, row in enumerate(timeline.rows):
        y = top + ROW_HEIGHT * j
        out.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end" fill="{INK}">{row.request_id}</text>')
        out += _svg_row(timeline, iterations, row, left, y, cell)
    out += _svg_bars(timeline, left, bars_top, cell)
    return document(width, bars_top + BAR_HEIGHT + 24, out)


def _svg_legend(timeline: Timeline, width: int) -> tuple[list[str], int]:
    """Return the legend of the kinds in the picture, and its number of lines."""
    out = [f'<text x="{MARGIN}" y="26" font-size="15" font-weight="600" fill="{INK}">Schedule</text>']
    used = {code for row in timeline.rows for code, _, _ in timeline.spans(row)}
    x, y = MARGIN, 40
    entries = [(kind, WORDS.get(kind[0], _name(kind))) for code, kind in enumerate(timeline.kinds)
               if code in used or kind[0] in ALWAYS]
    for kind, words in [*entries, (None, "ended")]:
        length = 20 + round(6.6 * len(words)) + 18
        if x > MARGIN and x + length > max(width, LEAST_WIDTH):
            x, y = MARGIN, y + 22
        if kind is None:
            out.append(f'<rect x="{x + 5}" y="{y}" width="3" height="14" fill="{ENDED}"/>')
        else:
            out.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" {_fill(kind)}/>')
        out.append(f'<text x="{x + 20}" y="{y + 11.5}" fill="{INK}">{escape(words)}</text>')
        x += length
    return out, (y - 40) // 22 + 1


def _svg_row(timeline: Timeline, iterations: list[IterationTrace], row: Row, left: float, y: float,
             cell: float) -> list[str]:
    """Return the SVG elements of one request's row: a box for each span, with its tokens if it is a context chunk."""
    out = []
    spans = list(timeline.spans(row))
    places = _places(timeline, row)
    chunks = iter(zip(row.chunks[::2], row.chunks[1::2], strict=True))
    for number, (code, start, begin_us) in enumerate(spans):
        kind, _ = timeline.kinds[code]
        is_last = number + 1 == len(spans)
        stop, end_us = (row.end, row.end_us) if is_last else spans[number + 1][1:]
        tokens = next(chunks)[1] if kind == CONTEXT else _generated(timeline, iterations, row.request_id, start, stop) \
            if kind == GENERATION else 0
        begin, end = places[number], places[number + 1]
        x, gap = left + cell * begin, min(1.0, cell / 6)
        width = max(cell * (end - begin) - gap, 0.5)
        when = _when(timeline, start, max(stop, start + 1))
        title = f"request {row.request_id}, {when}: {_name(timeline.kinds[code])}"
        title += f", {tokens} token{'s' * (tokens != 1)}" if tokens else ""
        title += f", {(end_us - begin_us) / 1e3:.3f} ms" if end_us > begin_us else ""
        out.append(f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{ROW_HEIGHT - 4}" rx="2" '
                   f"{_fill(timeline.kinds[code])}><title>{escape(title)}</title></rect>")
        if kind == CONTEXT and 7 * len(str(tokens)) + 2 <= cell:
            out.append(f'<text x="{x + (cell - gap) / 2:.2f}" y="{y + 16}" text-anchor="middle" font-size="11" '
                       f'fill="#ffffff">{tokens}</text>')
        if is_last and row.has_ended:
            out.append(f'<rect x="{x + width - 3:.2f}" y="{y + 2}" width="3" height="{ROW_HEIGHT - 4}" '
                       f'fill="{ENDED}"><title>request {row.request_id} ended</title></rect>')
    return out


def _places(timeline: Timeline, row: Row) -> list[float]:
    """Return where each span of a row begins, and where the last one ends, in columns.

    A span in the engine begins with its iteration; a span in the client within one, in proportion to its time.
    """
    places: list[float] = [row.end]
    for code, start, us in reversed(list(timeline.spans(row))):
        place = float(start)
        if timeline.kinds[code][0] == CLIENT:
            begin_us, next_us = (*timeline.begin_us, timeline.end_us)[start:start + 2]
            if next_us > begin_us:
                place += min((us - begin_us) / (next_us - begin_us), 1.0)
        places.insert(0, min(place, places[0]))
    return places


def _generated(timeline: Timeline, iterations: list[IterationTrace], request_id: int, start: int, stop: int) -> int:
    shift = timeline.has_before
    return sum(request_id in iteration.generation for iteration in iterations[start - shift:stop - shift])


def _svg_bars(timeline: Timeline, left: float, top: float, cell: float) -> list[str]:
    context, generation = timeline.counters["context_tokens"], timeline.counters["generation_tokens"]
    largest = max([*map(sum, zip(context, generation, strict=True)), 1])
    limit = timeline.settings.get("max_num_tokens", 0)
    is_near = isinstance(limit, int) and 0 < limit <= FARTHEST_LIMIT * largest
    most = max(largest, limit) if is_near else largest
    base = top + BAR_HEIGHT
    words = f"largest: {largest}" + (f", max_num_tokens: {limit}" if limit else "")
    out = [f'<text x="{left}" y="{top - 8}" fill="{FAINT}">tokens computed in each iteration ({words})</text>']
    for i in range(len(timeline.numbers)):
        y = float(base)
        for tokens, colour in ((generation[i], colours.GENERATION.light), (context[i], colours.CONTEXT.light)):
            if tokens:
                height = BAR_HEIGHT * tokens / most
                y -= height
                out.append(f'<rect x="{left + cell * i:.2f}" y="{y:.2f}" width="{cell - min(1.0, cell / 6):.2f}" '
                           f'height="{height:.2f}" fill="{colour}"/>')
    width = cell * len(timeline.numbers)
    out.append(f'<rect x="{left}" y="{base}" width="{width:.2f}" height="1" fill="{FAINT}"/>')
    if is_near:
        y = base - BAR_HEIGHT * limit / most
        out.append(f'<path d="M{left} {y:.2f}h{width:.2f}" stroke="{colours.LIMIT.light}" stroke-dasharray="4 3" '
                   f'fill="none"><title>max_num_tokens: {limit}</title></path>')
    return out


def _fill(kind: Kind) -> str:
    outline = f' stroke="{OUTLINE}"' if kind[0] == QUEUED else ""
    return f'fill="{colours.of_kind(*kind).light}"{outline}'


def _name(kind: Kind) -> str:
    return f"{kind[0]}: {kind[1]}" if kind[1] else kind[0]


def _number(timeline: Timeline, index: int) -> str:
    return "before" if timeline.has_before and index == 0 else str(timeline.numbers[index])


def _when(timeline: Timeline, start: int, stop: int) -> str:
    if stop - start == 1:
        return "before the first iteration" if timeline.has_before and start == 0 else (
            f"iteration {_number(timeline, start)}")
    return f"iterations {_number(timeline, start)}-{_number(timeline, stop - 1)}"


def _tick(count: int, cell: float) -> int:
    """Return the number of iterations from one label of the axis to the next.

    This is the smallest of a few round numbers at which the labels do not touch. If there is none, it is `count`.
    """
    return next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if step * cell >= 34), count)
