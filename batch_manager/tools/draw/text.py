"""A schedule as plain text."""

from collections.abc import Iterable, Sequence

from ...stats.trace import IterationTrace
from .picture import Picture, span_of_iterations

LEGEND = "C12 context, 12 tokens   G generation, 1 token   P paused   . waiting   - in the client   * ended"


def render_text(trace: Iterable[IterationTrace], *, width: int = 100, legend: bool = True) -> str:
    """Return the schedule as plain text in at most `width` columns.

    If a column for each request fits into the width, time runs down, and runs of equal iterations fold into one row
    ("x 14"). Otherwise each request has a row, and time runs to the right and wraps like staves of music. A stave shows
    only the requests that are live in it.
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
    names = [span_of_iterations(picture.iterations, start, count) for start, count in folds]
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
    columns = []                            # (first row, "x14" or "", width of the column)
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
    """Return the first line of a stave. A stave is one section of the wrapped picture.

    The line has the number of each iteration above its column, if there is room for the number.
    """
    line, at = head, len(head)
    for start, _, column_width in stave:
        number = str(picture.iterations[start])
        if (len(line) < at or line == head) and at + len(number) <= width:
            line = line.ljust(at) + number
        at += column_width + 1
    return line
