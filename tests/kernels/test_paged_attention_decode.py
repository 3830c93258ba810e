import heapq
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_manager.triton_kernels.decode_work_list import MERGE_PAGES, decode_work_list, most_parts, split_pages

B = 16                                  # tokens per block, by default
WHOLE, HALVED = 1000, 2                 # maximum pages of a part: sequences in one part, and in several


def nan_like(tensor):
    return torch.full_like(tensor, torch.nan)


@pytest.fixture
def work(integers):
    """work(kv_lengths, pages_per_part, window, sink, block) -> (work list, part starts), as the kernel takes them"""

    def make(kv_lengths, pages_per_part=WHOLE, window=None, sink=0, block=B):
        work_list, part_starts = decode_work_list(kv_lengths.tolist(), block, 1, 1, window, sink, pages_per_part)
        return integers(work_list.tolist()), integers(part_starts.tolist()) if part_starts[-1] else None

    return make


@pytest.fixture
def rotation(random):
    """rotation(size) -> the cosine and sine arguments of heads whose first `size` entries are rotated; none for 0"""

    def make(size, positions=200):
        if size == 0:
            return {}
        angles = random(positions, size // 2)
        return dict(cos_table=angles.cos(), sin_table=angles.sin())

    return make


@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_lengths_around_a_page(assert_equals_oracle, paged_cache, random, dtype, group, pages_per_part, work):
    cache = paged_cache([B - 1, B, B + 1, 1, 5 * B + 3], 2, 32, B, dtype)
    query = random(5, 2 * group, 32, dtype=dtype)
    assert_equals_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, pages_per_part), 0.2, out=nan_like(query),
        roundings=2, reduction=32 + 5 * B + 3, dtype=dtype,
    )


@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
@pytest.mark.parametrize("window", [1, B, 20, 1000])
def test_window(assert_equals_oracle, paged_cache, random, window, pages_per_part, work):
    cache = paged_cache([7, 3 * B, 90], 1, 32, B, torch.float32)
    query = random(3, 4, 32)
    assert_equals_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, pages_per_part, window), 0.2, window=window, out=nan_like(query),
        roundings=2, reduction=32 + 90, dtype=torch.float32,
    )


def test_pages_outside_the_window_are_not_read(assert_equals_oracle, paged_cache, random, work):
    cache = paged_cache([5 * B], 1, 32, B, torch.float32)
    query = random(1, 2, 32)
    arguments = (query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
                 *work(cache.kv_lengths, window=2 * B), 0.2)
    for page in cache.block_table[0, :3].tolist():
        cache.pool[page] = torch.nan
    assert_equals_oracle(
        "paged_attention_decode", *arguments, window=2 * B, reduction=100, dtype=torch.float32
    )


@pytest.mark.pairs
@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
@pytest.mark.parametrize("softcap, stretch", [(2.5, 1), (50.0, 1), (50.0, 40), (30.0, 10_000)])
@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores(
    assert_equals_oracle, paged_cache, random, dtype, softcap, stretch, window, pages_per_part, work
):
    """Kernel and oracle agree if the scores are far below the cap, about as large as the cap, or far above it.

    Far above the cap, all keys with scores of the same sign have the same weight.
    """
    cache = paged_cache([B - 1, 1, 5 * B + 3], 2, 32, B, dtype)
    query = random(3, 6, 32, dtype=dtype)
    out = nan_like(query)
    assert_equals_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, pages_per_part, window), 0.2 * stretch, window=window, out=out, softcap=softcap,
        roundings=2, reduction=(32 + 5 * B + 3) * min(stretch, 40),
        dtype=dtype,
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("softcap", [0.5, 4.0])
@pytest.mark.parametrize("window", [None, 20])
def test_the_oracle_caps_scores_before_the_softmax(run_oracle, streaming_attention, paged_cache, random, window,
                                                   softcap):
    cache = paged_cache([1, 20, 90], 2, 8, B, torch.float64)
    query = 3 * random(3, 4, 8, dtype=torch.float64)
    arguments = (query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths, None, None, 0.3,
                 window)
    out = run_oracle("paged_attention_decode", *arguments, softcap=softcap)
    expected = torch.stack([
        streaming_attention(query[i : i + 1], cache.contents[i], 0.3, window or 1000, 0, softcap)[0] for i in range(3)
    ])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(out[1:], run_oracle("paged_attention_decode", *arguments)[1:], atol=1e-3)


