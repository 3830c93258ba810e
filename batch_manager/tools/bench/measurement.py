"""All servings that one command asks for, on one engine."""

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

from ...config import Parts
from .client import Count
from .errors import BenchmarkError, InputError
from .load import Load
from .progress import Progress, duration, shown
from .run import bounds_of, load_of, point_fields, prepared, shared_fields
from .saturation import FEWEST_REQUESTS, Saturation, criterion_of, find_saturation, is_sustained
from .session import Served, Session
from .summary import sweep_table


class Measurement:
    """What the options ask for: one serving, a sweep, or the search of the saturation.

    options, workload, parts   as `run.benchmark` has them

    points    results of the servings so far
    served    the servings themselves, in the same order

    Raises InputError for what is no workload, or has too few requests.
    """

    def __init__(self, options: argparse.Namespace, workload: dict[str, Any], parts: Parts | None = None) -> None:
        self._options, self._parts = options, parts
        self._workload = prepared(workload, options)
        self._session: Session | None = None
        self._interrupted_at: Count | None = None
        self.points: list[dict[str, Any]] = []
        self.served: list[Served] = []
        if options.find_saturation and self._workload["n"] < FEWEST_REQUESTS:
            raise InputError(f"the workload has {self._workload['n']} requests; --find-saturation takes "
                             f"{FEWEST_REQUESTS} at least; give it a larger one")

    def run(self) -> dict[str, Any]:
        """The result, as it stands in the file. Raises what `run.benchmark` raises."""
        options, watch = self._options, None
        if options.log_iteration_data:
            def watch(record: str) -> None:
                print(record, file=sys.stderr)
        session = Session(options, self._workload, self._parts, watch=watch)
        with session:
            self._session = session         # not before: the warm-up counts nothing
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
        """What is known when it is interrupted, in words and as a table."""
        told = []
        if self.points:
            told.append(sweep_table([{"n": self._workload["n"], **point} for point in self.points]))
        if (count := self._interrupted_at) is not None:
            told.append(f"interrupted after {duration(count.seconds)}: {count.done} of {count.total} requests were "
                        f"done, {count.tokens:,} tokens generated")
        return "\n".join(told)

    def _shared(self) -> dict[str, Any]:
        return shared_fields(self._options, self._workload, self._session)

    def _serve(self, load: Load, label: str) -> dict[str, Any]:
        options, session = self._options, self._session
        shows = not options.quiet and not options.log_iteration_data
        requests = load.arriving(self._workload["requests"])
        with shown(shows, lambda: Progress(session.client, session.manager, requests, label)):
            try:
                served = session.serve(load)
            except KeyboardInterrupt:           # before the engine ends, and with it every request
                self._interrupted_at = session.client.count()
                raise
        point = point_fields(options, self._workload, served)
        self.points.append(point)
        self.served.append(served)
        return point

    def _find_saturation(self) -> Saturation:
        options = self._options
        bounds, share = bounds_of(options), options.slo_share

        def holds(rate: float) -> bool:
            point = self._serve(load_of(options, request_rate=rate), f"{rate:.4g} requests/s")
            point["sustained"] = is_sustained(point, bounds, share)
            return point["sustained"]

        # All at once says how many requests a second there can be at most, about: the first rate.
        most = self._serve(load_of(options, request_rate=0.0), "all at once")["requests_s"]
        if not most:
            raise BenchmarkError("every request failed when all arrived at once, the first with: "
                                 f"{self.points[0]['failures'][0]['error']}")
        found = find_saturation(holds, most, options.max_probes - 1, criterion_of(bounds, share))
        return replace(found, probes=found.probes + 1)
