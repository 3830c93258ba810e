"""Packs a `ScheduledBatch` into a `PackedStep`: all tokens of a step in one list of rows, contexts first.

A step is divided into calls of the model by one of three functions:

    packed   one packed call
    split    a call for the contexts, then a call for the generation rows
    padded   the calls of split, with padding. Contexts are padded to the longest one. The generation call has one row
             for each member of the static batch, and the row of a finished member is padding

Except for rounding, the result of a row does not depend on the function. A padded call of the model also has a
`PackedStep`. `Padding` gives, for each packed token, its row in the padded call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..attention.interface import PackedStep
from ..handover import NO_GENERATION, ContextWork, ScheduledBatch
from .block_tables import BlockTables, generation_rows


@dataclass(frozen=True, slots=True)
class Padding:
    """The rows of a padded call of the model.

    rows       [T] int64: padded row of each packed token, ascending; all other rows are padding
    num_rows   number of rows, padding included
    """

    rows: np.ndarray
    num_rows: int


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of the model.

    padding      where each packed token is in the padded call; None: the call is packed
    embeddings   [v, hidden size] float32: embeddings of the call's v prompt-tuning tokens, in order; None: no such
                 tokens
    """

    step: PackedStep
    padding: Padding | None = None
    embeddings: np.ndarray | None = None


# (batch, block tables, tokens per block) -> the calls of the model
Divide = Callable[[ScheduledBatch, BlockTables, int], list[ModelCall]]