def slopes_of(heads, is_rounded, random):
    """Return falling slopes, the last one negative; rounded to bfloat16 if is_rounded."""
    slopes = 0.7 ** torch.arange(1, heads + 1).to(random(1).device)
    slopes[-1] *= -1
    return slopes.bfloat16().float() if is_rounded else slopes


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("factor", [None, 0.3])
@pytest.mark.parametrize("window, sink", [(None, 0), (20, 3)])
def test_the_oracle_adds_slopes_after_the_cap_and_one_sink_logit(run_oracle, streaming_attention, paged_cache, random,
                                                                 window, sink, factor, softcap):
    cache = paged_cache([1, 20, 300], 2, 8, B, torch.float64)
    query, slopes, sink_logits = random(3, 4, 8, dtype=torch.float64), slopes_of(4, factor, random), random(4)
    out = run_oracle("paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table,
                     cache.kv_lengths, None, None, 0.3, window, sink=sink, softcap=softcap, alibi_slopes=slopes,
                     alibi_bfloat16_factor=factor, sink_logits=sink_logits)

    def product(head, position):                           # bfloat16 cannot represent this position above 256
        return float(slopes[head].bfloat16() * torch.tensor(position).bfloat16())

    def added(head, key, position):
        if factor is None:
            return float(slopes[head]) * (key - position)
        return factor * (product(head, key) - product(head, position))

    expected = torch.stack([
        streaming_attention(query[i : i + 1], cache.contents[i], 0.3, window or 1000, sink, softcap, added,
                            sink_logits.double())[0] for i in range(3)
    ])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.pairs
@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
@pytest.mark.parametrize("has_slopes, factor, has_sink_logits", [
    (True, None, False), (False, None, True), (True, None, True), (True, 0.25, False),
])
@pytest.mark.parametrize("more", [{}, {"window": 20, "sink": 5}, {"softcap": 2.5}])
def test_slopes_and_sink_logits(assert_equals_oracle, paged_cache, random, dtype, has_slopes, factor, has_sink_logits,
                                more, pages_per_part, work):
    cache = paged_cache([B - 1, 1, 300, 70], 2, 32, B, dtype)
    query = random(4, 6, 32, dtype=dtype)
    if has_slopes:
        more = {**more, "alibi_slopes": slopes_of(6, factor, random), "alibi_bfloat16_factor": factor}
    if has_sink_logits:
        more = {**more, "sink_logits": 3 * random(6)}
    assert_equals_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, pages_per_part, more.get("window"), more.get("sink", 0)), 0.2, out=nan_like(query),
        **more, roundings=2, reduction=4 * (32 + 300), dtype=dtype,
    )


@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
@pytest.mark.parametrize("sink_logit", [-torch.inf, -200.0, 200.0])
def test_sink_logits_far_from_all_scores(run_kernel, run_oracle, paged_cache, random, sink_logit, pages_per_part, work):
    cache = paged_cache([1, 90], 1, 32, B, torch.float32)
    arguments = (random(2, 2, 32), *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
                 *work(cache.kv_lengths, pages_per_part), 0.2)
    without = run_oracle("paged_attention_decode", *arguments)
    got = run_kernel("paged_attention_decode", *arguments, sink_logits=torch.full_like(random(2), sink_logit))
    torch.testing.assert_close(got, without * (sink_logit < 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sink", [0, 1, 4, B, B + 1])
@pytest.mark.parametrize("window", [1, B, 20, 1000])
def test_the_oracle_attends_under_the_streaming_mask(
    run_oracle, streaming_attention, paged_cache, random, window, sink
):
    cache = paged_cache([1, 20, 3 * B, 90], 2, 8, B, torch.float64)
    query = random(4, 4, 8, dtype=torch.float64)
    for sequence, length in enumerate(cache.kv_lengths.tolist()):
        cache.give_back(sequence, length - 1, window, sink)
    out = run_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths, None,
        None, 0.3, window=window, sink=sink,
    )
    expected = torch.stack(
        [streaming_attention(query[i : i + 1], cache.contents[i], 0.3, window, sink)[0] for i in range(4)]
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.pairs
@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
@pytest.mark.parametrize("sink", [1, 4, B, B + 1])
@pytest.mark.parametrize("window", [1, B, 20])
def test_sinks_stay_visible_and_pages_between_are_not_read(
    assert_equals_oracle, paged_cache, random, window, sink, pages_per_part, work
):
    cache = paged_cache([3, B + 2, 3 * B, 90, 150], 1, 32, B, torch.float32)
    given_back = [
        cache.give_back(sequence, length - 1, window, sink) for sequence, length in enumerate(cache.kv_lengths.tolist())
    ]
    assert given_back[-1] >= 6
    query = random(5, 4, 32)
    out = assert_equals_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, pages_per_part, window, sink), 0.2, window=window, out=nan_like(query), sink=sink,
        roundings=2, reduction=32 + 90, dtype=torch.float32,
    )
    assert out.isfinite().all()


