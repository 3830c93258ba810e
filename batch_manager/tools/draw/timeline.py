"""A run as spans and counters.

A request gets a new span for each context chunk and whenever its state changes, but not in every iteration.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...scheduling.waiting import IN_FLIGHT
from ...stats.trace import IterationTrace
from ..client_waits import ClientWaits
from ..request_spans import CLIENT, CONTEXT, GENERATION, NO_STEP, PAUSED, QUEUED, WAITING, end_of, has_no_step

Kind = tuple[str, str]                          # (kind, reason), as in request_spans.Span

FIXED_KINDS: tuple[Kind, ...] = ((CONTEXT, ""), (GENERATION, ""), (PAUSED, ""), (QUEUED, ""))
COUNTERS = ("live_blocks", "cached_blocks", "free_blocks", "queued_requests", "context_tokens", "generation_tokens",
            "context_requests", "form")


@dataclass(slots=True)
class Row:
    """One request, from its arrival to its end. Iterations are indices into the trace: 0, 1, 2, ...

    starts       first iteration of each span in the engine; a span ends where the next span begins
    kinds        kind of each span, as an index into `Timeline.kinds`
    chunks       two numbers for each context span, in order: first position and number of tokens of its chunk
    waits        (kind, start in microseconds) of each span in the client, before those in the engine
    began_us     start of the first span in the engine, in microseconds
    end          iteration after the last iteration of the row
    end_us       when the final response was sent, or the end of the last iteration if the trace does not record that
    has_ended    False: the trace ends before the request
    """

    request_id: int
    starts: array
    kinds: array
    chunks: array
    waits: list[tuple[int, int]] = field(default_factory=list)
    began_us: int = 0
    end: int = 0
    end_us: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class Timeline:
    """A trace as columns, appended iteration by iteration.

    A span is a series of consecutive iterations in which a request has the same activity, for example generation.
    The spans of a row are those of request_spans.py, with the same times.

    rows         a Row for each request, in the order of acceptance; requests that use the same id have separate rows
    kinds        all kinds of spans; a span has the index of its kind in this list
    numbers      iteration numbers of the trace
    begin_us     start of each iteration, in microseconds since the start of the first; never decreases
    end_us       end of the last iteration, in microseconds
    counters     name -> a value per iteration; that of `form` is a value of `forms`
    forms        form of a step, and what kept the step out of earlier forms -> a number; 0: no form is recorded
    phases_us    phase -> a duration per iteration in microseconds, or 0 if the phase did not run
    has_before   whether requests arrived before the first iteration. `close` then inserts a column for the time before
                 it: the column has no tokens and no phases, and times count from its start
    settings     name -> value of the engine's settings, if the trace records them

    Each context chunk is a separate span. While a request waits because its step is still in flight,
    its span goes on.
    """

    rows: list[Row] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=lambda: list(FIXED_KINDS))
    numbers: list[int] = field(default_factory=list)
    begin_us: list[int] = field(default_factory=list)
    end_us: int = 0
    counters: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in COUNTERS})
    forms: dict[str, int] = field(default_factory=lambda: {"": 0})
    phases_us: dict[str, list[int]] = field(default_factory=dict)
    has_before: bool = False
    settings: Mapping[str, int | str] = field(default_factory=dict)
    _origin_s: float = 0.0
    _codes: dict[Kind, int] = field(default_factory=lambda: {kind: i for i, kind in enumerate(FIXED_KINDS)})
    _alive: dict[int, Row] = field(default_factory=dict)
    _doing: dict[int, set[int]] = field(default_factory=dict)     # kind -> ids of the requests in such a span
    _client: ClientWaits = field(default_factory=ClientWaits)
    _open: tuple[IterationTrace, float, list[Row]] | None = None  # the last iteration, the end of its get, its ends

    @property
    def tokens(self) -> int:
        """Number of computed tokens: the tokens of contexts, and one token for each generating request."""
        return sum(self.counters["context_tokens"]) + sum(self.counters["generation_tokens"])

    def append(self, iteration: IterationTrace) -> None:
        index = len(self.numbers)
        self._end_iteration(iteration.started_at_s)
        self._count(iteration)
        self.settings = iteration.settings or self.settings
        got_at_s = self._client.begin(iteration)
        arrived = (WAITING, NO_STEP) if has_no_step(iteration) else (QUEUED, "")
        self._begin(arrived, iteration.arrived, index, may_be_older=False)
        if arrived == (WAITING, NO_STEP):
            self._begin(arrived, list(self._doing.get(self._codes[QUEUED, ""], ())), index)
        for reason, ids in iteration.waiting.items():
            if reason != IN_FLIGHT:
                self._begin((WAITING, reason), ids, index)
        for request_id, first, tokens in iteration.context:
            self._begin_chunk(request_id, first, tokens, index)
        self._begin((GENERATION, ""), iteration.generation, index)
        self._begin((PAUSED, ""), iteration.paused, index)
        for request_id, arrived_at_s in zip(iteration.arrived, iteration.arrived_at_s):
            row = self._alive[request_id]
            waits = self._client.waits(arrived_at_s, got_at_s)
            row.waits = [(self._code((CLIENT, wait.reason)), self._us(wait.begin_s)) for wait in waits]
            row.began_us = self._us(got_at_s if waits else arrived_at_s)
        self._open = iteration, got_at_s, list(self._ended(iteration, index))

    def close(self) -> None:
        """End the live rows at the end of the trace. Call this method after the last iteration."""
        self._end_iteration(math.inf)
        for row in self._alive.values():
            row.end, row.end_us = len(self.numbers), self.end_us
        earliest = min((row.waits[0][1] for row in self.rows if row.waits), default=0)
        if earliest < 0 and not self.has_before:
            self._insert_before(-earliest)

    def spans(self, row: Row) -> Iterator[tuple[int, int, int]]:
        """Yield (kind, first iteration, start in microseconds) of each span of a row, in order."""
        for code, begin_us in row.waits:
            yield code, min(max(bisect_right(self.begin_us, begin_us) - 1, 0), row.starts[0]), begin_us
        for number, (code, start) in enumerate(zip(row.kinds, row.starts, strict=True)):
            yield code, start, self.begin_us[start] if number else row.began_us

    def _insert_before(self, before_us: int) -> None:
        self.has_before = True
        self.begin_us[:] = [0, *(begin_us + before_us for begin_us in self.begin_us)]
        self.end_us += before_us
        self.numbers.insert(0, self.numbers[0] - 1)
        for values in (*self.counters.values(), *self.phases_us.values()):
            values.insert(0, 0)
        for row in self.rows:
            row.starts = array("Q", [start + 1 for start in row.starts])
            row.waits = [(code, begin_us + before_us) for code, begin_us in row.waits]
            row.began_us += before_us
            row.end_us += before_us
            row.end += 1

    def _us(self, seconds: float) -> int:
        return round(1e6 * (seconds - self._origin_s))

    def _ended(self, iteration: IterationTrace, index: int) -> Iterator[Row]:
        """End the rows of the requests that an iteration ended. Yields those whose end has no recorded time."""
        times = dict(zip(iteration.finished, iteration.finished_at_s))
        for request_id in iteration.finished:
            row = self._alive.pop(request_id, None)
            if row is not None:
                self._doing[row.kinds[-1]].discard(request_id)
                row.end, row.has_ended = index + 1, True
                if request_id in times:
                    row.end_us = self._us(times[request_id])
                else:
                    yield row

    def _end_iteration(self, next_s: float) -> None:
        """End the last iteration. The next one begins at `next_s`; infinite: there is none."""
        if self._open is None:
            return
        iteration, got_at_s, ended = self._open
        self._open = None
        is_idle = not self._alive
        end_s = end_of(iteration, next_s, is_idle=is_idle)
        self.end_us = max(self._us(end_s), self.begin_us[-1])
        for row in ended:
            row.end_us = self.end_us
        self._client.end(iteration, got_at_s, end_s if is_idle else None)

    def _count(self, iteration: IterationTrace) -> None:
        if not self.numbers:
            self._origin_s = iteration.started_at_s
        form = "; ".join([iteration.form, *(f"not {name}: {word}" for name, word in iteration.obstacles.items())])
        values = (iteration.live_blocks, iteration.cached_blocks, iteration.free_blocks, iteration.queued_requests,
                  sum(chunk[2] for chunk in iteration.context), len(iteration.generation), len(iteration.context),
                  self.forms.setdefault(form, len(self.forms)))
        for name, value in zip(COUNTERS, values, strict=True):
            self.counters[name].append(value)
        new = [phase for phase in iteration.phases_us if phase not in self.phases_us]
        self.phases_us |= {phase: [0] * len(self.numbers) for phase in new}
        for phase, times in self.phases_us.items():
            times.append(iteration.phases_us.get(phase, 0))
        self.numbers.append(iteration.iteration)
        self.begin_us.append(max(self._us(iteration.started_at_s), *self.begin_us[-1:], 0))

    def _code(self, kind: Kind) -> int:
        if kind not in self._codes:
            self._codes[kind] = len(self.kinds)
            self.kinds.append(kind)
        return self._codes[kind]

    def _begin(self, kind: Kind, ids: Sequence[int], index: int, *, may_be_older: bool = True) -> None:
        """Begin a span of `kind` at iteration `index` for each request of `ids` that is not in such a span.

        may_be_older   what happens to a request whose id has a live row, which is a row that has not ended. True:
                       the span is added to this row. False: the request is skipped
        """
        if not ids:
            return
        code = self._code(kind)
        changed = set(ids).difference(self._doing.get(code, ()))
        for request_id in ids if changed else ():
            if request_id in changed and (may_be_older or request_id not in self._alive):
                self._change(request_id, code, index)

    def _begin_chunk(self, request_id: int, first: int, tokens: int, index: int) -> None:
        row = self._change(request_id, self._codes[CONTEXT, ""], index)
        row.chunks.extend((first, tokens))

    def _change(self, request_id: int, code: int, index: int) -> Row:
        row = self._alive.get(request_id)
        if row is None:
            row = self._alive[request_id] = Row(request_id, array("Q"), array("H"), array("q"),
                                                began_us=self.begin_us[index])
            self.rows.append(row)
        else:
            self._doing[row.kinds[-1]].discard(request_id)
            if row.starts[-1] == index:                  # a second span that begins in an iteration replaces the first
                row.starts.pop()
                if self.kinds[row.kinds.pop()][0] == CONTEXT:
                    del row.chunks[-2:]
        row.starts.append(index)
        row.kinds.append(code)
        self._doing.setdefault(code, set()).add(request_id)
        return row
