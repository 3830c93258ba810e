"""The sessions of a workload: requests that are sent one after the other, each with the answers before it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Request = dict[str, Any]


def with_turns(requests: Sequence[Request]) -> list[Request]:
    """Return the requests of a workload, those of sessions as copies with their `turn`, which counts from 1."""
    turns: dict[int, int] = {}
    made = []
    for request in requests:
        if (session := request.get("session")) is not None:
            turns[session] = turns.get(session, 0) + 1
            request = dict(request, turn=turns[session])
        made.append(request)
    return made


def is_later_turn(request: Mapping[str, Any]) -> bool:
    return request.get("turn", 1) > 1


def next_turns(requests: Iterable[Request]) -> dict[int, Request]:
    """Return the id of a turn -> the next turn of its session."""
    latest: dict[int, Request] = {}
    found = {}
    for request in requests:
        if (session := request.get("session")) is not None:
            if session in latest:
                found[latest[session]["id"]] = request
            latest[session] = request
    return found


def num_sessions(requests: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the number of sessions; None: the requests are no turns of sessions."""
    return len({request["session"] for request in requests if request.get("session") is not None}) or None
