"""Each function of the compiled step gives a row the same bits alone, in steps of any size, in chunks, on any threads.

Every instruction set has its own bits. Attention also has the same bits for any size of blocks, and over keys and
values in FP8 as over the same numbers in a wider type.
"""

from functools import partial

import numpy as np
import pytest
import torch

from batch_manager.attention.fp8 import FP8
from batch_manager.attention.interface import LayerAttention, PackedStep
from batch_manager.layers.recording import ANY_ROWS, LookedUp, RecordedAttention, Recording, Rows
from batch_manager.runtime.forms.compiled.forward import CompiledForward
from batch_manager.runtime.forms.compiled.thread_governor import ThreadGovernor
from batch_manager.runtime.packing import ModelCall
from batch_manager.triton_kernels.cpu.native.matrix import PackedMatrix, QuantisedMatrix, QuantisedPanels

from .test_quantised_products import random_rows

pytestmark = pytest.mark.usefixtures("machine")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROWS = 100
PARTS = ((1,), (2, 1, 3), (5, 7, 33), (97, 3))             # numbers of rows of consecutive steps, repeated


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step_of(positions, slots, starts, tables):
    count = len(tables)
    return PackedStep(token_ids=positions, positions=positions, pool_slots=slots,
                      slots=np.arange(count, dtype=np.int32), query_starts=starts,
                      kv_lengths=np.zeros(count, np.int32), block_tables=tables, num_contexts=count,
                      logits_rows=np.zeros(0, np.int64))


def recorded(operate, x, first, threads):
    """Return the result of `operate` for rows `x`, at the positions from `first` on, without attention."""
    recording = Recording(x.dtype, strides=[x.shape[1]])
    result = operate(Rows(recording, 0, 0, x.shape[1]))
    recording.result = result.register
    forward = CompiledForward(recording, torch.zeros((1, 1, 2, 1, 16, 16), dtype=x.dtype), 1, ThreadGovernor(threads))
    positions = np.arange(first, first + len(x), dtype=np.int32)
    step = step_of(positions, np.zeros(len(x), np.int64), np.zeros(1, np.int32), np.zeros((0, 1), np.int32))
    return forward.run(ModelCall(step), x.clone(), None, ())[:, : result.width]


def operations(dtype):
    """Return name -> (width of a row, function that records operations on Rows)."""
    weight, table = torch.rand(77) + 0.5, random(ROWS, 77, seed=1, dtype=dtype)
    return {
        "rms norm": (77, lambda rows: rows.normed(weight, None, 1e-5, 1.0)),
        "layer norm": (77, lambda rows: rows.normed(weight, weight, 1e-5)),
        "norm of heads": (77, lambda rows: rows.view(ANY_ROWS, -1, 11).normed(weight[:11], None, 1e-5)),
        "sum": (77, lambda rows: rows + rows), "lookup": (77, lambda rows: rows + LookedUp(table)),
        **{kind: (154, lambda rows, kind=kind: rows.activated(kind, gated=True))
           for kind in ("silu", "gelu", "gelu_new", "relu")}}


def products(dtype):
    """Return name -> (number of inputs, function of rows, index of the first one, and threads)."""
    found = {}
    for inputs, outputs in ((576, 200), (100, 50), (33, 17)):
        matrix = PackedMatrix(random(outputs, inputs, dtype=dtype), random(outputs, seed=1, dtype=dtype), True)
        residual = random(ROWS, outputs, seed=3, dtype=dtype)
        found |= {f"{outputs} x {inputs}": (inputs, lambda x, first, threads, m=matrix: m.multiply(
                      x, torch.float32, threads)),
                  f"{outputs} x {inputs} added": (inputs, lambda x, first, threads, m=matrix, r=residual: m._run(
                      x, r[first : first + len(x)].clone(), adds=True, threads=threads)),
                  f"largest of {outputs} x {inputs}": (inputs, lambda x, first, threads, m=matrix: torch.stack(
                      [each.double() for each in m.largest(x, threads)], 1))}
    for kind, in_bytes in (("Q4_0", False), ("Q6_K", False), ("Q6_K", True)):
        panels = QuantisedPanels([(kind, 50)], 512, [(np.arange(50), random_rows(kind, 50, 512))])
        matrix = QuantisedMatrix(panels, dtype, has_byte_rows=in_bytes)
        found[kind, in_bytes] = 512, lambda x, first, threads, m=matrix: m.multiply(x, None, threads)
    return found


