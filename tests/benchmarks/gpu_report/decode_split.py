"""Decode attention with sequences split otherwise than in an engine, compared with copying.

`triton_kernels/decode_work_list.py` decides by estimates whether and how it splits. The report ends with the constants
that were fastest in all cases together. A record of split sequences has the time of their merge, in pages of a program,
by the times of split and whole sequences: `MERGE_PAGES` of that file is such a time. With single sequences, the fixed
parts of a deterministic engine are timed too; their keys are appended before.
"""

from collections.abc import Iterator

import numpy as np

from batch_manager.triton_kernels.context_work_list import FIXED_PART_KEYS
from batch_manager.triton_kernels.decode_work_list import MIN_PAGES_PER_PART, ROUNDS, times_in_pages
from batch_manager.triton_kernels.device_limits import device_limits
from batch_manager.triton_kernels.paged_attention_decode import decode_settings

from .bench import Bench
from .pages import Heads, PagedSequences
from .records import FAILED, Record
from .settings_code import Parts, Trial, text_of

_random = np.random.default_rng(1)
CASES = (
    ("64 of 4,096", Heads(8, 4, 128), np.full(64, 4096)),
    ("64 of 1 to 8,192", Heads(8, 4, 128), _random.integers(1, 8193, 64)),
    ("256 of 512, heads of 64", Heads(3, 3, 64), np.full(256, 512)),
    ("32 of 1,024", Heads(8, 4, 128), np.full(32, 1024)),
    ("256 of 100 to 2,047, groups of 2", Heads(8, 2, 128), _random.integers(100, 2048, 256)),
    ("1 of 1,024, heads of 64", Heads(8, 4, 64), np.full(1, 1024)),
    ("1 of 16,384", Heads(8, 4, 128), np.full(1, 16384)),
)
DRY_CASES = (("2 sequences", Heads(2, 2, 16), np.array([200, 33])),)
AS_IN_AN_ENGINE = Parts(MIN_PAGES_PER_PART, ROUNDS)
TRIED = (AS_IN_AN_ENGINE, Parts(4, 1), Parts(2, 1), Parts(1, 1), Parts(1, 3), Parts(4, 2), Parts(16, 3))
CASE_SECONDS = 2.5              # estimate


def run(bench: Bench) -> Iterator[Record]:
    trials: list[Trial] = []
    for case, heads, lengths in bench.pick(CASES, DRY_CASES):
        bench.require(bench.pick(CASE_SECONDS, len(CASES) * CASE_SECONDS))
        yield from _of_case(bench, case, heads, lengths, trials)
        bench.clock.forget()
        bench.add_text("decode-split", text_of(trials, bench.clock.name, device_limits().multiprocessors))


def _of_case(bench: Bench, case: str, heads: Heads, lengths: np.ndarray, trials: list[Trial]) -> Iterator[Record]:
    """Yield a record for each way to split the sequences, and add its trial to `trials` if it has constants."""
    sequences = PagedSequences(bench, heads, lengths, tokens_per_block=bench.pick(64, 16))
    block = sequences.pool.shape[4]
    resident = decode_settings(heads.size, block, sequences.pool.element_size(), device_limits()).resident_programs
    num_pages, page_seconds = -(-lengths // block), 0.0
    ways: list[tuple[str, Parts | None, int | None]] = [
        ("as in an engine", AS_IN_AN_ENGINE, None), ("whole", None, int(num_pages.max()))]
    ways += [(f"at least {parts.min_pages_per_part} pages, {parts.rounds} rounds", None if number == 0 else parts,
              parts.pages_per_part(lengths, block, heads.kv, resident)) for number, parts in enumerate(TRIED)]
    launches = [(*way, sequences.decode(resident, way[2]), sequences.decode_error) for way in ways]
    if len(lengths) == 1 or bench.is_dry:
        launches += [(text, None, None, sequences.context(num_parts=programs, part_keys=FIXED_PART_KEYS),
                      sequences.context_error)
                     for text, programs in (("deterministic", None), ("deterministic, one program", 1))]
    for text, parts, pages, launch, error_of in launches:
        if (error := error_of(launch)) > bench.allowed_error:
            yield Record("decode-split", f"{case}: {text}", status=FAILED,
                         note=f"the result is wrong: relative error {error:.2g}")
            continue
        timing = bench.clock.time(launch)
        rate = sequences.kv_bytes / timing.median
        if parts is not None:
            trials.append(Trial("decode_work_list", (), f"decode, {case}", parts, pages is None, timing,
                                "" if bench.is_dry else f"{rate / 1e9:,.0f} GB/s"))
        figures = f"{timing.median * 1e6:.1f} us"
        if pages is not None:
            whole, in_parts = times_in_pages(num_pages, pages, heads.kv, resident)
            if text == "whole":
                page_seconds = timing.median / whole
            elif pages < num_pages.max() and page_seconds:
                figures += f"; a merge of {timing.median / page_seconds - in_parts:.1f} pages"
        yield Record("decode-split", f"{case}: {text}", rate / 1e9, bench.copy_bytes_s / 1e9, "GB/s", timing.spread,
                     note="" if pages is None else f"at most {pages} pages a part", figures=figures)
