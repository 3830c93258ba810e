"""The frame of a plot: title, axes with units and round numbers, legend, and the pixel position of a value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .svg import BLUE, FAINT, GREEN, GREY, GRID, INK, ORANGE, PINK, YELLOW, document

COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, GREY)
WIDTH, HEIGHT, LEGEND_HEIGHT = 520, 320, 20
LEFT, RIGHT, TOP, BOTTOM = 64, 496, 72, 268         # edges of the plotting area in pixels
MOST_INTERVALS = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame of a plot.

    title, note        texts above the plot
    x_label, y_label   labels with units
    x_ticks, y_ticks   labelled values; the y axis runs from 0 to the last of them
    x_place            maps a value to its position on the x axis, 0 to 1
    names              names in the legend, in the order of COLOURS; "": no entry
    """

    title: str
    note: str
    x_label: str
    y_label: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_place: Callable[[float], float]
    names: Sequence[str]

    def at_x(self, x: float) -> float:
        return LEFT + (RIGHT - LEFT) * self.x_place(x)

    def at_y(self, y: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * y / self.y_ticks[-1]

    @property
    def height(self) -> int:
        return HEIGHT + (LEGEND_HEIGHT if any(self.names) else 0)

    def elements(self, inside: Sequence[str]) -> list[str]:
        """Return the SVG elements of the frame, followed by the elements inside it."""
        return [*self._texts(), *self._axes(), *inside]

    def document(self, inside: Sequence[str]) -> str:
        """Return the SVG document of the frame and the elements inside it."""
        return document(WIDTH, self.height, self.elements(inside))

    def _axes(self) -> list[str]:
        out = []
        for tick in self.y_ticks:
            y = self.at_y(tick)
            out.append(f'<path d="M{LEFT} {y:.2f}H{RIGHT}" stroke="{GRID}"/>')
            out.append(f'<text class="y" x="{LEFT - 8}" y="{y + 4:.2f}" text-anchor="end" fill="{FAINT}">'
                       f"{tick:,.12g}</text>")
        for tick in self.x_ticks:
            x = self.at_x(tick)
            out.append(f'<path d="M{x:.2f} {BOTTOM}v5" stroke="{FAINT}"/>')
            out.append(f'<text class="x" x="{x:.2f}" y="{BOTTOM + 19}" text-anchor="middle" fill="{FAINT}">'
                       f"{tick:,.12g}</text>")
        out.append(f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{FAINT}"/>')
        return out

    def _texts(self) -> list[str]:
        out = [f'<text x="16" y="24" font-size="15" font-weight="600" fill="{INK}">{escape(self.title)}</text>',
               f'<text x="16" y="41" font-size="11" fill="{FAINT}">{escape(self.note)}</text>',
               f'<text x="16" y="60" fill="{INK}">{escape(self.y_label)}</text>',
               f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle" fill="{INK}">'
               f"{escape(self.x_label)}</text>"]
        x = float(LEFT)
        for name, colour in zip(self.names, COLOURS):
            if name:
                out.append(f'<circle cx="{x:.1f}" cy="{HEIGHT + 4}" r="4" fill="{colour}"/>')
                out.append(f'<text x="{x + 10:.1f}" y="{HEIGHT + 8}" fill="{INK}">{escape(name)}</text>')
                x += 7.2 * len(name) + 36
        return out


def ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at least `most`, in at most MOST_INTERVALS equal intervals."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / MOST_INTERVALS))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * MOST_INTERVALS >= most)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Format a number with about three significant digits, and an integer in full."""
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    digits = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