def test_sinks_in_half_precision_and_through_slots(assert_equals_oracle, paged_cache, random, integers, dtype, work):
    cache = paged_cache([70, 200], 2, 64, 32, dtype)
    for sequence, length in enumerate([70, 200]):
        cache.give_back(sequence, length - 1, 40, 33)
    slots = integers([1, 0])
    lengths = cache.kv_lengths[slots.long()]
    assert_equals_oracle(
        "paged_attention_decode", random(2, 6, 64, dtype=dtype), *(rows[slots.long()] for rows in cache.take_newest()),
        cache.pool, cache.block_table, lengths,
        *work(lengths, HALVED, 40, 33, block=32), 0.1, window=40, slots=slots, sink=33,
        roundings=2, reduction=64 + 73, dtype=dtype,
    )


def test_sinks_without_a_window_mean_nothing(run_kernel, run_oracle, paged_cache, random, work):
    cache = paged_cache([40], 1, 32, B, torch.float32)
    arguments = (random(1, 2, 32), *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
                 *work(cache.kv_lengths), 0.2)
    for run in (run_kernel, run_oracle):
        out = [run("paged_attention_decode", *arguments, sink=sink) for sink in (0, 4)]
        assert torch.equal(*out)


@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
def test_padding_rows_are_zero_and_read_nothing(
    assert_equals_oracle, paged_cache, random, integers, pages_per_part, work
):
    cache = paged_cache([20, 1, 40], 1, 32, B, torch.float32)
    query, (key, value) = random(3, 2, 32), cache.take_newest()
    query[1] = key[1] = value[1] = torch.nan
    cache.block_table[1] = -(2**30)                        # an address far away
    lengths = integers([20, 0, 40])
    out = assert_equals_oracle(
        "paged_attention_decode", query, key, value, cache.pool, cache.block_table, lengths,
        *work(lengths, pages_per_part), 0.2, out=nan_like(query), reduction=100, dtype=torch.float32,
    )
    assert (out[1] == 0).all()


def test_sequences_are_found_through_their_slots(assert_equals_oracle, paged_cache, random, integers, work):
    cache = paged_cache([30, 17, 5, 64], 2, 32, B, torch.float32)
    slots = integers([3, 0])
    lengths = cache.kv_lengths[slots.long()]
    assert_equals_oracle(
        "paged_attention_decode", random(2, 4, 32), *(rows[slots.long()] for rows in cache.take_newest()),
        cache.pool, cache.block_table, lengths, *work(lengths), 0.2,
        slots=slots, reduction=100, dtype=torch.float32,
    )


@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 128, 256])
def test_head_sizes(assert_equals_oracle, paged_cache, random, dtype, head_size, work):
    cache = paged_cache([33, 70], 1, head_size, 64, dtype)
    query = random(2, 3, head_size, dtype=dtype)
    assert_equals_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, block=64), head_size**-0.5, out=nan_like(query),
        roundings=2, reduction=head_size + 70, dtype=dtype,
    )


