"""The work list of `paged_attention_decode`: one row per part of a sequence's pages. Pure host arithmetic.

The host knows all lengths before a step runs. It splits long sequences into parts of about equal size and starts the
longest parts first, so that one long sequence among many short ones fills the device as well as a uniform batch. When
the number of rows changes, no kernel is recompiled.
"""

import numpy as np

MIN_PAGES_PER_PART = 4      # a smaller part ends before its pipeline of loads is full
ROUNDS = 3                  # target number of parts per resident program; more would make the merge too expensive


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
    pages_per_part      maximum pages of a part. None: the smallest maximum, from 4 on, with which there are at most
                        about 3 * resident_programs programs. There is one program per part and KV head
    padded_to           minimum number of rows; rows of -1 are appended, whose programs exit immediately
    """
    pages = _visible_pages(np.asarray(kv_lengths, np.int64), tokens_per_block, window, sink)
    if pages_per_part is None:
        pages_per_part = max(MIN_PAGES_PER_PART, -(-int(pages.sum()) * num_kv_heads // (ROUNDS * resident_programs)))
    part_starts = np.zeros(len(pages) + 1, np.int32)
    if int(pages.max(initial=0)) <= pages_per_part:      # the common case, twice as fast as the general one
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
        most = min(most, num_sequences * -(-max_pages // MIN_PAGES_PER_PART))
    return max(num_sequences, most)


def _visible_pages(kv_lengths: np.ndarray, tokens_per_block: int, window: int | None, sink: int) -> np.ndarray:
    """Return [S]: the number of pages of each sequence that have a key visible to its newest token."""
    pages = -(-kv_lengths // tokens_per_block)
    if not window:
        return pages
    window_page = np.maximum(kv_lengths - window, 0) // tokens_per_block
    return pages - np.maximum(window_page - -(-sink // tokens_per_block), 0)
