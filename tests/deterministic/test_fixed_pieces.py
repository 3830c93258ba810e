"""Operations that run on pieces of fixed sizes give each row the same bits, however many rows there are.

`agreeing_sizes` finds the sizes of pieces that give the same bits.
"""

import pytest
import torch
from torch.nn import functional

from batch_manager.triton_kernels.cpu.fixed_pieces import ELEMENTS, agreeing_sizes, elementwise, in_pieces, row_by_row


@pytest.mark.parametrize("count", [1, 3, 4, 5, 11, 12, 16, 40, 63, 64, 65, 200])
@pytest.mark.parametrize("sizes", [(1, 4, 16, 64), (4, 64), (16,)])
def test_pieces_have_the_sizes_asked_for_and_make_up_the_whole(count, sizes):
    rows, seen = torch.randn(count, 3), []

    def doubled(piece):
        seen.append(len(piece))
        return 2 * piece

    assert torch.equal(in_pieces(doubled, rows, sizes=sizes), 2 * rows)
    assert set(seen) <= set(sizes) and sum(seen) >= count
    assert sum(seen) < 2 * count + sizes[0] + 8                 # padding stays small


def test_several_operands_are_cut_alike():
    left, right = torch.randn(13, 2, 3), torch.randn(13, 3, 4)
    torch.testing.assert_close(in_pieces(torch.bmm, left, right, sizes=(4,)), left @ right)


def test_sizes_that_give_other_bits_are_left_out():
    def product(rows):
        return rows + 1 if len(rows) == 2 else rows

    assert agreeing_sizes(product, torch.randn(16, 5), sizes=(1, 2, 4, 8)) == (1, 4, 8)


@pytest.mark.parametrize("product", [lambda rows: rows + torch.arange(len(rows))[:, None],
                                     lambda rows: rows + rows.roll(1, 0)], ids=["place", "neighbour"])
def test_an_operation_that_looks_at_a_rows_place_or_neighbour_has_no_size(product):
    assert agreeing_sizes(product, torch.randn(16, 5), sizes=(1, 2, 4, 8)) == ()


@pytest.mark.parametrize("function", [functional.silu, functional.gelu, torch.exp, torch.sigmoid,
                                      lambda x: functional.gelu(x, approximate="tanh")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_element_has_the_same_bits_wherever_it_stands(function, dtype):
    x = torch.randn(30_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = elementwise(function, x)
    for start, stop in [(0, 1), (5, 36), (7, ELEMENTS + 8), (1, 30_000), (29_999, 30_000)]:
        assert torch.equal(elementwise(function, x[start:stop]), whole[start:stop])


def test_torchs_own_functions_have_tails_that_round_otherwise():
    # The fixed pieces are needed only because of this difference.
    x = torch.randn(999, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([functional.silu(x[place : place + 1]) for place in range(len(x))])
    assert not torch.equal(functional.silu(x), alone)


@pytest.mark.parametrize("size", [3, 100, 4096, 20_000])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(size):
    rows = torch.randn(9, size, generator=torch.Generator().manual_seed(0))
    whole = row_by_row(lambda piece: piece.sum(1), rows)
    torch.testing.assert_close(whole, rows.sum(1), rtol=1e-4, atol=1e-3)
    for row in range(9):
        assert torch.equal(row_by_row(lambda piece: piece.sum(1), rows[row : row + 1]), whole[row : row + 1])