def test_more_query_heads_than_one_tile_row_block(assert_equals_oracle, paged_cache, random, work):
    cache = paged_cache([9, 40], 1, 32, 32, torch.float32)
    assert_equals_oracle(
        "paged_attention_decode", random(2, 20, 32), *cache.take_newest(), cache.pool, cache.block_table,
        cache.kv_lengths, *work(cache.kv_lengths, block=32), 0.2,
        reduction=100, dtype=torch.float32,
    )


@pytest.mark.parametrize("pages_per_part", [WHOLE, HALVED])
def test_what_came_from_one_projection_may_be_views_of_it_and_stays(
    assert_equals_oracle, paged_cache, random, work, rotation, pages_per_part
):
    cache = paged_cache([20, 33], 2, 32, B, torch.float32)
    cache.take_newest()
    packed = random(2, 8, 32)
    before = packed.clone()
    assert_equals_oracle(
        "paged_attention_decode", *packed.split([4, 2, 2], dim=1), cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, pages_per_part), 0.2, **rotation(32), roundings=2, reduction=100, dtype=torch.float32,
    )
    assert torch.equal(packed, before)


def test_the_same_bits_alone_and_in_a_batch_where_parts_are_the_same(run_kernel, paged_cache, random, work):
    cache = paged_cache([70, 20, 5], 1, 32, B, torch.float32)
    query, lengths = random(3, 2, 32), cache.kv_lengths
    key, value = cache.take_newest()
    together = run_kernel("paged_attention_decode", query, key, value, cache.pool, cache.block_table, lengths,
                          *work(lengths, HALVED), 0.2)
    alone = run_kernel("paged_attention_decode", query[:1], key[:1], value[:1], cache.pool, cache.block_table[:1],
                       lengths[:1], *work(lengths[:1], HALVED), 0.2)
    assert torch.equal(together[:1], alone)


# ---------------------------------------------------------------------- parts combined by the last program

ORDERS = [{}, *({"program_order": seed} for seed in range(4))]


@pytest.mark.pairs
@pytest.mark.parametrize("pages_per_part", [1, HALVED])
@pytest.mark.parametrize("kv_heads, group, head_size", [(2, 3, 32), (1, 1, 80), (1, 20, 32)])
@pytest.mark.parametrize("more", [{}, {"window": 40, "sink": 5}, {"sink_logits": True}])
def test_the_last_program_of_a_sequence_combines_its_parts_in_any_order_of_programs(
        assert_equals_oracle, paged_cache, random, integers, dtype, work, pages_per_part, kv_heads, group, head_size,
        more):
    """All orders give the same bits, and leave counters of zero for the next launch."""
    lengths = [1, 5 * B + 3, 0, B, 150, 2 * B + 1]         # up to ten parts; some sequences are not split
    cache = paged_cache(lengths, kv_heads, head_size, B, dtype)
    query, newest, pool = random(6, group * kv_heads, head_size, dtype=dtype), cache.take_newest(), cache.pool.clone()
    if more.get("sink_logits"):
        more = {"sink_logits": random(group * kv_heads)}
    counters, found = integers([[0] * kv_heads] * 6), []
    work_list, part_starts = work(cache.kv_lengths, pages_per_part, more.get("window"), more.get("sink", 0))
    for interpreted in ORDERS:
        cache.pool.copy_(pool)
        found.append(assert_equals_oracle(
            "paged_attention_decode", query, *newest, cache.pool, cache.block_table, cache.kv_lengths, work_list,
            part_starts, 0.2, out=nan_like(query), **more, counters=counters, interpreted=interpreted, roundings=2,
            reduction=head_size + 150, dtype=dtype))
        assert not counters.any()
    assert all(torch.equal(one, found[0]) for one in found)


