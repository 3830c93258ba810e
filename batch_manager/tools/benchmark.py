"""Serve a workload with a GptManager, through its callbacks, and say how fast that was.

    python -m batch_manager.tools.workload --out offline.json
    python -m batch_manager.tools.benchmark --model FOLDER --workload offline.json --threads 2 --out result.json

Requests are handed over when they arrive and decoded greedily to exactly the length they ask for. Every token is
stamped when the send callback receives it; all figures come from the stamps. Only the serving is timed: a warm-up with
other prompts goes before, in the same manager.

The result is one JSON object, written to --out and printed, without `first_tokens`, as one line:

    output_tok_s, total_tok_s         generated tokens, and prompt plus generated tokens, over wall_s
    ttft_ms_*, itl_ms_*, e2e_ms_*     time to the first token and to the last, both from arrival, and between tokens
    steps                             iterations of the engine with an active request
    peak_rss_mb                       largest resident set of this process and its children, added up
    load_s                            from the start of loading to the end of the warm-up
    cpu                               cores burnt by this process (own), by others (foreign; foreign_nice is the part at
                                      a positive nice level) and by the hypervisor (steal) while it served
    wrong_length                      requests whose output is not as long as asked for; the exit status is 1 then

Reads /proc, hence Linux.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..config import BLOCK_SIZES, LOAD_FORMATS, MODEL_IMPLEMENTATIONS, KvCacheConfig, Parts, TrtGptModelOptionalParams
from ..errors import BatchManagerError
from ..gpt_manager import GptManager
from ..names import SchedulerPolicy, TrtGptModelType
from ..requests.inference_request import InferenceRequest
from ..stats.trace import TraceFile
from .workload import FIRST_ORDINARY_TOKEN, at_least

POLICIES = {"guaranteed_no_evict": SchedulerPolicy.GUARANTEED_NO_EVICT,
            "max_utilization": SchedulerPolicy.MAX_UTILIZATION}
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
WARM_UP_PROMPT, WARM_UP_OUTPUT = 48, 6


class BenchmarkError(Exception):
    """The benchmark cannot be run, or its result would be worth nothing."""


@dataclass(slots=True)
class Receipt:
    """What one request got: its tokens, and when, in seconds from the start of the serving."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""


