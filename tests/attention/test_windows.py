"""Windows and sinks decide which tokens are visible and which blocks are read. Released blocks have no effect."""

import numpy as np
import pytest
import torch

from batch_manager.attention.interface import PackedStep
from batch_manager.attention.registry import make_attention
from batch_manager.attention.windows import blocks_seen, effective_windows

SINKS = [0, 1, 4, 16, 17]


@pytest.mark.parametrize("own, configured, sinks, expected", [
    ((None, None), None, 0, ((None, None), 0)),
    ((None, None), 20, 4, ((20, 20), 4)),
    ((7, None), None, 0, ((7, None), 0)),                     # a model's windows alone have no sinks
    ((7, None), 20, 4, ((7, 20), 4)),                         # the smaller one applies, and sinks everywhere
    ((30, None), 20, 0, ((20, 20), 0)),
    ((None, 7), 100, 4, ((None, 7), 4)),                      # no sequence is longer than 100
    ((None, None), 64, 4, ((None, None), 0)),
    ((None, None), 63, 4, ((63, 63), 4)),
])
def test_the_smaller_window_holds_and_sinks_belong_to_the_configured_one(own, configured, sinks, expected):
    assert effective_windows(own, configured, sinks, max_seq_len=64) == expected


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9, 100])
@pytest.mark.parametrize("sink", [0, 1, 4, 5, 9])
def test_the_blocks_seen_are_those_with_a_visible_key(window, sink):
    cases = [(first, length) for length in range(1, 30) for first in range(length)]
    seen = blocks_seen(*(np.array(column) for column in zip(*cases)), 4, window, sink)
    for (first, length), sinks, skipped, count in zip(cases, *seen):
        expected = {key // 4 for position in range(first, length) for key in range(position + 1)
                    if window is None or key > position - window or key < sink}
        assert [*range(sinks), *range(sinks + skipped, count + skipped)] == sorted(expected)


STALE = [-1, None, 2**31 - 1]           # what a block table has for a block that was given back; None: its id


@pytest.mark.parametrize("window, sink, stale", [                       # each pair of values
    (window, sink, STALE[(row + column) % 3]) for row, window in enumerate([1, 15, 16, 17, 40, 64, 200])
    for column, sink in enumerate(SINKS)])
def test_sinks_and_windows_of_every_size(attention_class, window, sink, stale, layout, step_of, by_oracle,
                                         without_what_left):
    shape = layout(4, 2, 16, windows=(window,), sink=sink)
    contexts = [(0, 3), (0, window), (0, window + 1), (0, 150), (48, 100), (112, 20), (144, 1)]
    step = step_of(contexts, [0, 14, 15, 16, 63, 64, window - 1, window, 99, 130], 125, 16)
    pool = shape.pool(125)
    expected_pool = pool.clone()
    given_back = without_what_left(shape, step, [pool, expected_pool], stale)
    assert given_back > 8 or window >= 40
    attention = attention_class(shape, pool, sink)
    attention.plan(step)
    query, key, value = shape.packed_qkv(step.num_tokens)
    expected = by_oracle(shape, expected_pool, 0, step, query, key, value, shape.rotary())
    result = attention.run(0, query, key, value, shape.rotary())
    assert result.isfinite().all()
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tokens_per_block", [8, 32])
def test_layers_with_and_without_a_window(tokens_per_block, layout, step_of, by_oracle):
    shape = layout(4, 2, 16, windows=(None, 30, 9), tokens_per_block=tokens_per_block, sink=10)
    step = step_of([(0, 70), (64, 30)], [1, 63, 64, 65], 64, tokens_per_block)
    pool = shape.pool(64)
    expected_pool = pool.clone()
    attention = make_attention(shape, pool, sink=10)
    attention.plan(step)
    for layer in range(3):
        query, key, value = shape.packed_qkv(step.num_tokens, seed=layer)
        expected = by_oracle(shape, expected_pool, layer, step, query, key, value, shape.rotary())
        torch.testing.assert_close(attention.run(layer, query, key, value, shape.rotary()), expected, atol=2e-5,
                                   rtol=2e-5)


