import pytest
import torch

B = 16                                  # tokens per block in these tests, unless they say otherwise


def nan_like(tensor):
    return torch.full_like(tensor, torch.nan)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_lengths_around_a_page(assert_equals_oracle, paged_cache, random, dtype, group, splits):
    cache = paged_cache([B - 1, B, B + 1, 1, 5 * B + 3], 2, 32, B, dtype)
    query = random(5, 2 * group, 32, dtype=dtype)
    assert_equals_oracle(
        "paged_attention_decode", query, cache.pool, cache.block_table, cache.kv_lengths, 0.2,
        out=nan_like(query), splits=splits, roundings=2, reduction=32 + 5 * B + 3, dtype=dtype,
    )


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [1, B, 20, 1000])
def test_window(assert_equals_oracle, paged_cache, random, window, splits):
    cache = paged_cache([7, 3 * B, 90], 1, 32, B, torch.float32)
    query = random(3, 4, 32)
    assert_equals_oracle(
        "paged_attention_decode", query, cache.pool, cache.block_table, cache.kv_lengths, 0.2, window=window,
        out=nan_like(query), splits=splits, roundings=2, reduction=32 + 90, dtype=torch.float32,
    )


def test_pages_outside_the_window_are_not_read(assert_equals_oracle, paged_cache, random):
    cache = paged_cache([5 * B], 1, 32, B, torch.float32)
    query = random(1, 2, 32)
    arguments = query, cache.pool, cache.block_table, cache.kv_lengths, 0.2
    for page in cache.block_table[0, :3].tolist():
        cache.pool[page] = torch.nan
    assert_equals_oracle(
        "paged_attention_decode", *arguments, window=2 * B, splits=1, reduction=100, dtype=torch.float32
    )


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("softcap, stretch", [(2.5, 1), (50.0, 1), (50.0, 40), (30.0, 10_000)])
@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores(assert_equals_oracle, paged_cache, random, dtype, softcap, stretch, window, splits):
    """Scores far below the cap, about as large, and so far above that all keys of one sign weigh the same."""
    cache = paged_cache([B - 1, 1, 5 * B + 3], 2, 32, B, dtype)
    query = random(3, 6, 32, dtype=dtype)
    out = nan_like(query)
    assert_equals_oracle(
        "paged_attention_decode", query, cache.pool, cache.block_table, cache.kv_lengths, 0.2 * stretch, window=window,
        out=out, splits=splits, softcap=softcap, roundings=2, reduction=(32 + 5 * B + 3) * min(stretch, 40),
        dtype=dtype,
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("softcap", [0.5, 4.0])
@pytest.mark.parametrize("window", [None, 20])
def test_the_oracle_caps_scores_before_the_softmax(run_oracle, streaming_attention, paged_cache, random, window,
                                                   softcap):
    cache = paged_cache([1, 20, 90], 2, 8, B, torch.float64)
    query = 3 * random(3, 4, 8, dtype=torch.float64)
    arguments = query, cache.pool, cache.block_table, cache.kv_lengths, 0.3, window
    out = run_oracle("paged_attention_decode", *arguments, softcap=softcap)
    expected = torch.stack([
        streaming_attention(query[i : i + 1], cache.contents[i], 0.3, window or 1000, 0, softcap)[0] for i in range(3)
    ])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(out[1:], run_oracle("paged_attention_decode", *arguments)[1:], atol=1e-3)


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
        "paged_attention_decode", query, cache.pool, cache.block_table, cache.kv_lengths, 0.3, window=window, sink=sink
    )
    expected = torch.stack(
        [streaming_attention(query[i : i + 1], cache.contents[i], 0.3, window, sink)[0] for i in range(4)]
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("sink", [1, 4, B, B + 1])
@pytest.mark.parametrize("window", [1, B, 20])
def test_sinks_stay_visible_and_pages_between_are_not_read(
    assert_equals_oracle, paged_cache, random, window, sink, splits
):
    cache = paged_cache([3, B + 2, 3 * B, 90, 150], 1, 32, B, torch.float32)
    given_back = [
        cache.give_back(sequence, length - 1, window, sink) for sequence, length in enumerate(cache.kv_lengths.tolist())
    ]
    assert given_back[-1] >= 6
    query = random(5, 4, 32)
    out = assert_equals_oracle(
        "paged_attention_decode", query, cache.pool, cache.block_table, cache.kv_lengths, 0.2, window=window,
        out=nan_like(query), splits=splits, sink=sink, roundings=2, reduction=32 + 90, dtype=torch.float32,
    )
    assert out.isfinite().all()


def test_sinks_in_half_precision_and_through_slots(assert_equals_oracle, paged_cache, random, integers, dtype):
    cache = paged_cache([70, 200], 2, 64, 32, dtype)
    for sequence, length in enumerate([70, 200]):
        cache.give_back(sequence, length - 1, 40, 33)
    slots = integers([1, 0])
    assert_equals_oracle(
        "paged_attention_decode", random(2, 6, 64, dtype=dtype), cache.pool, cache.block_table,
        cache.kv_lengths[slots.long()], 0.1, window=40, slots=slots, splits=2, sink=33,
        roundings=2, reduction=64 + 73, dtype=dtype,
    )


def test_sinks_without_a_window_mean_nothing(run_kernel, run_oracle, paged_cache, random):
    cache = paged_cache([40], 1, 32, B, torch.float32)
    arguments = random(1, 2, 32), cache.pool, cache.block_table, cache.kv_lengths, 0.2
    for run in (run_kernel, run_oracle):
        out = [run("paged_attention_decode", *arguments, splits=1, sink=sink) for sink in (0, 4)]
        assert torch.equal(*out)


@pytest.mark.parametrize("splits", [1, 2])
def test_padding_rows_are_zero_and_read_nothing(assert_equals_oracle, paged_cache, random, integers, splits):
    cache = paged_cache([20, 1, 40], 1, 32, B, torch.float32)
    query = random(3, 2, 32)
    query[1] = torch.nan
    cache.block_table[1] = -(2**30)                        # an address far away
    lengths = integers([20, 0, 40])
    out = assert_equals_oracle(
        "paged_attention_decode", query, cache.pool, cache.block_table, lengths, 0.2,
        out=nan_like(query), splits=splits, reduction=100, dtype=torch.float32,
    )
    assert (out[1] == 0).all()


def test_sequences_are_found_through_their_slots(assert_equals_oracle, paged_cache, random, integers):
    cache = paged_cache([30, 17, 5, 64], 2, 32, B, torch.float32)
    slots = integers([3, 0])
    assert_equals_oracle(
        "paged_attention_decode", random(2, 4, 32), cache.pool, cache.block_table, cache.kv_lengths[slots.long()], 0.2,
        slots=slots, reduction=100, dtype=torch.float32,
    )


@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 128, 256])
def test_head_sizes(assert_equals_oracle, paged_cache, random, dtype, head_size):
    cache = paged_cache([33, 70], 1, head_size, 64, dtype)
    query = random(2, 3, head_size, dtype=dtype)
    assert_equals_oracle(
        "paged_attention_decode", query, cache.pool, cache.block_table, cache.kv_lengths, head_size**-0.5,
        out=nan_like(query), roundings=2, reduction=head_size + 70, dtype=dtype,
    )


