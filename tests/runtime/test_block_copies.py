"""The native backend copies blocks to other blocks, to host memory and back."""

import numpy as np
import pytest
import torch

from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.handover import (
    BlockClear,
    BlockCopy,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from tests.harness.gpu import GPU, needs_gpu, needs_real_gpu

SIZE, BLOCKS = 16, 12
DEVICES = ["cpu", pytest.param(GPU, marks=[pytest.mark.gpu, needs_gpu], id="cuda")]


def build(checkpoint, device="cpu", host_blocks=3):
    one_block = 3 * 2 * 2 * SIZE * 8 * 4               # layers, keys and values, heads, tokens, head size, float32
    kv = KvCacheConfig(tokens_per_block=SIZE, max_tokens=BLOCKS * SIZE, enable_block_reuse=host_blocks > 0,
                       host_cache_size=host_blocks * one_block)
    return build_native_backend(checkpoint[0], TrtGptModelOptionalParams(device=device, dtype="float32",
                                                                         kv_cache_config=kv),
                                layout=packing.packed, num_slots=4)


def fill(backend):
    """Fill every block with a different number."""
    with torch.inference_mode():
        pool = backend._parts.pool
        pool.copy_(torch.arange(BLOCKS, device=pool.device).float().view(-1, 1, 1, 1, 1, 1).expand(
            pool.shape) + 1)


def carry_out(backend, *operations):
    """Run a step with these block operations. Its only sequence uses the last block."""
    step_of_another(backend, operations, backend._operations.num_done)


def step_of_another(backend, operations, first_operation):
    slot, block_id = np.array([3], np.int32), np.array([BLOCKS - 1], np.int32)
    backend.start(ScheduledBatch(
        0, context=(ContextWork(3, np.array([1], np.int32), 0, True, SlotSetup()),),
        block_table_updates=BlockTableUpdates(slot, np.zeros(1, np.int32), block_id), operations=operations,
        first_operation=first_operation)).finish()


def contents(backend):
    """Return the number in each block except the last."""
    pool = backend._parts.pool[:-1].cpu()
    assert all((block == block.flatten()[0]).all() for block in pool), "a block moves as one piece"
    return [int(block.flatten()[0]) for block in pool]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_carried_out_in_order(checkpoint, device):
    backend = build(checkpoint, device)
    fill(backend)
    copies = BlockCopy(0, 1, SIZE), BlockCopy(1, 2, SIZE), BlockCopy(3, 0, SIZE)
    carry_out(backend, *copies)
    assert contents(backend)[:4] == [4, 1, 1, 4]
    step_of_another(backend, (*copies, BlockCopy(2, 3, SIZE)), 0)
    assert contents(backend)[:4] == [4, 1, 1, 1], "what was done is not repeated"
    carry_out(backend, BlockClear(0), BlockCopy(0, 2, SIZE))
    assert contents(backend)[:4] == [0, 1, 0, 1], "a clear has its place among them"


@pytest.mark.parametrize("device", DEVICES)
def test_what_goes_to_the_host_comes_back_although_its_block_was_overwritten(checkpoint, device):
    backend = build(checkpoint, device)
    assert backend.info.host_blocks == 3
    fill(backend)
    carry_out(
        backend,
        BlockCopy(5, 2, SIZE, to_host=True), BlockCopy(6, 0, SIZE, to_host=True), BlockCopy(0, 5, SIZE),
        BlockCopy(2, 1, SIZE, from_host=True), BlockCopy(1, 2, SIZE, to_host=True), BlockCopy(0, 6, SIZE),
        BlockCopy(0, 7, SIZE, from_host=True), BlockCopy(2, 8, SIZE, from_host=True))
    assert contents(backend)[:9] == [1, 6, 3, 4, 5, 1, 1, 7, 6]


def test_a_copy_on_a_cpu_waits_for_no_other_thread(checkpoint, monkeypatch):
    """torch divides a large copy among its threads, and all wait for one whose core is busy."""
    backend = build(checkpoint, "cpu")
    fill(backend)
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    carry_out(backend, BlockCopy(0, 2, SIZE, to_host=True), BlockCopy(0, 1, SIZE),
              BlockCopy(2, 3, SIZE, from_host=True))
    monkeypatch.undo()
    assert contents(backend)[:4] == [1, 1, 3, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_goes_on_where_its_blocks_were_copied_to(checkpoint, device):
    """A sequence whose blocks were copied to other blocks, two of them through host memory, gets the same tokens.

    Another sequence runs a step between the copies.
    """
    length = 2 * SIZE + 4
    backend, prompt = build(checkpoint, device), np.arange(length, dtype=np.int32)

    def start(slot, length, blocks, tokens=None, operations=()):
        table = BlockTableUpdates(np.full(len(blocks), slot, np.int32), np.arange(len(blocks), dtype=np.int32),
                                  np.array(blocks, np.int32))
        if tokens is not None:
            work = ContextWork(slot, tokens, length, True, SlotSetup())
            return backend.start(ScheduledBatch(0, context=(work,), block_table_updates=table, operations=operations,
                                                first_operation=backend._operations.num_done)).finish().tokens[0]
        row = GenerationWork(np.array([slot], np.int32), np.array([length], np.int32))
        return backend.start(ScheduledBatch(0, generation=row, block_table_updates=table)).finish().tokens[0]

    first = start(0, 0, [1, 2, 3], prompt)
    carry_out(backend, BlockCopy(1, 0, SIZE, to_host=True), BlockCopy(2, 1, SIZE, to_host=True), BlockCopy(3, 9, 4))
    alone = [first, *(start(0, length + i, [1, 2, 3]) for i in range(3))]
    back = BlockCopy(0, 7, SIZE, from_host=True), BlockCopy(1, 8, SIZE, from_host=True)
    operations = BlockClear(1), BlockClear(2), BlockClear(3), *back
    moved = [start(1, length - 1, [7, 8, 9], prompt[length - 1 :], operations),
             *(start(1, length + i, [7, 8, 9]) for i in range(3))]
    assert moved == alone


def test_host_blocks_are_counted_as_memory(checkpoint):
    without, with_three = (build(checkpoint, host_blocks=n).memory_usage() for n in (0, 3))
    assert with_three.cpu - without.cpu == 3 * 3 * 2 * 2 * SIZE * 8 * 4 and with_three.pinned == 0
    backend = build(checkpoint)
    assert backend._parts.pool[0].nbytes == 3 * 2 * 2 * SIZE * 8 * 4
    backend.close()
    assert backend.memory_usage().cpu == 0


@pytest.mark.gpu
@needs_real_gpu
def test_on_a_gpu_host_blocks_are_pinned(checkpoint):
    without, with_three = (build(checkpoint, "cuda", n).memory_usage() for n in (0, 3))
    assert with_three.pinned - without.pinned == 3 * 3 * 2 * 2 * SIZE * 8 * 4


