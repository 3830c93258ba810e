"""A small run as a table. Each cell shows one request in one iteration."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from ...stats.trace import IterationTrace

SHORTEST_FOLD = 3

ABSENT, WAITING, CONTEXT, GENERATION, PAUSED, CLIENT = "", ".", "C", "G", "P", "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """One request in one iteration.

    kind     ABSENT, WAITING, CONTEXT, GENERATION, PAUSED or CLIENT
    tokens   tokens computed in this iteration
    ended    the request ended in this iteration
    """

    kind: str = ABSENT
    tokens: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return self.kind + (str(self.tokens) if self.kind == CONTEXT else "") + ("*" if self.ended else "")


@dataclass(frozen=True, slots=True)
class Picture:
    """A table of iterations x requests. `rows[i][j]` shows request `request_ids[j]` in iteration `iterations[i]`.

    Each cell has a kind. From the acceptance to the end of a request, its cells are WAITING, except in iterations for
    which the trace records another kind of cell; before the acceptance, they are CLIENT from the
    iteration in which the request arrived. If the trace has no arrival of a request, the first iteration that
    names the request counts as its arrival. Requests that use the same id one after the other share a column.
    """

    iterations: list[int]
    request_ids: list[int]
    rows: list[list[Cell]]

    @staticmethod
    def of(trace: Iterable[IterationTrace]) -> "Picture":
        alive: dict[int, bool] = {}         # in order of first appearance
        numbers, cells_of, begins = [], [], []
        for record in trace:
            begins.append(record.started_at_s)
            for request_id, arrived_at_s in zip(record.arrived, record.arrived_at_s):
                before = len(cells_of) - 1
                while before >= 0 and begins[before + 1] > arrived_at_s:
                    cells_of[before].setdefault(request_id, Cell(CLIENT))
                    before -= 1
            ran = {request_id: Cell(PAUSED) for request_id in record.paused}
            for request_id, _, tokens in record.context:
                ran[request_id] = Cell(CONTEXT, tokens)
            ran |= {request_id: Cell(GENERATION, 1) for request_id in record.generation}
            alive |= dict.fromkeys((*record.arrived, *ran, *record.finished), True)
            cells = {}
            for request_id, is_alive in alive.items():
                if is_alive:
                    cell = ran.get(request_id, Cell(WAITING))
                    ended = request_id in record.finished
                    cells[request_id] = Cell(cell.kind, cell.tokens, ended)
                    alive[request_id] = not ended
            numbers.append(record.iteration)
            cells_of.append(cells)
        return Picture(numbers, list(alive), [[cells.get(i, Cell()) for i in alive] for cells in cells_of])

    def columns(self) -> list[list[Cell]]:
        """Return the cells of each request, in the order of the iterations."""
        return [[row[j] for row in self.rows] for j in range(len(self.request_ids))]

    def folds(self) -> list[tuple[int, int]]:
        """Return (first row, number of rows) of each run of equal rows.

        Rows of runs shorter than SHORTEST_FOLD are returned one by one.
        """
        folds = []
        for _, run in groupby(range(len(self.rows)), key=lambda i: self.rows[i]):
            indices = list(run)
            if len(indices) >= SHORTEST_FOLD:
                folds.append((indices[0], len(indices)))
            else:
                folds += [(i, 1) for i in indices]
        return folds


def span_of_iterations(iterations: list[int], start: int, count: int) -> str:
    """Return the iteration numbers of `count` rows from index `start` as text, such as "7" or "7-20"."""
    return str(iterations[start]) if count == 1 else f"{iterations[start]}-{iterations[start + count - 1]}"
