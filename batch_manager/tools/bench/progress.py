"""Progress of a benchmark on stderr: a bar in a terminal, otherwise a line every few seconds.

A separate thread reads counters a few times a second, so that the callbacks and the worker do no extra work.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from ...errors import counted
from ...gpt_manager import GptManager
from .client import Client

BAR_PERIOD_S, LINE_PERIOD_S = 0.5, 5.0


class State(NamedTuple):
    """One reading of the counters.

    done, total      number of requests with a final response, and of all requests
    tokens_per_s     tokens generated per second since the previous reading
    active, queued   number of active requests, and of arrived requests that wait
    left_s           estimated seconds to the end; None: unknown
    """

    done: int
    total: int
    tokens_per_s: float
    active: int
    queued: int
    left_s: float | None

    def words(self) -> str:
        left = "" if self.left_s is None else f", {duration(self.left_s)} left"
        return (f"{self.done} of {counted(self.total, 'request')}, {self.tokens_per_s:,.0f} tokens/s, "
                f"{self.active} active, {self.queued} queued{left}")


def duration(seconds: float) -> str:
    """Format seconds, for example as 7 s, 2 min 5 s or 1 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress:
    """Context manager that shows the progress of one run. The bar disappears at the end.

    requests   the served requests, in the form of a workload
    label      name of the run, printed before its progress; "": no label
    """

    def __init__(self, client: Client, manager: GptManager, requests: list[dict[str, Any]], label: str = "",
                 file: IO[str] | None = None) -> None:
        self._client, self._manager = client, manager
        self._tokens_wanted = sum(request["max_tokens"] for request in requests)
        self._last_arrival = max(request["arrival_s"] for request in requests)
        self._label = label
        self._file = sys.stderr if file is None else file
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench progress", daemon=True)
        self._before = (0.0, 0)         # seconds, tokens

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def state(self) -> State:
        count, health = self._client.count(), self._manager.health()
        seconds, tokens = self._before
        self._before = count.seconds, count.tokens
        between = count.seconds - seconds
        rate = (count.tokens - tokens) / between if between > 0 else 0.0
        left_s = None
        if count.tokens:
            left_s = max((self._tokens_wanted - count.tokens) * count.seconds / count.tokens,
                         self._last_arrival - count.seconds, 0.0)
        active = health["active_requests"]
        return State(count.done, count.total, rate, active, max(count.arrived - count.done - active, 0), left_s)

    def _run(self) -> None:
        if self._file.isatty() and find_spec("rich") is not None:
            self._show_bar()
            return
        label = f"{self._label}: " if self._label else ""
        while not self._over.wait(LINE_PERIOD_S):
            print(f"{label}{self.state().words()}", file=self._file, flush=True)

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[words]}"))
        with Bar(*columns, console=Console(file=self._file), auto_refresh=False, transient=True) as bar:
            task = bar.add_task(self._label, total=None, words="")
            while not self._over.wait(BAR_PERIOD_S):
                state = self.state()
                bar.update(task, completed=state.done, total=state.total, words=state.words())
                bar.refresh()


def shown(enabled: bool, make: Callable[[], Progress]) -> Any:
    """Return `make()` if enabled, otherwise a context manager without an effect."""
    return make() if enabled else contextlib.nullcontext()
