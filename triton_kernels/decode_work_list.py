"""Which programs `paged_attention_decode` runs: one per part of a sequence's pages. Pure host arithmetic.

The host knows every length of a step before the step runs, so it cuts long sequences into parts of about equal size and
has the longest parts started first: a batch of one long sequence and many short ones fills the device as well as a
batch of equal ones does. Nothing that a kernel is compiled for depends on the result.
"""

import numpy as np

MIN_PAGES_PER_PART = 4      # a smaller part is over before its pipeline of loads is full
ROUNDS = 3                  # of programs on each place: with more the merge costs more than the balance gains


def decode_work_list(
    kv_lengths, tokens_per_block: int, num_kv_heads: int, places: int, window: int | None = None, sink: int = 0,
    pages_per_part: int | None = None, padded_to: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """(work list [W, 4] int32, part starts [S + 1] int32).

    A row of the work list is (sequence, first page, pages, partial result), those of most pages first. Pages are
    counted among those with a visible key, in order: 0 is the first page of the sinks, or of the window. A sequence in
    one part has partial result -1, for it needs none; the parts of any other are the partial results
    part_starts[s] .. part_starts[s + 1] - 1, in order. A sequence of length 0 has one row, of 0 pages.

    kv_lengths       [S] integers: keys of each sequence
    places           programs that the device runs at the same time, see `decode_settings`
    window, sink     as of `paged_attention_decode`
    pages_per_part   most pages of a part; None: as many as make ROUNDS programs for each place, 4 at least
    padded_to        at least this many rows, the last ones -1: programs that leave at once
    """
    pages = _visible_pages(np.asarray(kv_lengths, np.int64), tokens_per_block, window, sink)
    if pages_per_part is None:
        pages_per_part = max(MIN_PAGES_PER_PART, -(-int(pages.sum()) * num_kv_heads // (ROUNDS * places)))
    part_starts = np.zeros(len(pages) + 1, np.int32)
    if int(pages.max(initial=0)) <= pages_per_part:      # the common case, in half the time of the other
        sequence, first_page, part_pages, partial = np.arange(len(pages)), 0, pages, -1
    else:
        num_parts = np.maximum(-(-pages // pages_per_part), 1)
        np.cumsum(np.where(num_parts > 1, num_parts, 0), out=part_starts[1:])
        sequence = np.repeat(np.arange(len(pages)), num_parts)
        part = np.arange(len(sequence)) - (num_parts.cumsum() - num_parts)[sequence]
        share, larger_parts = np.divmod(pages, num_parts)        # the first `larger_parts` have a page more
        first_page = part * share[sequence] + np.minimum(part, larger_parts[sequence])
        part_pages = share[sequence] + (part < larger_parts[sequence])
        partial = np.where(num_parts[sequence] > 1, part_starts[sequence] + part, -1)

    num_rows = len(sequence)
    work_list = np.full((max(num_rows, padded_to), 4), -1, np.int32)
    rows = work_list[:num_rows]
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = sequence, first_page, part_pages, partial
    rows[:] = rows[np.argsort(-part_pages, kind="stable")]
    return work_list, part_starts


def _visible_pages(kv_lengths: np.ndarray, tokens_per_block: int, window: int | None, sink: int) -> np.ndarray:
    """[S]: pages of each sequence with a key that its newest token sees."""
    pages = -(-kv_lengths // tokens_per_block)
    if not window:
        return pages
    window_page = np.maximum(kv_lengths - window, 0) // tokens_per_block
    return pages - np.maximum(window_page - -(-sink // tokens_per_block), 0)
