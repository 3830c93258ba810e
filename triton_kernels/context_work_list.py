"""The work list of `paged_attention_context`: one row per tile of a sequence's new tokens. Pure host arithmetic.

A program computes a tile of queries, with a fixed number of rows. A tile of new tokens has the same number of tokens.
Each token has one query per query head. The queries of a full tile of tokens therefore need one program per query head,
and a row of the list starts this number of programs.

The size of a tile depends only on the head size and the element size, so the list does not depend on the device.
"""

import numpy as np

WORK_COLUMNS = 2


def context_tile_rows(head_size: int, element_size_bytes: int) -> int:
    """Return the number of rows of a tile of queries, which is also the number of tokens of a tile of new tokens.

    Registers limit the number. Tiles of float32 are smaller: no matrix instruction keeps its precision, and products
    without matrix instructions take more registers.
    """
    if element_size_bytes == 4:
        return 32 if head_size <= 64 else 16
    return 128 if head_size <= 128 else 64


def context_work_list(query_lengths, kv_lengths, tile_rows: int, padded_to: int = 0) -> np.ndarray:
    """Return the work list [W, WORK_COLUMNS] int32 with a row (sequence, index of the tile in the sequence) per tile.

    The tiles that see most keys come first.

    query_lengths, kv_lengths   [C] integers: new tokens and keys of each context, including the keys of this step
    padded_to                   minimum number of rows; rows of -1 are appended, whose programs exit immediately
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
    """Return the maximum number of rows of the `context_work_list` of a step.

    The step has at most `num_tokens` new tokens of at most `num_contexts` contexts. The maximum occurs when all
    contexts but one have a single token.
    """
    num_sequences = min(num_contexts, num_tokens)
    return num_sequences + (num_tokens - num_sequences) // tile_rows if num_sequences else 0
