"""Attention of one query token per sequence over that sequence's pages.

    out[s, h] = softmax(scale * query[s, h] . K[s, h // G]) V[s, h // G]
    over the keys k of sequence s with k > p - window or k < sink, where its query stands at p = kv_lengths[s] - 1

Shapes      query                    [S, HQ, D]   S sequences, HQ = G * HK query heads; heads contiguous
            kv_pool                  [N, 2, HK, B, D]   one layer's view of the pool: N blocks of B tokens
            block_table              [rows, max_blocks] int32   pages of a sequence, in order. An entry whose page
                                                        holds no visible key is not looked at: its block may have
                                                        been given to somebody else.
            kv_lengths               [S] int32   keys of each sequence, its newest token's included; 0 = padding row
            work_list                [W, 4] int32   from `decode_work_list` for the same lengths, window and sink, on
                                                    the queries' device; -1 in its first column is padding. The oracle
                                                    does not need it.
            part_starts              [S + 1] int32   likewise; None: no sequence has several parts
            slots                    [S] int32   the sequence's row of block_table; None: row s is sequence s
            out                      [S, HQ, D]   None: allocated; may be `query` itself
Units       window in tokens, None or 0 = no limit; scale > 0 is the factor on the scores.
            softcap: scores become softcap * tanh(scores / softcap), before the mask; None: they stay as they are.
            sink: first tokens that stay visible outside the window (StreamingLLM, Xiao et al. 2023); of no meaning
            without one. Positions are absolute: keys lie in the pool rotated by the position they were written at
            and are not rotated again when tokens between them and the query have left the window.
            The result depends on where the work list cuts a sequence in the last bits only.
Mutates     out. A row of length 0 is set to zero.
Returns     out.
Needs       a page with a visible key holds finite numbers in all its B tokens: the pool is zeroed once.
"""

import torch


def paged_attention_decode(
    query, kv_pool, block_table, kv_lengths, work_list, part_starts, scale, window=None, slots=None, out=None, sink=0,
    softcap=None,
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
        position = torch.arange(kv_length, dtype=torch.int64, device=query.device)
        if window:
            position = position[(position >= kv_length - window) | (position < sink)]
        block, offset = block_table[row, position // tokens_per_block].long(), position % tokens_per_block
        keys, values = (kv_pool[block, kind, :, offset].to(wide).transpose(0, 1) for kind in (0, 1))    # [HK, keys, D]

        rows = query[sequence].to(wide).reshape(num_kv_heads, group, head_size)
        scores = scale * rows @ keys.transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[sequence] = (scores.softmax(-1) @ values).reshape(num_heads, head_size).to(out.dtype)
    return out
