"""Append the newest token of each sequence to its pages, and attend over them.

    key, value and query of sequence s are those of its token at position p = kv_lengths[s] - 1
    rotated(x) = [x1 * cos - x2 * sin, x2 * cos + x1 * sin, the other D - R entries unchanged], where x1 and x2 are the
    first and the second half of the leading R entries, and cos and sin are row p of the tables
    with norms, x is first replaced by its RMS norm: x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight), where
    weight is query_norm or key_norm; rounded to the dtype of x
    page[0, h, p % B] = rotated(key[s, h]),  page[1, h, p % B] = value[s, h]   in block block_table[row of s, p // B]
    out[s, h] = softmax(scale * rotated(query[s, h]) . K[s, h // G]) V[s, h // G]
    over the keys k <= p of sequence s with k > p - window or k < sink

Shapes      query                    [S, HQ, D]   S sequences, HQ = G * HK query heads of size D; heads contiguous
            key, value               [S, HK, D]   likewise; the three may be views of one packed tensor
            kv_pool                  [N, 2, HK, B, D]   the pool of one layer: N blocks of B tokens; in the dtype of the
                                                        queries, or in e4m3 (torch.float8_e4m3fn)
            block_table              [rows, max_blocks] int32   pages of each sequence in order, including the newest
                                                        token's. Entries of pages without a visible key are not read:
                                                        their blocks may belong to another sequence.
            kv_lengths               [S] int32   keys of each sequence, including the newest token's; 0 = padded row
            work_list                [W, 4] int32   from `decode_work_list` for the same lengths, window and sink, on
                                                    the queries' device; -1 in its first column is padding. Ignored by
                                                    the oracle.
            part_starts              [S + 1] int32   likewise; None: no sequence is split
            slots                    [S] int32   row of block_table for each sequence; None: row s
            out                      [S, HQ, D]   None: allocated; must not share memory with query, key or value
            cos_table, sin_table     [positions, R / 2] float32   None: no rotation
            query_norm, key_norm     [D]   weights of the RMS norms of query and key heads; None: no norms
            counters                 [S, HK] int32, zeros   the last program of a split sequence combines its parts.
                                                    None: `paged_attention_merge` combines them
            alibi_slopes             [HQ] float32   None: no ALiBi bias
            sink_logits              [HQ] float32   None: no extra score
Units       window in tokens, None or 0 = no limit; scale > 0 is the factor on the scores.
            softcap: replace scores by softcap * tanh(scores / softcap), before the mask; None: no cap.
            alibi_slopes: add f(key position) - f(query position) to scores, after the cap and before the mask, with
            f(p) = slope * p. With alibi_bfloat16_factor > 0, f(p) = factor * bfloat16(slope * bfloat16(p)), as in
            Falcon; the slopes must then be representable in bfloat16.
            sink_logits: one extra score per head in the softmax, with a value of zeros. Unrelated to `sink`.
            sink: number of first tokens that stay visible outside the window (StreamingLLM, Xiao et al. 2023); ignored
            without a window. Positions are absolute: a key is rotated once, by its position, when it is written to the
            pool. It is not rotated again when tokens between it and the query leave the window.
            key_scale, value_scale: a pool in e4m3 stores keys and values divided by them and rounded, see fp8.py; the
            result is that of the rounded numbers times their scales. 1 for a pool in another dtype.
            The partition of the work list affects only the last bits of the result.
Mutates     kv_pool, at the newest position of each sequence, and out. A row of length 0 does not write to the pool;
            its output is zero.
Returns     out.
Needs       finite numbers in every page with a visible key, before the position of the newest token; the rest of a
            page is not read. No two sequences append to the same position of a block.
"""

import torch

from .paged_attention_context import alibi_bias
from .rope_kv_append import rope_kv_append


def paged_attention_decode(
    query, key, value, kv_pool, block_table, kv_lengths, work_list, part_starts, scale, window=None, slots=None,
    out=None, sink=0, softcap=None, cos_table=None, sin_table=None, alibi_slopes=None, alibi_bfloat16_factor=None,
    sink_logits=None, query_norm=None, key_norm=None, epsilon=0.0, weight_offset=0.0, counters=None,
    key_scale=1.0, value_scale=1.0,
):
    """Append the newest token of each sequence to its pages, and attend over the pages.

    See the module docstring for shapes.
    """
    num_sequences, num_heads, head_size = query.shape
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query) if out is None else out

    rows = [sequence if slots is None else int(slots[sequence]) for sequence in range(num_sequences)]
    newest = (kv_lengths.long() - 1).clamp(min=0)
    block = block_table[rows, newest // tokens_per_block].long()
    pool_slots = torch.where(kv_lengths > 0, block * tokens_per_block + newest % tokens_per_block, -1)
    query = rope_kv_append(query, key, value, kv_pool, pool_slots, newest, cos_table, sin_table,
                           query_out=torch.empty_like(query), query_norm=query_norm, key_norm=key_norm,
                           epsilon=epsilon, weight_offset=weight_offset, key_scale=key_scale, value_scale=value_scale)
    for sequence, row in enumerate(rows):
        kv_length = int(kv_lengths[sequence])
        if kv_length == 0:
            out[sequence] = 0
            continue
        position = torch.arange(kv_length, dtype=torch.int64, device=query.device)
        if window:
            position = position[(position >= kv_length - window) | (position < sink)]
        block, offset = block_table[row, position // tokens_per_block].long(), position % tokens_per_block
        keys, values = (kv_pool[block, kind, :, offset].to(wide).transpose(0, 1) for kind in (0, 1))    # [HK, keys, D]

        heads = query[sequence].to(wide).reshape(num_kv_heads, group, head_size)
        scores = scale * key_scale * heads @ keys.transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            slopes = alibi_slopes.view(num_kv_heads, group, 1)
            bias = alibi_bias(position, newest[sequence], slopes, alibi_bfloat16_factor)
            scores = scores + bias.to(wide)
        if sink_logits is not None:
            scores = torch.cat([scores, sink_logits.to(wide).view(num_kv_heads, group, 1)], 2)
        weights = scores.softmax(-1)[..., : len(position)]
        out[sequence] = (value_scale * weights @ values).reshape(num_heads, head_size).to(out.dtype)
    return out
