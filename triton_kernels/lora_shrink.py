"""The first product of LoRA adapters: rows of a step times the A of their adapters, for all projections of a layer.

    out[p, k, t, r] = sum of x[t, i] * A[r, i] over the inputs i of piece p;  A is that of row t's adapter, projection k

Shapes      x               [T, I]          rows of I inputs; contiguous rows, any row stride
            pages           [P, E]          pages of adapters, each with one rank of every projection of a model
            tiles           [W, 3] int32    first row, end, adapter: at most ROWS adjacent rows of one adapter
            adapter_pages   [D, R] int32    page of each rank of each adapter; R is a multiple of RANKS; any row stride
            ranks           [D, N] int32    rank of each adapter in each projection of the model; 0: it has none there;
                                            any row stride
            projections     [K, 5] int32    number (column of `ranks`), A's place in a page and B's place, both in units
                                            of UNIT entries, first output in the layer, number of outputs
            out             [pieces, K, T, R] float32; None: allocated
Mutates     out, of rows in `tiles` and of ranks that their adapter has. Other pages are never read.
Oracle      triton_kernels/reference/lora_shrink.py
Source      "S-LoRA" (arXiv 2311.03285): paged adapters, and "Punica" (arXiv 2310.18547): two products for a batch of
            many adapters; written for this project.

The inputs are cut into pieces of fixed size, so that a step of few rows has enough programs. lora_expand_add adds the
pieces in order. Tile, pieces and order do not depend on the number of rows: a row's bits depend on that row alone.
"""

import torch
import triton
import triton.language as tl

ROWS = 16                    # rows of a tile
RANKS = 16                   # ranks of a program
UNIT = 32                    # entries; every A and B begins at a multiple of it in its page
PIECE = 1024                 # inputs of a program


@triton.jit(
    do_not_specialize=["num_blocks", "adapter_stride", "ranks_stride", "out_stride_p", "out_stride_k", "out_stride_t"],
    do_not_specialize_on_alignment=["tiles_ptr", "adapter_pages_ptr", "ranks_ptr", "projections_ptr"],
)
def _lora_shrink_kernel(
    x_ptr, pages_ptr, tiles_ptr, adapter_pages_ptr, ranks_ptr, projections_ptr, out_ptr,
    x_stride_t, page_stride,                              # elements from one row, one page, to the next
    num_blocks, adapter_stride, ranks_stride,             # RANKS ranks are a block; from one adapter to the next
    out_stride_p, out_stride_k, out_stride_t,
    SIZE: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, UNIT: tl.constexpr, PIECE: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):
    tile, projection = tl.program_id(0), tl.program_id(1)
    piece, first_rank = tl.program_id(2) // num_blocks, tl.program_id(2) % num_blocks * RANKS
    first, end = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1)
    adapter = tl.load(tiles_ptr + 3 * tile + 2).to(tl.int64)
    own_ranks = tl.load(ranks_ptr + adapter * ranks_stride + tl.load(projections_ptr + 5 * projection))
    if first_rank < own_ranks:
        row, rank = first + tl.arange(0, ROWS), first_rank + tl.arange(0, RANKS)
        row_inside, rank_inside = row < end, rank < own_ranks
        page = tl.load(adapter_pages_ptr + adapter * adapter_stride + rank, mask=rank_inside, other=0)
        place = tl.load(projections_ptr + 5 * projection + 1).to(tl.int64) * UNIT
        x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * x_stride_t
        a_row_ptr = pages_ptr + page.to(tl.int64)[None, :] * page_stride + place        # arrives transposed
        step = tl.arange(0, STEP)
        total = tl.zeros([ROWS, RANKS], tl.float32)
        for start in tl.range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, SIZE), STEP, num_stages=STAGES):
            inner = start + step
            if SIZE % STEP == 0:
                x = tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None], other=0.0)
                a = tl.load(a_row_ptr + inner[:, None], mask=rank_inside[None, :], other=0.0)
            else:
                inside = inner < SIZE
                x = tl.load(x_row_ptr + inner[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0)
                a = tl.load(a_row_ptr + inner[:, None], mask=inside[:, None] & rank_inside[None, :], other=0.0)
            total = tl.dot(x, a, total, input_precision="ieee")
        out_row_ptr = out_ptr + piece.to(tl.int64) * out_stride_p + projection.to(tl.int64) * out_stride_k
        tl.store(out_row_ptr + row.to(tl.int64)[:, None] * out_stride_t + rank[None, :], total,
                 mask=row_inside[:, None] & rank_inside[None, :])


def lora_shrink(x, pages, tiles, adapter_pages, ranks, projections, out=None):
    """Multiply rows by the A of their adapters. Returns out. See the module docstring for shapes."""
    num_rows, size = x.shape
    num_pieces, num_ranks = triton.cdiv(size, PIECE), adapter_pages.shape[1]
    if out is None:
        out = torch.empty(num_pieces, len(projections), num_rows, num_ranks, dtype=torch.float32, device=x.device)
    assert x.dtype == pages.dtype and x.stride(1) == pages.stride(1) == out.stride(3) == 1
    assert num_ranks % RANKS == 0 and pages.stride(0) % UNIT == 0
    assert tiles.is_contiguous() and projections.is_contiguous() and adapter_pages.stride(1) == ranks.stride(1) == 1
    if len(tiles) == 0:
        return out

    step = 512 // (2 * x.element_size())
    grid = (len(tiles), len(projections), num_pieces * (num_ranks // RANKS))
    _lora_shrink_kernel[grid](
        x, pages, tiles, adapter_pages, ranks, projections, out, x.stride(0), pages.stride(0),
        num_ranks // RANKS, adapter_pages.stride(0), ranks.stride(0), out.stride(0), out.stride(1), out.stride(2),
        SIZE=size, ROWS=ROWS, RANKS=RANKS, UNIT=UNIT, PIECE=PIECE, STEP=step, STAGES=4, num_warps=2, num_stages=4,
    )
    return out