class Client:
    """The callbacks of one manager, and the requests on their way through it.

    Requests wait here until the manager asks for as many as it has room for.

    last_response   seconds from the start of the serving
    """

    def __init__(self) -> None:
        self._waiting: deque[InferenceRequest] = deque()
        self._receipts: dict[int, Receipt] = {}
        self._num_open = 0
        self._started = 0.0
        self._is_answered = False
        self._all_done = threading.Event()
        self.last_response = 0.0
        self.stats: list[str] = []

    def get(self, max_num_requests: int) -> list[InferenceRequest]:
        if self._is_answered:           # the iteration of the last response is over, its statistics are here
            self._is_answered = False
            self._all_done.set()
        waiting = self._waiting
        if not waiting:
            return []
        count = len(waiting) if max_num_requests < 0 else min(max_num_requests, len(waiting))
        return [waiting.popleft() for _ in range(count)]

    def send(self, request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        now = time.perf_counter() - self._started
        receipt = self._receipts[request_id]
        if error_message:
            receipt.error = error_message
        else:
            output_ids = tensors[0].array.tolist()[0][0]
            receipt.tokens += output_ids
            receipt.times += [now] * len(output_ids)
        if final_response:
            self.last_response = now
            self._num_open -= 1
            self._is_answered = not self._num_open

    def serve(self, manager: GptManager, requests: list[dict], *, streaming: bool, started: float,
              limit_s: float = math.inf) -> dict[int, Receipt]:
        """Hand requests over at their arrival times; return once each has had its final response.

        started   the perf_counter() that arrival times and stamps count from
        limit_s   seconds from `started` after which it is given up

        Raises BenchmarkError when a request fails, or the time is up.
        """
        self._started = started
        self._receipts = {request["id"]: Receipt() for request in requests}
        self._num_open = len(requests)
        self._all_done.clear()

        arriving = deque(sorted(requests, key=lambda request: request["arrival_s"]))
        while arriving:
            time.sleep(max(0.0, arriving[0]["arrival_s"] - (time.perf_counter() - started)))
            now = time.perf_counter() - started
            arrived = []
            while arriving and arriving[0]["arrival_s"] <= now:
                arrived.append(_inference_request(arriving.popleft(), streaming))
            self._waiting.extend(arrived)           # what arrives together is handed over together
            manager.notify()

        while not self._all_done.wait(1.0):
            if manager.wait_until_terminate(0) or manager.health()["callback_failures"]["send"]:
                raise BenchmarkError(f"not all requests were answered; the manager says {manager.health()}")
            if time.perf_counter() - started > limit_s:
                raise BenchmarkError(f"{self._num_open} of {len(requests)} requests are not done after {limit_s:.0f} s")
        errors = [receipt.error for receipt in self._receipts.values() if receipt.error]
        if errors:
            raise BenchmarkError(f"{len(errors)} of {len(requests)} requests failed, the first with: {errors[0]}")
        return self._receipts


def _inference_request(request: dict[str, Any], streaming: bool) -> InferenceRequest:
    tensors = {"input_ids": request["prompt"], "request_output_len": request["max_tokens"], "end_id": -1}
    return InferenceRequest(request["id"], tensors, is_streaming=streaming)


class ProcessMeter:
    """What this process and its children used, and what others burnt meanwhile, between `start` and `stop`.

    cpu           cores, as described at the top of the file
    peak_rss_mb   since the processes began
    """

    def __init__(self) -> None:
        self.cpu: dict[str, float | int] = {}
        self.peak_rss_mb = 0

    def start(self) -> None:
        self._began = time.perf_counter()
        self._machine, self._own = _machine_ticks(), _ticks_of(_family())

    def stop(self) -> None:
        family = _family()
        own = _ticks_of(family) - self._own
        busy, nice, steal = (after - before for after, before in zip(_machine_ticks(), self._machine, strict=True))
        ticks = (time.perf_counter() - self._began) * os.sysconf("SC_CLK_TCK")
        self.cpu = {
            "own_cores": round(own / ticks, 3),
            "foreign_nice": round(nice / ticks, 3),
            "foreign_cores": round(max(0, busy - own) / ticks, 3),
            "steal_cores": round(steal / ticks, 3),
            "ncpu": os.cpu_count() or 1,
        }
        self.peak_rss_mb = round(sum(_peak_rss_kb(process) for process in family) / 1024)


def _machine_ticks() -> tuple[int, int, int]:
    """Ticks of the whole machine: busy (nice included), nice, stolen."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return user + nice + system + irq + softirq, nice, steal


def _family() -> list[int]:
    """This process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    family = [os.getpid()]
    for process in family:              # grows while it is walked
        family += children.get(process, [])
    return family


def _stat_fields(process: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, ... Empty for a process that has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _ticks_of(processes: list[int]) -> int:
    """User and system ticks, those of children already waited for included."""
    return sum(sum(map(int, _stat_fields(process)[11:15])) for process in processes)


def _peak_rss_kb(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def benchmark(options: argparse.Namespace, workload: dict[str, Any], parts: Parts | None = None) -> dict[str, Any]:
    """Load, warm up, serve, shut down; the result as it stands in the file.

    options   as `parse_options` returns them
    parts     with a backend, the model is not read

    Raises BenchmarkError, and whatever the constructor of GptManager raises.
    """
    _check_workload(workload)
    loading = time.perf_counter()
    parts = Parts() if parts is None else parts
    vocab_size, max_seq_len, kv_tokens = workload["vocab"], None, None
    if parts.backend is None:
        from ..models import read_spec

        spec = read_spec(options.model, options.model_implementation)
        vocab_size, max_seq_len = min(vocab_size, spec.vocab_size), spec.max_position_embeddings
        bytes_per_token = (2 * spec.num_layers * spec.num_kv_heads * spec.head_size
                           * (2 if options.dtype == "bfloat16" else 4))
        kv_tokens = int(options.kv_gib * 2**30) // bytes_per_token

    client, meter = Client(), ProcessMeter()
    trace = contextlib.nullcontext() if options.trace is None else TraceFile(options.trace)
    if options.trace is not None:
        parts = replace(parts, trace=trace)
    with trace, GptManager(
        options.model,
        TrtGptModelType[options.type],
        max_beam_width=1,
        scheduler_policy=POLICIES[options.policy],
        get_inference_requests_cb=client.get,
        send_response_cb=client.send,
        return_batch_manager_stats_cb=client.stats.append if options.stats_csv else None,
        optional_params=TrtGptModelOptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=kv_tokens, tokens_per_block=options.tokens_per_block,
                                          enable_block_reuse=options.block_reuse),
            enable_chunked_context=options.chunked_context,
            max_batch_size=options.max_batch,
            max_num_tokens=options.max_tokens_per_step,
            device=options.device,
            dtype=options.dtype,
            load_format=options.load_format,
            num_threads=options.threads,
            cpu_compile=options.cpu_compile,
            model_implementation=options.model_implementation),
        exclude_input_in_output=True,
        parts=parts,
    ) as manager:
        for number in range(options.warm_up):
            requests = warm_up_requests(options.max_batch, vocab_size, max_seq_len, number)
            client.serve(manager, requests, streaming=options.streaming, started=time.perf_counter())
        client.stats.clear()
        steps = manager.health()["iterations"]
        load_s = time.perf_counter() - loading

        with busy_neighbours(options.busy_neighbours):
            meter.start()
            started = time.perf_counter()
            receipts = client.serve(manager, workload["requests"], streaming=options.streaming, started=started)
            wall_s = client.last_response
            meter.stop()
        steps = manager.health()["iterations"] - steps

    if options.stats_csv:
        write_stats(client.stats, options.stats_csv)
    return {
        "peer": "batch_manager",
        "variant": options.variant,
        "version": _versions(),
        "precision": PRECISIONS[options.dtype],
        "workload": options.workload.name,
        "mode": workload["mode"],
        "n": workload["n"],
        "threads": options.threads,
        "max_batch": options.max_batch,
        "max_tokens_per_step": options.max_tokens_per_step,
        "wall_s": round(wall_s, 4),
        **_figures(workload["requests"], receipts, wall_s, streaming=options.streaming),
        "peak_rss_mb": meter.peak_rss_mb,
        "load_s": round(load_s, 1),
        "steps": steps or None,
        "cpu": meter.cpu,
        "wrong_length": sum(len(receipts[request["id"]].tokens) != request["max_tokens"]
                            for request in workload["requests"]),
        "python": platform.python_version(),
        "first_tokens": {str(request_id): receipt.tokens[:8] for request_id, receipt in list(receipts.items())[:16]},
        "kv_precision": PRECISIONS[options.dtype],
        "kv_tokens": kv_tokens,
        "tokens_per_block": options.tokens_per_block,
        "engine": options.type,
        "scheduler": options.policy,
        "chunked_context": options.chunked_context,
        "cpu_compile": options.cpu_compile,
        "model_implementation": options.model_implementation,
        "busy_neighbours": options.busy_neighbours,
    }


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Within it, so many other processes compute without a pause, as programs that share the machine would."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def warm_up_requests(max_batch: int, vocab_size: int, max_seq_len: int | None, number: int) -> list[dict[str, Any]]:
    """A full batch that shrinks to one, so that every batch size has run once.

    The prompts come from a stream of random numbers of their own: they share no prefix with a workload.
    """
    random = np.random.default_rng([number, *b"warm-up"])
    longest = max_seq_len or 2**30
    return [
        {
            "id": i,
            "arrival_s": 0.0,
            "max_tokens": min(WARM_UP_OUTPUT + i, longest // 2),
            "prompt": random.integers(min(FIRST_ORDINARY_TOKEN, vocab_size - 1), vocab_size,
                                      min(WARM_UP_PROMPT + i, longest // 2)).tolist(),
        }
        for i in range(max_batch)
    ]


def _figures(requests: list[dict], receipts: dict[int, Receipt], wall_s: float, *, streaming: bool) -> dict[str, Any]:
    pairs = [(receipts[request["id"]].times, request["arrival_s"]) for request in requests]
    generated, prompts = sum(len(times) for times, _ in pairs), sum(len(request["prompt"]) for request in requests)
    first = [times[0] - arrival for times, arrival in pairs if times]
    last = [times[-1] - arrival for times, arrival in pairs if times]
    between = np.concatenate([np.diff(times) for times, _ in pairs])
    if not streaming:
        first, between = [], np.empty(0)
    return {
        "output_tokens": generated,
        "prompt_tokens": prompts,
        "output_tok_s": round(generated / wall_s, 2),
        "total_tok_s": round((prompts + generated) / wall_s, 2),
        "ttft_ms_p50": _percentile_ms(first, 50),
        "ttft_ms_p99": _percentile_ms(first, 99),
        "itl_ms_p50": _percentile_ms(between, 50),
        "itl_ms_p99": _percentile_ms(between, 99),
        "itl_ms_mean": round(float(between.mean()) * 1e3, 3) if len(between) else None,
        "e2e_ms_p50": _percentile_ms(last, 50),
        "e2e_ms_p99": _percentile_ms(last, 99),
    }


def _percentile_ms(seconds: Sequence[float] | np.ndarray, percent: float) -> float | None:
    return round(float(np.percentile(seconds, percent)) * 1e3, 3) if len(seconds) else None


def _versions() -> str:
    torch = sys.modules.get("torch")
    return f"batch_manager {__version__}" + ("" if torch is None else f", torch {torch.__version__}")


def _check_workload(workload: Any) -> None:
    needed = {"vocab", "mode", "n", "requests"}
    if not isinstance(workload, dict) or not needed <= workload.keys() or not workload["requests"]:
        raise BenchmarkError("the workload is no JSON object with "
                             f"{', '.join(sorted(needed))}; batch_manager.tools.workload writes one")
    ids = [request["id"] for request in workload["requests"]]
    if len(set(ids)) != len(ids):
        raise BenchmarkError("an id occurs twice in the workload")


def write_stats(records: list[str], path: Path) -> None:
    """The statistics of the manager as CSV, one row an iteration."""
    rows = [json.loads(record) for record in records]
    names = sorted({name for row in rows for name in row})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval=0)
        writer.writeheader()
        writer.writerows(rows)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m batch_manager.tools.benchmark", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a Hugging Face checkpoint")
    add("--workload", type=Path, required=True, help="JSON file, see batch_manager.tools.workload")
    add("--out", type=Path, required=True, help="the file to write the result to")
    add("--threads", type=at_least(1), default=2, help="threads of a CPU backend (2)")
    add("--max-batch", type=at_least(1), default=32, help="sequences in one step: max_batch_size (32)")
    add("--max-tokens-per-step", type=at_least(1), default=512, help="tokens in one step: max_num_tokens (512)")
    add("--kv-gib", type=float, default=1.0, help="GiB of the KV cache pool, through KvCacheConfig.max_tokens (1)")
    add("--tokens-per-block", type=int, choices=BLOCK_SIZES, default=KvCacheConfig().tokens_per_block,
        help=f"of the KV cache ({KvCacheConfig().tokens_per_block})")
    add("--block-reuse", action="store_true", help="KvCacheConfig.enable_block_reuse (off)")
    add("--device", help='"cpu", "cuda", "cuda:1" (cuda where there is one)')
    add("--dtype", choices=PRECISIONS, default="bfloat16", help="of weights and KV cache (bfloat16)")
    add("--load-format", choices=LOAD_FORMATS, default="auto", help='"dummy": random weights, config.json is enough')
    add("--type", choices=TrtGptModelType.__members__, default=TrtGptModelType.InflightFusedBatching.name,
        help="batching scheme (InflightFusedBatching)")
    add("--policy", choices=POLICIES, default="guaranteed_no_evict", help="scheduler policy (guaranteed_no_evict)")
    add("--chunked-context", action=argparse.BooleanOptionalAction,
        help="a prompt may be computed in chunks (on; V1 cannot)")
    add("--streaming", action=argparse.BooleanOptionalAction,
        help="a response for every token; without, only e2e is known of the latencies (on; V1 sends one response)")
    add("--cpu-compile", action=argparse.BooleanOptionalAction, default=None,
        help="steps on a CPU in compiled code, or not (where that can be)")
    add("--model-implementation", choices=MODEL_IMPLEMENTATIONS, default="auto",
        help="whose class computes the model (auto)")
    add("--busy-neighbours", type=at_least(0), default=0,
        help="other processes that compute all the time while the workload is served (0)")
    add("--warm-up", type=at_least(0), default=1, help="full batches before the clock starts (1)")
    add("--trace", type=Path, metavar="FILE",
        help="write a trace here, the warm-up's requests too; `batch-manager trace` reads it")
    add("--stats-csv", type=Path, help="write the manager's statistics here, a row an iteration")
    add("--variant", default="", help="a label for the result")
    options = parser.parse_args(argv)
    is_in_flight = options.type != TrtGptModelType.V1.name
    options.chunked_context = is_in_flight if options.chunked_context is None else options.chunked_context
    options.streaming = is_in_flight if options.streaming is None else options.streaming
    if not 0 < options.kv_gib < float("inf"):
        parser.error(f"--kv-gib is {options.kv_gib}: it must be more than 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    # Read when torch is imported, for every thread; num_threads of the manager alone comes later.
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    try:
        result = benchmark(options, json.loads(options.workload.read_text()))
    except (BatchManagerError, BenchmarkError, OSError, json.JSONDecodeError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({name: value for name, value in result.items() if name != "first_tokens"}), flush=True)
    if result["wrong_length"]:
        print(f"benchmark: {result['wrong_length']} requests have the wrong output length", file=sys.stderr)
    return 1 if result["wrong_length"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
