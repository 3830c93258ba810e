"""Deterministic attention agrees with the oracles. A token's result has the same bits for all ways to chunk its prompt.

Blocks that no window contains any more hold NaN, so that a result is NaN if such a block is read.
"""

import numpy as np
import pytest
import torch

from batch_manager.attention.registry import make_attention
from batch_manager.attention.torch_fixed_tiles import FixedTileAttention

STEPS = {
    "contexts from the first token on": ([(0, 1), (0, 16), (0, 63), (0, 64), (0, 65), (0, 130)], []),
    "later chunks": ([(16, 16), (32, 1), (48, 70), (128, 64)], []),
    "generation": ([], [0, 1, 14, 15, 16, 17, 31, 40, 100, 3]),
    "both": ([(0, 20), (32, 33)], [5, 47, 48, 90]),
}
HEADS = {"grouped": (6, 2, 16), "one key head": (4, 1, 8), "as many key heads": (3, 3, 24),
         "a group larger than a tile": (80, 1, 8)}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def check(layout, step, by_oracle, pool, expected_pool, rotary=None):
    rotary = layout.rotary() if rotary is None else rotary
    attention = FixedTileAttention(layout, pool, layout.sink)
    attention.plan(step)
    for layer in range(layout.num_layers):
        query, key, value = layout.packed_qkv(step.num_tokens, seed=layer)
        expected = by_oracle(layout, expected_pool, layer, step, query, key, value, rotary)
        result = attention.run(layer, query, key, value, rotary)
        torch.testing.assert_close(result, expected, atol=TOLERANCE[layout.dtype], rtol=TOLERANCE[layout.dtype])


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_kind_of_step_equals_the_oracles(case, heads, dtype, layout, step_of, by_oracle):
    shape = layout(*HEADS[heads], windows=(None, 10, 70), dtype=dtype)
    pool = shape.pool(72)
    check(shape, step_of(*STEPS[case], 64, 16), by_oracle, pool, pool.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scale_and_cap_of_each_layer(dtype, layout, step_of, by_oracle):
    shape = layout(6, 2, 16, windows=(None, 10, 70, None), scale=0.4, softcaps=(None, 1.5, 4.0, 50.0), dtype=dtype)
    pool = shape.pool(72)
    check(shape, step_of([(0, 70), (16, 16), (32, 1)], [0, 15, 40, 100, 3], 64, 16), by_oracle, pool, pool.clone())


@pytest.mark.parametrize("size", [2, 10])
def test_rotation_of_a_part_of_each_head(size, layout, step_of, by_oracle):
    shape = layout(6, 2, 16, windows=(None, 10))
    pool = shape.pool(72)
    check(shape, step_of([(0, 20), (32, 33)], [5, 47], 64, 16), by_oracle, pool, pool.clone(), shape.rotary(size=size))


@pytest.mark.parametrize("tokens_per_block", [8, 32, 64, 128])
def test_blocks_of_every_size(tokens_per_block, layout, step_of, by_oracle):
    shape = layout(4, 2, 16, windows=(None, 50), tokens_per_block=tokens_per_block)
    pool = shape.pool(80)
    check(shape, step_of([(0, 200), (tokens_per_block, 3)], [0, 130, 77], 80, tokens_per_block), by_oracle, pool,
          pool.clone())


@pytest.mark.parametrize("stale", [-1, None, 2**31 - 1], ids=["none", "still there", "nonsense"])
@pytest.mark.parametrize("sink", [0, 1, 17])
@pytest.mark.parametrize("window", [1, 16, 17, 40, 64, 200])
def test_what_was_given_back_is_not_read(window, sink, stale, layout, step_of, by_oracle, without_what_left):
    shape = layout(4, 2, 16, windows=(window,), sink=sink)
    contexts = [(0, 3), (0, window), (0, window + 1), (0, 150), (48, 100), (112, 20), (144, 1)]
    step = step_of(contexts, [0, 14, 15, 16, 63, 64, window - 1, window, 99, 130], 125, 16)
    pool = shape.pool(125)
    expected_pool = pool.clone()
    without_what_left(shape, step, [pool, expected_pool], stale)
    check(shape, step, by_oracle, pool, expected_pool)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_of_a_prompt_have_the_same_bits_whole_and_one_by_one(softcap, layout, step_of):
    length, shape = 150, layout(6, 2, 16, windows=(None, 30), softcaps=(softcap, softcap))
    query, key, value = shape.packed_qkv(length)

    def attend(cuts):
        """Return the results [tokens, ...] of each layer, computed in steps that end at the positions `cuts`.

        A step of one token is a generation step. A longer step is a chunk.
        """
        pool, rows = shape.pool(20), [[], []]
        attention = make_attention(shape, pool, deterministic=True)
        for start, stop in zip([0, *cuts], cuts):
            step = step_of([(start, stop - start)], [], 20, 16) if stop - start > 1 else step_of([], [start], 20, 16)
            attention.plan(step)
            for layer, of_layer in enumerate(rows):
                part = [tensor[start:stop].clone() for tensor in (query, key, value)]
                of_layer.append(attention.run(layer, *part, shape.rotary()))
        return [torch.cat(of_layer) for of_layer in rows]

    whole = attend([length])
    for cuts in ([*range(1, length + 1)], [7, 8, 71, 72, 150], [*np.arange(16, 150, 16), 150], [149, 150]):
        for alike, expected in zip(attend([int(cut) for cut in cuts]), whole, strict=True):
            assert torch.equal(alike, expected)
