"""Kernels over a KV cache in e4m3: how they round and widen, and that they see the rounded numbers and nothing else."""

import itertools

import pytest
import torch

from batch_manager.triton_kernels.context_work_list import UNIFORM_ROWS, ContextHeads, context_work_list
from batch_manager.triton_kernels.decode_work_list import decode_work_list

FP8, B = torch.float8_e4m3fn, 16
WITHIN = {"cpu": 0.0, "cuda": 1e-3}     # compiled, a product of matrices may add in another order if it widens one


def rounded(rows, scale=1.0):
    """Return `rows` / `scale` in e4m3, rounded by torch."""
    return (rows.float() / scale).clamp(-448, 448).to(FP8)


def assert_same_codes(found, expected):
    """Any code of NaN equals any other."""
    found, expected = (codes.contiguous().view(torch.uint8).cpu() for codes in (found, expected))
    assert torch.equal(torch.where(found & 127 == 127, 127, found), torch.where(expected & 127 == 127, 127, expected))


def test_keys_and_values_are_rounded_as_torch_rounds_them(run_kernel, dtype, integers, is_recording):
    """Every number of 16 bits, and in float32 also random bits and what lies half way between two numbers of e4m3."""
    bits = torch.arange(-2**15, 2**15, dtype=torch.int32)
    numbers = bits.to(torch.int16).view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).to(dtype)
    if dtype == torch.float32:
        draw = torch.Generator().manual_seed(0)
        numbers[: 2**14] = torch.randint(-2**31, 2**31 - 1, (2**14,), dtype=torch.int32, generator=draw).view(dtype)
        exact = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        middles = (exact[1:] + exact[:-1]) / 2
        numbers[: 3 * len(middles)] = torch.cat([middles, *(torch.nextafter(middles, limit) for limit in (
            torch.tensor(0.0), torch.tensor(torch.inf)))])
    keys = numbers.view(4, 4, 4096).to(integers([0]).device)
    pool, values = keys.new_zeros(1, 2, 4, B, 4096).to(FP8), -keys.flip(2)
    run_kernel("rope_kv_append", keys.clone(), keys, values, pool, integers([3, 9, 0, 2], torch.int64),
               key_scale=1.0, value_scale=0.37)
    if not is_recording:                                   # which computes on wide copies
        for kind, rows, scale in ((0, keys, 1.0), (1, values, 0.37)):
            assert_same_codes(pool[0, kind, :, [3, 9, 0, 2]], rounded(rows, scale).transpose(0, 1))


@pytest.mark.parametrize("kernel", ["rope_kv_append", "paged_attention_decode"])
def test_keys_are_normed_and_rotated_in_their_dtype_and_then_rounded(run_kernel, random, integers, kernel):
    query, key, value = random(2, 8, 32).split([4, 2, 2], 1)
    angles, pools = random(9, 10), [random(3, 2, 2, B, 32).to(kind) for kind in (FP8, torch.float32)]
    given = {"cos_table": angles.cos(), "sin_table": angles.sin(), "query_norm": random(32), "key_norm": random(32),
             "epsilon": 1e-3}
    for pool, scales in zip(pools, ({"key_scale": 0.3, "value_scale": 0.7}, {})):
        if kernel == "rope_kv_append":
            place = integers([2 * B + 4, B + 7], torch.int64), integers([4, 7])
        else:
            place = integers([[2], [1]]), integers([5, 8]), integers(decode_work_list([5, 8], B, 2, 1)[0].tolist()), \
                None, 0.2
        run_kernel(kernel, query.clone(), key, value, pool, *place, **given, **scales)
    for kind, scale in enumerate((0.3, 0.7)):
        for place in ((2, kind, slice(None), 4), (1, kind, slice(None), 7)):
            difference = rounded(pools[1][place], scale).float() - pools[0][place].float()
            assert (difference.abs() <= 32 * WITHIN[difference.device.type]).all()


@pytest.mark.parametrize("kernel, more", [
    ("decode", {}), ("decode", {"window": 20, "sink": 3, "softcap": 4.0}), ("context", {"window": 20, "sink": 3}),
    ("context", {"softcap": 4.0}), ("context", {"part_keys": 32}), ("context", {"part_keys": 32, "num_parts": 3})])
def test_attention_is_that_over_a_wide_cache_of_the_rounded_numbers(run_kernel, paged_cache, integers, random, kernel,
                                                                    more):
    """Bit by bit. Scales are powers of two, so that a wide cache has the products of numbers and scales, too."""
    scales, lengths = (0.25, 4.0), [90, 5]
    cache = paged_cache(lengths, 2, 32, B, torch.float32)
    stored, results = rounded(40 * cache.pool), []
    more = dict(more)
    num_parts = more.pop("num_parts", None)
    query, key, value = random(40, 8, 32).split([4, 2, 2], 1)
    for pool in (stored, torch.stack([part.float() * scale for part, scale in zip(stored.unbind(1), scales)], 1)):
        used = {"key_scale": scales[0], "value_scale": scales[1]} if pool.dtype == FP8 else {}
        if kernel == "decode":
            work, starts = decode_work_list(lengths, B, 2, 1, more.get("window"), more.get("sink", 0), 2)
            exact = [rounded(rows, scale).float() * scale for rows, scale in zip((key[:2], value[:2]), scales)]
            given = [query[:2], *exact, pool, cache.block_table, cache.kv_lengths, integers(work.tolist()),
                     integers(starts.tolist()), 0.02]
        else:
            heads = ContextHeads(4, 2, 1, more.get("part_keys"))
            work = context_work_list([33, 5], lengths, UNIFORM_ROWS if "part_keys" in more else 32, 0, heads,
                                     more.get("window"), more.get("sink", 0), num_parts)
            given = [query, pool, cache.block_table, integers([0, 33, 38]), cache.kv_lengths,
                     integers(work.work_list.tolist()), 0.02]
            if len(work.merged_rows):
                used |= {"part_starts": integers(work.part_starts.tolist()), "num_partials": int(work.part_starts[-1]),
                         "merged_rows": integers(work.merged_rows.tolist())}
        out = torch.full_like(given[0], torch.nan)
        results.append(run_kernel(f"paged_attention_{kernel}", *given, out=out, **more, **used))
    for first, second in itertools.pairwise(results):
        torch.testing.assert_close(first, second, rtol=0, atol=WITHIN[first.device.type] * 448, equal_nan=True)
    assert results[0][:2].isfinite().all()
