"""Norms, activations, sums and adapters that are recorded and run as a compiled step agree with torch in float32."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from batch_manager.adapter_values import AdapterPart
from batch_manager.attention.fp8 import FP8, Fp8Numbers
from batch_manager.attention.interface import LayerAttention, PackedStep
from batch_manager.decoding.slots import ADAPTER, SlotState
from batch_manager.handover import AdapterLoad
from batch_manager.layers.context import LayerContext
from batch_manager.layers.linear import Linear
from batch_manager.layers.recording import ANY_ROWS, LookedUp, RecordedAttention, Recording, Rows
from batch_manager.runtime.adapters.pool import LoraPool
from batch_manager.runtime.adapters.port import LoraPort
from batch_manager.runtime.forms.compiled.forward import CompiledForward
from batch_manager.runtime.forms.compiled.thread_governor import ThreadGovernor
from batch_manager.runtime.packing import ModelCall
from batch_manager.weights.source import DummyWeights
from tests.harness.adapters import content_of

pytestmark = pytest.mark.usefixtures("machine")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
POOL = (2, 1, 2, 1, 16, 16)


def run(recording, hidden):
    count = len(hidden)
    numbers = np.arange(count, dtype=np.int32)
    step = PackedStep(token_ids=numbers, positions=numbers[::-1].copy(), pool_slots=numbers.astype(np.int64),
                      slots=np.zeros(0, np.int32), query_starts=np.zeros(1, np.int32), kv_lengths=np.zeros(0, np.int32),
                      block_tables=np.zeros((0, 1), np.int32), num_contexts=0, logits_rows=np.zeros(0, np.int64))
    compiled = CompiledForward(recording, torch.zeros(POOL, dtype=hidden.dtype), 1, ThreadGovernor(2))
    return compiled.run(ModelCall(step), hidden.clone(), None, ())


def recorded(hidden, operate):
    recording = Recording(hidden.dtype, strides=[hidden.shape[1]])
    result = operate(Rows(recording, 0, 0, hidden.shape[1]))
    recording.result = result.register
    return run(recording, hidden)[:, : result.width]


def check(found, expected, dtype):
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected.float(), atol=max(rounding, 2e-6), rtol=max(rounding, 2e-6))


def hidden_states(width, dtype, count=70, scale=1.0):
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


@TYPES
@pytest.mark.parametrize("width", [1, 15, 16, 48, 100, 576])
def test_norms(width, dtype):
    x, weight, bias = hidden_states(width, dtype), torch.rand(width) + 0.5, torch.randn(width)
    wide = x.float()
    mean_square = wide.square().mean(1, keepdim=True)
    check(recorded(x, lambda rows: rows.normed(weight, None, 1e-5)), wide / (mean_square + 1e-5).sqrt() * weight, dtype)
    check(recorded(x, lambda rows: rows.normed(weight, None, 0.1, 1.0)),
          wide / (mean_square + 0.1).sqrt() * (weight + 1), dtype)
    check(recorded(x, lambda rows: rows.normed(weight, bias, 1e-5)),
          functional.layer_norm(wide, (width,), weight, bias, 1e-5), dtype)


@TYPES
def test_norms_of_heads(dtype):
    x, weight = hidden_states(96, dtype), torch.rand(24) + 0.5
    heads = x.float().view(-1, 4, 24)
    expected = heads / (heads.square().mean(2, keepdim=True) + 1e-6).sqrt() * weight
    check(recorded(x, lambda rows: rows.view(len(rows), -1, 24).normed(weight, None, 1e-6)), expected.flatten(1), dtype)
    middle = recorded(x, lambda rows: rows.view(len(rows), -1, 24).split_with_sizes([1, 2, 1], 1)[1].normed(
        weight, None, 1e-6))
    check(middle, expected[:, 1:3].flatten(1), dtype)


@TYPES
def test_norms_of_heads_with_weights_of_their_own(dtype):
    x, weight, bias = hidden_states(96, dtype), torch.rand(4, 24) + 0.5, torch.randn(24)
    expected = functional.layer_norm(x.float().view(-1, 4, 24), (24,), None, None, 1e-5) * weight + bias
    check(recorded(x, lambda rows: rows.view(len(rows), -1, 24).normed(weight, bias, 1e-5)), expected.flatten(1), dtype)


ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
               "gelu_new": lambda x: functional.gelu(x, approximate="tanh")}


@TYPES
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("width", [16, 48, 10, 77])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_activations(kind, width, scale, dtype):
    x = hidden_states(2 * width, dtype, scale=scale)
    gate, up = x.float().chunk(2, 1)
    check(recorded(x, lambda rows: rows.activated(kind, gated=True)) / scale,
          ACTIVATIONS[kind](gate) * up / scale, dtype)
    check(recorded(x, lambda rows: rows.activated(kind, gated=False)) / scale, ACTIVATIONS[kind](x.float()) / scale,
          dtype)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_what_is_not_a_number_stays_none(kind):
    x = hidden_states(64, torch.float32)
    x[3, 5], x[4, 40] = torch.nan, torch.nan
    found = recorded(x, lambda rows: rows.activated(kind, gated=False))
    assert torch.equal(found.isnan(), x.isnan())
    normed = recorded(x, lambda rows: rows.normed(torch.ones(64), None, 1e-5))
    assert torch.equal(normed.isnan().any(1), x.isnan().any(1)) and normed[3].isnan().all()


@TYPES
@pytest.mark.parametrize("width", [16, 50, 576])
def test_sums(width, dtype):
    x, table = hidden_states(width, dtype), hidden_states(width, dtype, count=80, scale=3.0)
    check(recorded(x, lambda rows: rows + rows), 2 * x.float(), dtype)
    positions = torch.arange(len(x) - 1, -1, -1)
    check(recorded(x, lambda rows: rows + LookedUp(table)), x.float() + table[positions].float(), dtype)


@TYPES
def test_keys_and_values_in_fp8_are_rounded_as_torch_rounds_them(dtype):
    """Every number of bfloat16, in heads that are no multiple of a vector; of float32, halfway and random ones."""
    count, size, scales = 656, 100, (1.0, 0.3)
    rows = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    if dtype == torch.float32:
        rows = torch.randint(-2**31, 2**31 - 1, (2**16,), dtype=torch.int32).view(torch.float32)
        numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        middles = (numbers[1:] + numbers[:-1]) / 2
        rows[:378] = torch.cat([middles, middles.nextafter(torch.zeros(1)), middles.nextafter(torch.full((1,), 500.0))])
    rows = torch.cat([rows, rows[: count * size - 2**16]]).view(count, 1, size).repeat(1, 3, 1)
    recording, pool = Recording(dtype, strides=[3 * size]), torch.zeros(41, 1, 2, 1, 16, size).to(FP8)
    how = LayerAttention(scale=1.0, key_scale=scales[0], value_scale=scales[1])
    parts = Rows(recording, 0, 0, 3 * size).view(ANY_ROWS, 3, size).split_with_sizes([1, 1, 1], 1)
    recording.result = RecordedAttention((1, 1, size), (how,), 0).run(0, *parts, None).register
    numbers = np.arange(count, dtype=np.int32)
    step = PackedStep(token_ids=numbers, positions=numbers, pool_slots=numbers.astype(np.int64),
                      slots=np.zeros(1, np.int32), query_starts=np.array([0, count], np.int32),
                      kv_lengths=np.array([count], np.int32), block_tables=np.arange(41, dtype=np.int32)[None],
                      num_contexts=1, logits_rows=np.zeros(0, np.int64))
    CompiledForward(recording, pool, 1, ThreadGovernor(2)).run(ModelCall(step), rows.flatten(1), None, ())
    found = pool[:, 0, :, 0].transpose(0, 1).reshape(2, count, size).transpose(0, 1)
    expected = Fp8Numbers(dtype, rows.device).rounded(rows[:, 1:], *scales)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_registers_share_memory_only_when_nobody_needs_them_any_more():
    """Registers of a compiled step share memory only after their last use.

    A register that is read by the last operation keeps its value, although many other registers come and go.
    """
    x = hidden_states(64, torch.float32)

    def operate(rows):
        first = kept = rows + rows
        for _ in range(20):
            kept = kept.activated("relu", gated=False) + first
        return kept + first

    expected = first = 2 * x
    for _ in range(20):
        expected = expected.relu() + first
    check(recorded(x, operate), expected + first, torch.float32)


def test_a_step_may_be_larger_than_those_before():
    weight = torch.rand(50) + 0.5
    recording = Recording(torch.float32, strides=[50])
    recording.result = Rows(recording, 0, 0, 50).normed(weight, None, 1e-5).activated("relu", gated=False).register
    compiled = CompiledForward(recording, torch.zeros(POOL), 1, ThreadGovernor(2))
    for count in (3, 1, 500, 2, 499):
        x = hidden_states(50, torch.float32, count)
        step = SimpleNamespace(positions=np.zeros(count), pool_slots=np.zeros(count), query_starts=np.zeros(1),
                               kv_lengths=np.zeros(0), block_tables=np.zeros((0, 1)), slots=[])
        found = compiled.run(ModelCall(step), x.clone(), None, ())
        check(found, functional.rms_norm(x, (50,), weight, 1e-5).relu(), torch.float32)


def test_where_there_is_no_memory_for_a_larger_step_smaller_ones_go_on(monkeypatch):
    weight = torch.rand(50) + 0.5
    recording = Recording(torch.float32, strides=[50])
    recording.result = Rows(recording, 0, 0, 50).normed(weight, None, 1e-5).activated("relu", gated=False).register
    compiled = CompiledForward(recording, torch.zeros(POOL), 1, ThreadGovernor(2))
    compiled._make_room(3)
    registers = compiled._registers.copy()

    def no_memory(num_bytes):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("batch_manager.runtime.forms.compiled.forward.allocate", no_memory)
        with pytest.raises(MemoryError):
            compiled._make_room(500)
    assert compiled._capacity == 3 and (compiled._registers == registers).all()


CPU, SIZES, INPUTS = torch.device("cpu"), (72, 530, 33), 672
LENGTHS = [1, 1, 40, 3, 1, 70, 2, 5]                       # rows of each sequence
ADAPTERS = [None, 0, 1, None, 2, 0, 0, 2]                  # of each sequence
RANKS = [(1, 0, 5), (16, 64, 0), (7, 8, 9)]                # of each adapter in q, k, v


@TYPES
@pytest.mark.parametrize("adds", [False, True], ids=["new", "added"])
def test_adapters_of_a_layer(dtype, adds):
    """On rows in any segments. No page of another adapter is read."""
    torch.manual_seed(0)
    port = LoraPort()
    context = LayerContext(device=CPU, dtype=dtype, compiled_step=True, adapters=port)
    layer = Linear(DummyWeights(0, CPU, dtype), context, [f"layers.0.attn.{name}_proj" for name in "qkv"], INPUTS,
                   SIZES)
    pool = LoraPool(port.projections, port.entries, 100, dtype, CPU)
    pool.pages.fill_(torch.nan)
    slots, free, factors = SlotState(8, CPU), np.random.default_rng(0).permutation(100).tolist(), []
    for ranks in RANKS:
        pages = tuple(free.pop() for _ in range(max(ranks)))
        factors.append([(torch.randn(rank, INPUTS) / 25, torch.randn(size, rank)) for rank, size in zip(ranks, SIZES)])
        parts = tuple(AdapterPart(f"attn_{name}", 0, a.numpy(), b.numpy())
                      for name, (a, b) in zip("qkv", factors[-1]) if len(a))
        pool.load(AdapterLoad(0, pages, content_of(parts)))
        for slot, adapter in enumerate(ADAPTERS):
            if adapter == len(factors) - 1:
                slots.adapters[slot], slots.features[slot] = pages, ADAPTER
    port.bind(pool, slots)

    x = torch.randn(sum(LENGTHS), INPUTS).to(dtype)
    recording = Recording(dtype, strides=[INPUTS])
    rows = Rows(recording, 0, 0, INPUTS)
    if adds:                                               # to another product, in the columns of a wider register
        twice = Linear(DummyWeights(1, CPU, dtype), LayerContext(device=CPU, dtype=dtype, compiled_step=True),
                       ["base"], INPUTS, [sum(SIZES)])
        result = layer.add_to(twice(rows), rows)
    else:
        result = layer(rows)
    recording.result = result.register
    starts = np.cumsum([0, *LENGTHS]).astype(np.int32)
    numbers = np.arange(len(x), dtype=np.int32)
    step = PackedStep(token_ids=numbers, positions=numbers, pool_slots=numbers.astype(np.int64),
                      slots=np.arange(8, dtype=np.int32), query_starts=starts, kv_lengths=np.zeros(0, np.int32),
                      block_tables=np.zeros((0, 1), np.int32), num_contexts=0, logits_rows=np.zeros(0, np.int64))
    found = {}
    for served in (port, None):
        forward = CompiledForward(recording, torch.zeros((2, 1, 2, 1, 16, 16), dtype=dtype), 1, ThreadGovernor(2),
                                  served)
        forward._step.cache = None                         # no sequence attends: there are products alone
        found[served] = forward.run(ModelCall(step), x.clone(), None, ())[:, : sum(SIZES)]
    for first, end, adapter in zip(starts[:-1], starts[1:], ADAPTERS):
        base, adapted, own = found[None][first:end], found[port][first:end], x[first:end].double()
        if adapter is None:
            assert torch.equal(adapted, base)
            continue
        added = torch.cat([own @ a.to(dtype).double().T @ b.to(dtype).double().T for a, b in factors[adapter]], 1)
        expected, rounding = base.double() + added, 3 * torch.finfo(dtype).eps
        torch.testing.assert_close(adapted.double(), expected, atol=max(rounding, 1e-5), rtol=max(rounding, 1e-5))
        assert (adapted - base).abs().max() > 0.5