def test_it_is_the_program_that_comes_last_and_its_counter_that_counts(interpreter, paged_cache, random, integers,
                                                                       work, is_recording):
    if is_recording or torch.cuda.is_available():
        pytest.skip("atomic operations are noted in the interpreter")
    cache, counters = paged_cache([90, 3, 40], 2, 32, B, torch.float32), integers([[0, 0]] * 3)
    arguments = (random(3, 4, 32), *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
                 *work(cache.kv_lengths, 1), 0.2)
    noted = interpreter("paged_attention_decode", "paged_attention_decode", arguments, {"counters": counters},
                        noted_atomics=True)
    counted = Counter(address for _, addresses, _ in noted for address in addresses)
    assert sorted(counted.values()) == [3, 3, 6, 6]        # parts of the split sequences, for each kv head


# ---------------------------------------------------------------------- the newest token

LENGTHS = [1, 2, B, B + 1, B + 2, 3 * B, 3 * B + 1, 5 * B + 3]


@pytest.fixture
def norms(random):
    """norms(size, dtype) -> the arguments of norms of heads"""

    def make(size, dtype=torch.float32):
        return dict(query_norm=random(size, dtype=dtype), key_norm=random(size, dtype=dtype), epsilon=1e-3,
                    weight_offset=0.5)

    return make


@pytest.mark.pairs
@pytest.mark.parametrize("pages_per_part", [WHOLE, 1])
@pytest.mark.parametrize("rotary_size, has_norms", [(0, False), (20, False), (0, True), (20, True), (32, True)])
@pytest.mark.parametrize("window, sink", [(None, 0), (1, 3), (20, 5)])
def test_the_newest_token_is_normed_rotated_appended_and_attended_to(
    assert_equals_oracle, paged_cache, random, dtype, rotary_size, has_norms, window, sink, pages_per_part, work,
    rotation, norms
):
    """Each sequence's newest token is normed, rotated, appended to the pool and attended to.

    Before the call, the token's page holds NaN from the token's position on. The pages that the token does not see hold
    NaN too.
    """
    cache = paged_cache(LENGTHS, 2, 32, B, dtype)
    for sequence, length in enumerate(LENGTHS):
        if window:
            cache.give_back(sequence, length - 1, window, sink)
    cache.take_newest()
    query, key, value = random(len(LENGTHS), 10, 32, dtype=dtype).split([6, 2, 2], dim=1)
    before = cache.pool.clone()
    out = assert_equals_oracle(
        "paged_attention_decode", query, key, value, cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, pages_per_part, window, sink), 0.2, window=window, out=nan_like(query), sink=sink,
        **rotation(rotary_size), **(norms(32, dtype) if has_norms else {}), roundings=4 + 3 * has_norms,
        reduction=32 + 90, dtype=dtype,
    )
    assert out.isfinite().all()
    changed = ~((cache.pool == before) | cache.pool.isnan() & before.isnan())
    assert changed.sum() == key.numel() + value.numel()


@pytest.mark.parametrize("head_size", [32, 80])
def test_norms_change_queries_and_keys_as_a_norm_of_its_own_does(run_kernel, paged_cache, random, dtype, work, rotation,
                                                                 norms, head_size):
    cache = paged_cache(LENGTHS, 2, head_size, B, dtype)
    cache.take_newest()
    query, key, value = random(len(LENGTHS), 10, head_size, dtype=dtype).split([6, 2, 2], dim=1)
    pools, given, tables = [cache.pool, cache.pool.clone()], norms(head_size, dtype), rotation(20)

    def attend(pool, query, key, **more):
        return run_kernel("paged_attention_decode", query, key, value, pool, cache.block_table, cache.kv_lengths,
                          *work(cache.kv_lengths, 1), head_size**-0.5, **tables, **more)

    normed = [run_kernel("rms_norm", rows, given[f"{part}_norm"], given["epsilon"],
                         weight_offset=given["weight_offset"]) for part, rows in (("query", query), ("key", key))]
    found, expected = attend(pools[0], query, key, **given), attend(pools[1], *normed)
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps)
    torch.testing.assert_close(*pools, rtol=eps, atol=eps, equal_nan=True)


