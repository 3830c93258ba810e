"""Causal attention of each sequence's new tokens (a whole prompt or a chunk) over its pages.

    token r of sequence c stands at position p = kv_lengths[c] - query_length[c] + r
    and sees the keys k <= p with k > p - window or k < sink

Shapes      query                    [T, HQ, D]   T packed tokens; heads contiguous, any row stride
            kv_pool                  [N, 2, HK, B, D]   one layer's view of the pool; the new tokens' own keys and
                                                        values are already in it
            block_table              [rows, max_blocks] int32   pages of a sequence, in order. An entry whose page
                                                        holds no visible key is not looked at: its block may have
                                                        been given to another one.
            cu_seqlens               [C + 1] int32   sequence c owns query rows cu_seqlens[c] .. cu_seqlens[c + 1] - 1
            kv_lengths               [C] int32   keys of each sequence after this step's tokens
            work_list                [W, 2] int32   from `context_work_list`, on the queries' device; row (c, m) is the
                                                    m-th tile of sequence c's new tokens, as many as a tile of
                                                    queries has rows; (-1, -1) is padding.
                                                    The oracle does not need it.
            slots                    [C] int32   the sequence's row of block_table; None: row c is sequence c
            out                      [T, HQ, D]   None: allocated
            alibi_slopes             [HQ] float32   None: positions add nothing to scores
            sink_logits              [HQ] float32   None: there are none
Units       window in tokens, None or 0 = no limit; scale > 0 is the factor on the scores.
            softcap: scores become softcap * tanh(scores / softcap), before the mask; None: they stay as they are.
            alibi_slopes: f(key position) - f(query position) is added to scores after that and before the mask, with
            f(p) = slope * p; None: nothing. With alibi_bfloat16_factor > 0, f(p) = factor * bfloat16(slope *
            bfloat16(p)), as Falcon has it; slopes are then numbers of bfloat16.
            sink_logits: each row's softmax has one more score, that of its head, whose value is zeros; None: it has
            not. They have nothing to do with `sink`.
            sink: first tokens that stay visible outside the window (StreamingLLM, Xiao et al. 2023); of no meaning
            without one. Positions are absolute: keys lie in the pool rotated by the position they were written at
            and are not rotated again when tokens between them and the query have left the window.
            uniform_rows: a matter of the kernel's bits.
Mutates     out, only rows below cu_seqlens[C]: rows after them (generation, padding) are neither read nor written.
Returns     out.
Needs       a page with a visible key holds finite numbers in all its B tokens: the pool is zeroed once.
"""

import torch


def paged_attention_context(
    query, kv_pool, block_table, cu_seqlens, kv_lengths, work_list, scale, window=None, slots=None, out=None, sink=0,
    uniform_rows=None, softcap=None, alibi_slopes=None, alibi_bfloat16_factor=None, sink_logits=None,
):
    """Several query tokens per sequence; see the module's docstring for shapes."""
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

        position = visible.any(0).nonzero()[:, 0]                                 # seen by one row at least
        block, offset = block_table[row, position // tokens_per_block].long(), position % tokens_per_block
        keys, values = (kv_pool[block, kind, :, offset].to(wide).transpose(0, 1) for kind in (0, 1))    # [HK, keys, D]
        visible = visible[:, position]

        for head in range(num_heads):
            scores = scale * query[begin:end, head].to(wide) @ keys[head // group].T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores + added_by_position(position, query_position, alibi_slopes[head],
                                                    alibi_bfloat16_factor).to(wide)
            scores = scores.masked_fill(~visible, -torch.inf)
            if sink_logits is not None:
                scores = torch.cat([scores, sink_logits[head].to(wide).expand(len(scores), 1)], 1)
            out[begin:end, head] = (scores.softmax(-1)[:, : len(position)] @ values[head // group]).to(out.dtype)
    return out


def added_by_position(key_position, query_position, slope, bfloat16_factor):
    """f(key position) - f(query position) in float64; all shapes broadcast."""
    if bfloat16_factor is None:
        return slope.double() * (key_position - query_position).double()

    def product(position):
        return (slope.bfloat16() * position.bfloat16()).double()

    return bfloat16_factor * (product(key_position) - product(query_position))
