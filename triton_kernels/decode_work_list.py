"""The work list of `paged_attention_decode`: one row per part of a sequence's pages. Pure host arithmetic.

The host knows all lengths before a step runs. It splits long sequences into parts of about equal size and starts the
longest parts first, so that one long sequence among many short ones fills the device as well as a uniform batch. It
splits nothing if whole sequences keep the device as busy: a launch that merges parts would only take time. When the
number of rows changes, no kernel is recompiled.
"""

import numpy as np

MIN_PAGES_PER_PART = 4      # a smaller part ends before its pipeline of loads is full
ROUNDS = 3                  # target number of parts per resident program; more would make the merge too expensive
MERGE_PAGES = 3             # a merge launch takes as long as this number of pages of a program, by an estimate


def decode_work_list(
    kv_lengths, tokens_per_block: int, num_kv_heads: int, resident_programs: int, window: int | None = None,
    sink: int = 0, pages_per_part: int | None = None, padded_to: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (work list [W, 4] int32, part starts [S + 1] int32).

    A row of the work list is (sequence, first page, number of pages, index of the partial result). Rows are sorted by
    descending number of pages. Page numbers count only pages with a visible key; the pages of the sinks come first. An
    unsplit sequence has index -1, because it has no partial result. The parts of a split sequence s have the indices
    part_starts[s] .. part_starts[s + 1] - 1, in order. A sequence of length 0 has one row of 0 pages.

    kv_lengths          [S] integers: keys of each sequence
    resident_programs   programs that the device runs at the same time; see `decode_settings`
    window, sink        as in `paged_attention_decode`
    pages_per_part      maximum pages of a part. None: `split_pages`, or nothing is split if that does not pay. There
                        is one program per part and KV head
    padded_to           minimum number of rows; rows of -1 are appended, whose programs exit immediately
    """
    pages = _visible_pages(np.asarray(kv_lengths, np.int64), tokens_per_block, window, sink)
    longest = int(pages.max(initial=0))
    if pages_per_part is None:
        pages_per_part = split_pages(int(pages.sum()), num_kv_heads, resident_programs)
        if longest > pages_per_part and not _pays(pages, pages_per_part, num_kv_heads, resident_programs):
            pages_per_part = longest
    part_starts = np.zeros(len(pages) + 1, np.int32)
    if longest <= pages_per_part:      # the common case, twice as fast as the general one
        sequence, first_page, part_pages, partial = np.arange(len(pages)), 0, pages, -1
    else:
        num_parts = np.maximum(-(-pages // pages_per_part), 1)
        np.cumsum(np.where(num_parts > 1, num_parts, 0), out=part_starts[1:])
        sequence = np.repeat(np.arange(len(pages)), num_parts)
        part = np.arange(len(sequence)) - (num_parts.cumsum() - num_parts)[sequence]
        share, larger_parts = np.divmod(pages, num_parts)        # the first `larger_parts` have one more page
        first_page = part * share[sequence] + np.minimum(part, larger_parts[sequence])
        part_pages = share[sequence] + (part < larger_parts[sequence])
        partial = np.where(num_parts[sequence] > 1, part_starts[sequence] + part, -1)

    num_rows = len(sequence)
    work_list = np.full((max(num_rows, padded_to), 4), -1, np.int32)
    rows = work_list[:num_rows]
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = sequence, first_page, part_pages, partial
    rows[:] = rows[np.argsort(-part_pages, kind="stable")]
    return work_list, part_starts


def most_parts(num_sequences: int, max_pages: int | None, num_kv_heads: int, resident_programs: int) -> int:
    """Return the largest number of rows that `decode_work_list` can need, not counting padding rows.

    max_pages   pages of the longest sequence; None: unbounded
    """
    most = num_sequences + ROUNDS * resident_programs // num_kv_heads
    if max_pages is not None:
        of_small_parts = min(num_sequences * max_pages, num_sequences + resident_programs // (2 * num_kv_heads))
        most = min(most, max(num_sequences * -(-max_pages // MIN_PAGES_PER_PART), of_small_parts))
    return max(num_sequences, most)


def split_pages(num_pages: int, num_kv_heads: int, resident_programs: int, least: int = MIN_PAGES_PER_PART,
                rounds: int = ROUNDS) -> int:
    """Return the maximum pages of a part if a step with `num_pages` visible pages is split.

    There are about `rounds` programs per resident program, with at least `least` pages each. If these are fewer
    than half of the resident programs, parts are smaller, down to one page, because the device has room for more.
    """
    work = num_pages * num_kv_heads
    return max(-(-work // (rounds * resident_programs)), min(least, max(-(-2 * work // resident_programs), 1)))


def _pays(pages: np.ndarray, pages_per_part: int, num_kv_heads: int, resident_programs: int) -> bool:
    """Whether parts of `pages_per_part` pages, with their merge, take less time than whole sequences."""
    whole, in_parts = times_in_pages(pages, pages_per_part, num_kv_heads, resident_programs)
    return in_parts + MERGE_PAGES < whole


def times_in_pages(pages: np.ndarray, pages_per_part: int, num_kv_heads: int,
                   resident_programs: int) -> tuple[float, float]:
    """Return (time of whole sequences, time of parts of `pages_per_part` pages without their merge).

    pages   [S] visible pages of each sequence

    The times are upper bounds, in pages of one program. If the longest programs start first, a program starts
    at the latest when the programs before it would be done if they shared the device evenly (R. L. Graham, Bounds
    on Multiprocessing Timing Anomalies, 1969). For sequences of one length the programs run in waves, whose number is
    exact.
    """
    descending = np.sort(pages)[::-1]
    shared = descending.cumsum() * (num_kv_heads / resident_programs)
    evenly = float((shared + descending * (1 - 1 / resident_programs)).max())
    waves = int(descending[np.arange(0, len(pages) * num_kv_heads, resident_programs) // num_kv_heads].sum())
    return min(evenly, waves), float(shared[-1]) + pages_per_part


def _visible_pages(kv_lengths: np.ndarray, tokens_per_block: int, window: int | None, sink: int) -> np.ndarray:
    """Return [S]: the number of pages of each sequence that have a key visible to its newest token."""
    pages = -(-kv_lengths // tokens_per_block)
    if not window:
        return pages
    window_page = np.maximum(kv_lengths - window, 0) // tokens_per_block
    return pages - np.maximum(window_page - -(-sink // tokens_per_block), 0)
