"""The work list of `paged_attention_context`: the tiles of new tokens, and the parts of their keys. Host arithmetic.

There are tiles of queries and tiles of new tokens. A program computes a tile of queries. All tiles of queries have
the same number of rows. A full tile of new tokens has as many tokens as a tile of queries has rows. Each token has
one query per query head. A full tile of new tokens therefore needs one program per query head. Each row of the list
starts one program per query head.

A short chunk of a long sequence has few tiles, and each tile sees many keys. The keys of such a tile are split into
parts, so that the programs of one chunk fill the device. Each part has a row of the list. `paged_attention_merge`
combines the partial results of the parts.

The size of a tile depends only on the head size and the element size. The number of parts also depends on the number
of programs that the device runs at the same time.

With `ContextHeads.part_keys`, for deterministic engines, the keys of a sequence are cut into fixed parts, from position
0 on. A program computes the results of several adjacent fixed parts, and each has a partial result of its own. The
number of programs then shows in no bit. The keys of a layer with a window are one part, and never split.
"""

from typing import NamedTuple

import numpy as np

WORK_COLUMNS = 5
MIN_KEYS_PER_PART = 256     # with fewer keys, writing and merging the partial results would take too long
FIXED_PART_KEYS = 512       # `part_keys` of deterministic engines
UNIFORM_ROWS = 16           # rows of their tiles: the minimum of a matrix instruction, as most sequences have one row


class ContextHeads(NamedTuple):
    """The numbers from which `context_work_list` decides into how many parts it splits a tile.

    resident_programs   programs that the device runs at the same time; see `context_heads`
    part_keys           keys of a fixed part; None: parts of any size
    """

    num_heads: int
    num_kv_heads: int
    resident_programs: int
    part_keys: int | None = None


class ContextTileWork(NamedTuple):
    """The work of `paged_attention_context` for all layers with the same window.

    If the keys of a tile are split into m > 1 parts, the tokens of the tile are called split. A split token has m
    partial results, or one for each fixed part. S is the number of split tokens.

    work_list     [W, WORK_COLUMNS] int32   the columns: sequence; index of the tile among the tiles of the sequence's
                                            new tokens; index of the part; number of parts of the tile; index of the
                                            first partial result of the tile's first token, or -1 for a tile in one part
    part_starts   [S + 1] int32   the partial results of the s-th split token are part_starts[s] .. part_starts[s+1] - 1
    merged_rows   [S] int32   index of each split token in the packed tokens
    """

    work_list: np.ndarray
    part_starts: np.ndarray
    merged_rows: np.ndarray


def context_tile_rows(head_size: int, element_size_bytes: int) -> int:
    """Return the number of rows of a tile of queries. A full tile of new tokens has the same number of tokens.

    The registers limit this number. Tiles of float32 are smaller, because no matrix instruction keeps the precision
    of float32. Products without matrix instructions take more registers.
    """
    if element_size_bytes == 4:
        return 32 if head_size <= 64 else 16
    return 128 if head_size <= 128 else 64


def context_work_list(
    query_lengths, kv_lengths, tile_rows: int, padded_to: int = 0, heads: ContextHeads | None = None,
    window: int | None = None, sink: int = 0, num_parts: int | None = None,
) -> ContextTileWork:
    """Return the work of contexts. Rows of the work list with more keys come first.

    query_lengths, kv_lengths   [C] integers: new tokens and keys of each context, including the keys of this step
    padded_to                   minimum number of rows; rows of -1 are appended, whose programs exit immediately
    heads                       ContextHeads, which decide into how many parts a tile is split; None: no tile is split
    window, sink                as in `paged_attention_context`
    num_parts                   number of parts of every tile, whatever `heads` counts; None: `heads` decides
    """
    query_lengths, kv_lengths = np.asarray(query_lengths, np.int64), np.asarray(kv_lengths, np.int64)
    num_tiles = -(-query_lengths // tile_rows)
    sequence = np.repeat(np.arange(len(num_tiles)), num_tiles)
    first_of_sequence = num_tiles.cumsum() - num_tiles
    tile = np.arange(len(sequence)) - first_of_sequence[sequence]

    tokens = np.minimum(query_lengths[sequence] - tile * tile_rows, tile_rows)
    keys = kv_lengths[sequence] - query_lengths[sequence] + tile * tile_rows + tokens
    if window:
        keys = np.minimum(keys, window + sink)             # of the tile's last token
    part_keys = None if heads is None else heads.part_keys
    if window and part_keys:
        parts = np.ones(len(keys), np.int64)
    elif num_parts is not None:
        parts = np.full(len(keys), num_parts)
    else:
        parts = np.ones(len(keys), np.int64) if heads is None else _num_parts(tokens, keys, tile_rows, heads)
    results = -(-keys // part_keys) if part_keys else parts               # of each token of a split tile

    partial, part_starts, merged_rows, part = -1, np.zeros(1, np.int32), np.empty(0, np.int32), 0
    if parts.max(initial=1) > 1:
        is_split = parts > 1
        num_partials = np.where(is_split, tokens * results, 0)
        partial = np.where(is_split, num_partials.cumsum() - num_partials, -1)
        split_tokens = tokens[is_split]
        part_starts = np.zeros(int(split_tokens.sum()) + 1, np.int32)
        np.cumsum(np.repeat(results[is_split], split_tokens), out=part_starts[1:])
        first_token = (query_lengths.cumsum() - query_lengths)[sequence] + tile * tile_rows
        offset = np.arange(len(part_starts) - 1) - np.repeat(split_tokens.cumsum() - split_tokens, split_tokens)
        merged_rows = (np.repeat(first_token[is_split], split_tokens) + offset).astype(np.int32)
        row = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(row)) - (parts.cumsum() - parts)[row]
        sequence, tile, parts, keys, partial = (values[row] for values in (sequence, tile, parts, keys, partial))

    num_rows = len(sequence)
    work_list = np.full((max(num_rows, padded_to), WORK_COLUMNS), -1, np.int32)
    rows = work_list[:num_rows]
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4] = sequence, tile, part, parts, partial
    rows[:] = rows[np.argsort(-keys / parts, kind="stable")]
    return ContextTileWork(work_list, part_starts, merged_rows)


