"""A plot of lines as SVG: points with a range each, and axes with units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .svg import BLUE, FAINT, GRID, INK, ORANGE, document

COLOURS = (BLUE, ORANGE)
WIDTH, HEIGHT, LEGEND_HEIGHT = 520, 320, 20
LEFT, RIGHT, TOP, BOTTOM = 64, 496, 72, 268         # of the area that the points lie in
MOST_INTERVALS = 5


@dataclass(frozen=True, slots=True)
class Point:
    """low, high   ends of the bar through the point"""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """name   in the legend; "" where the plot has one line"""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class LinePlot:
    """At most as many lines as there are COLOURS. Both axes begin at 0, unless x is doubled.

    x_label, y_label   with units
    note               below the title: what points and bars are
    doubles_x          each doubling of x takes the same room; the axis then names the points' own x
    """

    title: str
    note: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    doubles_x: bool = False

    def render(self) -> str:
        """The SVG document. Raises ValueError for a plot without points, or with more lines than colours."""
        points = [point for line in self.lines for point in line.points]
        if not points or len(self.lines) > len(COLOURS):
            raise ValueError(f"the plot {self.title!r} has {len(points)} points in {len(self.lines)} lines; it takes "
                             f"at least one point and at most {len(COLOURS)} lines")
        y_ticks = ticks(max(point.high for point in points))
        if self.doubles_x:
            x_ticks = sorted({point.x for point in points})
            low, high = math.log2(x_ticks[0]), math.log2(x_ticks[-1])
        else:
            x_ticks = ticks(max(point.x for point in points))
            low, high = 0.0, x_ticks[-1]

        def at_x(x: float) -> float:
            place = math.log2(x) if self.doubles_x else x
            return LEFT + (RIGHT - LEFT) * ((place - low) / (high - low) if high > low else 0.5)

        def at_y(y: float) -> float:
            return BOTTOM - (BOTTOM - TOP) * y / y_ticks[-1]

        out = self._texts()
        for tick in y_ticks:
            y = at_y(tick)
            out.append(f'<path d="M{LEFT} {y:.2f}H{RIGHT}" stroke="{GRID}"/>')
            out.append(f'<text class="y" x="{LEFT - 8}" y="{y + 4:.2f}" text-anchor="end" fill="{FAINT}">'
                       f"{number(tick)}</text>")
        for tick in x_ticks:
            x = at_x(tick)
            out.append(f'<path d="M{x:.2f} {BOTTOM}v5" stroke="{FAINT}"/>')
            out.append(f'<text class="x" x="{x:.2f}" y="{BOTTOM + 19}" text-anchor="middle" fill="{FAINT}">'
                       f"{number(tick)}</text>")
        out.append(f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{FAINT}"/>')
        for line, colour in zip(self.lines, COLOURS):
            way = " ".join(f"{at_x(point.x):.2f},{at_y(point.y):.2f}" for point in line.points)
            out.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for point in line.points:
                x = at_x(point.x)
                title = f"{line.name}{': ' if line.name else ''}{number(point.x)}: {number(point.y)} "
                title += f"({number(point.low)} to {number(point.high)})"
                out.append(f'<path class="range" d="M{x:.2f} {at_y(point.low):.2f}V{at_y(point.high):.2f}" '
                           f'stroke="{colour}" stroke-width="6" stroke-opacity="0.35"/>')
                out.append(f'<circle cx="{x:.2f}" cy="{at_y(point.y):.2f}" r="3.5" fill="{colour}">'
                           f"<title>{escape(title)}</title></circle>")
        has_legend = any(line.name for line in self.lines)
        return document(WIDTH, HEIGHT + (LEGEND_HEIGHT if has_legend else 0), out)

    def _texts(self) -> list[str]:
        out = [f'<text x="16" y="24" font-size="15" font-weight="600" fill="{INK}">{escape(self.title)}</text>',
               f'<text x="16" y="41" font-size="11" fill="{FAINT}">{escape(self.note)}</text>',
               f'<text x="16" y="60" fill="{INK}">{escape(self.y_label)}</text>',
               f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle" fill="{INK}">'
               f"{escape(self.x_label)}</text>"]
        x = float(LEFT)
        for line, colour in zip(self.lines, COLOURS):
            if line.name:
                out.append(f'<circle cx="{x:.1f}" cy="{HEIGHT + 4}" r="4" fill="{colour}"/>')
                out.append(f'<text x="{x + 10:.1f}" y="{HEIGHT + 8}" fill="{INK}">{escape(line.name)}</text>')
                x += 7.2 * len(line.name) + 36
        return out


def ticks(most: float) -> list[float]:
    """Round numbers from 0 up to at least `most`, in at most MOST_INTERVALS equal intervals."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / MOST_INTERVALS))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * MOST_INTERVALS >= most)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def number(value: float) -> str:
    """With three digits at least, and no more behind the point than that takes."""
    digits = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
