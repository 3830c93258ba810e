"""Goals G1, G1b and G1c: decode attention, compared with the memory bandwidth and with a peer."""

from collections.abc import Iterator

import numpy as np

from .attention_peer import attention_peer
from .bench import Bench
from .pages import Heads, PagedSequences
from .records import FAILED, NOT_REACHED, Record

LARGE, SMALL, TINY = Heads(8, 4, 128), Heads(3, 3, 64), Heads(2, 2, 16)
ONE_SEQUENCE_LENGTHS = (1024, 4096, 16384)


def run(bench: Bench) -> Iterator[Record]:
    bench.require(8)
    yield from _against_copying(bench, "G1", "64 sequences of 4,096", LARGE, np.full(64, 4096))
    bench.require(5)
    ragged = np.random.default_rng(1).integers(1, 8193, 64)
    yield from _against_copying(bench, "G1-ragged", "64 sequences of 1 to 8,192", LARGE, ragged)
    bench.require(5)
    yield from _against_copying(bench, "G1b", "256 sequences of 512", SMALL, np.full(256, 512))
    yield from _one_sequence(bench)


def _sequences(bench: Bench, heads: Heads, lengths: np.ndarray) -> PagedSequences:
    if bench.is_dry:
        return PagedSequences(bench, TINY, np.array([20, 33]), tokens_per_block=16)
    return PagedSequences(bench, heads, lengths)


def _against_copying(bench: Bench, goal: str, case: str, heads: Heads, lengths: np.ndarray) -> Iterator[Record]:
    sequences = _sequences(bench, heads, lengths)
    launch = sequences.decode()
    error = sequences.decode_error(launch)
    if error > bench.allowed_error:
        yield Record(goal, case, status=FAILED, note=f"the result is wrong: relative error {error:.2g}")
        return
    timing = bench.clock.time(launch)
    yield Record(goal, case, sequences.kv_bytes / timing.median / 1e9, bench.copy_bytes_s / 1e9, "GB/s", timing.spread,
                 figures=f"{timing.median * 1e6:.1f} us a layer; reading alone {bench.read_bytes_s / 1e9:,.0f} GB/s")


def _one_sequence(bench: Bench) -> Iterator[Record]:
    peer = attention_peer(bench.peers)
    for length in ONE_SEQUENCE_LENGTHS:
        bench.require(3)
        case = f"one sequence of {length:,}"
        sequences = _sequences(bench, LARGE, np.array([length]))
        launch = sequences.decode()
        error = sequences.decode_error(launch)
        if error > bench.allowed_error:
            yield Record("G1c", case, status=FAILED, note=f"the result is wrong: relative error {error:.2g}")
            continue
        ours = bench.clock.time(launch)
        if peer is None:
            yield Record("G1c", case, ours.median * 1e6, None, "us", ours.spread, note="no attention peer was given")
            continue
        theirs_launch = peer.decode(sequences)
        if (error := sequences.decode_error(theirs_launch)) > bench.allowed_error:
            yield Record("G1c", case, status=NOT_REACHED, note=f"{peer.name} is wrong: relative error {error:.2g}")
            continue
        theirs = bench.clock.time(theirs_launch)
        yield Record("G1c", case, ours.median * 1e6, theirs.median * 1e6, "us", ours.spread,
                     note=f"against {peer.name}")
