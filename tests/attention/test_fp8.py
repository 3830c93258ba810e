"""Keys and values in e4m3: how numbers are rounded, and attention over the rounded ones, against float64."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from batch_manager.attention.fp8 import FP8, Fp8Numbers
from batch_manager.attention.torch_fixed_tiles import FixedTileAttention
from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.errors import ConfigError
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import refuse_fp8_cache
from batch_manager.runtime.forms.table import Asked

CPU = torch.device("cpu")
CODES = np.arange(256, dtype=np.uint8)
# The numbers of codes 0 to 126; 127 is NaN. The table is written down from the format's definition.
NUMBERS = np.array([math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10)
                    for code in range(127)])


def nearest(numbers):
    """Return the codes of the nearest numbers of e4m3, ties to the even code, of float64 `numbers`; NaN is 127."""
    size = np.minimum(np.abs(numbers), 448.0)
    above = np.searchsorted(NUMBERS, size).clip(1, 126)
    below, middle = above - 1, (NUMBERS[above] + NUMBERS[above - 1]) / 2
    code = np.where((size > middle) | (size == middle) & (above % 2 == 0), above, below)
    return np.where(np.isnan(numbers), 127, code).astype(np.uint8) | (np.signbit(numbers) << 7).astype(np.uint8)


def value_of(stored):
    """Return the float64 numbers of a tensor in e4m3."""
    code = stored.view(torch.uint8).numpy()
    return torch.from_numpy(np.where(code & 127 == 127, np.nan, np.append(NUMBERS, 0)[code & 127])
                            * np.where(code >> 7, -1.0, 1.0))


def test_every_bfloat16_number_and_samples_of_others_round_to_the_nearest():
    bits = torch.arange(-2**15, 2**15, dtype=torch.int16)
    wide = torch.randint(-2**31, 2**31 - 1, (100_000,), dtype=torch.int32).view(torch.float32)
    middles = torch.from_numpy((NUMBERS[1:] + NUMBERS[:-1]) / 2).float()
    around = torch.cat([torch.nextafter(middles, torch.tensor(limit)) for limit in (0.0, math.inf)])
    for rows in (bits.view(torch.bfloat16), bits.view(torch.float16), wide, middles, -around, around):
        found = Fp8Numbers(rows.dtype, CPU).rounded(rows.view(-1, 1, 1)).view(torch.uint8).view(-1).numpy()
        expected, is_nan = nearest(rows.double().numpy()), torch.isnan(rows).numpy()
        np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])
        assert (found[is_nan] & 127 == 127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_widened_to_its_number(dtype):
    codes = torch.from_numpy(CODES).view(FP8)
    torch.testing.assert_close(Fp8Numbers(dtype, CPU).widened(codes).double(), value_of(codes), rtol=0, atol=0,
                               equal_nan=True)


def attended(layout, layer, step, query, keys, values, sink_logits):
    """Return the attention of one layer in float64.

    keys, values   [blocks, kv heads, tokens per block, head_size], with the step's own ones
    """
    size, group, how = layout.tokens_per_block, layout.num_heads // layout.num_kv_heads, layout.attention[layer]
    result = torch.empty(query.shape, dtype=torch.float64)
    for row, (begin, end) in enumerate(itertools.pairwise(step.query_starts)):
        length = int(step.kv_lengths[row])
        position = np.arange(length)
        block = step.block_tables[row, position // size]
        seen_keys, seen_values = (part[block, :, position % size].repeat_interleave(group, 1)
                                  for part in (keys, values))
        at, key_at = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)
        hidden = key_at > at
        if how.window:
            hidden |= (key_at <= at - how.window) & (key_at >= layout.sink)
        scores = torch.einsum("thd,khd->htk", query[begin:end].double(), seen_keys) * how.scale
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        scores = scores.masked_fill(hidden, -math.inf)
        if sink_logits is not None:
            scores = torch.cat([scores, sink_logits.double()[:, None, None].expand(-1, scores.shape[1], 1)], 2)
        result[begin:end] = torch.einsum("htk,khd->thd", scores.softmax(-1)[..., :length], seen_values)
    return result.flatten(1)


@pytest.mark.parametrize("dtype, within", [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=str)
@pytest.mark.parametrize("options", [
    {"windows": (None, 10, 70)}, {"windows": (None, 33), "sink": 3, "softcaps": (4.0, None)},
    {"windows": (None,), "sink_logits": (0.5, -1.0, 2.0, 0.0, 1.0, -0.5)}], ids=["windows", "sinks", "sink logits"])
def test_attention_sees_the_rounded_keys_and_values(implementation, dtype, within, options, layout, step_of):
    """Chunks at the start of a prompt and later, and generation, with the scales of a layer."""
    class Scaled(layout):
        @property
        def attention(self):
            return tuple(replace(how, key_scale=0.25 + layer, value_scale=3.0 - layer)
                         for layer, how in enumerate(super().attention))

    shape = Scaled(6, 2, 16, dtype=dtype, **options)
    step = step_of([(0, 5), (0, 70), (48, 70)], [0, 15, 40, 100, 3], 64, 16)
    pool = shape.pool(64).clamp(-448, 448).to(FP8)
    before = pool.clone()
    attention = implementation(shape, pool, shape.sink, dtype)
    attention.plan(step)
    for layer, how in enumerate(shape.attention):
        query, key, value = shape.packed_qkv(step.num_tokens, seed=layer)
        key[0, 0, :2], value[1, 1, :2] = torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4])     # saturate
        result = attention.run(layer, query.clone(), key.clone(), value.clone(), None, **shape.more)
        expected_pool, at = before[:, layer].clone().view(torch.uint8), torch.from_numpy(step.pool_slots)
        for kind, (rows, scale) in enumerate(((key, how.key_scale), (value, how.value_scale))):
            codes = nearest((rows.float() / scale).double().numpy())
            expected_pool[at // 16, kind, :, at % 16] = torch.from_numpy(codes)
        assert torch.equal(pool[:, layer].view(torch.uint8), expected_pool)
        stored = value_of(pool[:, layer].contiguous())
        expected = attended(shape, layer, step, query, stored[:, 0] * how.key_scale, stored[:, 1] * how.value_scale,
                            shape.more.get("sink_logits"))
        bound = within * stored[:, 1].abs().max().item() * how.value_scale / 8
        torch.testing.assert_close(result.double(), expected, atol=bound, rtol=within)


def test_a_chunk_gets_the_bits_of_the_whole_prompt(layout, step_of):
    """A prompt's first chunk sees its own keys as a later one does: from the pool, rounded."""
    shape = layout(6, 2, 16, windows=(None,))
    rows = shape.packed_qkv(64)

    def run(chunks):
        pool = torch.zeros(shape.pool(8).shape).to(FP8)
        attention, found = FixedTileAttention(shape, pool, dtype=torch.float32), []
        for start, count in chunks:
            attention.plan(step_of([(start, count)], [], 8, 16, consecutive=True))
            found.append(attention.run(0, *(part[start:start + count].clone() for part in rows), None))
        return torch.cat(found)
    assert torch.equal(run([(0, 64)]), run([(0, 16), (16, 32), (48, 16)]))


def test_an_attention_of_your_own_is_refused():
    params = TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="^KvCacheConfig.kv_cache_dtype is 'fp8_e4m3', but Parts.attention is set; "):
        refuse_fp8_cache(Asked(params, CPU, packing.packed, has_triton=False, has_attention=True))
