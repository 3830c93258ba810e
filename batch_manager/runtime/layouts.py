"""How the work of a step is cut into calls of the model.

    fused    everything packed into one call
    split    the contexts in one call, then the generation rows in another
    padded   as split, each call padded: contexts to the longest of them, generation to a row for each member of the
             static batch, so that a member that is done leaves an empty row

A row's result does not depend on the layout beyond rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..attention.interface import PackedStep
from ..handover import NO_GENERATION, ScheduledBatch
from .block_tables import BlockTables
from .packing import Padding, pack, padding, virtual_embeddings


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of the model.

    padding      where the packed rows stand in a padded call; None: the call is packed
    embeddings   [v, hidden size] float32: of the call's prompt-tuning tokens, in order; None: it has none
    """

    step: PackedStep
    padding: Padding | None = None
    embeddings: np.ndarray | None = None


Layout = Callable[[ScheduledBatch, BlockTables, int], list[ModelCall]]


def fused(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """One call."""
    embeddings = virtual_embeddings(batch.context) if batch.context else None
    return [ModelCall(pack(batch, tables, tokens_per_block), embeddings=embeddings)]


def split(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """A context call, then a generation call; one that would be empty is left out."""
    if not (batch.context and len(batch.generation)):
        return fused(batch, tables, tokens_per_block)
    parts = (replace(batch, generation=NO_GENERATION), replace(batch, context=()))
    return [call for part in parts for call in fused(part, tables, tokens_per_block)]


def padded(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[ModelCall]:
    """As `split`, each call padded."""
    return [replace(call, padding=padding(call.step, batch.num_places * batch.generation.beam_width))
            for call in split(batch, tables, tokens_per_block)]