def packed(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """Return one packed call with all tokens of the batch."""
    embeddings = prompt_tuning_embeddings(batch.context) if batch.context else None
    return [ModelCall(pack(batch, tables, tokens_per_block), embeddings=embeddings)]


def split(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """Return a packed model call for the contexts, then one for the generation rows. Empty calls are left out."""
    if not (batch.context and len(batch.generation)):
        return packed(batch, tables, tokens_per_block)
    parts = (replace(batch, generation=NO_GENERATION), replace(batch, context=()))
    return [call for part in parts for call in packed(part, tables, tokens_per_block)]


def padded(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """Return a padded model call for the contexts, then one for the generation rows. Empty calls are left out."""
    return [replace(call, padding=padding(call.step, batch.num_padded_rows * batch.generation.beam_width))
            for call in split(batch, tables, tokens_per_block)]


def padding(step: PackedStep, num_generation_rows: int) -> Padding | None:
    """Return where the tokens of a step are in a padded call of the model; None if no row would be padding.

    Contexts are padded to the length of the longest one. Generation rows are padded to `num_generation_rows` rows.

    step   contains only contexts, or only generation rows
    """
    count = len(step.slots)
    if step.num_contexts:
        assert step.num_contexts == count
        lengths = np.diff(step.query_starts)
        longest = int(lengths.max())
        first_rows = np.arange(count, dtype=np.int64) * longest
        rows, num_rows = np.repeat(first_rows - step.query_starts[:-1], lengths), count * longest
        rows += np.arange(step.num_tokens)
    else:
        rows, num_rows = np.arange(count, dtype=np.int64), max(num_generation_rows, count)
    return Padding(rows, num_rows) if num_rows > step.num_tokens else None


def pack(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> PackedStep:
    """Pack a batch. Each beam is packed as a sequence. `tables` must have been updated with the batch.

    If any generating sequence has draft tokens, each generating sequence is packed as a context: a chunk of its newest
    token and its drafts.

    Raises   AssertionError if a token of the step has no block. Blocks of earlier tokens may have been released.
    """
    context, num_drafts = batch.context, batch.generation.num_drafts
    if not context and num_drafts is None:
        return _pack_generation(batch, tables, tokens_per_block)

    generation_slots, generation_starts, generation_table_rows = generation_rows(batch)
    context_lengths = np.array([len(work.token_ids) for work in context], np.int32)
    num_contexts, num_sequences = len(context), len(context) + len(generation_slots)
    num_context_tokens = int(context_lengths.sum())

    slots = np.empty(num_sequences, np.int32)
    slots[:num_contexts] = [work.slot for work in context]
    slots[num_contexts:] = generation_slots
    table_rows = slots
    if batch.max_beam_width > 1:
        table_rows = slots * np.int32(batch.max_beam_width)
        table_rows[num_contexts:] = generation_table_rows
    starts = np.empty(num_sequences, np.int32)
    starts[:num_contexts] = [work.start for work in context]
    starts[num_contexts:] = generation_starts

    query_lengths = np.ones(num_sequences, np.int32)
    query_lengths[:num_contexts] = context_lengths
    if num_drafts is not None:
        query_lengths[num_contexts:] += num_drafts
    query_starts = np.zeros(num_sequences + 1, np.int32)
    np.cumsum(query_lengths, out=query_starts[1:])
    kv_lengths = starts + query_lengths

    num_tokens = int(query_starts[-1])
    token_ids = np.zeros(num_tokens, np.int32)
    if context:
        np.concatenate([work.token_ids for work in context], out=token_ids[:num_context_tokens], casting="same_kind")
    if num_drafts is not None:
        is_draft = np.ones(num_tokens, bool)
        is_draft[:num_context_tokens] = is_draft[query_starts[num_contexts:-1]] = False
        token_ids[is_draft] = batch.generation.draft_tokens
    positions = np.arange(num_tokens, dtype=np.int32)
    positions += np.repeat(starts - query_starts[:-1], query_lengths)

    max_blocks = _check(table_rows, kv_lengths, tables, tokens_per_block)
    return PackedStep(
        token_ids=token_ids,
        positions=positions,
        pool_slots=_pool_slots(_blocks(tables, np.repeat(table_rows, query_lengths), positions, tokens_per_block),
                               positions, tokens_per_block),
        slots=slots,
        query_starts=query_starts,
        kv_lengths=kv_lengths,
        block_tables=tables.rows[table_rows, :max_blocks],
        num_contexts=num_contexts if num_drafts is None else num_sequences,
        logits_rows=_logits_rows(context, num_drafts, query_starts),
        num_verifying=0 if num_drafts is None else len(generation_slots),
    )


def prompt_tuning_embeddings(context: tuple[ContextWork, ...]) -> np.ndarray | None:
    """Return the embeddings [v, hidden size] of the v prompt-tuning tokens, in packed order; None if v is 0."""
    given = [work.embeddings for work in context if work.embeddings is not None]
    return np.concatenate(given) if given else None


def slots_not_finite(context: tuple[ContextWork, ...], finite: np.ndarray) -> list[int]:
    """Return the slots of the contexts in which the hidden state of at least one token, drafts aside, is not finite.

    finite   [context tokens] bool, in packed order: whether the hidden state of each token is finite
    """
    slots, stop = [], 0
    for work in context:
        start, stop = stop, stop + len(work.token_ids)
        if not finite[start:stop - work.num_drafts].all():
            slots.append(work.slot)
    return slots


class GenerationRows(NamedTuple):
    """The generation rows of a step, with one token each.

    slots        [n] int32   slot of the sequence; repeated for each beam
    positions    [n] int32   position of the token
    kv_lengths   [n] int32   tokens in the KV cache, including the token of this step
    table_rows   [n] int32   row of the sequence in the block tables
    blocks       [n] int32   id of the block that holds the token
    max_blocks   number of blocks of the longest sequence
    """

    slots: np.ndarray
    positions: np.ndarray
    kv_lengths: np.ndarray
    table_rows: np.ndarray
    blocks: np.ndarray
    max_blocks: int


def locate_generation(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> GenerationRows:
    """Return the generation rows of a batch without drafts. Raises the exceptions of `pack`."""
    slots = table_rows = batch.generation.slots
    positions = batch.generation.kv_lengths
    if batch.max_beam_width > 1:
        slots, positions, table_rows = generation_rows(batch)
    kv_lengths = positions + np.int32(1)
    max_blocks = _check(table_rows, kv_lengths, tables, tokens_per_block)
    return GenerationRows(slots, positions, kv_lengths, table_rows,
                          _blocks(tables, table_rows, positions, tokens_per_block), max_blocks)


NO_GENERATION_ROWS = GenerationRows(*[np.empty(0, np.int32)] * 5, 0)


class ContextRows(NamedTuple):
    """The contexts of a step: t tokens of c contexts.

    slots          [c] int32   slot of the sequence if a token is sampled after the chunk, else a slot that is not used
    positions      [t] int32   position of each token
    kv_lengths     [c] int32   tokens in the KV cache, including the tokens of this step
    table_rows     [c] int32   row of the sequence in the block tables
    token_ids      [t] int32
    pool_slots     [t] int64   where the key and value of each token go, as in PackedStep
    query_starts   [c + 1] int32   offset of each context in the t tokens, then t
    logits_rows    [c] int64   row of the last token of each context among all rows of the step
    """

    slots: np.ndarray
    positions: np.ndarray
    kv_lengths: np.ndarray
    table_rows: np.ndarray
    token_ids: np.ndarray
    pool_slots: np.ndarray
    query_starts: np.ndarray
    logits_rows: np.ndarray


NO_CONTEXT_ROWS = ContextRows(*[np.empty(0, np.int32)] * 6, np.zeros(1, np.int32), np.empty(0, np.int64))


def locate_contexts(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int, *, unused_slot: int,
                    num_rows_before: int) -> ContextRows:
    """Return where the contexts of a batch are, as ContextRows. Raises the exceptions of `pack`.

    The batch must have at least one context, and no drafts.

    unused_slot       the slot of contexts after which no token is sampled
    num_rows_before   number of rows of the step before those of the contexts
    """
    step = pack(replace(batch, generation=NO_GENERATION), tables, tokens_per_block)
    is_sampled = [work.is_last_chunk for work in batch.context]
    return ContextRows(np.where(is_sampled, step.slots, np.int32(unused_slot)), step.positions, step.kv_lengths,
                       step.slots * np.int32(batch.max_beam_width), step.token_ids, step.pool_slots, step.query_starts,
                       step.query_starts[1:] + np.int64(num_rows_before - 1))


def _pack_generation(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> PackedStep:
    """Pack generation rows without drafts: the faster path for one token per row."""
    slots, positions, kv_lengths, table_rows, blocks, max_blocks = locate_generation(
        batch, tables, tokens_per_block)
    return PackedStep(
        token_ids=np.zeros(len(slots), np.int32),
        positions=positions,
        pool_slots=_pool_slots(blocks, positions, tokens_per_block),
        slots=slots,
        query_starts=np.arange(len(slots) + 1, dtype=np.int32),
        kv_lengths=kv_lengths,
        block_tables=tables.rows[table_rows, :max_blocks],
        num_contexts=0,
        logits_rows=np.arange(len(slots)),
    )


def _blocks(tables: BlockTables, table_rows: np.ndarray, positions: np.ndarray, tokens_per_block: int) -> np.ndarray:
    blocks = tables.rows[table_rows, positions // tokens_per_block]
    assert blocks.min() >= 0, "a token's block was given back before the token was written"
    return blocks


def _pool_slots(blocks: np.ndarray, positions: np.ndarray, tokens_per_block: int) -> np.ndarray:
    """Return the index of each token's entry in the KV cache pool, [n] int64: block id * tokens_per_block + offset."""
    pool_slots = blocks.astype(np.int64)
    pool_slots *= tokens_per_block
    pool_slots += positions % tokens_per_block
    return pool_slots


def _logits_rows(context: tuple[ContextWork, ...], num_drafts: np.ndarray | None,
                 query_starts: np.ndarray) -> np.ndarray:
    """Return the packed rows whose logits are sampled, ascending.

    A generating sequence, or a context in its last chunk, has the rows of its last 1 + (number of drafts) tokens. Other
    contexts have none.
    """
    counts, ends = np.ones(len(query_starts) - 1, np.int64), query_starts[1:].astype(np.int64)
    counts[:len(context)] = [work.is_last_chunk * (1 + work.num_drafts) for work in context]
    if num_drafts is not None:
        counts[len(context):] += num_drafts
    first_rows, last_counts = ends - counts, np.cumsum(counts)
    return np.arange(int(last_counts[-1])) + np.repeat(first_rows - (last_counts - counts), counts)


def _check(table_rows: np.ndarray, kv_lengths: np.ndarray, tables: BlockTables, tokens_per_block: int) -> int:
    """Assert that each sequence has blocks for all its tokens. Returns the number of blocks of the longest sequence."""
    assert len(table_rows), "an empty batch"
    mapped = tables.mapped[table_rows]
    outside = kv_lengths > mapped * tokens_per_block
    assert not outside.any(), (
        f"block table rows {table_rows[outside].tolist()} with lengths {kv_lengths[outside].tolist()} do not fit their "
        f"{mapped[outside].tolist()} blocks of {tokens_per_block} tokens")
    return -(-int(kv_lengths.max()) // tokens_per_block)
