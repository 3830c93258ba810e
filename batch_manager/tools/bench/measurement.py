"""Do all runs of one command on one engine."""

import argparse
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from ...config import Parts
from ...errors import counted
from .client import Count
from .errors import InputError
from .load import Load
from .progress import Progress, duration, shown
from .run import bounds_of, load_of, point_fields, prepared, shared_fields
from .saturation import (
    FEWEST_REQUESTS,
    WITH_SESSIONS,
    Saturation,
    criterion_of,
    find_saturation,
    is_sustained,
    probe_load,
    repetitions,
)
from .session import Served, Session
from .sessions import num_sessions
from .summary import sweep_table


class Measurement:
    """Measures one run, a sweep, or the saturation, as the options specify.

    options    from `parse_options`
    workload   the workload, as read from its file
    parts      parts of the engine; if they have a backend, the model is not read

    points    results of the completed runs
    served    the completed runs, in the same order

    The constructor raises InputError if the workload is invalid or has too few requests.
    """

    def __init__(self, options: argparse.Namespace, workload: dict[str, Any], parts: Parts | None = None) -> None:
        self._options, self._parts = options, parts
        self._workload = prepared(workload, options)
        self._session: Session | None = None
        self._interrupted_at: Count | None = None
        self.points: list[dict[str, Any]] = []
        self.served: list[Served] = []
        if options.find_saturation and num_sessions(self._workload["requests"]):
            raise InputError(WITH_SESSIONS.format(option="--find-saturation"))
        if options.find_saturation and self._workload["n"] < FEWEST_REQUESTS:
            raise InputError(f"the workload has {counted(self._workload['n'], 'request')}; --find-saturation needs at "
                             f"least {FEWEST_REQUESTS}; use a larger workload")

    def run(self) -> dict[str, Any]:
        """Measure, and return the result in the form of the result file.

        Raises BenchmarkError if the run has no valid result, and the errors of the constructor of GptManager.
        """
        options, watch = self._options, None
        if options.log_iteration_data:
            def watch(record: str) -> None:
                print(record, file=sys.stderr)
        session = Session(options, self._workload, self._parts, watch=watch)
        with session:
            self._session = session         # set after the warm-up: an interrupted warm-up has no result
            if options.sweep is not None:
                name, values = options.sweep
                for number, value in enumerate(values, 1):
                    words = f"{value:g} requests/s" if name == "request_rate" else f"concurrency {value}"
                    self._serve(load_of(options, **{name: value}), f"{words if value else 'all at once'}, {number} of "
                                                                   f"{len(values)}")
                return {**self._shared(), "kind": "sweep", "swept": name, "points": self.points}
            if options.find_saturation:
                found = self._find_saturation()
                return {**self._shared(), "kind": "saturation", "swept": "request_rate",
                        "saturation": asdict(found), "points": self.points}
            return {**self._shared(), "kind": "run", **self._serve(load_of(options), "")}

    def so_far(self) -> str:
        """Return the results so far as text, to print when the run is interrupted."""
        texts = []
        if self.points:
            texts.append(sweep_table([{"n": self._workload["n"], **point} for point in self.points]))
        if (count := self._interrupted_at) is not None:
            texts.append(f"interrupted after {duration(count.seconds)}: {count.done} of "
                        f"{counted(count.total, 'request')} were done, {counted(count.tokens, 'token')} generated")
        return "\n".join(texts)

    def _shared(self) -> dict[str, Any]:
        return shared_fields(self._options, self._workload, self._session)

    def _serve(self, load: Load, label: str) -> dict[str, Any]:
        options, session = self._options, self._session
        shows = not options.quiet and not options.log_iteration_data
        requests = load.arriving(self._workload["requests"])
        with shown(shows, lambda: Progress(session.client, session.manager, requests, label)):
            try:
                served = session.serve(load)
            except KeyboardInterrupt:           # before the session closes and ends every request
                self._interrupted_at = session.client.count()
                raise
        point = point_fields(options, self._workload, served)
        self.points.append(point)
        self.served.append(served)
        return point

    def _find_saturation(self) -> Saturation:
        options = self._options
        bounds, share = bounds_of(options), options.slo_share
        in_order = sorted(self._workload["requests"], key=lambda request: request["arrival_s"])
        repeated = repetitions(np.arange(len(in_order)), np.array([len(request["prompt"]) for request in in_order]),
                               np.array([request["max_tokens"] for request in in_order]),
                               max(options.max_batch_size, options.max_num_sequences or 0))

        def holds(rate: float) -> bool:
            load = probe_load(load_of(options, request_rate=rate), repeated)
            point = {**self._serve(load, f"{rate:.4g} requests/s"), "n": repeated * self._workload["n"]}
            self.points[-1] = point
            point["sustained"] = is_sustained(point, bounds, share)
            return point["sustained"]

        return find_saturation(lambda: self._serve(load_of(options, request_rate=0.0), "all at once"), holds,
                               options.max_probes, criterion_of(bounds, share))
