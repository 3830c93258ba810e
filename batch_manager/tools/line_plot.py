"""A line plot as SVG: points with ranges, and axes with units."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .plot_frame import BOTTOM, COLOURS, LEFT, RIGHT, TOP, Frame, number, ticks
from .svg import INK

LABEL_SIZE, LABEL_HEIGHT, LETTER_WIDTH = 11, 11, 6.4      # pixels; the width is that of a wide letter
LINE_SAMPLES = 4.0                                        # pixels between the points of a line that labels avoid


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line.

    low, high   y values of the ends of the vertical bar through the point
    label       text beside the point, if there is room for it; "": no label
    """

    x: float
    y: float
    low: float
    high: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot.

    name   name in the legend; "" if the plot has one line
    """

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class LinePlot:
    """A plot of at most len(COLOURS) lines. Both axes begin at 0, except a logarithmic x axis.

    x_label, y_label   labels with units
    note               text below the title, which explains the points and the vertical bars through them
    doubles_x          True: a logarithmic x axis, labelled with the x values of the points; False: a linear one
    """

    title: str
    note: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    doubles_x: bool = False

    def render(self) -> str:
        """Return the SVG document. Raises ValueError for a plot without points, or with more lines than colours."""
        points = [point for line in self.lines for point in line.points]
        if not points or len(self.lines) > len(COLOURS):
            raise ValueError(f"the plot {self.title!r} has {len(points)} points in {len(self.lines)} lines; "
                             f"expected at least one point and at most {len(COLOURS)} lines")
        if self.doubles_x:
            x_ticks = sorted({point.x for point in points})
            low, high = math.log2(x_ticks[0]), math.log2(x_ticks[-1])
        else:
            x_ticks = ticks(max(point.x for point in points))
            low, high = 0.0, x_ticks[-1]

        def x_place(x: float) -> float:
            place = math.log2(x) if self.doubles_x else x
            return (place - low) / (high - low) if high > low else 0.5

        frame = Frame(self.title, self.note, self.x_label, self.y_label, x_ticks,
                      ticks(max(point.high for point in points)), x_place, [line.name for line in self.lines])
        out = []
        for line, colour in zip(self.lines, COLOURS):
            way = " ".join(f"{frame.at_x(point.x):.2f},{frame.at_y(point.y):.2f}" for point in line.points)
            out.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for point in line.points:
                x = frame.at_x(point.x)
                out.append(f'<path class="range" d="M{x:.2f} {frame.at_y(point.low):.2f}V{frame.at_y(point.high):.2f}" '
                           f'stroke="{colour}" stroke-width="6" stroke-opacity="0.35"/>')
                out.append(f'<circle cx="{x:.2f}" cy="{frame.at_y(point.y):.2f}" r="3.5" fill="{colour}">'
                           f"<title>{escape(_tooltip(line, point))}</title></circle>")
        return frame.document(out + list(_labels(self.lines, frame)))


def _tooltip(line: Line, point: Point) -> str:
    """Return the text of the tooltip of a point."""
    where = f"{line.name}{': ' if line.name else ''}{number(point.x)}: {number(point.y)}"
    return f"{where} ({point.label or f'{number(point.low)} to {number(point.high)}'})"


def _labels(lines: Sequence[Line], frame: Frame) -> Iterator[str]:
    """Yield the SVG elements of labels above, right, left or below their points.

    A label that would overlap a line or another label at each of these positions is left out.
    """
    taken = [(x - 1, y - 1, x + 1, y + 1) for line in lines for x, y in _places(line, frame)]
    for line in lines:
        for point in line.points:
            if not point.label:
                continue
            x, y, width = frame.at_x(point.x), frame.at_y(point.y), LETTER_WIDTH * len(point.label)
            for left, top in ((x - width / 2, y - 7 - LABEL_HEIGHT), (x + 8, y - LABEL_HEIGHT / 2),
                              (x - 8 - width, y - LABEL_HEIGHT / 2), (x - width / 2, y + 7)):
                box = (left, top, left + width, top + LABEL_HEIGHT)
                inside = box[0] >= LEFT and box[2] <= RIGHT and box[1] >= TOP - 8 and box[3] <= BOTTOM
                if inside and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    yield (f'<text class="label" x="{left + width / 2:.2f}" y="{top + LABEL_HEIGHT - 2:.2f}" '
                           f'font-size="{LABEL_SIZE}" text-anchor="middle" fill="{INK}">{escape(point.label)}</text>')
                    break


def _places(line: Line, frame: Frame) -> Iterator[tuple[float, float]]:
    """Yield the positions (x, y) of the points of a line, and closely spaced positions between them, in pixels."""
    places = [(frame.at_x(point.x), frame.at_y(point.y)) for point in line.points]
    yield from places
    for (x0, y0), (x1, y1) in zip(places, places[1:]):
        count = int(max(abs(x1 - x0), abs(y1 - y0)) / LINE_SAMPLES)
        yield from ((x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(1, count))


def _overlap(box: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
