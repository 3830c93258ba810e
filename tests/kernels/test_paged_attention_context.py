import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch_manager.triton_kernels.context_work_list import (
    FIXED_PART_KEYS,
    MIN_KEYS_PER_PART,
    UNIFORM_ROWS,
    WORK_COLUMNS,
    ContextHeads,
    context_tile_rows,
    context_work_list,
    most_context_work,
    most_partials,
)

B = 16                                  # tokens per block, by default


@pytest.fixture
def check(assert_equals_oracle, paged_cache, random, integers):
    """check(query_lengths, kv_lengths, ...): asserts that kernel and oracle agree, and returns the kernel's result.

    Three generation rows after the context rows must be neither read nor written."""

    def run(query_lengths, kv_lengths, group=1, num_kv_heads=1, head_size=32, tokens_per_block=B,
            dtype=torch.float32, window=None, padded_to=0, sink=0, scale=None, softcap=None, part_keys=None,
            num_parts=None, **more):
        cache = paged_cache(kv_lengths, num_kv_heads, head_size, tokens_per_block, dtype)
        if window:
            for sequence, (new, length) in enumerate(zip(query_lengths, kv_lengths)):
                cache.give_back(sequence, length - new, window, sink)
        num_rows = sum(query_lengths)
        query = random(num_rows + 3, (group + 2) * num_kv_heads, head_size, dtype=dtype)
        query = query[:, : group * num_kv_heads]           # as a projection returns it, next to keys and values
        query[num_rows:] = torch.nan                       # generation rows: neither read nor written
        cu_seqlens = torch.tensor([0, *query_lengths]).cumsum(0).tolist()
        tile_rows = UNIFORM_ROWS if part_keys else context_tile_rows(head_size, query.element_size())
        heads = ContextHeads(group * num_kv_heads, num_kv_heads, 1, part_keys) if part_keys else None
        work = context_work_list(query_lengths, kv_lengths, tile_rows, padded_to, heads, window, sink, num_parts)
        work_list, part_starts, merged_rows = (torch.from_numpy(array).to(query.device) for array in work)
        has_more_operations = softcap or more
        if num_parts:
            more = {**more, "part_starts": part_starts, "merged_rows": merged_rows,
                    "num_partials": int(part_starts[-1])}
        return assert_equals_oracle(
            "paged_attention_context", query, cache.pool, cache.block_table, integers(cu_seqlens), cache.kv_lengths,
            work_list, scale or head_size**-0.5, window=window, out=torch.full_like(query, torch.nan), sink=sink,
            softcap=softcap, part_keys=part_keys, **more,
            roundings=2, reduction=(head_size + max(kv_lengths)) * (40 if has_more_operations else 1), dtype=dtype,
        )

    return run


@pytest.mark.parametrize("group", [1, 3])
def test_whole_prompts_around_a_page(check, dtype, group):
    check([B - 1, B, B + 1, 1], [B - 1, B, B + 1, 1], group=group, dtype=dtype)


@pytest.mark.parametrize("start", [1, B - 1, B, 37])
def test_a_chunk_starts_in_the_middle(check, dtype, start):
    check([40, 5], [40 + start, 5 + start], group=4, dtype=dtype)


