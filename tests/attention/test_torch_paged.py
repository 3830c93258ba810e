"""Attention in torch and compiled attention agree with the oracles of the kernels, in results and in the pool.

The pool is full of random numbers before each step, so that reading or writing a wrong block is noticed.
"""

from types import SimpleNamespace

import pytest
import torch

from batch_manager.attention.registry import make_attention

STEPS = {
    "one context": ([(0, 5)], []),
    "contexts from the first token on": ([(0, 1), (0, 16), (0, 63), (0, 64), (0, 65), (0, 130)], []),
    "later chunks": ([(16, 16), (32, 1), (48, 70), (128, 64)], []),
    "one sequence generating": ([], [0]),
    "generation": ([], [0, 1, 14, 15, 16, 17, 31, 40, 100, 3]),
    "both": ([(0, 20), (32, 33)], [5, 47, 48, 90]),
}
HEADS = {"grouped": (6, 2, 16), "one key head": (4, 1, 8), "as many key heads": (3, 3, 24)}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def check(attention_class, layout, step, by_oracle, rotary):
    pool = layout.pool(72)
    expected_pool = pool.clone()
    attention = attention_class(layout, pool, sink=layout.sink)
    attention.plan(step)
    for layer in range(layout.num_layers):
        query, key, value = layout.packed_qkv(step.num_tokens, seed=layer)
        expected = by_oracle(layout, expected_pool, layer, step, query, key, value, rotary)
        result = attention.run(layer, query, key, value, rotary)
        torch.testing.assert_close(result, expected, atol=TOLERANCE[layout.dtype], rtol=TOLERANCE[layout.dtype])
    # The step's own tokens agree within the tolerance, and all else is as it was.
    block, offset = (torch.from_numpy(found) for found in divmod(step.pool_slots, layout.tokens_per_block))
    written = expected_pool[block, ..., offset, :]
    torch.testing.assert_close(pool[block, ..., offset, :], written, atol=TOLERANCE[layout.dtype],
                               rtol=TOLERANCE[layout.dtype])
    pool[block, ..., offset, :] = written
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_kind_of_step_equals_the_oracles(attention_class, case, heads, dtype, layout, step_of, by_oracle):
    shape = layout(*HEADS[heads], windows=(None, 10, 70), dtype=dtype)
    check(attention_class, shape, step_of(*STEPS[case], 64, 16), by_oracle, shape.rotary())


WIDE_HEADS = {"14 of 2, 64": (14, 2, 64), "3 of 1, 32": (3, 1, 32), "40 of 1, 96": (40, 1, 96),
              "4 of 4, 128": (4, 4, 128), "20 of 2, 256": (20, 2, 256)}


