"""A run as spans and counters.

A request gets a new span for each context chunk and whenever its state changes, but not in every iteration.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...scheduling.waiting import IN_FLIGHT
from ...stats.trace import IterationTrace
from ..request_spans import CONTEXT, GENERATION, PAUSED, QUEUED, WAITING

Kind = tuple[str, str]                          # (kind, reason), as in request_spans.Span

FIXED_KINDS: tuple[Kind, ...] = ((CONTEXT, ""), (GENERATION, ""), (PAUSED, ""), (QUEUED, ""))
COUNTERS = ("live_blocks", "cached_blocks", "free_blocks", "queued_requests", "context_tokens", "generation_tokens")


@dataclass(slots=True)
class Row:
    """One request, from its first to its last iteration. Iterations are indices into the trace: 0, 1, 2, ...

    starts       first iteration of each span; a span ends where the next span begins
    kinds        kind of each span, as an index into `Timeline.kinds`
    chunks       two numbers for each context span, in order: first position and number of tokens of its chunk
    end          iteration after the last iteration of the row
    has_ended    False: the trace ends before the request
    """

    request_id: int
    starts: array
    kinds: array
    chunks: array
    end: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class Timeline:
    """A trace as columns, appended iteration by iteration.

    A span is a series of consecutive iterations in which a request has the same activity, for example generation.

    rows         a Row for each request, in order of arrival; requests that use the same id have separate rows
    kinds        all kinds of spans; a span has the index of its kind in this list
    numbers      iteration numbers of the trace
    begin_us     start of each iteration, in microseconds since the start of the first iteration; never decreases
    counters     name -> a value per iteration
    phases_us    phase -> a duration per iteration in microseconds, or 0 if the phase did not run

    Each context chunk is a separate span. While a request waits because its step is still in flight,
    its span goes on.
    """

    rows: list[Row] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=lambda: list(FIXED_KINDS))
    numbers: list[int] = field(default_factory=list)
    begin_us: list[int] = field(default_factory=list)
    counters: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in COUNTERS})
    phases_us: dict[str, list[int]] = field(default_factory=dict)
    _origin_s: float = 0.0
    _last_us: int = 0
    _codes: dict[Kind, int] = field(default_factory=lambda: {kind: i for i, kind in enumerate(FIXED_KINDS)})
    _alive: dict[int, Row] = field(default_factory=dict)
    _doing: dict[int, set[int]] = field(default_factory=dict)     # kind -> ids of the requests in such a span

    @property
    def end_us(self) -> int:
        """End of the phases of the last iteration, in microseconds."""
        return self._last_us + sum(values[-1] for values in self.phases_us.values())

    @property
    def tokens(self) -> int:
        """Number of computed tokens: the tokens of contexts, and one token for each generating request."""
        return sum(self.counters["context_tokens"]) + sum(self.counters["generation_tokens"])

    def append(self, iteration: IterationTrace) -> None:
        index = len(self.numbers)
        self._count(iteration)
        self._begin((QUEUED, ""), iteration.arrived, index, may_be_older=False)
        for reason, ids in iteration.waiting.items():
            if reason != IN_FLIGHT:
                self._begin((WAITING, reason), ids, index)
        for request_id, first, tokens in iteration.context:
            self._begin_chunk(request_id, first, tokens, index)
        self._begin((GENERATION, ""), iteration.generation, index)
        self._begin((PAUSED, ""), iteration.paused, index)
        for request_id in iteration.finished:
            row = self._alive.pop(request_id, None)
            if row is not None:
                self._doing[row.kinds[-1]].discard(request_id)
                row.end, row.has_ended = index + 1, True

    def close(self) -> None:
        """End the live rows at the end of the trace. Call this method after the last iteration."""
        for row in self._alive.values():
            row.end = len(self.numbers)

    def _count(self, iteration: IterationTrace) -> None:
        if not self.numbers:
            self._origin_s = iteration.started_at_s
        self._last_us = max(self._last_us, round(1e6 * (iteration.started_at_s - self._origin_s)))
        values = (iteration.live_blocks, iteration.cached_blocks, iteration.free_blocks, iteration.queued_requests,
                  sum(chunk[2] for chunk in iteration.context), len(iteration.generation))
        for name, value in zip(COUNTERS, values, strict=True):
            self.counters[name].append(value)
        for phase in iteration.phases_us:
            if phase not in self.phases_us:
                self.phases_us[phase] = [0] * len(self.numbers)
        for phase, times in self.phases_us.items():
            times.append(iteration.phases_us.get(phase, 0))
        self.numbers.append(iteration.iteration)
        self.begin_us.append(self._last_us)

    def _code(self, kind: Kind) -> int:
        code = self._codes.get(kind)
        if code is None:
            code = self._codes[kind] = len(self.kinds)
            self.kinds.append(kind)
        return code

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
            row = self._alive[request_id] = Row(request_id, array("Q"), array("H"), array("q"))
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
