"""How the work of a step is cut into calls of the model.

    fused   everything packed into one call
    split   the contexts in one call, then the generation rows in another

A row's result does not depend on the layout beyond rounding.
"""

from ..attention.interface import PackedStep
from ..handover import ScheduledBatch
from .block_tables import BlockTables
from .packing import pack


def fused(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[PackedStep]:
    """One call."""
    return [pack(batch, tables, tokens_per_block)]


def split(batch: ScheduledBatch, tables: BlockTables, tokens_per_block: int) -> list[PackedStep]:
    """A context call, then a generation call; one that would be empty is left out."""
    contexts, count = len(batch.context), batch.num_sequences
    if contexts in (0, count):
        return fused(batch, tables, tokens_per_block)
    parts = (batch.part(0, contexts), batch.part(contexts, count))
    return [pack(part, tables, tokens_per_block) for part in parts]
