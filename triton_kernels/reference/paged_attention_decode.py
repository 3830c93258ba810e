"""Attention of one query token per sequence over that sequence's pages.

    out[s, h] = softmax(scale * query[s, h] . K[s, h // G]) V[s, h // G]
    over the last `window` of the kv_lengths[s] keys of sequence s

Shapes      query                    [S, HQ, D]   S sequences, HQ = G * HK query heads; heads contiguous
            kv_pool                  [N, 2, HK, B, D]   one layer's view of the pool: N blocks of B tokens
            block_table              [rows, max_blocks] int32   pages of a sequence, in order
            kv_lengths               [S] int32   keys of each sequence, its newest token's included; 0 = padding row
            slots                    [S] int32   the sequence's row of block_table; None: row s is sequence s
            out                      [S, HQ, D]   None: allocated; may be `query` itself
Units       window in tokens, None or 0 = no limit; scale is the factor on the scores.
            splits: parts a sequence's pages are cut into, None = chosen from the shapes. The result depends on it in
            the last bits only; pass a constant to get the same bits in every batch.
Mutates     out. A row of length 0 is set to zero.
Returns     out.
Needs       every page that is mapped holds finite numbers in all its B tokens: the pool is zeroed once.
"""

import torch


def paged_attention_decode(
    query, kv_pool, block_table, kv_lengths, scale, window=None, slots=None, out=None, splits=None
):
    """One query token per sequence; see the module's docstring for shapes."""
    num_sequences, num_heads, head_size = query.shape
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query) if out is None else out

    for sequence in range(num_sequences):
        kv_length = int(kv_lengths[sequence])
        if kv_length == 0:
            out[sequence] = 0
            continue
        row = sequence if slots is None else int(slots[sequence])
        num_pages = -(-kv_length // tokens_per_block)
        pages = kv_pool[block_table[row, :num_pages].long()].to(wide)             # [pages, 2, HK, B, D]
        keys, values = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_size)[:, :, :kv_length]
        first = max(0, kv_length - window) if window else 0

        rows = query[sequence].to(wide).reshape(num_kv_heads, group, head_size)
        scores = scale * rows @ keys[:, first:].transpose(1, 2)
        out[sequence] = (scores.softmax(-1) @ values[:, first:]).reshape(num_heads, head_size).to(out.dtype)
    return out
