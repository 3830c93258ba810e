"""All work of a step before its first layer, in one launch: update the block tables and embed the input tokens.

    block_table.flat[table_entries[i]] = table_blocks[i]
    token[t] = last_tokens[slots[t], positions[t] mod C]     for the first R rows: generation
               input_tokens[t - R]                           for the other rows: contexts
    out[t]   = embedding[token[t]], or token[t] without an embedding
    cleared  = 0

Shapes      block_table              [rows, m] int32, contiguous
            table_entries            [u] int64   indices into the flat table; duplicates must have equal blocks
            table_blocks             [u] int32
            last_tokens              [S, C] int64, contiguous; C a power of two
            slots, positions         [R] int64   positions can have more entries, which are not read
            input_tokens             [T - R] int64   can be empty
            embedding                [V, H]   contiguous rows, any row stride; None: out is the tokens
            cleared                  [q, c] int32, contiguous   memory to zero for later kernels of the step, or None
            out                      [T, H] in the dtype of the embedding, or [T] int64; contiguous. None: allocated
Mutates     block_table, cleared, out. Returns out.
Oracle      triton_kernels/reference/prepare_step.py
Source      written for this project.

There are two kinds of programs. A program of the first kind handles one piece of the hidden size of one row. A
program of the second kind writes up to CHANGES table entries. No program reads what another writes. The launch
depends on the sizes alone.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 1024                        # hidden entries per program
CHANGES = tl.constexpr(256)             # table entries per program


# Slices of the index tensors start anywhere, and the number of rows varies: neither may recompile the kernel.
@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_changes", "num_cleared"],
    do_not_specialize_on_alignment=[
        "table_ptr", "entry_ptr", "block_ptr", "slot_ptr", "position_ptr", "input_token_ptr", "cleared_ptr",
    ],
)
def _prepare_step_kernel(
    table_ptr, entry_ptr, block_ptr, last_ptr, slot_ptr, position_ptr, input_token_ptr, embedding_ptr, cleared_ptr,
    out_ptr,
    num_rows, num_slots, num_changes, num_cleared,        # T, R, u, q
    hidden_size, embedding_stride,
    COLUMNS: tl.constexpr, LOOKS_UP: tl.constexpr, BLOCK: tl.constexpr,
    CLEARED: tl.constexpr, CLEARED_POW2: tl.constexpr,    # c; 0: none
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    num_programs = tl.maximum(num_rows, num_cleared)      # for rows; the remaining programs change the table
    if row >= num_programs:
        if piece == 0:
            change = (row - num_programs) * CHANGES + tl.arange(0, CHANGES)
            entry = tl.load(entry_ptr + change, mask=change < num_changes, other=0)
            block = tl.load(block_ptr + change, mask=change < num_changes, other=0)
            tl.store(table_ptr + entry, block, mask=change < num_changes)
        return

    if CLEARED > 0:
        index = tl.arange(0, CLEARED_POW2)
        if (row < num_cleared) & (piece == 0):
            tl.store(cleared_ptr + row * CLEARED + index, tl.zeros([CLEARED_POW2], tl.int32), mask=index < CLEARED)
    if row < num_rows:
        token = tl.full((), 0, tl.int64)
        if row < num_slots:
            column = tl.load(position_ptr + row) & (COLUMNS - 1)
            token = tl.load(last_ptr + tl.load(slot_ptr + row) * COLUMNS + column)
        else:
            token = tl.load(input_token_ptr + (row - num_slots))
        if LOOKS_UP:
            lane = piece * BLOCK + tl.arange(0, BLOCK)
            entries = tl.load(embedding_ptr + token * embedding_stride + lane, mask=lane < hidden_size, other=0.0)
            tl.store(out_ptr + row * hidden_size + lane, entries, mask=lane < hidden_size)
        else:
            tl.store(out_ptr + row, token)


def prepare_step(
    block_table, table_entries, table_blocks, last_tokens, slots, positions, input_tokens, embedding=None, cleared=None,
    out=None,
):
    """Update the block tables and embed the input tokens. Returns out. See the module docstring for shapes."""
    num_slots, num_changes = len(slots), len(table_entries)
    num_rows, num_cleared = num_slots + len(input_tokens), 0 if cleared is None else len(cleared)
    hidden_size = 1 if embedding is None else embedding.shape[1]
    if out is None:
        like = last_tokens if embedding is None else embedding
        out = torch.empty((num_rows,) if embedding is None else (num_rows, hidden_size), dtype=like.dtype,
                          device=like.device)
    columns = last_tokens.shape[1]
    assert columns & (columns - 1) == 0 and last_tokens.is_contiguous() and block_table.is_contiguous()
    assert out.is_contiguous() and (embedding is None or embedding.stride(1) == 1)
    assert cleared is None or cleared.is_contiguous()
    assert all(values.is_contiguous() for values in (table_entries, table_blocks, slots, positions, input_tokens))
    num_programs = max(num_rows, num_cleared) + triton.cdiv(num_changes, CHANGES.value)
    if num_programs == 0:
        return out

    block = min(MAX_BLOCK, triton.next_power_of_2(hidden_size))
    width = 0 if cleared is None else cleared.shape[1]
    _prepare_step_kernel[(num_programs, triton.cdiv(hidden_size, block))](
        block_table, table_entries, table_blocks, last_tokens, slots, positions, input_tokens, embedding, cleared, out,
        num_rows, num_slots, num_changes, num_cleared, hidden_size, 0 if embedding is None else embedding.stride(0),
        COLUMNS=columns, LOOKS_UP=embedding is not None, BLOCK=block,
        CLEARED=width, CLEARED_POW2=triton.next_power_of_2(max(width, 1)), num_warps=4,
    )
    return out
