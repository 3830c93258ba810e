"""The pages of adapters on the device. A page has one rank of every projection: a row of each A, a column of each B."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...errors import InsufficientMemoryError, counted
from ...handover import AdapterLoad
from ...triton_kernels.cpu.large_pages import allocate
from ..device.running import is_out_of_memory, pinned

MADE_UP_RANKS = 3
ROWS, RANKS = 16, 16               # of a tile of the kernels lora_shrink and lora_expand_add
PIECE = 1024                       # inputs of a program of lora_shrink
ALIGNED = 32                       # entries to which offsets in a page are rounded up; the rest is zeros


class Place(NamedTuple):
    """Where the rows of a module's B are among the outputs of a projection, in tensors of the whole model.

    module, layer   as in AdapterPart
    first_row       row of B that is row 0 of the projection: above 0 if the module is the whole of a stacked one
    """

    layer: int
    module: str
    first_row: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """One projection that adapters change, as this process has it.

    index         number of the projection in the pool
    a, b          first entry of its row of A and of its column of B in a page
    in_size       number of inputs
    out_size      number of outputs
    first_output  its first output among those of the `Linear`
    columns       the columns of A that this process has; None: all
    rows          [out_size] int64: the row of B for each output; None: in order
    scale         factor on B; None: no factor
    places        modules whose tensors may have its A and B
    """

    index: int
    a: int
    b: int
    in_size: int
    out_size: int
    first_output: int
    columns: range | None
    rows: torch.Tensor | None
    scale: float | None
    places: Sequence[Place]

    def part_of_a(self, a: torch.Tensor) -> torch.Tensor:
        """Return the part [D, in_size] of an A [D, inputs of the whole model]."""
        return a if self.columns is None else a[:, self.columns.start : self.columns.stop]

    def part_of_b(self, b: torch.Tensor, first_row: int) -> torch.Tensor:
        """Return the part [out_size, D] of a B [outputs of the whole model, D], in the order of the outputs."""
        if self.rows is not None:
            b = b[self.rows + first_row]
        else:
            b = b[first_row : first_row + self.out_size]
        return b if self.scale is None else b.float() * self.scale


class Loaded(NamedTuple):
    """An adapter on the device.

    pages   [D] int32: the page of each rank
    ranks   [projections] int32: its rank in each projection; 0: it does not change the projection
    runs    (first rank, first page, number of pages) of each run of adjacent pages
    addresses   of `pages` and `ranks`, for compiled code
    """

    pages: np.ndarray
    ranks: np.ndarray
    runs: Sequence[tuple[int, int, int]]
    addresses: tuple[int, int]

    @classmethod
    def of(cls, pages: Sequence[int], ranks: np.ndarray) -> "Loaded":
        """Return an adapter with a page for each rank. `ranks` must not be changed later."""
        array = np.array(pages, np.int32)
        return cls(array, ranks, runs_of(pages), (array.ctypes.data, ranks.ctypes.data))


class LoraPool:
    """The pages of adapters.

    projections   of the model, by their index
    entries       of a page
    pages         [num_pages, entries] on the device
    most_pages    of an adapter; rounded up to RANKS

    page_table    [num_pages + 1, most_pages] int32 on the device: for each page that is the first of an adapter, the
                  adapter's pages. The last row belongs to no adapter
    rank_table    [num_pages + 1, projections] int32 on the device: likewise, its ranks. Those of the last row are 0

    Raises InsufficientMemoryError.
    """

    def __init__(self, projections: Sequence[Projection], entries: int, num_pages: int, dtype: torch.dtype,
                 device: torch.device, most_pages: int = 64) -> None:
        num_bytes, most_pages = num_pages * entries * dtype.itemsize, -(-most_pages // RANKS) * RANKS
        self.projections, self._at = projections, {}
        for projection in projections:
            for place in projection.places:
                self._at.setdefault((place.layer, place.module), []).append((projection, place.first_row))
        try:
            if device.type != "cpu":
                self.pages = torch.zeros((num_pages, entries), dtype=dtype, device=device)
            else:
                self.pages = torch.from_numpy(allocate(num_bytes)).view(dtype).view(num_pages, entries)
            table = torch.zeros((num_pages + 1, most_pages + len(projections)), dtype=torch.int32, device=device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise InsufficientMemoryError(
                f"{counted(num_pages, 'page')} of adapters take {counted(num_bytes, 'byte')}",
                f"{device} cannot allocate them", "lower PeftCacheConfig.device_cache_percent") from error
        self.page_table, self.rank_table, self._table = table[:, :most_pages], table[:, most_pages:], table
        self._loaded: dict[tuple[int, ...], Loaded] = {}
        self._owner: dict[int, tuple[int, ...]] = {}       # page -> key in _loaded

    @property
    def num_bytes(self) -> int:
        return self.pages.nbytes

    def load(self, operation: AdapterLoad) -> None:
        """Carry out a load. Adapters that had any of its pages are gone."""
        key, content, pages = operation.page_ids, operation.content, self.pages
        for page in key:
            self._loaded.pop(self._owner.get(page, ()), None)
        runs = runs_of(key)
        if pages.device.type != "cpu":                     # the copies run on the stream of the steps
            block = pinned((len(key), pages.shape[1]), pages.dtype).zero_()
        elif len(runs) == 1:
            block = pages[key[0] : key[0] + len(key)].zero_()
        else:
            block = torch.zeros((len(key), pages.shape[1]), dtype=pages.dtype, device="cpu")
        ranks = np.zeros(len(self.projections), np.int32)
        for part in () if content is None else content.parts:
            a, b = _tensor(part.a), _tensor(part.b)
            for projection, first_row in self._at.get((part.layer, part.module), ()):    # () on other stages
                at, to, rank = projection.a, projection.b, len(a)
                block[:rank, at : at + projection.in_size] = projection.part_of_a(a)
                block[:rank, to : to + projection.out_size] = projection.part_of_b(b, first_row).t()
                ranks[projection.index] = rank
        if pages.device.type != "cpu" or len(runs) > 1:
            for first, page, count in runs:
                pages[page : page + count].copy_(block[first : first + count], non_blocking=True)
        self._keep(key, ranks)

    @contextmanager
    def made_up(self) -> Iterator[tuple[int, ...]]:
        """Context manager: the first pages have an adapter of random numbers. Yields the pages, which are zeros later.
        """
        key, generator = tuple(range(min(MADE_UP_RANKS, len(self.pages)))), torch.Generator("cpu").manual_seed(0)
        own, ranks = self.pages[: len(key)], np.zeros(len(self.projections), np.int32)
        for projection in self.projections:
            for start, size, scale in ((projection.a, projection.in_size, projection.in_size),
                                       (projection.b, projection.out_size, len(key))):
                values = torch.randn((len(key), size), generator=generator, dtype=torch.float32, device="cpu")
                own[:, start : start + size] = values / scale**0.5
            ranks[projection.index] = 1 + projection.index % len(key)
        self._keep(key, ranks)
        try:
            yield key
        finally:
            own.zero_()
            del self._loaded[key]

    def _keep(self, key: tuple[int, ...], ranks: np.ndarray) -> None:
        on_cpu, width = self.pages.device.type == "cpu", self._table.shape[1]
        row = torch.zeros(width, dtype=torch.int32, device="cpu") if on_cpu else pinned((width,), torch.int32).zero_()
        assert len(key) <= self.page_table.shape[1], "an adapter has more ranks than max_adapter_size"
        row[: len(key)] = torch.tensor(key, dtype=torch.int32, device="cpu")
        row[self.page_table.shape[1] :] = torch.from_numpy(ranks)
        self._table[key[0]].copy_(row, non_blocking=True)
        self._loaded[key] = Loaded.of(key, ranks)
        self._owner.update(dict.fromkeys(key, key))

    def at(self, pages: tuple[int, ...]) -> Loaded:
        """Return the adapter that was loaded into these pages. Raises KeyError if there is none."""
        return self._loaded[pages]


def runs_of(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (index of the first, first page, number of pages) of each run of adjacent pages in `pages`."""
    runs: list[tuple[int, int, int]] = []
    for index, page in enumerate(pages):
        if runs and page == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((index, page, 1))
    return runs


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor with the values of an array of AdapterPart."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.astype(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
