"""If a KV cache block holds NaN, exactly the requests that read it fail. The logits of all others keep their bits."""

import numpy as np
import pytest
import torch

from batch_manager.handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup

BLOCK, LENGTHS = 8, (5, 30, 70)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_exactly_the_readers_fail(laboratory, family):
    backend, random = laboratory(family).backend("fused"), np.random.default_rng(0)
    prompts = [random.integers(0, 200, length).astype(np.int32) for length in LENGTHS]
    blocks = [list(range(10 * slot, 10 * slot + length // BLOCK + 1)) for slot, length in enumerate(LENGTHS)]
    window = 20 if family == "mistral" else 10**6

    def context(slot):
        table = np.array([(slot, index, block) for index, block in enumerate(blocks[slot])], np.int32)
        return ScheduledBatch(
            iteration=0, block_table_updates=BlockTableUpdates(*table.T),
            context=(ContextWork(slot, prompts[slot], 0, True, SlotSetup(return_generation_logits=True)),))

    def generate():
        slots, lengths = np.arange(3, dtype=np.int32), np.array(LENGTHS, np.int32)
        return backend.start(ScheduledBatch(iteration=1, generation=GenerationWork(slots, lengths))).finish()

    for slot in range(3):
        assert backend.start(context(slot)).finish().failures == {}
    clean = generate().generation_logits
    planted = 0
    for slot, length in enumerate(LENGTHS):
        for index, block in enumerate(blocks[slot]):
            with torch.inference_mode():
                kept = backend._parts.pool[block].clone()
                backend._parts.pool[block] = torch.nan
            output = generate()
            with torch.inference_mode():
                backend._parts.pool[block] = kept
            reads = (index + 1) * BLOCK > length + 1 - window
            assert set(output.failures) == ({slot} if reads else set())
            for other, logits in output.generation_logits.items():
                if other not in output.failures:
                    assert np.array_equal(logits, clean[other])
            planted += 1
    assert planted == sum(map(len, blocks))
