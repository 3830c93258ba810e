"""What the programs of `paged_attention_context` compute: one row of the list per tile of a sequence's new tokens.

Pure host arithmetic. A tile has as many tokens as a program's tile of queries has rows. Its row of the list starts a
program for each query head, as many as the queries of all its tokens fill.

The tile height depends on the head size and the element size alone, so the code that packs a step can make the list
without knowing the device.
"""

import numpy as np

WORK_COLUMNS = 2      # integers of one row of the list


def context_tile_rows(head_size: int, element_size_bytes: int) -> int:
    """Rows of a tile of queries, tokens of a tile of tokens: what the registers hold with heads of `head_size` entries.

    float32 has no matrix instruction that keeps its precision, and its products take more registers.
    """
    if element_size_bytes == 4:
        return 32 if head_size <= 64 else 16
    return 128 if head_size <= 128 else 64


def context_work_list(query_lengths, kv_lengths, tile_rows: int, padded_to: int = 0) -> np.ndarray:
    """[W, WORK_COLUMNS] int32: rows (sequence, tile of its new tokens), those that see most keys first.

    query_lengths, kv_lengths   [C] integers: new tokens, and keys after this step, of each context sequence
    padded_to                   at least this many rows, the last ones (-1, -1): programs that leave at once
    """
    query_lengths, kv_lengths = np.asarray(query_lengths, np.int64), np.asarray(kv_lengths, np.int64)
    num_tiles = -(-query_lengths // tile_rows)
    sequence = np.repeat(np.arange(len(num_tiles)), num_tiles)
    first_of_sequence = num_tiles.cumsum() - num_tiles
    tile = np.arange(len(sequence)) - first_of_sequence[sequence]

    computed = kv_lengths - query_lengths
    keys_seen = np.minimum(computed[sequence] + (tile + 1) * tile_rows, kv_lengths[sequence])
    order = np.argsort(-keys_seen, kind="stable")

    work_list = np.full((max(len(order), padded_to), WORK_COLUMNS), -1, np.int32)
    work_list[: len(order), 0], work_list[: len(order), 1] = sequence[order], tile[order]
    return work_list


def most_context_tiles(num_tokens: int, num_contexts: int, tile_rows: int) -> int:
    """Rows that a `context_work_list` has at most for so many new tokens in so many sequences, or for fewer.

    Most rows come from sequences of one token each and one sequence that has the other tokens.
    """
    num_sequences = min(num_contexts, num_tokens)
    return num_sequences + (num_tokens - num_sequences) // tile_rows if num_sequences else 0