def test_more_query_heads_than_one_tile_row_block(assert_equals_oracle, paged_cache, random):
    cache = paged_cache([9, 40], 1, 32, 32, torch.float32)
    assert_equals_oracle(
        "paged_attention_decode", random(2, 20, 32), cache.pool, cache.block_table, cache.kv_lengths, 0.2,
        reduction=100, dtype=torch.float32,
    )


def test_queries_may_be_views_and_receive_the_result(assert_equals_oracle, paged_cache, random):
    cache = paged_cache([20, 33], 2, 32, B, torch.float32)
    packed = random(2, 8, 32)
    before = packed.clone()
    query = packed[:, :4]
    assert_equals_oracle(
        "paged_attention_decode", query, cache.pool, cache.block_table, cache.kv_lengths, 0.2, out=query,
        splits=1, reduction=100, dtype=torch.float32,
    )
    assert torch.equal(packed[:, 4:], before[:, 4:])


def test_the_same_bits_alone_and_in_a_batch(run_kernel, paged_cache, random):
    cache = paged_cache([70, 20, 5], 1, 32, B, torch.float32)
    query = random(3, 2, 32)
    rest = cache.pool, cache.block_table, cache.kv_lengths
    together = run_kernel("paged_attention_decode", query, *rest, 0.2, splits=2)
    alone = run_kernel("paged_attention_decode", query[:1], rest[0], rest[1][:1], rest[2][:1], 0.2, splits=2)
    assert torch.equal(together[:1], alone)
