import pytest
import torch

from .lora_adapters import make_adapters
from .test_lora_shrink import CASES


@pytest.mark.parametrize("case", [*CASES, "aligned"])
def test_outputs_are_added_to_rows_with_an_adapter_only(assert_equals_oracle, random, dtype, case):
    in_size, sizes, ranks, runs, num_rows = CASES.get(case, (64, [160, 32], [[0, 3, 18]], [(1, 18, 0)], 20))
    gap = 32 if case == "aligned" else 3
    y = random(num_rows, sum(sizes) + gap * len(sizes), dtype=dtype)
    adapters = make_adapters(random, dtype, y.device, in_size, sizes, ranks, runs, gap=gap)
    shrunk = torch.full((adapters.num_pieces, len(sizes), num_rows, adapters.num_ranks), torch.nan, device=y.device)
    before, with_adapter = y.clone(), torch.zeros(num_rows, dtype=torch.bool)
    for first, end, adapter in runs:
        with_adapter[first:end] = True
        for k in range(len(sizes)):
            rank = ranks[adapter][k + 1]
            shrunk[:, k, first:end, :rank] = random(adapters.num_pieces, end - first, rank)
    most = max(max(own) for own in ranks)
    assert_equals_oracle("lora_expand_add", y, shrunk, adapters.pages, *adapters.indices, max(sizes), gap == 32,
                         roundings=3, reduction=most * adapters.num_pieces, dtype=dtype)
    assert torch.equal(y[~with_adapter], before[~with_adapter])
    for number in range(len(sizes)):                                # the gap before each projection
        start = sum(sizes[:number]) + gap * number
        assert torch.equal(y[:, start : start + gap], before[:, start : start + gap])


def test_strided_rows_and_nothing_to_do(assert_equals_oracle, random, run_kernel):
    packed = random(5, 3, 40)
    adapters = make_adapters(random, torch.float32, packed.device, 40, [40], [[0, 3]], [(1, 4, 0)])
    shrunk = random(1, 1, 5, 16)
    before = packed.clone()
    assert_equals_oracle("lora_expand_add", packed[:, 1], shrunk, adapters.pages, *adapters.indices, 40, reduction=40,
                         dtype=torch.float32)
    tiles, *others = adapters.indices
    run_kernel("lora_expand_add", packed[:, 0], shrunk, adapters.pages, tiles[:0], *others, 40)
    assert torch.equal(packed[:, ::2], before[:, ::2])


def test_a_row_has_the_same_bits_alone_and_anywhere_among_others(run_kernel, random, dtype):
    y, shrunk = random(40, 24, dtype=dtype), random(2, 2, 40, 32)
    adapters = make_adapters(random, dtype, y.device, 1100, [16, 8], [[0, 7, 20]], [(0, 40, 0)])

    def added(y, shrunk):
        tiles = torch.tensor([(first, min(first + 16, len(y)), 0) for first in range(0, len(y), 16)],
                             dtype=torch.int32, device=y.device)
        result = y.clone()
        run_kernel("lora_expand_add", result, shrunk.contiguous(), adapters.pages, tiles, *adapters.indices[1:], 16,
                   interpreted={"dots_in_one_order": True})
        return result

    together = added(y, shrunk)
    for row in (0, 1, 15, 16, 39):
        assert torch.equal(added(y[row : row + 1], shrunk[:, :, row : row + 1]), together[row : row + 1])
    order = torch.arange(40).roll(13)
    assert torch.equal(added(y[order], shrunk[:, :, order]), together[order])
