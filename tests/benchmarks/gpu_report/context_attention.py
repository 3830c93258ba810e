"""Goals G2 and G2b: context attention, compared with a matrix product and with a peer.

Two more records of G2 compare split attention, whose keys are divided into parts, with unsplit attention.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from .attention_peer import attention_peer
from .bench import Bench
from .pages import Heads, PagedSequences
from .records import FAILED, Record

WIDE, NARROW, TINY = Heads(8, 4, 128), Heads(8, 4, 64), Heads(2, 2, 16)
LENGTHS = (4096, 16384)
LAUNCHES, REPEATS = 4, 10


def run(bench: Bench) -> Iterator[Record]:
    for heads, goals in ((WIDE, ("G2", "G2b")), (NARROW, (None, "G2b-64"))):
        for length in LENGTHS:
            bench.require(5)
            yield from _one(bench, heads, length, *goals)
    bench.require(4)
    yield from _of_a_short_chunk(bench)


def _of_a_short_chunk(bench: Bench) -> Iterator[Record]:
    """Compare unsplit attention with attention that is split as in the engine, for a chunk of 64 tokens.

    The chunk follows 16,320 tokens. The goal of G2 is for whole prompts, so the records are not judged.
    """
    for heads in (WIDE, NARROW)[: bench.pick(2, 1)]:
        if bench.is_dry:
            sequences = PagedSequences(bench, TINY, np.array([40]), new_tokens=3, tokens_per_block=16)
        else:
            sequences = PagedSequences(bench, heads, np.array([16384]), new_tokens=64)
        rates = []
        for num_parts in (bench.pick(None, 2), 1):
            launch = sequences.context(num_parts=num_parts)
            if (error := sequences.context_error(launch)) > bench.allowed_error:
                yield Record("G2", "a short chunk", status=FAILED,
                             note=f"the result is wrong: relative error {error:.2g}, heads of {heads.size}")
                return
            timing = bench.clock.time(launch, launches=LAUNCHES, repeats=REPEATS)
            rates.append((sequences.causal_operations / timing.median / 1e12, timing.spread))
        (split, spread), (unsplit, _) = rates
        yield Record("G2", f"64 tokens after 16,320 others, heads of {heads.size}", split, unsplit, "TFLOP/s", spread,
                     judged=False, note="split keys against unsplit keys")


def _one(bench: Bench, heads: Heads, length: int, against_matrix: str | None, against_peer: str) -> Iterator[Record]:
    case = f"one sequence of {length:,}"
    if bench.is_dry:
        sequences = PagedSequences(bench, TINY, np.array([20]), new_tokens=20, tokens_per_block=16)
    else:
        sequences = PagedSequences(bench, heads, np.array([length]), new_tokens=length)
    launch = sequences.context()
    error = sequences.context_error(launch)
    if error > bench.allowed_error:
        for goal in filter(None, (against_matrix, against_peer)):
            yield Record(goal, case, status=FAILED, note=f"the result is wrong: relative error {error:.2g}")
        return
    timing = bench.clock.time(launch, launches=LAUNCHES, repeats=REPEATS)
    rate = sequences.causal_operations / timing.median
    if against_matrix is not None:
        yield Record(against_matrix, case, rate / 1e12, bench.matmul_flop_s / 1e12, "TFLOP/s", timing.spread)
    peer = attention_peer(bench.peers)
    name, theirs = ("torch", _of_torch(bench, sequences)) if peer is None else (peer.name, peer.context(sequences))
    if peer is not None and (error := sequences.context_error(theirs)) > bench.allowed_error:
        yield Record(against_peer, case, status=FAILED, note=f"{name} is wrong: relative error {error:.2g}")
        return
    other = sequences.causal_operations / bench.clock.time(theirs, launches=LAUNCHES, repeats=REPEATS).median
    yield Record(against_peer, case, rate / 1e12, other / 1e12, "TFLOP/s", timing.spread, judged=peer is not None,
                 note=f"against {name}" if peer else "against torch's scaled_dot_product_attention, keys not paged")


def _of_torch(bench: Bench, sequences: PagedSequences) -> Callable[[int], torch.Tensor]:
    """Return a function that launches torch's attention on one random sequence with contiguous keys and values.

    The sequence has the length, the head size and the number of query heads of `sequences`. Keys and values have as
    many heads as queries.
    """
    heads, length = sequences.heads, sequences.new_tokens
    query = bench.normal(1, heads.query, length, heads.size)
    keys, values = (bench.normal(1, heads.query, length, heads.size) for _ in range(2))
    return lambda number: scaled_dot_product_attention(query, keys, values, is_causal=True, scale=heads.scale)
