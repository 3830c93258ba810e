"""Layouts: how a step is divided into calls of the model.

    fused    one packed call
    split    a call for the contexts, then a call for the generation rows
    padded   the calls of split, with padding. Contexts are padded to the longest one. The generation call has one row
             for each member of the static batch, and the row of a finished member is padding

Except for rounding, the result of a row does not depend on the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..attention.interface import PackedStep
from ..handover import NO_GENERATION, ScheduledBatch
from .block_tables import BlockTables
from .packing import Padding, pack, padding, prompt_tuning_embeddings


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


Layout = Callable[[ScheduledBatch, BlockTables, int], list[ModelCall]]


def fused(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """Return one packed call with all tokens of the batch."""
    embeddings = prompt_tuning_embeddings(batch.context) if batch.context else None
    return [ModelCall(pack(batch, tables, tokens_per_block), embeddings=embeddings)]


def split(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """Return a packed model call for the contexts, then one for the generation rows. Empty calls are left out."""
    if not (batch.context and len(batch.generation)):
        return fused(batch, tables, tokens_per_block)
    parts = (replace(batch, generation=NO_GENERATION), replace(batch, context=()))
    return [call for part in parts for call in fused(part, tables, tokens_per_block)]


def padded(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """Return a padded model call for the contexts, then one for the generation rows. Empty calls are left out."""
    return [replace(call, padding=padding(call.step, batch.num_padded_rows * batch.generation.beam_width))
            for call in split(batch, tables, tokens_per_block)]
