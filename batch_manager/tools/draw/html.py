"""A run as one HTML file, which needs no network and no libraries. The scripts of the file are in page/."""

from html import escape
from importlib.resources import files
from typing import IO

from ...errors import counted
from . import colours
from .packing import pack
from .timeline import Timeline

# The scripts in order of dependency.
SCRIPTS = ("unpack.js", "axis.js", "spans.js", "tiles.js", "rows.js", "counters.js", "details.js", "view.js", "main.js")


def write_html(timeline: Timeline, file: IO[bytes], *, title: str) -> None:
    """Close the timeline and write its page. `title` may be any text."""
    timeline.close()
    page = files(__package__) / "page"
    about = {"title": title, "summary": summary(timeline), "ended": list(colours.ENDED),
             "colours": [list(colours.of_kind(*kind)) for kind in timeline.kinds]}
    parts = {
        "TITLE": escape(title),
        "SUMMARY": escape(about["summary"]),
        "STYLE": (page / "view.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join((page / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    # Inserted text is not searched again, because a title may contain the name of a part.
    before, _, after = (page / "view.html").read_text(encoding="utf-8").partition("{{DATA}}")
    file.write(_filled(before, parts).encode())
    file.write(pack(timeline, about))
    file.write(_filled(after, parts).encode())


def summary(timeline: Timeline) -> str:
    """Describe the size of the run in words."""
    iterations = len(timeline.numbers) - timeline.has_before
    words = [counted(len(timeline.rows), "request"), counted(iterations, "iteration")]
    seconds = timeline.end_us / 1e6
    if seconds > 0:
        words.append(f"{seconds:,.3f} s" if seconds < 100 else f"{seconds:,.0f} s")
    words.append(counted(timeline.tokens, "token") + " computed")
    if seconds > 0:
        words.append(f"{timeline.tokens / seconds:,.0f} tokens/s")
    return ", ".join(words)


def _filled(template: str, parts: dict[str, str]) -> str:
    first, *rest = template.split("{{")
    out = [first]
    for piece in rest:
        name, _, text = piece.partition("}}")
        out += [parts[name], text]
    return "".join(out)
