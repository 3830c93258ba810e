"""Which programs `paged_attention_context` runs: one per tile of query rows of a sequence. Pure host arithmetic.

The tile height depends on the head size and the element size alone, so whoever packs a step can make the list without
knowing the device.
"""

import torch


def context_tile_rows(head_size: int, element_size_bytes: int) -> int:
    """Query rows of one tile: what the registers hold with a head of `head_size` entries.

    float32 has no matrix instruction that keeps its precision, and its products take more registers.
    """
    if element_size_bytes == 4:
        return 32 if head_size <= 64 else 16
    return 128 if head_size <= 128 else 64


def context_work_list(query_lengths, kv_lengths, tile_rows: int, padded_to: int = 0) -> torch.Tensor:
    """[W, 2] int32 on the CPU: rows (sequence, tile of query rows), those that see most keys first.

    query_lengths, kv_lengths   [C] integers: new tokens, and keys after this step, of each context sequence
    padded_to                   at least this many rows, the last ones (-1, -1): programs that leave at once
    """
    query_lengths = torch.as_tensor(query_lengths, dtype=torch.int64, device="cpu")
    kv_lengths = torch.as_tensor(kv_lengths, dtype=torch.int64, device="cpu")
    num_tiles = (query_lengths + tile_rows - 1) // tile_rows
    sequence = torch.arange(len(num_tiles), dtype=torch.int64, device="cpu").repeat_interleave(num_tiles)
    first_of_sequence = num_tiles.cumsum(0) - num_tiles
    tile = torch.arange(len(sequence), dtype=torch.int64, device="cpu") - first_of_sequence[sequence]

    computed = kv_lengths - query_lengths
    keys_seen = torch.minimum(computed[sequence] + (tile + 1) * tile_rows, kv_lengths[sequence])
    order = keys_seen.argsort(descending=True, stable=True)

    work_list = torch.full((max(len(order), padded_to), 2), -1, dtype=torch.int32, device="cpu")
    work_list[: len(order)] = torch.stack([sequence[order], tile[order]], dim=1)
    return work_list
