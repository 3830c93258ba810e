"""Causal attention of each sequence's new tokens (a whole prompt or a chunk) over its pages.

    query_length[c] = cu_seqlens[c + 1] - cu_seqlens[c]
    token r of sequence c has position p = kv_lengths[c] - query_length[c] + r
    and sees the keys k <= p with k > p - window or k < sink

Shapes      query                    [T, HQ, D]   T packed tokens of C sequences, HQ query heads of size D; heads
                                                  contiguous, any row stride
            kv_pool                  [N, 2, HK, B, D]   the pool of one layer: N blocks of B tokens, HK key heads; in
                                                        the dtype of the queries, or in e4m3 (torch.float8_e4m3fn).
                                                        It already has the keys and values of the new tokens
            block_table              [rows, max_blocks] int32   pages of each sequence in order. Entries of pages
                                                        without a visible key are not read: their blocks may belong
                                                        to another sequence.
            cu_seqlens               [C + 1] int32   sequence c owns query rows cu_seqlens[c] .. cu_seqlens[c + 1] - 1
            kv_lengths               [C] int32   keys of each sequence, including those of this step
            work_list                [W, 5] int32   from `context_work_list`; ignored by the oracle
            slots                    [C] int32   row of block_table for each sequence; None: row c
            out                      [T, HQ, D]   None: allocated
            alibi_slopes             [HQ] float32   None: no ALiBi bias
            sink_logits              [HQ] float32   None: no extra score
            part_starts              [S + 1] int32   from `context_work_list`; ignored by the oracle
            merged_rows              [S] int32   likewise
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
            part_keys, num_partials: ignored by the oracle.
Mutates     out, rows below cu_seqlens[C]. Later rows (generation, padding) are neither read nor written.
Returns     out.
Needs       finite numbers for all B tokens of every page with a visible key: zero the pool once.
"""

import torch


def paged_attention_context(
    query, kv_pool, block_table, cu_seqlens, kv_lengths, work_list, scale, window=None, slots=None, out=None, sink=0,
    part_keys=None, softcap=None, alibi_slopes=None, alibi_bfloat16_factor=None, sink_logits=None,
    part_starts=None, merged_rows=None, num_partials=0, key_scale=1.0, value_scale=1.0,
):
    """Attend from several tokens per sequence. See the module docstring for shapes."""
    num_heads, head_size = query.shape[1:]
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty_like(query) if out is None else out

    for sequence in range(len(kv_lengths)):
        begin, end, kv_length = int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1]), int(kv_lengths[sequence])
        row = sequence if slots is None else int(slots[sequence])
        first_position = kv_length - (end - begin)
        query_position = torch.arange(first_position, kv_length, dtype=torch.int64, device=query.device)[:, None]
        key_position = torch.arange(kv_length, dtype=torch.int64, device=query.device)[None, :]
        visible = key_position <= query_position
        if window:
            visible &= (key_position > query_position - window) | (key_position < sink)

        position = visible.any(0).nonzero()[:, 0]                                 # seen by at least one row
        block, offset = block_table[row, position // tokens_per_block].long(), position % tokens_per_block
        keys, values = (kv_pool[block, kind, :, offset].to(wide).transpose(0, 1) for kind in (0, 1))    # [HK, keys, D]
        visible = visible[:, position]

        for head in range(num_heads):
            scores = scale * key_scale * query[begin:end, head].to(wide) @ keys[head // group].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores + alibi_bias(position, query_position, alibi_slopes[head],
                                             alibi_bfloat16_factor).to(wide)
            scores = scores.masked_fill(~visible, -torch.inf)
            if sink_logits is not None:
                scores = torch.cat([scores, sink_logits[head].to(wide).expand(len(scores), 1)], 1)
            out[begin:end, head] = (value_scale * scores.softmax(-1)[:, : len(position)] @ values[head // group]
                                    ).to(out.dtype)
    return out


def alibi_bias(key_position, query_position, slope, bfloat16_factor):
    """Return the ALiBi bias f(key position) - f(query position) in float64. All shapes broadcast.

    The module docstring defines f, under `alibi_slopes`.
    """
    if bfloat16_factor is None:
        return slope.double() * (key_position - query_position).double()

    def product(position):
        return (slope.bfloat16() * position.bfloat16()).double()

    return bfloat16_factor * (product(key_position) - product(query_position))
