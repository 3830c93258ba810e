"""Random adapters in pages, and their arguments of lora_shrink and lora_expand_add, for the tests of both."""

from dataclasses import dataclass

import torch

UNIT, ROWS, RANKS, PIECE = 32, 16, 16, 1024


@dataclass
class Adapters:
    """A layer's projections, adapters in pages in random order, and the rows of a step that have them.

    ranks         [adapters][projections of the model] rank; the layer has the projections from number 1 on
    runs          (first row, end, adapter) of each run of rows; the rows between runs have no adapter
    indices       the arguments tiles, adapter_pages, ranks and projections
    pages         [P, E]: pages of nobody, and ranks that an adapter lacks, are NaN
    """

    in_size: int
    sizes: list[int]
    ranks: list[list[int]]
    runs: list[tuple[int, int, int]]
    pages: torch.Tensor = None
    indices: tuple[torch.Tensor, ...] = ()
    a: dict = None
    b: dict = None

    @property
    def num_pieces(self):
        return -(-self.in_size // PIECE)

    @property
    def num_ranks(self):
        return self.indices[1].shape[1]


def make_adapters(random, dtype, device, in_size, sizes, ranks, runs, gap=0):
    """Return Adapters. `gap` outputs of the layer are before each projection."""
    adapters = Adapters(in_size, sizes, ranks, runs)

    def units(size):
        return -(-size // UNIT)

    projections, place, output = [], 1, 0
    for number, size in enumerate(sizes, 1):
        output += gap
        projections.append((number, place, place + units(in_size), output, size))
        place, output = place + units(in_size) + units(size), output + size
    most = max(max(own) for own in ranks)
    free = torch.randperm(sum(max(own) for own in ranks) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    adapters.pages = torch.full((len(free), place * UNIT), torch.nan, dtype=dtype, device=device)
    table = torch.full((len(ranks), -(-most // RANKS) * RANKS), 2**30, dtype=torch.int32)     # far outside the pages
    adapters.a, adapters.b = {}, {}
    for adapter, own in enumerate(ranks):
        mine = [free.pop() for _ in range(max(own))]
        table[adapter, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for k, (number, a, b, _, size) in enumerate(projections):
            rank = own[number]
            adapters.a[adapter, k] = random(rank, in_size, dtype=dtype) / in_size**0.5
            adapters.b[adapter, k] = random(rank, size, dtype=dtype)
            for r in range(rank):
                adapters.pages[mine[r], a * UNIT : a * UNIT + in_size] = adapters.a[adapter, k][r]
                adapters.pages[mine[r], b * UNIT : b * UNIT + size] = adapters.b[adapter, k][r]
    tiles = [(first, min(first + ROWS, end), adapter) for start, end, adapter in runs
             for first in range(start, end, ROWS)]
    adapters.indices = tuple(value.to(device) for value in (
        torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3), table, torch.tensor(ranks, dtype=torch.int32),
        torch.tensor(projections, dtype=torch.int32)))
    return adapters
