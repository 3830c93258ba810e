"""Computes the size of the scratch memory of paged attention, without importing triton, for the memory plan.

The scratch memory holds the partial results of split sequences, in decode attention, and of split tiles of queries, in
context attention. The launchers allocate it in each layer and free it after the layer, so that all layers use
the same memory.
"""

from .context_work_list import FIXED_PART_KEYS, UNIFORM_ROWS, ContextHeads, context_tile_rows, most_partials
from .decode_work_list import most_parts

# Programs of 4 and of 8 warps that a multiprocessor runs at the same time, at most; see `decode_settings` and
# `context_heads`.
MOST_DECODE_PROGRAMS, MOST_CONTEXT_PROGRAMS = 4, 2
FLOAT32_BYTES = 4


def attention_scratch_bytes(num_rows: int, num_heads: int, num_kv_heads: int, head_size: int, element_size_bytes: int,
                            multiprocessors: int, deterministic_keys: int = 0) -> int:
    """Return an upper estimate of the bytes of partial results of a step with contexts and `num_rows` generation rows.

    multiprocessors      number of multiprocessors of the device
    deterministic_keys   keys of the longest sequence, if context attention with fixed parts computes all rows; else 0
    """
    of_heads = num_heads * (head_size + 1) * FLOAT32_BYTES                    # a result and a logarithm for each head
    if deterministic_keys:
        heads = ContextHeads(num_heads, num_kv_heads, MOST_DECODE_PROGRAMS * multiprocessors, FIXED_PART_KEYS)
        return most_partials(UNIFORM_ROWS, heads, deterministic_keys) * of_heads
    heads = ContextHeads(num_heads, num_kv_heads, MOST_CONTEXT_PROGRAMS * multiprocessors)
    of_contexts = most_partials(context_tile_rows(head_size, element_size_bytes), heads)
    of_rows = most_parts(num_rows, None, num_kv_heads, MOST_DECODE_PROGRAMS * multiprocessors)
    return (of_contexts + of_rows) * of_heads
