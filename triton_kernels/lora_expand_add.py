"""The second product of LoRA adapters, added to a layer's outputs: B times the result of lora_shrink.

    y[t, first output of k + o] += sum of B[o, r] * (sum of shrunk[p, k, t, r] over p) over the ranks r

Shapes      y               [T, O]          outputs of the layer; contiguous rows, any row stride
            shrunk          [pieces, K, T, R] float32, from lora_shrink
            pages           [P, E]          pages of adapters, each with one rank of every projection of a model
            tiles           [W, 3] int32    first row, end, adapter: at most ROWS adjacent rows of one adapter
            adapter_pages   [D, R] int32    page of each rank of each adapter; R is a multiple of RANKS; any row stride
            ranks           [D, N] int32    rank of each adapter in each projection of the model; 0: it has none there;
                                            any row stride
            projections     [K, 5] int32    number (column of `ranks`), A's place in a page and B's place, both in units
                                            of UNIT entries, first output in the layer, number of outputs
            most_outputs    largest number of outputs in `projections`
            aligned         whether every first output and number of outputs is a multiple of UNIT
Mutates     y, of rows in `tiles` and of projections that their adapter changes. Other pages are never read.
Oracle      triton_kernels/reference/lora_expand_add.py
Source      "S-LoRA" (arXiv 2311.03285): paged adapters, and "Punica" (arXiv 2310.18547): two products for a batch of
            many adapters; written for this project.

The shrunk row is rounded to the dtype of the pages, as peft rounds it. The product and the sum with y are in float32
and rounded once. Tile and order do not depend on the number of rows: a row's bits depend on that row alone.
"""

import triton
import triton.language as tl

from .lora_shrink import RANKS, ROWS, UNIT

COLUMNS = 128                # outputs of a program


@triton.jit(
    do_not_specialize=["num_pieces", "adapter_stride", "ranks_stride", "shrunk_stride_p", "shrunk_stride_k",
                       "shrunk_stride_t"],
    do_not_specialize_on_alignment=["tiles_ptr", "adapter_pages_ptr", "ranks_ptr", "projections_ptr"],
)
def _lora_expand_add_kernel(
    y_ptr, shrunk_ptr, pages_ptr, tiles_ptr, adapter_pages_ptr, ranks_ptr, projections_ptr,
    y_stride_t, page_stride,                              # elements from one row, one page, to the next
    num_pieces, adapter_stride, ranks_stride,             # the last two: from one adapter to the next
    shrunk_stride_p, shrunk_stride_k, shrunk_stride_t,
    ROWS: tl.constexpr, RANKS: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):
    tile, projection = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1)
    adapter = tl.load(tiles_ptr + 3 * tile + 2).to(tl.int64)
    own_ranks = tl.load(ranks_ptr + adapter * ranks_stride + tl.load(projections_ptr + 5 * projection))
    first_output = tl.load(projections_ptr + 5 * projection + 3)
    num_outputs = tl.load(projections_ptr + 5 * projection + 4)
    if ALIGNED:
        first_output, num_outputs = tl.multiple_of(first_output, UNIT), tl.multiple_of(num_outputs, UNIT)
    begin = tl.program_id(2) * COLUMNS
    if (own_ranks > 0) & (begin < num_outputs):
        row, column = first + tl.arange(0, ROWS), begin + tl.arange(0, COLUMNS)
        row_inside, column_inside = row < end, column < num_outputs
        place = tl.load(projections_ptr + 5 * projection + 2).to(tl.int64) * UNIT
        shrunk_row_ptr = shrunk_ptr + projection.to(tl.int64) * shrunk_stride_k \
            + row.to(tl.int64)[:, None] * shrunk_stride_t
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        in_page = column < tl.cdiv(num_outputs, UNIT) * UNIT            # wide loads; more columns are not stored
        for start in range(0, own_ranks, RANKS):
            rank = start + tl.arange(0, RANKS)
            rank_inside = rank < own_ranks
            page = tl.load(adapter_pages_ptr + adapter * adapter_stride + rank, mask=rank_inside, other=0)
            b = tl.load(pages_ptr + page.to(tl.int64)[:, None] * page_stride + place + column[None, :],
                        mask=rank_inside[:, None] & in_page[None, :], other=0.0)
            inside = row_inside[:, None] & rank_inside[None, :]
            shrunk = tl.zeros([ROWS, RANKS], tl.float32)
            piece_ptr = shrunk_row_ptr + rank[None, :]
            for _ in range(num_pieces):
                shrunk += tl.load(piece_ptr, mask=inside, other=0.0)
                piece_ptr += shrunk_stride_p
            total = tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee")
        out_ptr = y_ptr + row.to(tl.int64)[:, None] * y_stride_t + first_output + column[None, :]
        inside = row_inside[:, None] & column_inside[None, :]
        total += tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr, total.to(y_ptr.dtype.element_ty), mask=inside)


def lora_expand_add(y, shrunk, pages, tiles, adapter_pages, ranks, projections, most_outputs,
                    aligned=False):
    """Add the outputs of adapters to y, in place. Returns y. See the module docstring for shapes."""
    assert y.dtype == pages.dtype and y.stride(1) == pages.stride(1) == shrunk.stride(3) == 1
    assert adapter_pages.shape[1] % RANKS == 0 and pages.stride(0) % UNIT == 0
    assert tiles.is_contiguous() and projections.is_contiguous() and adapter_pages.stride(1) == ranks.stride(1) == 1
    if len(tiles) == 0:
        return y

    grid = (len(tiles), len(projections), triton.cdiv(most_outputs, COLUMNS))
    _lora_expand_add_kernel[grid](
        y, shrunk, pages, tiles, adapter_pages, ranks, projections, y.stride(0), pages.stride(0), shrunk.shape[0],
        adapter_pages.stride(0), ranks.stride(0), shrunk.stride(0), shrunk.stride(1), shrunk.stride(2),
        ROWS=ROWS, RANKS=RANKS, UNIT=UNIT, COLUMNS=COLUMNS, ALIGNED=aligned, num_warps=4,
    )
    return y
