"""Colours of the kinds of spans, for light and dark pages. Every picture uses the same colours."""

from typing import NamedTuple

from ...scheduling import waiting
from .. import client_waits, request_spans
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
LIMIT = Colour("#b3261e", "#ff8a80")

# Pale tints like the colour of WAITING, so that a waiting request does not look like a running request.
WAITING_FOR: dict[str, Colour] = {
    waiting.COMPLETE: Colour("#dfe8cf", "#46523a"),
    waiting.BATCH_SIZE: Colour("#cfd5dc", "#4b5560"),
    waiting.BATCH_RUNS: Colour("#e4dcc3", "#575039"),
    waiting.PREFIX: Colour("#dacfeb", "#4d4363"),
    waiting.BLOCKS: Colour("#f3d3bb", "#66472f"),
    waiting.TOKENS: Colour("#c9d9ef", "#36496a"),
    waiting.ADAPTER_PAGES: Colour("#e3c9dd", "#5a3a54"),
    waiting.BEAM_WIDTH: Colour("#c8e2e1", "#2f5655"),
    waiting.ORDER: WAITING,
}


# Tints of one colour, so that a request that is not in the engine looks like no request that is.
CLIENT = Colour("#f0c9d6", "#5e3847")
IN_CLIENT: dict[str, Colour] = {
    client_waits.NEXT_GET: Colour("#f8dfe7", "#48303a"),
    client_waits.FREE_ROOM: Colour("#fbeef2", "#382930"),
    client_waits.IDLE: Colour("#fbeef2", "#382930"),
}
_OF_KIND = {request_spans.CONTEXT: CONTEXT, request_spans.GENERATION: GENERATION, request_spans.PAUSED: PAUSED,
            request_spans.QUEUED: QUEUED}


def of_kind(kind: str, reason: str) -> Colour:
    """Return the colour of spans. WAITING_FOR and IN_CLIENT list the reasons that have a tint of their own."""
    if kind == request_spans.CLIENT:
        return IN_CLIENT.get(reason, CLIENT)
    return _OF_KIND.get(kind) or WAITING_FOR.get(reason, WAITING)
