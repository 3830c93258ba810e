"""With ALiBi slopes and sink logits, all CPU attentions agree with the oracles and with a dense attention in this file.

Sink logits are refused if the layer has none, and required if it has.
"""

import dataclasses

import numpy as np
import pytest
import torch

from batch_manager import ConfigError
from batch_manager.attention.interface import LayerAttention, PackedStep
from batch_manager.attention.torch_fixed_tiles import FixedTileAttention
from batch_manager.layers.recording import ANY_ROWS, NotRecordableError, RecordedAttention, Rows
from batch_manager.runtime.forms.fixed.recording import LaunchRecording

SLOPES = (0.7, 0.25, 0.09, 0.0, -0.003, 1.0)
ROUNDED = tuple(torch.tensor(SLOPES).bfloat16().tolist())
SINK_LOGITS = (0.5, -30.0, 2.0, 0.0, 30.0, -1.0)
KINDS = {
    "slopes": {"slopes": SLOPES}, "slopes of bfloat16": {"slopes": ROUNDED, "slope_factor": 0.3},
    "sink logits": {"sink_logits": SINK_LOGITS},
    "both": {"slopes": SLOPES, "sink_logits": SINK_LOGITS},
    "both of bfloat16": {"slopes": ROUNDED, "slope_factor": 0.3, "sink_logits": SINK_LOGITS},
}
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(6, 2, 16), (6, 1, 8), (6, 6, 24)], ids=["grouped", "one key head", "as many"])
@pytest.mark.parametrize("dtype, sink", [(torch.float32, 0), (torch.float32, 17), (torch.bfloat16, 17)], ids=str)
def test_every_kind_of_step_equals_the_oracles(implementation, kind, heads, dtype, sink, layout, step_of, by_oracle,
                                               without_what_left):
    shape = layout(*heads, windows=(10, 70), softcaps=(4.0, None), dtype=dtype, sink=sink, **KINDS[kind])
    step = step_of([(0, 20), (0, 130), (32, 33), (128, 200)], [0, 5, 47, 48, 300], 72, 16)
    pool = shape.pool(72)
    expected_pool = pool.clone()
    without_what_left(shape, step, [pool, expected_pool])
    attention = implementation(shape, pool, sink)
    attention.plan(step)
    for layer in range(2):
        query, key, value = shape.packed_qkv(step.num_tokens, seed=layer)
        expected = by_oracle(shape, expected_pool, layer, step, query, key, value, shape.rotary())
        result = attention.run(layer, query, key, value, shape.rotary(), **shape.more)
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def dense(query, key, value, how, sink, sink_logits):
    """Compute the attention of a whole sequence in float64, from a full score matrix and a full visibility mask.

    Returns the result in float32.

    how   the LayerAttention of the layer
    """
    length, heads = query.shape[:2]
    position = torch.arange(length)
    back = position[:, None] - position
    visible = back >= 0
    if how.window is not None:
        visible &= (back < how.window) | (position < sink)
    key, value = (rows.repeat_interleave(heads // rows.shape[1], 1).double() for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * how.scale
    if how.softcap is not None:
        scores = how.softcap * (scores / how.softcap).tanh()
    for head in range(heads):
        slope = torch.tensor(0.0 if how.alibi_slopes is None else how.alibi_slopes[head])
        if how.alibi_bfloat16_factor is None:
            scores[head] -= slope.double() * back
        else:                # a bias by the key's position; softmax ignores terms that all keys of a row have in common
            added = (slope.bfloat16() * position.bfloat16()).double() * how.alibi_bfloat16_factor
            scores[head] += added - added[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + sink_logits.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, value).flatten(1).float()


@pytest.mark.parametrize("seed", range(12))
def test_a_life_in_random_chunks_equals_dense_attention(implementation, seed, layout):
    draw = np.random.default_rng(seed)
    heads, kv_heads = [(6, 2), (4, 4), (5, 1), (8, 2)][seed % 4]
    factor = [None, 0.4, None][seed % 3]
    slopes = torch.tensor(draw.uniform(-0.1, 0.6, heads))
    slopes = (slopes.bfloat16() if factor else slopes).tolist()
    length, block = int(draw.integers(60, 330)), 16
    shape = layout(heads, kv_heads, 16, windows=(None, int(draw.integers(1, 90))),
                   softcaps=(None, 3.0)[:: 1 if seed % 2 else -1], sink=int(draw.integers(0, 20)),
                   slopes=None if seed % 5 == 4 else tuple(slopes), slope_factor=None if seed % 5 == 4 else factor,
                   sink_logits=tuple(draw.normal(0, 2, heads).tolist()) if seed % 2 else None)
    table = draw.permutation(-(-length // block)).astype(np.int32)
    pool = shape.pool(len(table))
    attention = implementation(shape, pool, shape.sink)
    rows, inputs = [[], []], [shape.packed_qkv(length, seed=seed + layer) for layer in (0, 1)]
    start = 0
    while start < length:
        is_context = start < length // 2
        stop = min(start + int(draw.integers(1, 150)), length) if is_context else start + 1
        place = np.arange(start, stop)
        attention.plan(PackedStep(
            token_ids=np.zeros(len(place), np.int32), positions=place.astype(np.int32),
            pool_slots=table[place // block].astype(np.int64) * block + place % block, slots=np.zeros(1, np.int32),
            query_starts=np.array([0, len(place)], np.int32), kv_lengths=np.array([stop], np.int32),
            block_tables=table[None], num_contexts=int(is_context), logits_rows=np.zeros(0, np.int64)))
        for layer, qkv in enumerate(inputs):
            rows[layer].append(attention.run(layer, *(part[start:stop].clone() for part in qkv), None, **shape.more))
        start = stop
    for layer, qkv in enumerate(inputs):
        expected = dense(*qkv, shape.attention[layer], shape.sink, shape.more.get("sink_logits"))
        torch.testing.assert_close(torch.cat(rows[layer]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_prompt_have_the_same_bits_whole_and_one_by_one(kind, layout, step_of):
    length, shape = 150, layout(6, 2, 16, windows=(None, 30), **KINDS[kind])
    query, key, value = shape.packed_qkv(length)

    def attend(cuts):
        attention = FixedTileAttention(shape, shape.pool(20), shape.sink)
        rows = [[] for _ in range(shape.num_layers)]
        for start, stop in zip([0, *cuts], cuts):
            step = step_of([(start, stop - start)], [], 20, 16) if stop - start > 1 else step_of([], [start], 20, 16)
            attention.plan(step)
            for layer, of_layer in enumerate(rows):
                part = [tensor[start:stop].clone() for tensor in (query, key, value)]
                of_layer.append(attention.run(layer, *part, shape.rotary(), **shape.more))
        return [torch.cat(of_layer) for of_layer in rows]

    whole = attend([length])
    for cuts in ([*range(1, length + 1)], [7, 8, 71, 72, 150]):
        for alike, expected in zip(attend(cuts), whole, strict=True):
            assert torch.equal(alike, expected)


@pytest.mark.parametrize("sink_logit", [-torch.inf, -200.0, 200.0])
def test_sink_logits_far_from_all_scores(implementation, sink_logit, layout, step_of):
    shape, step = layout(6, 2, 16, windows=(None,)), step_of([(0, 20)], [40], 20, 16)
    results = []
    for logits in (None, (sink_logit,) * 6):
        shape = dataclasses.replace(shape, sink_logits=logits)
        attention = implementation(shape, shape.pool(20))
        attention.plan(step)
        results.append(attention.run(0, *shape.packed_qkv(step.num_tokens), None, **shape.more))
    torch.testing.assert_close(results[1], results[0] * (sink_logit < 0))


@pytest.mark.parametrize("has_sink_logits", [True, False])
def test_sink_logits_that_the_layer_does_not_speak_of_are_refused(implementation, has_sink_logits, layout, step_of):
    shape, step = layout(6, 2, 16, windows=(None,)), step_of([(0, 20)], [], 20, 16)
    shape = dataclasses.replace(shape, sink_logits=SINK_LOGITS if has_sink_logits else None)
    attention = implementation(shape, shape.pool(20))
    attention.plan(step)
    # The step cannot be compiled. Attention in torch runs instead, and raises the error.
    with pytest.raises((ConfigError, NotRecordableError), match="attention.* called with(out)? sink_logits"):
        attention.run(0, *shape.packed_qkv(step.num_tokens), None,
                      sink_logits=None if has_sink_logits else torch.zeros(6))


@pytest.mark.parametrize("kind", KINDS)
def test_launches_are_given_the_sink_logits(kind, layout):
    shape = layout(6, 2, 16, windows=(None,), **KINDS[kind])
    attention, launches = RecordedAttention((6, 2, 16), shape.attention, 0), LaunchRecording(torch.float32)
    heads = launches.incoming(160).view(ANY_ROWS, -1, 16).split_with_sizes([6, 2, 2], 1)
    given = shape.more.get("sink_logits")
    assert isinstance(attention.run(0, *heads, None, **shape.more), Rows)
    assert launches.operations[0].more.get("sink_logits") is given or given is not None


@pytest.mark.parametrize("wrong, name", [
    ({"alibi_slopes": (0.5, float("inf"))}, "alibi_slopes"), ({"alibi_slopes": [0.5]}, "alibi_slopes"),
    ({"alibi_slopes": ()}, "alibi_slopes"), ({"alibi_slopes": ("a",)}, "alibi_slopes"),
    ({"alibi_bfloat16_factor": 0.5}, "alibi_bfloat16_factor"),
    ({"alibi_slopes": (0.5,), "alibi_bfloat16_factor": 0.0}, "alibi_bfloat16_factor"),
    ({"has_sink_logits": None}, "has_sink_logits"),
])
def test_values_out_of_range_are_refused_by_name(wrong, name):
    with pytest.raises(ConfigError, match=f"LayerAttention.{name} is"):
        LayerAttention(scale=1.0, **wrong)
