"""Colours of the kinds of spans, for light and dark pages. Every picture uses the same colours."""

from typing import NamedTuple

from ...scheduling import waiting
from ..svg import BLUE, ORANGE


class Colour(NamedTuple):
    """The CSS colours of one kind of span, on light and on dark pages."""

    light: str
    dark: str


CONTEXT = Colour(BLUE, "#4a8ede")
GENERATION = Colour("#8cc5a2", "#4f9a6c")
PAUSED = Colour(ORANGE, "#e8894a")
WAITING = Colour("#e3e6ea", "#3a424b")
QUEUED = Colour("#f4f5f7", "#262c33")
ENDED = Colour("#14202b", "#f2f5f8")

# Pale tints like the colour of WAITING, so that a waiting request does not look like a running request.
WAITING_FOR: dict[str, Colour] = {
    waiting.BATCH_SIZE: Colour("#cfd5dc", "#4b5560"),
    waiting.BATCH_RUNS: Colour("#e4dcc3", "#575039"),
    waiting.PREFIX: Colour("#dacfeb", "#4d4363"),
    waiting.BLOCKS: Colour("#f3d3bb", "#66472f"),
    waiting.TOKENS: Colour("#c9d9ef", "#36496a"),
    waiting.BEAM_WIDTH: Colour("#c8e2e1", "#2f5655"),
    waiting.ORDER: WAITING,
}


def of_waiting(reason: str) -> Colour:
    """Return the colour of waiting spans with this reason. All reasons of custom schedulers have the same colour."""
    return WAITING_FOR.get(reason, WAITING)