@pytest.mark.parametrize("rotary_size, has_norms", [(0, False), (20, False), (32, False), (32, True)])
def test_the_pool_holds_what_rope_kv_append_writes(
    run_kernel, paged_cache, random, integers, dtype, rotary_size, work, rotation, has_norms, norms
):
    cache = paged_cache(LENGTHS, 2, 32, B, dtype)
    cache.take_newest()
    query, key, value = random(len(LENGTHS), 10, 32, dtype=dtype).split([6, 2, 2], dim=1)
    newest, appended = cache.kv_lengths.long() - 1, cache.pool.clone()
    tables = rotation(rotary_size) | (norms(32, dtype) if has_norms else {})
    pool_slots = cache.block_table[range(len(LENGTHS)), newest // B] * B + newest % B
    run_kernel("paged_attention_decode", query, key, value, cache.pool, cache.block_table, cache.kv_lengths,
               *work(cache.kv_lengths), 0.2, **tables)
    run_kernel("rope_kv_append", query, key, value, appended, pool_slots, newest, **tables)
    # Compiled, one kernel may fuse a product into the sum where the other does not. They sum squares in other orders.
    eps = 2 * torch.finfo(dtype).eps if appended.is_cuda or has_norms else 0.0
    torch.testing.assert_close(cache.pool, appended, rtol=eps, atol=eps, equal_nan=True)


@pytest.mark.parametrize("width", [2, 3])
def test_beams_share_the_pages_before_those_they_append_to(
    assert_equals_oracle, paged_cache, random, integers, width, work, rotation
):
    """Kernel and oracle agree for beams whose block tables share all pages except the last, to which a beam appends."""
    cache = paged_cache([2 * B + 5] * width, 2, 32, B, torch.float32)
    cache.block_table[1:, :2] = cache.block_table[0, :2].clone()
    cache.take_newest()
    query, key, value = random(width, 8, 32).split([4, 2, 2], dim=1)
    assert_equals_oracle(
        "paged_attention_decode", query, key, value, cache.pool, cache.block_table, cache.kv_lengths,
        *work(cache.kv_lengths, 1), 0.2, slots=integers(list(range(width))), **rotation(32), roundings=2,
        reduction=100, dtype=torch.float32,
    )


# ---------------------------------------------------------------------- the work list


@pytest.mark.parametrize("lengths", [
    pytest.param([3, 200, 17, 64, 90, 1, 33], id="ragged"),
    pytest.param([9, 700, 4, 16], id="one long"),
    pytest.param([0, 0, 0], id="empty"),
    pytest.param([0, 300, 0], id="one between padding rows"),
])
@pytest.mark.parametrize("window, sink", [(None, 0), (150, 0), (100, 20)])
def test_attention_over_the_work_list_of_a_step(
    assert_equals_oracle, paged_cache, random, integers, lengths, window, sink
):
    """Kernel and oracle agree for a work list that was made for 40 resident programs and padded to 60 rows."""
    cache = paged_cache(lengths, 2, 32, B, torch.float32)
    work_list, part_starts = decode_work_list(lengths, B, 2, 40, window, sink, padded_to=60)
    assert len(work_list) == 60 and (part_starts[-1] or window or not any(lengths))
    query = random(len(lengths), 4, 32)
    assert_equals_oracle(
        "paged_attention_decode", query, *cache.take_newest(), cache.pool, cache.block_table, cache.kv_lengths,
        integers(work_list.tolist()), integers(part_starts.tolist()), 0.2, window=window, out=nan_like(query),
        sink=sink, roundings=2, reduction=32 + max(lengths), dtype=torch.float32,
    )


def visible_pages(length, window, sink, block):
    """Return the indices of the pages of a sequence with a key that its newest token sees, by checking each key."""
    return sorted({key // block for key in range(length) if not window or key >= length - window or key < sink})


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), max_size=12), block=st.sampled_from([4, 16]),
    num_kv_heads=st.integers(1, 9), resident_programs=st.sampled_from([1, 7, 40, 264]),
    window=st.sampled_from([None, 1, 16, 50, 300]), sink=st.sampled_from([0, 1, 16, 20]), padded_to=st.integers(0, 20),
)
def test_every_visible_page_is_in_one_part_and_the_longest_parts_come_first(
    lengths, block, num_kv_heads, resident_programs, window, sink, padded_to
):
    sink = sink if window else 0
    pages = [len(visible_pages(length, window, sink, block)) for length in lengths]
    work_list, part_starts = decode_work_list(lengths, block, num_kv_heads, resident_programs, window, sink,
                                              padded_to=padded_to)
    assert work_list.dtype == part_starts.dtype == np.int32 and len(work_list) >= padded_to
    rows = work_list[work_list[:, 0] >= 0]
    assert (work_list[len(rows):] == -1).all() and (len(rows) == len(work_list) or len(work_list) == padded_to)

    most = split_pages(sum(pages), num_kv_heads, resident_programs) if part_starts[-1] else max(pages, default=0)
    assert (rows[:, 2] <= most).all() and (np.diff(rows[:, 2]) <= 0).all()
    assert len(rows) <= most_parts(len(lengths), max(pages, default=0), num_kv_heads, resident_programs)
    assert part_starts[0] == 0 and len(part_starts) == len(lengths) + 1
    for sequence, count in enumerate(pages):
        parts = rows[rows[:, 0] == sequence]
        parts = parts[np.argsort(parts[:, 1], kind="stable")].tolist()
        covered = [page for _, first, size, _ in parts for page in range(first, first + size)]
        assert covered == list(range(count))
        partials = [partial for *_, partial in parts]
        if len(parts) == 1:
            assert partials == [-1] and part_starts[sequence] == part_starts[sequence + 1]
        else:
            assert partials == list(range(part_starts[sequence], part_starts[sequence + 1]))
            sizes = [size for _, _, size, _ in parts]
            assert max(sizes) - min(sizes) <= 1


