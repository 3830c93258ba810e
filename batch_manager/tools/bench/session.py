"""An engine that is loaded once and serves a workload any number of times."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ...config import MAX_DRAFT_TOKENS, Parts
from ...stats.statistics_table import ACCEPTED_AT
from ...stats.trace import IterationTrace, TraceFile
from .client import Client, Receipt
from .engine import load_adapters, make_manager, model_limits
from .gate import Gate
from .load import Load
from .neighbours import busy_neighbours
from .process_meter import ProcessMeter
from .request_options import RequestOptions
from .synthetic_drafts import SyntheticDrafter
from .warm_up import warm_up_requests

MS = 1e-3
LONGEST_WAIT_S = 2.0           # for the record of an iteration


@dataclass(frozen=True, slots=True)
class Served:
    """One run of a workload.

    load        arrival process
    requests    the served requests, with their arrival times
    receipts    request id -> tokens and times of the request
    wall_s      seconds from the start to the last response
    steps       number of iterations with an active request
    meter       CPU use during the run, and peak memory
    records     statistics records of the iterations; empty if they were not kept
    drafts      "sequences" in steps with drafts, "tokens" drafted, and those "accepted_at" each place; with synthetic
                drafts, also the number of "different_outputs" than without drafts. None: no drafts
    """

    load: Load
    requests: list[dict[str, Any]]
    receipts: dict[int, Receipt]
    wall_s: float
    steps: int
    meter: ProcessMeter
    records: list[str]
    drafts: dict[str, Any] | None = None


class Session:
    """Serves a workload on one engine, as often as `serve` is called.

    Entering the context starts the engine, and leaving it shuts the engine down. An exception ends live requests at
    once.

    options, parts   see `Measurement`
    watch            called with each statistics record, on the worker thread; None: no call

    kv_tokens        tokens of the KV cache pool; None: the engine decides
    load_s           seconds from the start of loading to the end of the warm-up

    Entering raises the errors of the constructor of GptManager, and BenchmarkError if the warm-up fails.
    """

    def __init__(self, options: argparse.Namespace, workload: dict[str, Any], parts: Parts | None = None, *,
                 watch: Callable[[str], None] | None = None) -> None:
        self._options, self._workload = options, workload
        self._parts = Parts() if parts is None else parts
        self._synthetic: SyntheticDrafter | None = None
        if options.synthetic_acceptance is not None:
            self._synthetic = SyntheticDrafter(options.synthetic_acceptance)
            self._parts = replace(self._parts, drafter=self._synthetic)
        self._watch = watch
        self._served = 0
        self._stack = contextlib.ExitStack()
        self.client = Client(prompts_included=not options.exclude_input_in_output_seq)
        self._is_warm = False
        self._adapters: list[int] = []
        self._trace_file: TraceFile | None = None
        self._settings: Mapping[str, int | str] = {}     # of the engine; empty once they are in the trace
        self._newest_record = "{}"
        self.kv_tokens: int | None = None
        self.load_s = 0.0

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._load(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._stack.__exit__(*reason)

    def _load(self, stack: contextlib.ExitStack) -> None:
        options, parts, loading = self._options, self._parts, time.perf_counter()
        vocab_size, max_seq_len, self.kv_tokens = model_limits(options, parts)
        vocab_size = self._workload["vocab"] if vocab_size is None else min(vocab_size, self._workload["vocab"])
        if options.trace is not None:
            self._trace_file = stack.enter_context(TraceFile(options.trace))
            parts = replace(parts, trace=self._trace_iteration)
        client = self.client
        self.manager = manager = stack.enter_context(make_manager(
            options, parts, self.kv_tokens, get=client.get, send=client.send, stats=self._stats_callback()))
        self._adapters = load_adapters(options, manager)
        # More requests than a run can have at a time would only take time and memory.
        num_requests = options.max_batch_size
        if not options.find_saturation:
            num_requests = min(num_requests, self._workload["n"])
        for number in range(options.warm_up):
            requests = warm_up_requests(num_requests, vocab_size, max_seq_len, number)
            client.serve(manager, requests, streaming=options.streaming, started=time.perf_counter(),
                         options=RequestOptions(adapters=self._adapters))
        self.load_s = time.perf_counter() - loading
        if self._synthetic is not None:                # which makes no drafts yet
            receipts = self.serve(Load(request_rate=0.0)).receipts
            self._synthetic.texts = {number: receipt.tokens for number, receipt in receipts.items()}
        self._is_warm = True

    def _trace_iteration(self, iteration: IterationTrace) -> None:
        if iteration.settings:        # the first iteration has them, and it may be one of the warm-up
            self._settings = iteration.settings
        if self._is_warm and self._trace_file is not None:
            self._trace_file(replace(iteration, settings=self._settings) if self._settings else iteration)
            self._settings = {}

    def _stats_callback(self) -> Callable[[str], None] | None:
        takers = [self.client.keep_stats] if self._options.keep_stats else []
        if self._watch is not None:
            takers.append(self._watch)
        if self._options.speculative_config is not None:
            takers.append(partial(setattr, self, "_newest_record"))
        if len(takers) < 2:
            return takers[0] if takers else None

        def give(record: str) -> None:
            for taker in takers:
                taker(record)
        return give

    def _draft_counts(self) -> list[int] | None:
        """Return, since the start: sequences in steps with drafts, drafts, and accepted ones at each place."""
        if self._options.speculative_config is None:
            return None
        wait_until, record = time.perf_counter() + LONGEST_WAIT_S, {}
        while time.perf_counter() < wait_until:        # the record of an iteration follows its last response
            record = json.loads(self._newest_record)
            if record.get("Iteration Counter", -1) + 1 >= self.manager.health()["iterations"]:
                break
            time.sleep(0.01)
        places = (f"{ACCEPTED_AT}{place}" for place in range(1, MAX_DRAFT_TOKENS + 1))
        return [record[key] for key in ("Draft Steps", "Draft Tokens", *places) if key in record]

    def serve(self, load: Load) -> Served:
        """Serve the workload with the arrival process `load`.

        Each run has its own cache salt, so that it does not reuse KV cache blocks of other runs.

        Raises BenchmarkError if the engine stops answering.
        """
        options, client = self._options, self.client
        requests = load.arriving(self._workload["requests"])
        salt = f"run {self._served}" if options.block_reuse else None
        self._served += 1
        asks = RequestOptions(
            end_id=options.eos_id, pad_id=options.pad_id, beam_width=options.beam_width,
            context_logits=options.return_context_logits, generation_logits=options.return_generation_logits,
            timings=options.queue_times, cache_salt=salt, adapters=self._adapters)
        gate = None
        in_progress = load.concurrency or 0
        at_most = 0 if load.is_closed else in_progress
        if options.first_batch_delay or options.static_emulated_batch_size or at_most:
            gate = Gate(options.first_batch_delay * MS, options.static_emulated_batch_size or 0,
                        options.static_emulated_timeout * MS, at_most)
        client.stats.clear()
        drafts, steps, meter = self._draft_counts(), self.manager.health()["iterations"], ProcessMeter()
        with busy_neighbours(options.busy_neighbours):
            meter.start()
            receipts = client.serve_all(self.manager, requests, streaming=options.streaming,
                                        started=time.perf_counter(), options=asks,
                                        concurrency=in_progress if load.is_closed else 0,
                                        gate=gate)
            meter.stop()
        steps = self.manager.health()["iterations"] - steps
        if drafts is not None:
            now = self._draft_counts() or []
            sequences, tokens, *at = [after - before for before, after in zip(drafts or [0] * len(now), now)] or [0, 0]
            drafts = {"sequences": sequences, "tokens": tokens, "accepted_at": at}
            if self._synthetic is not None:
                texts = self._synthetic.texts
                drafts["different_outputs"] = sum(receipt.tokens != texts.get(number, receipt.tokens)
                                                  for number, receipt in receipts.items())
        return Served(load, requests, receipts, client.last_response, steps, meter, list(client.stats), drafts)