@pytest.mark.parametrize("heads", WIDE_HEADS)
@pytest.mark.parametrize("tokens_per_block", [16, 32, 64, 256])
def test_wide_heads_in_bfloat16(attention_class, heads, tokens_per_block, layout, step_of, by_oracle):
    """In bfloat16, attention agrees with the oracles for heads of 32 to 256 entries and blocks of 16 to 256 tokens.

    A processor's matrix unit computes such heads in tiles if the block size is a multiple of 32.
    """
    shape = layout(*WIDE_HEADS[heads], windows=(None, 10, 70, None), softcaps=(None, None, 4.0, 1.5),
                   dtype=torch.bfloat16, tokens_per_block=tokens_per_block)
    blocks = {16: 64, 32: 40, 64: 24, 256: 12}[tokens_per_block]
    starts = [start // tokens_per_block * tokens_per_block for start in (64, 128)]
    step = step_of([(0, 5), (0, 130), (starts[0], 70), (starts[1], 1)], [0, 15, 40, 100, 3, 257], blocks,
                   tokens_per_block)
    check(attention_class, shape, step, by_oracle, shape.rotary())


@pytest.mark.parametrize("heads", [(6, 2, 16), (14, 2, 64), (40, 1, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_long_sequences_that_are_cut_into_parts(attention_class, heads, dtype, layout, step_of, by_oracle):
    shape = layout(*heads, windows=(None, 600), dtype=dtype, tokens_per_block=64)
    check(attention_class, shape, step_of([(0, 40)], [510, 511, 512, 1100, 1500], 72, 64), by_oracle,
          shape.rotary(2048))


@pytest.mark.parametrize("sink", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sink_tokens_are_seen_from_behind_every_window(attention_class, sink, dtype, layout, step_of, by_oracle):
    shape = layout(14, 2, 64, windows=(10, 70), dtype=dtype, tokens_per_block=32, sink=sink)
    step = step_of([(0, 5), (0, 130), (96, 70), (128, 1)], [0, 40, 100, 257], 40, 32)
    check(attention_class, shape, step, by_oracle, shape.rotary())


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 100, 500])
def test_windows_of_every_size(attention_class, window, layout, step_of, by_oracle):
    shape = layout(4, 2, 16, windows=(window,))
    contexts = [(0, 3), (0, 64), (0, 150), (48, 100), (112, 20)]
    step = step_of(contexts, [0, 14, 15, 16, 63, 64, 65, 99, 130], 72, 16)
    check(attention_class, shape, step, by_oracle, shape.rotary())


@pytest.mark.parametrize("tokens_per_block", [16, 32, 64])
@pytest.mark.parametrize("consecutive", [False, True])
def test_block_sizes_and_orders(attention_class, tokens_per_block, consecutive, layout, step_of, by_oracle):
    shape = layout(4, 2, 16, windows=(None, 40), tokens_per_block=tokens_per_block)
    step = step_of([(0, 70), (64, 10)], [1, 63, 64, 65], 64, tokens_per_block, consecutive)
    check(attention_class, shape, step, by_oracle, shape.rotary())


def test_lengths_far_apart_are_put_into_several_groups(attention_class, layout, step_of, by_oracle, monkeypatch):
    monkeypatch.setattr("batch_manager.attention.torch_paged.MAX_PADDED_BYTES", 20_000)
    shape = layout(4, 2, 16, windows=(None,))
    step = step_of([(0, 4)], [200, 1, 90, 2, 100, 3, 210, 4], 64, 16)
    check(attention_class, shape, step, by_oracle, shape.rotary())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scale_and_cap_of_each_layer(attention_class, dtype, layout, step_of, by_oracle):
    shape = layout(6, 2, 16, windows=(None, 10, 70, None), scale=0.4, softcaps=(None, 1.5, 4.0, 50.0), dtype=dtype)
    assert [by.softcap for by in shape.attention] == [None, 1.5, 4.0, 50.0]
    step = step_of([(0, 70), (16, 16), (32, 1)], [0, 15, 40, 100, 3], 64, 16)
    check(attention_class, shape, step, by_oracle, shape.rotary())


@pytest.mark.parametrize("size", [2, 10])
def test_rotation_of_a_part_of_each_head(attention_class, size, layout, step_of, by_oracle):
    shape = layout(6, 2, 16, windows=(None, 10))
    check(attention_class, shape, step_of([(0, 20), (32, 33)], [5, 47], 64, 16), by_oracle, shape.rotary(size=size))


def test_a_model_without_rotation(attention_class, layout, step_of, by_oracle):
    step = step_of([(0, 9), (16, 3)], [20, 30], 64, 16)
    check(attention_class, layout(3, 3, 16, windows=(None,)), step, by_oracle, None)


def test_tensors_that_do_not_lie_side_by_side(attention_class, layout, step_of, by_oracle):
    shape, step = layout(4, 2, 16, windows=(None,)), step_of([(0, 9)], [20], 64, 16)
    query, key, value = (part.clone() for part in shape.packed_qkv(step.num_tokens))
    pool = shape.pool(64)
    expected = by_oracle(shape, pool.clone(), 0, step, query, key, value, shape.rotary())
    attention = attention_class(shape, pool)
    attention.plan(step)
    torch.testing.assert_close(attention.run(0, query, key, value, shape.rotary()), expected, atol=2e-5, rtol=2e-5)


def test_two_rotary_tables_in_one_step(attention_class, layout, step_of, by_oracle):
    shape, step = layout(4, 2, 16, windows=(None, None)), step_of([(0, 9)], [20], 64, 16)
    one = shape.rotary()
    pool, expected_pool = shape.pool(64), shape.pool(64)
    attention = attention_class(shape, pool)
    attention.plan(step)
    for layer, rotary in enumerate([one, SimpleNamespace(cos=one.sin, sin=one.cos)]):
        query, key, value = shape.packed_qkv(step.num_tokens)
        expected = by_oracle(shape, expected_pool, layer, step, query, key, value, rotary)
        torch.testing.assert_close(attention.run(layer, query, key, value, rotary), expected, atol=2e-5, rtol=2e-5)


def test_blocks_of_others_are_neither_read_nor_written(attention_class, layout, step_of):
    shape, step = layout(4, 2, 16, windows=(None, 20)), step_of([(0, 9), (32, 20)], [20, 3, 100], 64, 16)
    pool = shape.pool(64)
    own = {int(block) for row, length in zip(step.block_tables, step.kv_lengths) for block in row[: -(-length // 16)]}
    others = [block for block in range(64) if block not in own]
    pool[others] = torch.nan
    attention = attention_class(shape, pool)
    attention.plan(step)
    for layer in range(2):
        assert attention.run(layer, *shape.packed_qkv(step.num_tokens), shape.rotary()).isfinite().all()
    assert pool[others].isnan().all()


def test_the_registry_takes_torch_on_a_cpu_and_says_so(layout, caplog):
    shape = layout(4, 2, 16, windows=(None,))
    with caplog.at_level("INFO", logger="batch_manager.attention.registry"):
        attention = make_attention(shape, shape.pool(4))
    assert attention.dispatch == "torch" and "torch" in caplog.text
