"""What every iteration did to whom: for pictures, simulations and bug reports. Ids and counts, no tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import IO

import orjson


@dataclass(frozen=True, slots=True)
class IterationTrace:
    """One iteration.

    context      (request id, first position, tokens) of each chunk
    generation   request ids
    paused, finished   request ids
    arrived      request ids accepted at the start of the iteration, whether they ran in it or wait
    """

    iteration: int
    context: tuple[tuple[int, int, int], ...]
    generation: tuple[int, ...]
    paused: tuple[int, ...]
    finished: tuple[int, ...]
    arrived: tuple[int, ...] = ()


@dataclass(slots=True)
class Trace:
    """An append-only list of iterations; give its `append` to `Parts(trace=...)`."""

    iterations: list[IterationTrace] = field(default_factory=list)

    def append(self, iteration: IterationTrace) -> None:
        self.iterations.append(iteration)


def write_trace(iterations: Iterable[IterationTrace], file: IO[bytes]) -> None:
    """One line of JSON an iteration."""
    for iteration in iterations:
        file.write(orjson.dumps(asdict(iteration), option=orjson.OPT_APPEND_NEWLINE))


def read_trace(file: IO[bytes]) -> Iterator[IterationTrace]:
    """The iterations that `write_trace` wrote.

    Raises ValueError, which names the line, for anything else.
    """
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield _iteration(orjson.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is no iteration of a trace; expected one JSON object with "
                             f"{', '.join(f.name for f in fields(IterationTrace))}") from error


def _iteration(record: dict) -> IterationTrace:
    return IterationTrace(
        iteration=int(record["iteration"]),
        context=tuple((int(request_id), int(start), int(tokens)) for request_id, start, tokens in record["context"]),
        generation=tuple(int(request_id) for request_id in record["generation"]),
        paused=tuple(int(request_id) for request_id in record["paused"]),
        finished=tuple(int(request_id) for request_id in record["finished"]),
        arrived=tuple(int(request_id) for request_id in record.get("arrived", ())),
    )
