"""Append the newest token of each sequence to its pages, and attend over them.

Arguments, results and rules are those of the kernel, in triton_kernels/paged_attention_decode.py.
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
