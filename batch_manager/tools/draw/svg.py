"""A schedule as an SVG document, for small runs."""

from collections.abc import Iterable
from html import escape

from ...stats.trace import IterationTrace
from ..svg import FAINT, INK, document
from . import colours
from .picture import ABSENT, CONTEXT, GENERATION, PAUSED, WAITING, Cell, Picture, span_of_iterations

FILL = {WAITING: colours.WAITING.light, CONTEXT: colours.CONTEXT.light, GENERATION: colours.GENERATION.light,
        PAUSED: colours.PAUSED.light}
WORDS = {CONTEXT: "context, number of tokens", GENERATION: "generation, one token", PAUSED: "paused",
         WAITING: "waiting"}
NAMES = {CONTEXT: "context", GENERATION: "generation", PAUSED: "paused", WAITING: "waiting"}      # of boxes
ENDED = colours.ENDED.light
ROW_HEIGHT, BAR_HEIGHT, MARGIN = 24, 64, 16


def render_svg(trace: Iterable[IterationTrace]) -> str:
    """Return the schedule as an SVG document: a column per iteration, and a row per request.

    Below the rows, a bar shows the tokens of each iteration.
    """
    picture = Picture.of(trace)
    count = max(len(picture.rows), 1)
    cell = min(30.0, max(3.0, round(1200 / count, 2)))
    left = MARGIN + 12 + 8 * max([len("request"), *(len(str(i)) for i in picture.request_ids)])
    top = 104
    rows_bottom = top + ROW_HEIGHT * len(picture.request_ids)
    bars_top = rows_bottom + 34
    width = round(max(left + cell * count + MARGIN, 640))
    height = bars_top + BAR_HEIGHT + 24
    out = [
        *_svg_legend(),
        f'<text x="{left - 10}" y="{top - 8}" text-anchor="end" fill="{FAINT}">request</text>',
        f'<text x="{left}" y="{top - 26}" fill="{FAINT}">iteration</text>',
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
    """Return the SVG elements of one request's row.

    A run of equal cells is one rectangle. Each context chunk is a separate rectangle with its number of tokens.
    """
    out, i = [], 0
    while i < len(column):
        kind, run = column[i].kind, 1
        while (kind != CONTEXT and not column[i + run - 1].ended
               and i + run < len(column) and column[i + run].kind == kind):
            run += 1
        if kind != ABSENT:
            x, gap = left + cell * i, min(1.0, cell / 6)
            tokens = sum(c.tokens for c in column[i: i + run])
            when = f"iteration{'s' * (run > 1)} {span_of_iterations(picture.iterations, i, run)}"
            title = f"request {request_id}, {when}: {NAMES[kind]}"
            title += f", {tokens} token{'s' * (tokens != 1)}" if tokens else ""
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
    out = [f'<text x="{left}" y="{top - 8}" fill="{FAINT}">tokens computed in each iteration (largest: {most})</text>']
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
    return out


def _tick(count: int, cell: float) -> int:
    """Return the number of iterations from one label of the axis to the next.

    This is the smallest of a few round numbers at which the labels do not touch. If there is none, it is `count`.
    """
    return next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if step * cell >= 34), count)
