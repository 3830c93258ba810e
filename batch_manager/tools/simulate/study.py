"""The simulations of one command: one setting, or a sweep."""

import argparse
import csv
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import counted
from ...stats.trace import TraceWriter
from ..bench.errors import InputError
from ..bench.files import REQUEST_COLUMNS, TURN_COLUMNS, request_rows_of
from ..bench.load import Load
from ..bench.result import provenance, python_version, version_text
from ..bench.run import bounds_of
from ..bench.saturation import (
    FEWEST_REQUESTS,
    WITH_SESSIONS,
    Saturation,
    criterion_of,
    find_saturation,
    is_sustained,
)
from ..datasets import DatasetError, ReadReport, Selection, read_records, refuse_options_of_texts, selection_of
from ..datasets.reading import SHARE_OF_MEMORY, memory_bytes
from ..output_file import OutputFiles
from ..shared_options import POLICIES
from .capacity import Capacity, find_fewest_replicas, probed_traffic
from .cost_model import CostModel
from .engine_settings import EngineSettings
from .figures import point_fields, stamps_of
from .fleet import simulate
from .options import MOST_REPLICAS, combinations
from .traffic import Traffic

SECONDS_BETWEEN_LINES = 0.5
MOST_BLOCKS = 10_000_000        # blocks of a pool
BYTES_PER_BLOCK, BYTES_PER_SLOT, BYTES_PER_REPLICA = 160, 24, 30_000    # about, in the tables of a simulated engine
OF_THE_RUN = ("model", "precision", "threads", "kv_precision", "cpu_compile", "model_implementation")


