import pytest
import torch

from .lora_adapters import make_adapters

CASES = {
    "one row": (64, [64], [[9, 3]], [(0, 1, 0)], 1),
    "many ranks, other projections": (96, [40, 8, 8], [[1, 17, 0, 64], [3, 1, 16, 2], [0, 0, 5, 0]],
                                      [(0, 3, 1), (5, 40, 0), (40, 41, 2), (41, 60, 1)], 62),
    "an odd size": (70, [33, 5], [[2, 4, 20], [2, 2, 2]], [(1, 2, 0), (2, 4, 1)], 5),
    "pieces": (2200, [16], [[0, 5]], [(0, 18, 0)], 18),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_own_pages_only(assert_equals_oracle, random, dtype, case):
    in_size, sizes, ranks, runs, num_rows = CASES[case]
    x = random(num_rows, in_size, dtype=dtype)
    adapters = make_adapters(random, dtype, x.device, in_size, sizes, ranks, runs)
    out = torch.full((adapters.num_pieces, len(sizes), num_rows, adapters.num_ranks), torch.nan, device=x.device)
    assert_equals_oracle("lora_shrink", x, adapters.pages, *adapters.indices, out, roundings=0, reduction=in_size,
                         dtype=dtype)
    for first, end, adapter in runs:
        for k in range(len(sizes)):
            a = adapters.a[adapter, k].double()
            expected = x[first:end].double() @ a.t()
            found = out[:, k, first:end].sum(0)
            torch.testing.assert_close(found[:, : len(a)].double(), expected, rtol=0, atol=1e-6 * in_size)
            assert found[:, len(a) :].isnan().all()


def test_strided_rows_and_nothing_to_do(assert_equals_oracle, random, run_kernel):
    packed = random(5, 3, 40)
    adapters = make_adapters(random, torch.float32, packed.device, 40, [8], [[0, 3]], [(1, 4, 0)])
    out = torch.full((1, 1, 5, 16), torch.nan, device=packed.device)
    assert_equals_oracle("lora_shrink", packed[:, 1], adapters.pages, *adapters.indices, out, reduction=40,
                         dtype=torch.float32)
    tiles, *others = adapters.indices
    assert run_kernel("lora_shrink", packed[:, 1], adapters.pages, tiles[:0], *others).shape == (1, 1, 5, 16)


def test_a_row_has_the_same_bits_alone_and_anywhere_among_others(run_kernel, random, dtype):
    x = random(40, 1100, dtype=dtype)
    adapters = make_adapters(random, dtype, x.device, 1100, [16, 8], [[0, 7, 20]], [(0, 40, 0)])

    def shrunk(x):
        tiles = torch.tensor([(first, min(first + 16, len(x)), 0) for first in range(0, len(x), 16)],
                             dtype=torch.int32, device=x.device)
        out = torch.zeros(2, 2, len(x), 32, device=x.device)
        run_kernel("lora_shrink", x, adapters.pages, tiles, *adapters.indices[1:], out,
                   interpreted={"dots_in_one_order": True})
        return out

    together = shrunk(x)
    for row in (0, 1, 15, 16, 39):
        assert torch.equal(shrunk(x[row : row + 1]), together[:, :, row : row + 1])
    order = torch.arange(40).roll(13)
    assert torch.equal(shrunk(x[order].contiguous()), together[:, :, order])