def lengths_around_tiles(tile_rows, group):
    """Return lengths of chunks: one token, about the tokens whose query heads fill one tile, and larger numbers.

    group   number of query heads of each token in a tile
    """
    tokens = max(tile_rows // group, 1)
    return [1, tokens, tokens + 1, tile_rows, tile_rows + tokens + 1]


@pytest.mark.parametrize("group, more", [
    (3, {}), (3, {"window": 20, "sink": 5, "softcap": 2.5}), (4, {}), (4, {"window": 20}), (4, {"part_keys": 16}),
    (8, {"window": 20, "sink": 5}), (3, {"window": 20, "sink": 5, "part_keys": 16}),
])
def test_short_and_long_chunks_together(check, dtype, group, more):
    tile_rows = UNIFORM_ROWS if "part_keys" in more else context_tile_rows(32, dtype.itemsize)
    lengths = lengths_around_tiles(tile_rows, group)
    check(lengths, [length + 9 * number for number, length in enumerate(lengths)], group=group, dtype=dtype, **more)


@pytest.mark.parametrize("group, part_keys", [(1, None), (3, None), (4, 16), (8, None), (17, 32)])
def test_programs_walk_keys_for_full_tiles_of_queries(calls_within, paged_cache, random, integers, group, part_keys):
    """A chunk of few tokens reads the keys once for all heads of a group."""
    tile_rows = UNIFORM_ROWS if part_keys else context_tile_rows(16, 4)
    lengths = lengths_around_tiles(tile_rows, group)
    kv_lengths = [length + 9 * number for number, length in enumerate(lengths)]
    cache = paged_cache(kv_lengths, 1, 16, B, torch.float32)
    key_tiles = len(calls_within(
        "paged_attention_context", random(sum(lengths), group, 16), cache.pool, cache.block_table,
        integers([0, *np.cumsum(lengths)]), cache.kv_lengths,
        integers(context_work_list(lengths, kv_lengths, tile_rows).work_list), 0.2, part_keys=part_keys,
        softcap=1.0,
        of="soft_cap",                                     # called once per tile of keys in each program
    ))
    expected = 0
    for length, kv_length in zip(lengths, kv_lengths):
        for first_query in range(0, length * group, tile_rows):
            last_token = (min(first_query + tile_rows, length * group) - 1) // group
            expected += -(-(kv_length - length + last_token + 1) // B)
    assert key_tiles == expected


@pytest.mark.parametrize("tokens, heads, kv_heads, programs", [
    (16, 32, 8, 8), (1, 8, 2, 2), (32, 8, 2, 2), (33, 8, 2, 4), (128, 4, 1, 4), (129, 3, 1, 4), (100, 2, 2, 2)])
@pytest.mark.parametrize("part_keys", [None, 64])
def test_a_program_computes_a_tile_of_the_queries_of_all_heads_of_a_group(
        calls_within, paged_cache, random, integers, tokens, heads, kv_heads, programs, part_keys):
    """The tokens x heads queries of a kv head take as few programs as there are tiles of queries.

    With one program per query head and tile of tokens, 16 tokens with 32 heads would take 32 programs."""
    tile_rows = UNIFORM_ROWS if part_keys else context_tile_rows(16, 2)
    cache = paged_cache([tokens], kv_heads, 16, B, torch.float16)
    walks = calls_within(
        "paged_attention_context", random(tokens, heads, 16, dtype=torch.float16), cache.pool, cache.block_table,
        integers([0, tokens]), cache.kv_lengths, integers(context_work_list([tokens], [tokens], tile_rows).work_list),
        0.2, part_keys=part_keys, of="_walk_tiles")        # called twice by each program with queries, or for each part
    if part_keys is None:
        assert len(walks) == 2 * programs == 2 * kv_heads * -(-tokens * heads // kv_heads // tile_rows)
    else:
        last_tokens = [min(first + tile_rows, tokens * heads // kv_heads) - 1
                       for first in range(0, tokens * heads // kv_heads, tile_rows)]
        assert len(walks) >= kv_heads * sum(last * kv_heads // heads // part_keys + 1 for last in last_tokens)
    for shapes in walks:
        assert (tile_rows, 16) in shapes                   # the queries
        assert {rows for rows, *_ in shapes} == {tile_rows}


def test_several_tiles_of_query_rows(check):
    check([75, 33], [75, 75], group=2)                     # float32 tiles have 32 rows


@pytest.mark.parametrize("window", [1, 5, B, 3 * B, 50, 1000])
def test_window(check, window):
    check([40, 30, 3], [40, 75, 60], group=3, window=window)


@pytest.mark.parametrize("softcap, scale, more", [
    (2.5, 0.2, {}), (50.0, 0.2, {}), (50.0, 8.0, {}), (30.0, 2000.0, {}), (2.5, 0.2, {"window": 20}),
    (30.0, 2000.0, {"window": 20}), (50.0, 8.0, {"window": 20, "sink": 5}), (30.0, 2000.0, {"part_keys": 32}),
])
def test_capped_scores(check, dtype, softcap, scale, more):
    """Kernel and oracle agree if the scores are far below the cap, about as large as the cap, or far above it.

    Far above the cap, all keys with scores of the same sign have the same weight.
    """
    assert check([40, 5], [77, 5], group=2, dtype=dtype, softcap=softcap, scale=scale, **more)[:45].isfinite().all()


@pytest.mark.parametrize("softcap", [0.5, 4.0])
@pytest.mark.parametrize("window", [None, 20])
def test_the_oracle_caps_scores_before_the_softmax(run_oracle, streaming_attention, paged_cache, random, integers,
                                                   window, softcap):
    cache = paged_cache([50], 2, 8, B, torch.float64)
    query = 3 * random(30, 4, 8, dtype=torch.float64)
    arguments = (query, cache.pool, cache.block_table, integers([0, 30]), cache.kv_lengths, None, 0.3, window)
    out = run_oracle("paged_attention_context", *arguments, softcap=softcap)
    expected = streaming_attention(query, cache.contents[0], 0.3, window or 1000, 0, softcap)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(out, run_oracle("paged_attention_context", *arguments), atol=1e-3)


def slopes_of(heads, is_rounded, random):
    """Return falling slopes, the last one negative; rounded to bfloat16 if is_rounded."""
    slopes = 0.7 ** torch.arange(1, heads + 1).to(random(1).device)
    slopes[-1] *= -1
    return slopes.bfloat16().float() if is_rounded else slopes


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("factor", [None, 0.3])
@pytest.mark.parametrize("window, sink", [(None, 0), (20, 3)])
def test_the_oracle_adds_slopes_after_the_cap_and_one_sink_logit(run_oracle, streaming_attention, paged_cache, random,
                                                                 integers, window, sink, factor, softcap):
    cache = paged_cache([290], 2, 8, B, torch.float64)
    query, slopes, sink_logits = random(30, 4, 8, dtype=torch.float64), slopes_of(4, factor, random), random(4)
    out = run_oracle("paged_attention_context", query, cache.pool, cache.block_table, integers([0, 30]),
                     cache.kv_lengths, None, 0.3, window, sink=sink, softcap=softcap, alibi_slopes=slopes,
                     alibi_bfloat16_factor=factor, sink_logits=sink_logits)

    @functools.cache
    def product(head, position):                           # bfloat16 cannot represent this position above 256
        return float(slopes[head].bfloat16() * torch.tensor(position).bfloat16())

    def added(head, key, position):
        if factor is None:
            return slope_of_head[head] * (key - position)
        return factor * (product(head, key) - product(head, position))

    slope_of_head = slopes.tolist()
    expected = streaming_attention(query, cache.contents[0], 0.3, window or 1000, sink, softcap, added,
                                   sink_logits.double())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.pairs
@pytest.mark.parametrize("has_slopes, factor, has_sink_logits", [
    (True, None, False), (False, None, True), (True, None, True), (True, 0.25, False),
])
@pytest.mark.parametrize("more", [{}, {"softcap": 2.5}, {"window": 20, "sink": 5, "part_keys": 16}])
def test_slopes_and_sink_logits(check, random, dtype, has_slopes, factor, has_sink_logits, more):
    if has_slopes:
        more = {**more, "alibi_slopes": slopes_of(6, factor, random), "alibi_bfloat16_factor": factor}
    if has_sink_logits:
        more = {**more, "sink_logits": 3 * random(6)}
    check([40, 5, 1], [300, 5, 70], group=3, num_kv_heads=2, dtype=dtype, **more)


@pytest.mark.parametrize("sink_logit", [-torch.inf, -200.0, 200.0])
@pytest.mark.parametrize("window", [None, 20])
def test_sink_logits_far_from_all_scores(run_kernel, run_oracle, paged_cache, random, integers, window, sink_logit):
    cache = paged_cache([75], 1, 32, B, torch.float32)
    query, tile_rows = random(40, 2, 32), context_tile_rows(32, 4)
    work_list = torch.from_numpy(context_work_list([40], [75], tile_rows).work_list).to(query.device)
    arguments = (query, cache.pool, cache.block_table, integers([0, 40]), integers([75]), work_list, 0.2, window)
    without = run_oracle("paged_attention_context", *arguments)
    got = run_kernel("paged_attention_context", *arguments, sink_logits=torch.full_like(random(2), sink_logit))
    torch.testing.assert_close(got, without * (sink_logit < 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sink", [1, 4, B, B + 1])
@pytest.mark.parametrize("window", [1, 20, 50])
def test_sinks_stay_visible_and_pages_between_are_not_read(check, window, sink):
    check([40, 30, 33, 3], [40, 75, 150, 100], group=3, window=window, sink=sink)


def test_more_sinks_than_the_first_tiles_and_a_window_wider_than_a_tile(check, dtype):
    check([75, 140], [200, 140], head_size=64, group=2, tokens_per_block=128, window=70, sink=130, dtype=dtype)


@pytest.mark.parametrize("sink", [0, 1, 4, B, B + 1])
@pytest.mark.parametrize("window", [1, B, 20, 1000])
def test_the_oracle_attends_under_the_streaming_mask(
    run_oracle, streaming_attention, paged_cache, random, integers, window, sink
):
    cache = paged_cache([20, 60, 90], 2, 8, B, torch.float64)
    lengths = [20, 7, 40]
    query = random(67, 4, 8, dtype=torch.float64)
    for sequence, new in enumerate(lengths):
        cache.give_back(sequence, int(cache.kv_lengths[sequence]) - new, window, sink)
    out = run_oracle(
        "paged_attention_context", query, cache.pool, cache.block_table, integers([0, 20, 27, 67]), cache.kv_lengths,
        None, 0.3, window=window, sink=sink,
    )
    expected = torch.cat(
        [streaming_attention(rows, contents, 0.3, window, sink)
         for rows, contents in zip(query.split(lengths), cache.contents)]
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_size", [16, 64, 80, 128, 256])
def test_head_sizes(check, dtype, head_size):
    check([20, 5], [70, 9], head_size=head_size, group=2, tokens_per_block=64, dtype=dtype)


@pytest.mark.parametrize("tokens_per_block", [16, 32, 64, 128])
def test_block_sizes(check, tokens_per_block):
    check([30, 140], [150, 140], tokens_per_block=tokens_per_block)


def test_padding_of_the_work_list_does_nothing(check):
    check([5, 9], [20, 9], padded_to=6)


def test_a_sequence_without_new_tokens(check):
    check([5, 0, 7], [20, 16, 7])


def test_sequences_are_found_through_their_slots(assert_equals_oracle, paged_cache, random, integers):
    cache = paged_cache([30, 17, 5], 2, 32, B, torch.float32)
    slots = integers([2, 0])
    assert_equals_oracle(
        "paged_attention_context", random(8, 4, 32), cache.pool, cache.block_table, integers([0, 5, 8]),
        cache.kv_lengths[slots.long()], integers([[0, 0, 0, 1, -1], [1, 0, 0, 1, -1]]), 0.2, slots=slots,
        reduction=100, dtype=torch.float32,
    )


def test_chunks_give_what_the_whole_prompt_gives(run_kernel, paged_cache, random, integers):
    cache = paged_cache([50], 1, 32, B, torch.float32)
    query = random(50, 2, 32)

    def attend(begin, end):
        work_list = context_work_list([end - begin], [end], context_tile_rows(32, 4)).work_list
        work_list = torch.from_numpy(work_list).to(query.device)
        return run_kernel(
            "paged_attention_context", query[begin:end], cache.pool, cache.block_table, integers([0, end - begin]),
            integers([end]), work_list, 0.2,
        )

    whole = attend(0, 50)
    chunked = torch.cat([attend(0, 20), attend(20, 50)])
    torch.testing.assert_close(chunked, whole, rtol=0, atol=100 * torch.finfo(torch.float32).eps)


@pytest.mark.pairs
@pytest.mark.parametrize("num_parts", [2, 3, 20])
@pytest.mark.parametrize("more", [
    {}, {"window": 20}, {"window": 20, "sink": 5}, {"softcap": 2.5}, {"window": 50, "softcap": 2.5, "sink": B + 1},
])
def test_parts_of_the_keys_are_merged(check, dtype, num_parts, more):
    """Some parts have no key: they are empty, or the window of a row or the newest positions exclude all their keys."""
    check([12, 5, 1, 9], [140, 75, 70, 9], group=3, num_kv_heads=2, dtype=dtype, num_parts=num_parts, **more)


@pytest.mark.pairs
@pytest.mark.parametrize("has_slopes, factor", [(True, None), (True, 0.25), (False, None)])
@pytest.mark.parametrize("more", [{}, {"softcap": 2.5}, {"window": 20, "sink": 5}])
def test_parts_with_slopes_count_the_sink_logits_once(check, random, dtype, has_slopes, factor, more):
    if has_slopes:
        more = {**more, "alibi_slopes": slopes_of(6, factor, random), "alibi_bfloat16_factor": factor}
    check([12, 5, 1], [300, 5, 70], group=3, num_kv_heads=2, dtype=dtype, num_parts=3, sink_logits=3 * random(6),
          **more)


@pytest.mark.parametrize("head_size, tokens_per_block", [(16, 16), (80, 64), (256, 64), (64, 128)])
def test_parts_of_several_head_and_block_sizes(check, dtype, head_size, tokens_per_block):
    check([20, 5], [370, 9], head_size=head_size, group=2, tokens_per_block=tokens_per_block, dtype=dtype, num_parts=3)


@pytest.mark.parametrize("window", [None, 600])
def test_split_and_unsplit_chunks_together(assert_equals_oracle, paged_cache, random, integers, window):
    """A step with padding after the work list, the split tokens and the tokens of the contexts, as in a graph."""
    query_lengths, kv_lengths, heads = [7, 30, 0, 3], [1200, 30, 40, 700], ContextHeads(4, 2, 32)
    cache = paged_cache(kv_lengths, 2, 32, B, torch.float32)
    if window:
        for sequence, (new, length) in enumerate(zip(query_lengths, kv_lengths)):
            cache.give_back(sequence, length - new, window, 0)
    tile_rows = context_tile_rows(32, 4)
    most = most_context_work(48, 4, tile_rows, heads, 1200)
    work_list, part_starts, merged_rows = context_work_list(query_lengths, kv_lengths, tile_rows, most.rows, heads,
                                                            window)
    assert len(work_list) == most.rows and len(merged_rows) == 10 < part_starts[-1]
    padding = most.split - len(merged_rows)
    query = random(48, 4, 32)
    query[40:] = torch.nan
    assert_equals_oracle(
        "paged_attention_context", query, cache.pool, cache.block_table, integers([0, 7, 37, 37, 40]), cache.kv_lengths,
        integers(work_list.tolist()), 0.2, window=window, out=torch.full_like(query, torch.nan),
        part_starts=integers([*part_starts.tolist(), *[int(part_starts[-1])] * padding]),
        merged_rows=integers([*merged_rows.tolist(), *[0] * padding]), num_partials=most_partials(tile_rows, heads),
        roundings=2, reduction=1300, dtype=torch.float32)


def test_the_work_list_names_every_tile_once_and_the_longest_first():
    work_list, part_starts, merged_rows = context_work_list([200, 1, 0, 5], [200, 300, 9, 5], 128, padded_to=6)
    assert work_list[:, :2].tolist() == [[1, 0], [0, 1], [0, 0], [3, 0], [-1, -1], [-1, -1]]
    assert (work_list[:4, 2:] == [0, 1, -1]).all() and (part_starts.tolist(), len(merged_rows)) == ([0], 0)
    assert context_work_list([], [], 128).work_list.shape == (0, WORK_COLUMNS)


COUNTS = {"lengths": st.lists(st.tuples(st.integers(0, 70), st.one_of(st.integers(0, 300), st.integers(0, 40_000))),
                              max_size=6),
          "tile_rows": st.sampled_from([1, 16, 33, 128]), "kv_heads": st.integers(1, 9), "group": st.integers(1, 9),
          "resident_programs": st.integers(1, 300), "window": st.sampled_from([None, 1, 700, 5000]),
          "sink": st.sampled_from([0, 4, 900]), "part_keys": st.sampled_from([None, 64, FIXED_PART_KEYS])}


@given(**COUNTS, more_tokens=st.integers(0, 20), more_contexts=st.integers(0, 2))
def test_no_work_has_more_rows_parts_or_programs_than_planned(lengths, tile_rows, kv_heads, group, resident_programs,
                                                              window, sink, part_keys, more_tokens, more_contexts):
    heads = ContextHeads(kv_heads * group, kv_heads, resident_programs, part_keys)
    query_lengths, kv_lengths = [new for new, _ in lengths], [new + cached for new, cached in lengths]
    work = context_work_list(query_lengths, kv_lengths, tile_rows, heads=heads, window=window, sink=sink)
    most = most_context_work(sum(query_lengths) + more_tokens, len(lengths) + more_contexts, tile_rows, heads,
                             max(kv_lengths, default=0))
    assert len(work.work_list) <= most.rows and len(work.merged_rows) <= most.split
    assert work.part_starts[-1] <= most_partials(tile_rows, heads, max(kv_lengths, default=0))
    split = work.work_list[work.work_list[:, 4] >= 0]
    tokens = [min(query_lengths[sequence] - tile * tile_rows, tile_rows) for sequence, tile, *_ in split.tolist()]
    assert sum(kv_heads * -(-count * group // tile_rows) for count in tokens) <= resident_programs


@given(**COUNTS, num_parts=st.sampled_from([None, 1, 2, 7]))
def test_every_part_of_a_tile_and_every_partial_result_of_a_token_is_there_once(
        lengths, tile_rows, kv_heads, group, resident_programs, window, sink, part_keys, num_parts):
    heads = ContextHeads(kv_heads * group, kv_heads, resident_programs, part_keys)
    query_lengths, kv_lengths = [new for new, _ in lengths], [new + cached for new, cached in lengths]
    work = context_work_list(query_lengths, kv_lengths, tile_rows, 0, heads, window, sink, num_parts)
    parts = {}
    for sequence, tile, part, count, partial in work.work_list.tolist():
        parts.setdefault((sequence, tile, count, partial), []).append(part)
    assert sorted((sequence, tile) for sequence, tile, *_ in parts) == [
        (sequence, tile) for sequence, new in enumerate(query_lengths) for tile in range(-(-new // tile_rows))]
    expected = {}                                          # packed token -> indices of its partial results
    for (sequence, tile, count, partial), found in parts.items():
        assert sorted(found) == list(range(count)) and (partial < 0) == (count == 1)
        end = min((tile + 1) * tile_rows, query_lengths[sequence])
        keys = kv_lengths[sequence] - query_lengths[sequence] + end
        results = -(-keys // part_keys) if part_keys else count
        for token in range(tile * tile_rows, end) if count > 1 else ():
            begin = partial + (token - tile * tile_rows) * results
            expected[sum(query_lengths[:sequence]) + token] = (begin, begin + results)
    starts = work.part_starts.tolist()
    assert dict(zip(work.merged_rows.tolist(), zip(starts, starts[1:]))) == expected
    assert starts == sorted(starts) and len(starts) == len(work.merged_rows) + 1 == len(expected) + 1


def test_one_short_chunk_of_a_long_sequence_fills_the_device():
    """The chunk has 64 tokens after a prefix of 16k tokens; the heads are those of Llama 8B, the device an H100."""
    heads, computed = ContextHeads(32, 8, 132), 16_384
    work = context_work_list([64], [computed + 64], 128, heads=heads)
    programs = len(work.work_list) * 8 * 2                 # 64 tokens of 4 heads are two tiles of queries per kv head
    assert 0.9 * 132 < programs <= 132
    with_others = context_work_list([64] + [1] * 40, [computed + 64] + [200] * 40, 128, heads=heads)
    assert len(with_others.merged_rows) == 64 and with_others.work_list[0, 3] > 4
    for new, cached, window in ((2048, 0, None), (8192, 0, None), (2048, 16_384, None), (64, 2 * MIN_KEYS_PER_PART - 65,
                                None), (64, computed, 2 * MIN_KEYS_PER_PART - 1)):
        assert len(context_work_list([new], [new + cached], 128, heads=heads, window=window).merged_rows) == 0


@given(num_tokens=st.integers(0, 300), num_contexts=st.integers(0, 9), tile_rows=st.integers(1, 33))
def test_some_work_list_has_as_many_rows_as_planned(num_tokens, num_contexts, tile_rows):
    num_sequences = min(num_contexts, num_tokens)
    lengths = [1] * (num_sequences - 1) + [num_tokens - num_sequences + 1] * bool(num_sequences)
    num_rows = len(context_work_list(lengths, lengths, tile_rows).work_list)
    assert (num_rows, 0) == most_context_work(num_tokens, num_contexts, tile_rows)


@pytest.mark.parametrize("settings", [
    {}, {"window": 20}, {"window": 20, "sink": 5}, {"window": 20, "slopes": 0.25}, {"slopes": 0.25}, {"softcap": 2.5}])
def test_fixed_parts_give_a_row_the_same_bits_whatever_the_chunk_and_the_programs(run_kernel, paged_cache, random,
                                                                                  integers, dtype, settings):
    """The results of the parts are combined in registers, or, with several programs, by `paged_attention_merge`."""
    length, heads, head_size, part_keys = 53, 3, 32, 16    # the heads of a group may lie in two tiles
    cache = paged_cache([length], 1, head_size, B, dtype)
    query = random(length, heads, head_size, dtype=dtype)
    if "slopes" in settings:
        settings = {**settings, "alibi_bfloat16_factor": settings["slopes"], "sink_logits": random(heads),
                    "alibi_slopes": slopes_of(heads, settings["slopes"], random)}
        del settings["slopes"]

    def attend(start, stop, num_parts):
        work_list, part_starts, merged_rows = (torch.from_numpy(array).to(query.device) for array in context_work_list(
            [stop - start], [stop], UNIFORM_ROWS, 0, ContextHeads(heads, 1, 1, part_keys), settings.get("window"),
            num_parts=num_parts))
        parts = {"part_starts": part_starts, "merged_rows": merged_rows, "num_partials": int(part_starts[-1])}
        assert (len(merged_rows) > 0) == (num_parts > 1 and "window" not in settings)
        return run_kernel("paged_attention_context", query[start:stop], cache.pool, cache.block_table,
                          integers([0, stop - start]), integers([stop]), work_list, head_size**-0.5,
                          part_keys=part_keys, interpreted={"dots_in_one_order": True}, **settings,
                          **(parts if len(merged_rows) else {}))

    whole = attend(0, length, 1)
    for start, stop, num_parts in [(0, length, 3), (0, 16, 1), (0, 1, 2), (7, 20, 1), (20, 53, 2), (52, 53, 4),
                                   (24, 25, 1), (32, 33, 3), (47, 49, 9)]:
        assert torch.equal(attend(start, stop, num_parts), whole[start:stop]), (start, stop, num_parts)


@pytest.mark.pairs
@pytest.mark.parametrize("num_parts", [None, 2, 7])
@pytest.mark.parametrize("more", [{}, {"softcap": 2.5}, {"window": 20, "sink": 5}])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_fixed_parts_compute_what_the_others_do(check, random, dtype, num_parts, more, has_slopes):
    if has_slopes:
        more = {**more, "alibi_slopes": slopes_of(6, None, random), "sink_logits": 3 * random(6)}
    check([12, 5, 1, 9, 1], [140, 75, 70, 9, 1], group=3, num_kv_heads=2, dtype=dtype, num_parts=num_parts,
          part_keys=32, **more)
