"""A plot of amounts over time as SVG: stacked layers, with one bar per layer for each span of time."""

from collections.abc import Sequence
from dataclasses import dataclass

from .plot_frame import COLOURS, LEFT, RIGHT, WIDTH, Frame, number, ticks
from .svg import FAINT, document


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time in a plot.

    amounts   amount of each layer of the plot from `begin` to `end`, lowest layer first
    """

    begin: float
    end: float
    amounts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StackedPlot:
    """A plot of at most len(COLOURS) layers. Both axes begin at 0.

    names   names of the layers, lowest first
    limit   (level, label) of a dashed line; None: no line
    """

    title: str
    note: str
    x_label: str
    y_label: str
    names: Sequence[str]
    spans: Sequence[Span]
    limit: tuple[float, str] | None = None

    def render(self) -> str:
        """Return the SVG document. Raises ValueError for a plot without spans, or with more layers than colours."""
        frame, inside = self.drawn()
        return frame.document(inside)

    def drawn(self) -> tuple[Frame, list[str]]:
        """Return the frame, and the SVG elements inside it. Raises ValueError as `render` does."""
        if not self.spans or len(self.names) > len(COLOURS):
            raise ValueError(f"the plot {self.title!r} has {len(self.spans)} spans and {len(self.names)} layers; "
                             f"expected at least one span and at most {len(COLOURS)} layers")
        x_ticks = ticks(max(span.end for span in self.spans))
        most = max(max(sum(span.amounts) for span in self.spans), self.limit[0] if self.limit else 0.0)
        frame = Frame(self.title, self.note, self.x_label, self.y_label, x_ticks, ticks(most),
                      lambda x: x / x_ticks[-1], self.names)
        out = []
        for layer, colour in enumerate(COLOURS[: len(self.names)]):
            steps = []
            for span in self.spans:
                below = sum(span.amounts[:layer])
                left, right = frame.at_x(span.begin), frame.at_x(span.end)
                top, bottom = frame.at_y(below + span.amounts[layer]), frame.at_y(below)
                if span.amounts[layer] > 0:
                    steps.append(f"M{left:.2f} {bottom:.2f}V{top:.2f}H{right:.2f}V{bottom:.2f}Z")
            if steps:
                out.append(f'<path class="layer" d="{"".join(steps)}" fill="{colour}" shape-rendering="crispEdges"/>')
        if self.limit is not None:
            level, words = self.limit
            y = frame.at_y(level)
            out.append(f'<path d="M{LEFT} {y:.2f}H{RIGHT}" stroke="{FAINT}" stroke-dasharray="5 3"/>')
            out.append(f'<text x="{RIGHT}" y="{y - 5:.2f}" font-size="11" text-anchor="end" fill="{FAINT}">'
                       f"{words}: {number(level)}</text>")
        return frame, out


@dataclass(frozen=True, slots=True)
class Panels:
    """Plots over the same time, one below the other."""

    plots: Sequence[StackedPlot]

    def render(self) -> str:
        """Return the SVG document. Raises ValueError as `StackedPlot.render` does."""
        out, height = [], 0
        for plot in self.plots:
            frame, inside = plot.drawn()
            out += [f'<g transform="translate(0 {height})">', *frame.elements(inside), "</g>"]
            height += frame.height
        return document(WIDTH, height, out)