def test_a_group_of_sequences_with_different_gaps(attention_class, layout, step_of, by_oracle, without_what_left,
                                                  monkeypatch):
    monkeypatch.setattr("batch_manager.attention.torch_paged.MAX_PADDED_BYTES", 3_000)
    shape = layout(4, 2, 16, windows=(20,), sink=20)
    step = step_of([], [3, 200, 19, 20, 21, 35, 36, 90, 47, 48], 64, 16)
    pool = shape.pool(64)
    expected_pool = pool.clone()
    without_what_left(shape, step, [pool, expected_pool])
    attention = attention_class(shape, pool, sink=20)
    attention.plan(step)
    query, key, value = shape.packed_qkv(step.num_tokens)
    expected = by_oracle(shape, expected_pool, 0, step, query, key, value, shape.rotary())
    torch.testing.assert_close(attention.run(0, query, key, value, shape.rotary()), expected, atol=2e-5, rtol=2e-5)


def dense(query, key, value, rotary, window, sink):
    """Compute the attention of a whole sequence with a full visibility mask. Rotate by absolute positions."""
    length, heads, head_size = query.shape
    half = head_size // 2
    cos, sin = rotary.cos[:length, None], rotary.sin[:length, None]

    def turned(x):
        return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)

    position = torch.arange(length)
    back = position[:, None] - position
    visible = (back >= 0) & ((back < window) | (position < sink))
    group = heads // key.shape[1]
    query, key, value = turned(query), turned(key).repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * head_size**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value).flatten(1)


@pytest.mark.parametrize("chunk", [None, 16, 48])
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("window", [16, 21])
def test_a_life_in_which_blocks_are_given_back_as_they_leave_the_window(attention_class, window, sink, chunk, layout):
    # The prompts are shorter than, as long as, and longer than the window. Generation then continues far beyond it.
    shape = layout(4, 2, 16, windows=(window,), sink=sink)
    for prompt in (window - 5, window, window + 1, 130):
        total = prompt + 60
        query, key, value = shape.packed_qkv(total, seed=prompt)
        expected = dense(query, key, value, shape.rotary(), window, sink)

        pool = torch.full_like(shape.pool(20), torch.nan)
        attention, table = attention_class(shape, pool, sink), np.full(20, -1, np.int32)
        free, start, dropped, rows = list(np.random.default_rng(0).permutation(20)), 0, -(-sink // 16), []
        while start < total:
            length = min(start + (chunk or prompt), prompt) if start < prompt else start + 1
            for index in range(-(-start // 16), -(-length // 16)):
                table[index] = free.pop()
                pool[table[index]] = 0
            place = np.arange(start, length)
            step = PackedStep(
                token_ids=np.zeros(len(place), np.int32), positions=place.astype(np.int32),
                pool_slots=table[place // 16].astype(np.int64) * 16 + place % 16, slots=np.zeros(1, np.int32),
                query_starts=np.array([0, len(place)], np.int32), kv_lengths=np.array([length], np.int32),
                block_tables=table[None].copy(), num_contexts=int(start < prompt), logits_rows=np.zeros(0, np.int64))
            attention.plan(step)
            rows.append(attention.run(0, *(part[start:length].clone() for part in (query, key, value)),
                                      shape.rotary()))
            start = length
            while (dropped + 1) * 16 <= start - window + 1:       # the next query is at `start`
                pool[table[dropped]] = torch.nan
                free.insert(0, table[dropped])
                table[dropped] = -1
                dropped += 1
        assert len(free) >= 20 - (-(-sink // 16) + -(-window // 16) + 1)
        torch.testing.assert_close(torch.cat(rows), expected, atol=2e-5, rtol=2e-5)
