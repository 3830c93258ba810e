"""Checks that replayed graphs compute what the same steps compute when their kernels are launched one by one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from ....handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup, StepOutput
from ....sampling_config import SamplingConfig
from ....seams import PendingStep
from ...parts import DeviceParts
from ..comparison import TOLERANCES
from ..form import Forms, UnservedBatchError

GREEDY = SlotSetup(return_log_probs=True, prompt_length=1)
SAMPLED = SlotSetup(SamplingConfig(top_k=8, random_seed=0), return_log_probs=True, prompt_length=1)
MOST_SEQUENCES = 256
CHUNK_TOKENS = 3                           # of the prompt in a step with contexts


def difference_of_graphs(start: Callable[[ScheduledBatch], PendingStep], replayed: Forms, launched: Forms,
                         parts: DeviceParts, *, long_blocks: int) -> str:
    """Run steps of each kind twice: replayed, and with their kernels launched one by one. Overwrites the KV cache.

    The kinds are: greedy or sampled rows, or rows with an adapter; keys that attention splits or not; with and without
    contexts.

    start         runs a step in a form that serves any batch, and carries its setups and changes of block tables out
    replayed      the form `graph` alone
    launched      the same form, with launches in place of graphs
    long_blocks   number of blocks of a sequence that attention may split
    Returns       the first difference in tokens or log-probabilities as text; "": there is none
    """
    tolerance, setups = TOLERANCES[parts.pool.dtype].log_probs, [GREEDY, SAMPLED]
    with ExitStack() as adapters:
        if parts.adapters is not None:
            pages = adapters.enter_context(parts.adapters.pool.made_up())
            setups.insert(0, replace(GREEDY, adapter_pages=pages))      # the first: slots keep the bit until the next
        return _first_difference(start, setups, replayed, launched, parts, long_blocks, tolerance)


def _first_difference(start: Callable[[ScheduledBatch], PendingStep], setups: Sequence[SlotSetup], replayed: Forms,
                      launched: Forms, parts: DeviceParts, long_blocks: int, tolerance: float) -> str:
    for setup in setups:
        for lengths in _lengths(parts, long_blocks):
            for batch in _batches(start, setup, lengths, parts.tokens_per_block, parts.vocab_size):
                try:
                    output = replayed.start(batch).finish()
                except UnservedBatchError:
                    continue
                if text := _difference(output, launched.start(batch).finish(), tolerance):
                    return f"{text}, in a step of {len(batch.generation)} sequences and {len(batch.context)} contexts"
    return ""


def _lengths(parts: DeviceParts, long_blocks: int) -> Iterator[np.ndarray]:
    """Yield the numbers of cached tokens of the sequences of a step: many short ones, then one long one."""
    num_blocks = len(parts.pool)
    yield np.ones(min(parts.num_slots, num_blocks, MOST_SEQUENCES), np.int32)
    if 1 < long_blocks <= num_blocks:
        yield np.array([(long_blocks - 1) * parts.tokens_per_block], np.int32)


def _batches(start: Callable[[ScheduledBatch], PendingStep], setup: SlotSetup, lengths: np.ndarray,
             tokens_per_block: int, vocab_size: int) -> Iterator[ScheduledBatch]:
    """Set up a sequence for each of `lengths`, with blocks of its own. Yield a step in which all of them generate, and
    one in which the last one computes more tokens of its prompt.
    """
    blocks = -(-(lengths + CHUNK_TOKENS) // tokens_per_block)
    slots = np.arange(len(lengths), dtype=np.int32)
    rows = np.repeat(slots, blocks)
    pages = np.arange(len(rows), dtype=np.int32) - np.repeat(blocks.cumsum() - blocks, blocks).astype(np.int32)
    prompts = [np.array([slot * 7 % vocab_size], np.int32) for slot in slots.tolist()]
    start(ScheduledBatch(
        iteration=0, block_table_updates=BlockTableUpdates(rows, pages, np.arange(len(rows), dtype=np.int32)),
        context=tuple(ContextWork(slot, prompt, int(length) - 1, True, setup.continuing(prompt.tolist()))
                      for slot, prompt, length in zip(slots.tolist(), prompts, lengths)))).finish()
    yield ScheduledBatch(iteration=1, generation=GenerationWork(slots, lengths))
    chunk = np.arange(CHUNK_TOKENS, dtype=np.int32) % vocab_size
    longer = ContextWork(int(slots[-1]), chunk, int(lengths[-1]), True)
    yield ScheduledBatch(iteration=2, context=(longer,), generation=GenerationWork(slots[:-1], lengths[:-1]))


def _difference(replayed: StepOutput, launched: StepOutput, tolerance: float) -> str:
    if replayed.failures.keys() != launched.failures.keys():
        return (f"slots {sorted(replayed.failures)} have unusable rows replayed, and slots {sorted(launched.failures)} "
                "launched")
    differ = np.flatnonzero(replayed.tokens != launched.tokens)
    if len(differ):
        row = int(differ[0])
        return f"row {row} has token {replayed.tokens[row]} replayed and {launched.tokens[row]} launched"
    usable = ~np.isin(launched.slots, list(launched.failures))
    largest = float(np.abs(replayed.log_probs - launched.log_probs)[usable].max(initial=0.0))
    return "" if largest <= tolerance else f"a log-probability differs by {largest:.3g}; {tolerance} is allowed"
