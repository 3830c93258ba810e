"""Goals G6 and G6b: tokens/s of 256 simultaneous requests of very different lengths, compared with other engines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .bench import Bench, OutOfTimeError
from .engines import engine, joined, make_requests, not_reached
from .records import FAILED, Record
from .shapes import QWEN3_600M, TINY, Shape
from .transformers_peer import serve_with_transformers

COUNT, SHORTEST, LONGEST = 256, 100, 1024
WORKLOAD = "headline.json"                      # in the folder of the report, for peers that are measured separately
LOAD_SECONDS, RUN_SECONDS = 22, 8               # estimates
PEER_SECONDS, PEER_LOAD_SECONDS = 45, 15        # the peer stops when this time is over


def run(bench: Bench, graphs: bool = True) -> Iterator[Record]:
    """Yield the records of the comparison with other engines (goal G6 of the report) and with transformers (G6b).

    graphs   use CUDA graphs; False: yield only the records of G6
    """
    bench.require(LOAD_SECONDS + 2 * RUN_SECONDS)
    shape = bench.pick(QWEN3_600M, TINY)
    workload = headline_workload(shape, bench.pick(COUNT, 2), *bench.pick((SHORTEST, LONGEST), (3, 5)))
    (bench.out / WORKLOAD).write_text(json.dumps(workload))
    requests, rates = workload["requests"], []
    with engine(bench, QWEN3_600M, max_batch=COUNT, graphs=graphs) as made:
        for _ in range(bench.pick(2, 1)):
            served = made.serve(requests)
            rates.append(served.output_tokens / served.seconds)
    ours, spread = max(rates), max(rates) / min(rates) - 1
    case = f"{made.label}, {COUNT} requests"
    if bench.wants("G6"):
        yield from _against_results(bench, case, ours, spread, workload, made.note)
    if graphs and bench.wants("G6b"):
        yield _against_transformers(bench, case, ours, spread, shape, requests, made.note)


def headline_workload(shape: Shape, count: int, shortest: int, longest: int) -> dict[str, Any]:
    """Return a workload in the form of batch_manager.tools.workload.

    Lengths are uniformly random, and all requests arrive at once.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(shortest, longest + 1, (count, 2))
    prompt_tokens, output_tokens = lengths.sum(0).tolist()
    return {"seed": 0, "vocab": shape.vocabulary, "mode": "offline", "rate": 0.0, "n": count,
            "prompt_tokens": prompt_tokens, "output_tokens": output_tokens,
            "requests": make_requests(shape, [tuple(pair) for pair in lengths.tolist()])}


def _against_results(bench: Bench, case: str, ours: float, spread: float,
                     workload: dict[str, Any], note: str = "") -> Iterator[Record]:
    """Yield a record for each result of another engine (a peer) that the user has supplied for `workload`.

    The user must have measured these results on the same device.

    ours           this engine's output tokens/s
    spread, note   see `Record`
    """
    found = list(peer_results(bench.peers, workload))
    if not found:
        yield Record("G6", case, ours, None, "tokens/s", spread,
                     note=joined(note, "no peer's result of this workload was given"))
    for name, rate in found:
        yield Record("G6", f"{case}, against {name}", ours, rate, "tokens/s", spread, note=note)


def peer_results(folder: Path | None, workload: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, output tokens/s) of each result for this workload in `folder`, which has results of other engines.

    The results are in the format of batch_manager.tools.bench.
    """
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        result = json.loads(path.read_text())
        if isinstance(result, dict) and result.get("workload") == WORKLOAD and not result.get("wrong_length") and all(
                result.get(name) == workload[name] for name in ("n", "prompt_tokens", "output_tokens")):
            yield f"{result['peer']} {result.get('variant', '')}".strip(), float(result["output_tok_s"])


def _against_transformers(bench: Bench, case: str, ours: float, spread: float, shape: Shape,
                          requests: list[dict[str, Any]], note: str = "") -> Record:
    case = f"{case}, against transformers"
    try:
        bench.require(PEER_SECONDS)
    except OutOfTimeError as error:
        return not_reached("G6b", case, str(error))
    try:
        rate, theirs = serve_with_transformers(bench, shape, requests, PEER_SECONDS - PEER_LOAD_SECONDS)
    except Exception as error:
        return Record("G6b", case, status=FAILED, note=f"{type(error).__name__}: {error}"[:300])
    return Record("G6b", case, ours, rate, "tokens/s", spread, note=joined(note, theirs))