class Study:
    """Runs the simulations of a command.

    options   the command's options, as `parse_options` returns them for a command without --fit
    points    the settings and figures of each simulation that `run` has finished, in order

    The constructor raises InputError for a cost model or a workload that cannot be read, for a cost model with an
    error above --max-fit-error, and for a workload without selected requests.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        cost = CostModel.read(options.cost)
        if cost.error is not None:
            cost.error.check(options.max_fit_error / 100)
        self._cost = replace(cost, generation_spread=(), mixed_spread=()) if options.no_scatter else cost
        self._report = ReadReport()
        self._traffic = self._read(_selection(options))
        self.points: list[dict[str, Any]] = []
        self._requests_csv: Any = None      # writes the rows of --requests-csv

    @property
    def notes(self) -> list[str]:
        """Sentences about requests that were left out or truncated."""
        return self._report.notes()

    def run(self, files: OutputFiles) -> dict[str, Any]:
        """Run all simulations and return the result.

        files   output files of the command; `run` opens the trace file of --trace through this object

        Raises ConfigError for settings that a manager would refuse, and OSError if the trace cannot be written. A
        sweep over request rates reads the workload again for each simulation. Raises InputError if the workload
        cannot be read, or if the size of the KV cache pool is invalid.
        """
        options = self._options
        trace = None if options.trace is None else TraceWriter(files.open(options.trace, "wb"))
        if options.requests_csv is not None:
            self._requests_csv = csv.writer(files.open(options.requests_csv))
            has_turns = self._traffic.turns is not None
            self._requests_csv.writerow([*REQUEST_COLUMNS, *(TURN_COLUMNS if has_turns else []), "replica"])
        if options.find_saturation:
            found = self._find_saturation()
            return {**self._shared(), "kind": "saturation", "swept": "request_rate", "saturation": asdict(found),
                    "points": self.points}
        if options.find_replicas:
            capacity = self._find_replicas()
            return {**self._shared(), "kind": "sweep", "swept": "replicas", "capacity": asdict(capacity),
                    "points": self.points}
        settings = combinations(options.sweep)
        for number, changed in enumerate(settings, 1):
            label = "" if len(settings) == 1 else f"{number} of {len(settings)}: {words_of(changed)}"
            self._simulate(changed, label, trace=trace)
        if not options.sweep:
            return {**self._shared(), "kind": "run", **self.points[0]}
        return {**self._shared(), "kind": "sweep", "swept": "settings", "points": self.points}

    def _find_saturation(self) -> Saturation:
        options, bounds = self._options, bounds_of(self._options)
        self._check_count("--find-saturation")

        def holds(rate: float) -> bool:
            return self._is_sustained({"request_rate": rate}, self._probed(rate, options.replicas))

        def serve_at_once() -> dict[str, Any]:
            self._simulate({"request_rate": 0.0}, "all at once",
                           self._traffic.repeated(1, np.zeros(len(self._traffic))))
            self.points[0]["sustained"] = None
            return self.points[0]

        return find_saturation(serve_at_once, holds, options.max_probes, criterion_of(bounds, options.slo_share))

    def _find_replicas(self) -> Capacity:
        options = self._options
        self._check_count("--find-replicas")
        if not np.ptp(self._traffic.arrival_s):
            raise InputError("--find-replicas was given, and all requests arrive at once; expected a rate to sustain; "
                             "set --request-rate, or use a workload with arrival times")

        def holds(replicas: int) -> bool:
            return self._is_sustained({"replicas": replicas}, self._probed(options.request_rate, replicas))

        return find_fewest_replicas(holds, options.replicas, MOST_REPLICAS, options.max_probes,
                                    criterion_of(bounds_of(options), options.slo_share))

    def _check_count(self, option: str) -> None:
        if self._traffic.turns is not None:
            raise InputError(WITH_SESSIONS.format(option=option))
        if len(self._traffic) < FEWEST_REQUESTS:
            raise InputError(f"the workload has {counted(len(self._traffic), 'request')}; {option} needs at least "
                             f"{FEWEST_REQUESTS}; use a larger workload")

    def _probed(self, rate: float | None, replicas: int) -> Traffic:
        options = self._options
        most_active = max(options.max_batch_size, options.max_num_sequences or 0)
        return probed_traffic(self._traffic, Load(request_rate=rate), most_active, replicas)

    def _is_sustained(self, changed: dict[str, Any], traffic: Traffic) -> bool:
        """Simulate the traffic with changed settings, and return whether its rate was sustained."""
        self._simulate(changed, words_of(changed), traffic)
        point = self.points[-1]
        point["n"] = len(traffic)
        point["sustained"] = is_sustained(point, bounds_of(self._options), self._options.slo_share)
        return bool(point["sustained"])

    def _simulate(self, changed: dict[str, Any], label: str, traffic: Traffic | None = None,
                  trace: TraceWriter | None = None) -> None:
        """Simulate the workload, or other traffic, with changed settings. Adds the result to `points`."""
        options = argparse.Namespace(**{**vars(self._options), **changed})
        if traffic is None:
            traffic = self._read(_selection(options)) if "request_rate" in changed else self._traffic
        load = Load(request_rate=options.request_rate, concurrency=options.concurrency,
                    delays=options.delays, random_seed=options.random_seed)
        began = time.perf_counter()
        with _Progress(options, len(traffic), label) as watch:
            run = simulate(traffic, self._settings(options, traffic), self._cost, num_replicas=options.replicas,
                           routing=options.routing, concurrency=options.concurrency if load.is_closed else None,
                           at_most=None if load.is_closed else options.concurrency, seed=options.scatter_seed,
                           trace=trace, leaps=not options.no_leaps, watch=watch)
        mode = "closed loop" if load.is_closed else "online" if traffic.arrival_s[-1] > 0 else "offline"
        self.points.append({"settings": changed, **self._fields(options, run.replicas[0].num_blocks),
                            **point_fields(run, load, mode, bounds_of(options), time.perf_counter() - began)})
        if self._requests_csv is not None:
            rows = request_rows_of(len(self.points), load, range(len(traffic)), stamps_of(run), run.log_book.errors)
            more = [] if traffic.turns is None else traffic.turns.columns()
            self._requests_csv.writerows([*row, *each] for row, each in zip(
                rows, zip(*more, run.log_book.replica.tolist(), strict=True), strict=True))

    def _settings(self, options: argparse.Namespace, traffic: Traffic) -> EngineSettings:
        tokens = options.max_tokens_in_paged_kvcache
        if tokens is None:
            fitted = self._cost.about
            tokens = (fitted.get("num_blocks") or 0) * (fitted.get("tokens_per_block") or options.tokens_per_block)
        num_blocks = tokens // options.tokens_per_block
        if not 1 <= num_blocks <= MOST_BLOCKS:
            raise InputError(f"the size of the KV cache pool is {tokens} tokens, which is {num_blocks} blocks "
                             f"of {options.tokens_per_block} tokens; expected 1 to {MOST_BLOCKS:,} blocks; set the "
                             "size in tokens with --max-tokens-in-paged-kvcache")
        num_slots = max(options.max_batch_size, options.max_num_sequences or 0)
        needed = options.replicas * (num_blocks * BYTES_PER_BLOCK + num_slots * BYTES_PER_SLOT + BYTES_PER_REPLICA)
        if needed > (memory := memory_bytes()) * SHARE_OF_MEMORY:
            raise InputError(f"{counted(options.replicas, 'replica')} with {num_blocks:,} blocks and {num_slots:,} "
                             f"requests each need about {needed / 2**30:,.0f} GiB; expected at most half of the "
                             f"{memory / 2**30:,.0f} GiB of memory of this machine; lower --replicas, "
                             "--max-tokens-in-paged-kvcache or --max-batch-size")
        longest = int((traffic.input_tokens + traffic.output_tokens).max())
        return EngineSettings(
            num_blocks=num_blocks, max_seq_len=options.max_seq_len or longest,
            tokens_per_block=options.tokens_per_block, policy=POLICIES[options.policy],
            max_batch_size=options.max_batch_size, max_num_tokens=options.max_num_tokens,
            max_num_sequences=options.max_num_sequences,
            enable_chunked_context=options.chunked_context, enable_block_reuse=options.block_reuse,
            enable_trt_overlap=options.enable_trt_overlap)

    def _read(self, selection: Selection) -> Traffic:
        options = self._options
        try:
            traffic = Traffic.of_records(read_records(
                options.workload, selection, format=options.format, tokenizer=options.tokenizer,
                output_tokens=options.output_tokens, report=self._report))
            refuse_options_of_texts(self._report.format, {"--tokenizer": options.tokenizer,
                                                          "--output-tokens": options.output_tokens})
        except (DatasetError, OSError) as error:
            raise InputError(str(error)) from error
        if not len(traffic):
            raise InputError(f"{options.workload} has no selected requests; expected at least one; change the "
                             "selection")
        return traffic

    def _shared(self) -> dict[str, Any]:
        options, cost = self._options, self._cost
        return {
            **provenance(options.command, "none"), "peer": "batch_manager simulate", "variant": options.variant,
            "version": version_text(), "python": python_version(), "workload": Path(options.workload).name,
            "n": len(self._traffic), **{name: cost.about.get(name) for name in OF_THE_RUN}, "streaming": True,
            "beam_width": 1, "engine": "InflightFusedBatching", "seed": options.scatter_seed,
            "busy_neighbours": cost.about.get("busy_neighbours") or 0,
            "cost": {"file": str(options.cost), "error": "unknown" if cost.error is None else cost.error.words(),
                     "step_error": None if cost.error is None else asdict(cost.error), "about": dict(cost.about)}}

    def _fields(self, options: argparse.Namespace, num_blocks: int) -> dict[str, Any]:
        return {"max_batch": options.max_batch_size, "max_tokens_per_step": options.max_num_tokens,
                "scheduler": options.policy, "chunked_context": options.chunked_context,
                "block_reuse": options.block_reuse, "tokens_per_block": options.tokens_per_block,
                "kv_tokens": num_blocks * options.tokens_per_block, "routing": options.routing}


def words_of(changed: dict[str, Any]) -> str:
    """Format a setting of a sweep, for example as "max_batch 8, policy max_utilization"."""
    return ", ".join(f"{name} {value_words(value)}" for name, value in changed.items())


def value_words(value: Any) -> str:
    if type(value) is bool:
        return "on" if value else "off"
    return f"{value:g}" if type(value) is float else str(value)


def _selection(options: argparse.Namespace) -> Selection:
    try:
        return selection_of(options)
    except DatasetError as error:
        raise InputError(str(error)) from error


class _Progress:
    """A progress line on stderr, if stderr is a terminal."""

    def __init__(self, options: argparse.Namespace, total: int, label: str) -> None:
        self._shows = not options.quiet and sys.stderr.isatty()
        self._total, self._label = total, f"{label}: " if label else ""
        self._next = time.perf_counter() + SECONDS_BETWEEN_LINES

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, done: int, now: float) -> None:
        if self._shows and time.perf_counter() >= self._next:
            self._next = time.perf_counter() + SECONDS_BETWEEN_LINES
            print(f"\r\x1b[K{self._label}{done:,} of {counted(self._total, 'request')} done after {now:,.0f} "
                  "simulated seconds", end="", file=sys.stderr, flush=True)