def _num_parts(tokens: np.ndarray, keys: np.ndarray, tile_rows: int, heads: ContextHeads) -> np.ndarray:
    """Return the number of parts of each tile.

    The work of a program is the number of keys that it walks. A share is the work of all programs of the step
    before any tile is split, divided by `resident_programs`. A part has at least one share of keys, and at least
    MIN_KEYS_PER_PART keys, or as many as a fixed part. The split tiles together therefore have at most
    `resident_programs` programs. A tile is split only if it sees at least two shares of keys. A prompt that fills the
    device is not split, because none of its tiles sees twice as many keys as its mean tile.

    tokens   tokens of each tile
    keys     keys that the last token of each tile sees
    """
    group = heads.num_heads // heads.num_kv_heads
    programs = heads.num_kv_heads * -(-tokens * group // tile_rows)
    total = max(int((programs * keys).sum()), 1)
    return np.maximum(np.minimum(keys // _least_keys(heads), keys * heads.resident_programs // total), 1)


class MostContextTileWork(NamedTuple):
    """Maximum sizes of the arrays of a ContextTileWork.

    rows       rows of the work list
    split      tokens whose keys are split into parts
    """

    rows: int
    split: int


def most_context_work(num_tokens: int, num_contexts: int, tile_rows: int, heads: ContextHeads | None = None,
                      max_keys: int = 0) -> MostContextTileWork:
    """Return the largest array sizes of a ContextTileWork for up to `num_tokens` new tokens of `num_contexts` contexts.

    The maximum number of tiles occurs when all contexts but one have a single token.

    heads      ContextHeads, which decide into how many parts a tile is split; None: no tile is split
    max_keys   keys of the longest sequence
    """
    num_sequences = min(num_contexts, num_tokens)
    num_tiles = num_sequences + (num_tokens - num_sequences) // tile_rows if num_sequences else 0
    most_parts = 1 if heads is None else min(max_keys // _least_keys(heads),
                                             heads.resident_programs // heads.num_kv_heads)
    if most_parts < 2:
        return MostContextTileWork(num_tiles, 0)
    more = min(num_tiles * (most_parts - 1), heads.resident_programs // heads.num_kv_heads - 1)
    return MostContextTileWork(num_tiles + more, min(num_tokens, _most_pairs(tile_rows, heads) // 2))


def most_partials(tile_rows: int, heads: ContextHeads, max_keys: int = 0) -> int:
    """Return the maximum number of partial results of a ContextTileWork. A partial result has all heads of a token.

    max_keys   keys of the longest sequence; needed for fixed parts only
    """
    pairs = _most_pairs(tile_rows, heads)
    return pairs if heads.part_keys is None else pairs // 2 * -(-max_keys // heads.part_keys)


def _most_pairs(tile_rows: int, heads: ContextHeads) -> int:
    """Return the maximum number of pairs of a split token and a program's part of its keys. A token has at least two.

    There are at most `resident_programs` programs of split tiles, each with at most `tile_rows` queries.
    """
    return heads.resident_programs * tile_rows // heads.num_heads


def _least_keys(heads: ContextHeads) -> int:
    return heads.part_keys or MIN_KEYS_PER_PART
