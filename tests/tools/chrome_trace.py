"""Checks a file against Chrome's trace event format, which Perfetto and chrome://tracing read.

The rules are from the document "Trace Event Format" of the Chromium project. They cover the three kinds of events that
`batch-manager trace perfetto` writes: complete events (X), counters (C) and metadata (M).
"""

from collections import defaultdict
from typing import Any

METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
            "thread_sort_index": "sort_index"}
MOST_TID = 2**31 - 1


def faults(document: Any) -> list[str]:
    """Return a line for each violation of the format in `document`, a trace file that was read as JSON."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["there is no list traceEvents"]
    found = []
    if document.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append(f"displayTimeUnit is {document['displayTimeUnit']!r}")
    tracks: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for number, event in enumerate(document["traceEvents"]):
        found += [f"event {number}: {fault}" for fault in _faults_of(event)]
        if not found and event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], number))
    for track, slices in tracks.items():
        open_until: list[float] = []
        for begin, negative, number in sorted(slices):
            end = begin - negative
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            if open_until and end > open_until[-1]:
                found.append(f"event {number}: overlaps another slice of track {track} and is not inside it")
            open_until.append(end)
    return found


def _faults_of(event: Any) -> list[str]:
    if not isinstance(event, dict):
        return ["is no object"]
    phase, found = event.get("ph"), []
    if phase not in ("X", "C", "M"):
        return [f"has the phase {phase!r}"]
    if not isinstance(event.get("name"), str) or not event["name"]:
        found.append("has no name")
    found += [f"{name} is {event.get(name)!r}" for name in (("pid",) if phase == "C" else ("pid", "tid"))
              if not _is_number(event.get(name), int) or not 0 <= event[name] <= MOST_TID]
    found += [f"{name} is {event.get(name)!r}" for name in {"X": ("ts", "dur"), "C": ("ts",), "M": ()}[phase]
              if not _is_number(event.get(name), int | float) or not 0 <= event[name] < 2**53]
    arguments = event.get("args", {})
    if not isinstance(arguments, dict):
        found.append("args is no object")
    elif phase == "C" and not (arguments and all(_is_number(value, int | float) for value in arguments.values())):
        found.append("a counter without numbers")
    elif phase == "M" and event.get("name") in METADATA and METADATA[event["name"]] not in arguments:
        found.append(f"{event['name']} without its value")
    elif phase == "M" and event.get("name") not in METADATA:
        found.append(f"there is no metadata {event.get('name')!r}")
    return found


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