@TYPES
def test_rowwise_operations_and_products(dtype):
    functions = products(dtype) | {name: (width, partial(recorded, operate))
                                   for name, (width, operate) in operations(dtype).items()}
    wrong = []
    for name, (width, function) in functions.items():
        x = random(ROWS, width, seed=2, dtype=dtype)
        expected = function(x, 0, 1)
        for threads, parts in enumerate(PARTS, 1):
            first = number = 0
            while first < ROWS:
                count = min(parts[number % len(parts)], ROWS - first)
                if not torch.equal(function(x[first : first + count], first, threads), expected[first : first + count]):
                    wrong.append((name, threads, first, count))
                first, number = first + count, number + 1
    assert wrong == []


LENGTHS = (560, 90)                                        # tokens of two sequences; a part has 512 keys
WHOLE = [[(0, 0, 560), (1, 0, 90)]]
STEPS = [[(0, 0, 100)], [(1, 0, 1), (0, 100, 405)], [(1, 1, 70), (0, 505, 12)],
         *([(0, 517 + i, 1), (1, 71 + i, 1)] for i in range(19)), [(0, 536, 2)], [(0, 538, 22)]]
KINDS = {
    "plain": LayerAttention(scale=0.3), "window": LayerAttention(scale=0.3, window=75),
    "softcap": LayerAttention(scale=0.3, softcap=2.0),
    "slopes": LayerAttention(scale=0.3, alibi_slopes=(0.3, -0.1, 0.01, 0.2, 0.1, 0.05)),
    "sink logits": LayerAttention(scale=0.3, has_sink_logits=True)}


def attended(dtype, heads, how, steps, block, threads, sink, cached=None):
    """Return the attention of all tokens of both sequences [tokens, width], computed in these steps.

    Keys and values are numbers of FP8.

    steps    of (sequence, first token, number of tokens)
    cached   type of the keys and values in the pool; None: dtype
    """
    query_heads, kv_heads, size = heads
    width, blocks = (query_heads + 2 * kv_heads) * size, [-(-length // block) for length in LENGTHS]
    given = [random(length, width, seed=4 + i, dtype=dtype) for i, length in enumerate(LENGTHS)]
    for rows in given:
        rows[:, query_heads * size :] = rows[:, query_heads * size :].to(FP8).to(dtype)
    found = [torch.full((length, query_heads * size), torch.nan, dtype=dtype) for length in LENGTHS]
    pool = torch.full((sum(blocks), 1, 2, kv_heads, block, size), torch.nan).to(cached or dtype)
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    tables = np.zeros((2, max(blocks)), np.int32)
    tables[0, : blocks[0]], tables[1, : blocks[1]] = order[: blocks[0]], order[blocks[0] :]
    recording = Recording(dtype, strides=[width])
    parts = Rows(recording, 0, 0, width).view(ANY_ROWS, -1, size).split_with_sizes([query_heads, kv_heads, kv_heads], 1)
    recording.result = RecordedAttention(heads, (how,), sink).run(
        0, *parts, None, torch.linspace(-1, 1, query_heads) if how.has_sink_logits else None).register
    forward = CompiledForward(recording, pool, query_heads, ThreadGovernor(threads), is_uniform=True)
    for step in steps:
        positions = [np.arange(first, first + count, dtype=np.int32) for _, first, count in step]
        slots = [tables[sequence][own // block].astype(np.int64) * block + own % block
                 for (sequence, _, _), own in zip(step, positions)]
        packed = step_of(np.concatenate(positions), np.concatenate(slots), np.cumsum(
            [0, *(count for _, _, count in step)], dtype=np.int32), tables[[sequence for sequence, _, _ in step]])
        x = torch.cat([given[sequence][first : first + count] for sequence, first, count in step])
        result, at = forward.run(ModelCall(packed), x, None, ()), 0
        for sequence, first, count in step:
            found[sequence][first : first + count] = result[at : at + count, : query_heads * size]
            at += count
    return torch.cat(found)


@TYPES
@pytest.mark.parametrize("heads", [(6, 2, 32), (6, 6, 24), (6, 1, 64)], ids=str)
def test_attention(dtype, heads):
    for name, how in KINDS.items():
        expected = attended(dtype, heads, how, WHOLE, 64, 1, 0)
        assert expected.isfinite().all()
        for threads, (steps, block, sink, cached) in enumerate((
                (WHOLE, 16, 0, None), (STEPS, 64, 0, FP8), (STEPS, 32, 0, None), (WHOLE, 256, 0, FP8),
                (STEPS, 128, 70, FP8)), 1):
            if sink and name != "window":
                continue
            own = attended(dtype, heads, how, WHOLE, 64, 1, sink) if sink else expected
            found = attended(dtype, heads, how, steps, block, threads, sink, cached)
            assert torch.equal(found, own), (name, block, (found != own).any(1).nonzero().flatten())
