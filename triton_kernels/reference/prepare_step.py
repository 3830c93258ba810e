"""All work of a step before its first layer, in one launch: update the block tables and embed the input tokens.

    block_table.flat[table_entries[i]] = table_blocks[i]
    token[t] = last_tokens[slots[t], positions[t] mod C]     for the first R rows: generation
               input_tokens[t - R]                           for the other rows: contexts
    out[t]   = embedding[token[t]], or token[t] without an embedding
    cleared  = 0

Shapes      as in triton_kernels/prepare_step.py
Mutates     block_table, cleared, out. Returns out.
"""

import torch


def prepare_step(
    block_table, table_entries, table_blocks, last_tokens, slots, positions, input_tokens, embedding=None, cleared=None,
    out=None,
):
    """Update the block tables and embed the input tokens. Returns out. See the module docstring."""
    block_table.view(-1)[table_entries] = table_blocks
    if cleared is not None:
        cleared.zero_()
    newest = last_tokens[slots, positions[: len(slots)] % last_tokens.shape[1]]
    tokens = torch.cat([newest, input_tokens])
    found = tokens if embedding is None else embedding[tokens]
    return found if out is None else out.copy_(found)
