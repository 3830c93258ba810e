"""Causal attention of each sequence's new tokens (a whole prompt or a chunk) over its pages.

Arguments, results and rules are those of the kernel, in triton_kernels/paged_attention_context.py.
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
