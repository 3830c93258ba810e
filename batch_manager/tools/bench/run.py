"""One run of a workload, and its result."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ...errors import counted
from ..datasets import DatasetError, ReadReport, read_workload, refuse_options_of_texts, selection_of
from .engine import precision_of, vocabulary_of
from .errors import InputError
from .load import Load
from .metrics import Bounds, figures, turn_figures
from .result import provenance, python_version, version_text
from .session import Served, Session
from .sessions import num_sessions, with_turns

FIRST_TOKENS, FIRST_REQUESTS = 8, 16        # a result has the first tokens of the first requests


def shared_fields(options: argparse.Namespace, workload: dict[str, Any], session: Session) -> dict[str, Any]:
    """Return the fields of a result that are the same for all runs of a session."""
    precision = precision_of(options, session.manager.info.dtype)
    return {
        **provenance(options.command, session.manager.info.device),
        "peer": "batch_manager",
        "variant": options.variant,
        "version": version_text(),
        "precision": precision,
        "workload": options.workload.name,
        "n": workload["n"],
        "threads": options.num_threads,
        "max_batch": options.max_batch_size,
        "max_tokens_per_step": options.max_num_tokens,
        "load_s": round(session.load_s, 1),
        "python": python_version(),
        "kv_precision": precision if options.kv_cache_dtype == "auto" else "fp8",
        "kv_tokens": session.kv_tokens,
        "tokens_per_block": options.tokens_per_block,
        "engine": options.type, "scheduler": options.policy, "chunked_context": options.chunked_context,
        "block_reuse": options.block_reuse, "disk_cache": options.disk_cache_path is not None,
        "streaming": options.streaming, "beam_width": options.beam_width,
        "cpu_compile": options.cpu_compile,
        "model_implementation": options.model_implementation,
        "quantization": options.quantization, "quantized_activations": options.quantized_activations,
        "speculative_config": options.speculative_config and asdict(options.speculative_config),
        "synthetic_acceptance": options.synthetic_acceptance,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "busy_neighbours": options.busy_neighbours,
    }


def point_fields(options: argparse.Namespace, workload: Mapping[str, Any], served: Served) -> dict[str, Any]:
    """Return the fields of a result that describe one run."""
    load, receipts = served.load, served.receipts
    offered = load.offered_rate(served.requests)
    return {
        "mode": mode_of(workload, load),
        "sessions": num_sessions(served.requests),
        "request_rate": load.request_rate,
        "delays": load.delays if load.request_rate else None,
        "concurrency": load.concurrency,
        "offered_rate": None if offered is None else round(offered, 4),
        "wall_s": round(served.wall_s, 4),
        **figures(served.requests, receipts, served.wall_s, streaming=options.streaming, bounds=bounds_of(options),
                  counts_early_ends=options.eos_id == -1),
        "turns": turn_figures(served.requests, receipts, served.wall_s, streaming=options.streaming),
        "peak_rss_mb": served.meter.peak_rss_mb,
        "steps": served.steps or None,
        "drafts": served.drafts,
        "cpu": served.meter.cpu,
        "first_tokens": {str(request_id): receipt.tokens[:FIRST_TOKENS]
                         for request_id, receipt in list(receipts.items())[:FIRST_REQUESTS]},
    }


def load_of(options: argparse.Namespace, **swept: float | None) -> Load:
    """Return the load that the options specify.

    swept   request_rate or concurrency of one point of a sweep; replaces the value in the options
    """
    return Load(**{"request_rate": options.request_rate, "concurrency": options.concurrency,
                   "delays": options.delays, "random_seed": options.random_seed, **swept})


def bounds_of(options: argparse.Namespace) -> Bounds:
    return Bounds(options.slo_ttft_ms, options.slo_itl_ms, options.slo_e2e_ms)


def mode_of(workload: Mapping[str, Any], load: Load) -> str:
    if load.is_closed:
        return "closed loop"
    if load.request_rate is None:
        return workload["mode"]
    return "online" if load.request_rate else "offline"


def prepared(workload: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the workload if it is valid. Raises InputError if not.
    """
    needed = {"vocab", "mode", "n", "requests"}
    if not isinstance(workload, dict) or not needed <= workload.keys() or not workload["requests"]:
        raise InputError(f"{options.workload} is not a workload; expected an object with {', '.join(sorted(needed))}; "
                         "create one with batch-manager workload")
    requests = workload["requests"]
    for number, request in enumerate(requests):
        if not isinstance(request, dict) or not {"id", "arrival_s", "max_tokens", "prompt"} <= request.keys():
            raise InputError(f"requests[{number}] of {options.workload} lacks a field; expected an object with id, "
                             "arrival_s, max_tokens and prompt")
    ids = [request["id"] for request in requests]
    if len(set(ids)) != len(ids):
        twice = next(request_id for number, request_id in enumerate(ids) if request_id in ids[:number])
        raise InputError(f"the id {twice} occurs twice in {options.workload}; expected unique ids")
    return dict(workload, n=len(requests), requests=with_turns(requests))


def read_requests(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Read the file of --workload, in any format of `tools.datasets`.

    Returns the workload, and notes on requests that were left out or truncated. Raises InputError if the file cannot be
    read, and the errors of `read_spec` if the model cannot be read.
    """
    report = ReadReport()
    try:
        # The rate is that of the load, which a sweep changes.
        selection = replace(selection_of(options), request_rate=None)
        vocab_size = vocabulary_of(options)
        for option, token in (("--eos-id", options.eos_id), ("--pad-id", options.pad_id)):
            if token >= vocab_size:
                raise InputError(f"{option} is {token}; the vocabulary has {counted(vocab_size, 'token')}; expected -1 "
                                 f"for none, or 0 to {vocab_size - 1}")
        workload = read_workload(options.workload, selection, vocab_size=vocab_size, format=options.format,
                                 tokenizer=options.tokenizer or options.model,
                                 output_tokens=options.output_tokens, report=report)
        refuse_options_of_texts(report.format, {"--tokenizer": options.tokenizer,
                                                "--output-tokens": options.output_tokens})
    except (DatasetError, OSError) as error:
        raise InputError(str(error)) from error
    return workload, report.notes()