def test_one_long_sequence_among_short_ones_is_cut_and_equal_ones_that_fill_the_device_are_not():
    block, heads, resident_programs = 64, 8, 264
    work_list, part_starts = decode_work_list([32_768] + [256] * 63, block, heads, resident_programs)
    assert part_starts[-1] > 60 and work_list[:, 2].max() <= 8
    work_list, part_starts = decode_work_list([512] * 256, block, heads, resident_programs)
    assert part_starts[-1] == 0 and work_list[:, 0].tolist() == list(range(256))


def pages_of_time(work_list, part_starts, num_kv_heads, resident_programs):
    """Return the time of a work list in pages of one program: a free program takes the next row; a merge comes last."""
    busy = [0] * resident_programs
    for size in np.repeat(work_list[:, 2], num_kv_heads).tolist():
        heapq.heapreplace(busy, busy[0] + size)
    return max(busy) + (MERGE_PAGES if part_starts[-1] else 0)


@pytest.mark.parametrize(("lengths", "num_kv_heads", "is_split", "programs"), [
    pytest.param([1024] * 32, 8, False, 256, id="an 8B model, 32 sequences"),
    pytest.param([4096] * 64, 8, False, 512, id="64 long ones"),
    pytest.param([512] * 256, 3, False, 768, id="a 135M model, 256 sequences"),
    pytest.param([1024], 8, True, 128, id="one sequence, parts of one page"),
    pytest.param([16_384], 8, True, 512, id="one long sequence"),
    pytest.param([4096] * 40, 8, True, 960, id="a second wave with few programs"),
    pytest.param([256], 8, False, 8, id="too short for a merge"),
])
def test_a_step_is_split_only_where_that_saves_more_than_the_merge_takes(lengths, num_kv_heads, is_split, programs):
    """The list takes at most a seventh longer than the best of whole sequences, 3 rounds of parts, and small parts."""
    resident = 264                                       # 132 multiprocessors with two programs each
    work_list, part_starts = decode_work_list(lengths, 64, num_kv_heads, resident)
    assert (bool(part_starts[-1]), len(work_list) * num_kv_heads) == (is_split, programs)
    num_pages = sum(-(-length // 64) for length in lengths)
    others = (10_000, max(4, -(-num_pages * num_kv_heads // (3 * resident))),
              split_pages(num_pages, num_kv_heads, resident))
    best = min(pages_of_time(*decode_work_list(lengths, 64, num_kv_heads, resident, pages_per_part=pages),
                             num_kv_heads, resident) for pages in others)
    assert pages_of_time(work_list, part_starts, num_kv_heads, resident) <= 8 / 7 * best
