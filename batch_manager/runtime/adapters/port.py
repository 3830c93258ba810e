"""The port through which `Linear` layers add the outputs of adapters, and the adapters of each step's rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from ...adapter_values import MODULE_NAMES, SEPARATE_ATTENTION, AdapterModules, locate_projection
from ...attention.interface import PackedStep
from ...decoding.slots import ADAPTER, SlotState
from ...triton_kernels import dispatch
from ...weights.matrices import WHOLE_MATRIX, Share, rows_of_parts
from .pool import ALIGNED, PIECE, RANKS, ROWS, Loaded, LoraPool, Place, Projection


class Segment(NamedTuple):
    """Adjacent rows of a step, from `first` to before `end`, with one adapter."""

    first: int
    end: int
    adapter: Loaded


class LoraPort:
    """Satisfies layers.context.AdapterPort: the adapters of one model.

    First the layers ask `of`, then `bind` sets the pool. A forward runs inside `active`, which says which rows have
    which adapter. Outside, for instance in a capture, no layer adds anything.

    wanted             names of the modules that adapters may change; None: all
    max_adapter_size   largest rank of an adapter
    deterministic      make the output of a row independent of the other rows, to the bit
    device             device of the layers

    uses_kernels       whether a layer launches the two kernels for all adapters of a step; otherwise, products in torch
                       for each segment
    sent               tiles, pages and ranks of the running forward's adapters, as the kernels take them; (): the
                       layers compute the segments in torch
    """

    def __init__(self, wanted: Sequence[str] | None = None, max_adapter_size: int = 64, deterministic: bool = False,
                 device: torch.device | str = "cpu") -> None:
        self._wanted = None if wanted is None else {*wanted, *(SEPARATE_ATTENTION if "attn_qkv" in wanted else ())}
        self.max_adapter_size, self.deterministic, self.device = max_adapter_size, deterministic, torch.device(device)
        self.uses_kernels, self.sent = dispatch.use_triton(self.device), ()
        self.projections: list[Projection] = []
        self.entries = 0                                   # of a page
        self._sizes: dict[str, dict[int, tuple[int, int]]] = {}
        self._most_sums = 0                                # of lora_shrink, for a token and a rank, in a layer
        self.segments: list[Segment] = []                  # of the running forward
        self._planned: list[Segment] = []
        self.pool: LoraPool | None = None
        self._slots: SlotState | None = None

    @property
    def modules(self) -> AdapterModules:
        """The projections that adapters can change, in the sizes of the whole model."""
        sizes = dict(self._sizes)
        if set(SEPARATE_ATTENTION) <= sizes.keys():
            own = [sizes[module] for module in SEPARATE_ATTENTION]
            sizes["attn_qkv"] = {layer: (size[0], sum(each[layer][1] for each in own))
                                 for layer, size in own[0].items()}
        count = 1 + max((layer for layers in sizes.values() for layer in layers), default=-1)
        return AdapterModules({module: tuple(sizes[module].get(layer) for layer in range(count))
                               for module in MODULE_NAMES if module in sizes})

    def sizes(self) -> tuple[tuple[str, int, int, int], ...]:
        """Return (module, layer, inputs, outputs) of each projection, in the sizes of the whole model."""
        return tuple((module, layer, *size) for module, layers in self._sizes.items() for layer, size in layers.items())

    def scratch_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the largest result of lora_shrink in a step of `num_tokens`."""
        return 4 * self._most_sums * _multiple(self.max_adapter_size, RANKS) * num_tokens * self.uses_kernels

    def add_sizes(self, sizes: Sequence[tuple[str, int, int, int]]) -> None:
        """Add what another rank's `sizes` returned, so that `modules` has the layers of all stages."""
        for module, layer, *size in sizes:
            self._sizes.setdefault(module, {})[layer] = (size[0], size[1])

    def bind(self, pool: LoraPool, slots: SlotState) -> None:
        """Set the pool with the pages, and the slots that say which sequence has which pages. Called once."""
        self.pool, self._slots = pool, slots

    def of(self, names: Sequence[str], in_size: int, sizes: Sequence[int], *, row_order: torch.Tensor | None,
           scale: float | None, share: Share) -> "LoraModule | None":
        located = [locate_projection(name) for name in names]
        if None in located:
            return None
        modules = [(layer, module) for layer, own in located for module in own]
        stored = list(rows_of_parts(names, sizes, share if share.of == "outputs" else WHOLE_MATRIX))
        outputs = [sum(sizes)] if len(modules) == 1 else list(sizes)
        if len(modules) != len(outputs):
            return None
        columns, whole_in_size = None, in_size
        if share.of == "inputs" and share.size > 1:
            columns, whole_in_size = range(share.rank * in_size, (share.rank + 1) * in_size), in_size * share.size
        # Rows of the stored tensors, one after another, that this process has, in the order of the outputs.
        starts = np.cumsum([0, *(whole for _, whole, _ in stored)]).tolist()
        rows = torch.cat([start + torch.arange(whole, dtype=torch.int64, device="cpu")[_slice(part)]
                          for start, (_, whole, parts) in zip(starts, stored) for part in parts])
        if row_order is not None:
            rows = rows[row_order.cpu()]
        whole_sizes = [whole for _, whole, _ in stored]
        if len(whole_sizes) < len(outputs):                # one tensor with several modules of one size
            whole_sizes = [whole_sizes[0] // len(outputs)] * len(outputs)
        is_stacked = tuple(module for _, module in modules) == SEPARATE_ATTENTION
        first_output, first_row, own = 0, 0, []
        for (layer, module), size, whole in zip(modules, outputs, whole_sizes):
            order = rows[first_output : first_output + size] - first_row
            in_order = torch.equal(order, torch.arange(size, dtype=torch.int64, device="cpu"))
            places = [Place(layer, module), *([Place(layer, "attn_qkv", first_row)] if is_stacked else [])]
            if self._wanted is None or module in self._wanted:
                a = self.entries
                b = a + _aligned(in_size)
                self.entries = b + _aligned(size)
                own.append(Projection(len(self.projections), a, b, in_size, size, first_output, columns,
                                      None if in_order else order, scale, places))
                self.projections.append(own[-1])
                self._sizes.setdefault(module, {})[layer] = (whole_in_size, whole)
            first_output, first_row = first_output + size, first_row + whole
        self._most_sums = max(self._most_sums, -(-in_size // PIECE) * len(own))
        return LoraModule(self, own) if own else None

    @property
    def unused_tile(self) -> int:
        """The value of each entry of a tile without rows and ranks."""
        return len(self.pool.pages)

    @property
    def num_planned(self) -> int:
        """Number of arrays that the newest `plan` returned."""
        return int(self.uses_kernels and bool(self._planned))

    def plan(self, step: PackedStep) -> Sequence[np.ndarray]:
        """Find the adapters of the step's rows, and return the array of tiles that the kernels read, if they do.

        Raises KeyError if an adapter is not on the device.
        """
        self._planned = self.segments_of(step.slots, step.query_starts)
        return [self.tiles_of(self._planned)] if self.num_planned else ()

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sent = ()
        if tensors:
            most = _multiple(max(len(segment.adapter.pages) for segment in self._planned), RANKS)
            self.sent = (tensors[0], self.pool.page_table[:, :most], self.pool.rank_table)

    def tiles_of(self, segments: Sequence[Segment]) -> np.ndarray:
        """Return the tiles of the kernels, [W, 3] int32: first row, end, first page of the adapter."""
        return np.array([(first, min(first + ROWS, segment.end), segment.adapter.pages[0]) for segment in segments
                         for first in range(segment.first, segment.end, ROWS)], np.int32).reshape(-1, 3)

    def segments_of(self, step_slots: np.ndarray, starts: np.ndarray, first_row: int = 0) -> list[Segment]:
        """Return the segments of a step's rows that have an adapter, in order.

        step_slots   [n] slot of each sequence
        starts       [n + 1] offsets of their rows, which begin at `first_row`
        """
        slots, segments = self._slots, []
        has_adapter = slots.features[step_slots] & ADAPTER
        if not has_adapter.any():
            return segments
        last = None
        for index in np.nonzero(has_adapter)[0].tolist():
            pages, first, end = slots.adapters[int(step_slots[index])], int(starts[index]), int(starts[index + 1])
            first, end = first + first_row, end + first_row
            if segments and segments[-1].end == first and pages == last:
                segments[-1] = segments[-1]._replace(end=end)
            else:
                segments.append(Segment(first, end, self.pool.at(pages)))
                last = pages
        return segments

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Context manager: the sequence in slot 0 has a made-up adapter."""
        slots = self._slots
        with self.pool.made_up() as slots.adapters[0]:
            slots.features[0] |= ADAPTER
            try:
                yield
            finally:
                slots.features[0] &= ~ADAPTER
                del slots.adapters[0]

    @contextmanager
    def at_fixed_addresses(self, tiles: torch.Tensor) -> Iterator[None]:
        """Context manager for a forward whose tiles are in `tiles` [W, 3]. All its launches depend on W alone."""
        self.sent = (tiles, self.pool.page_table, self.pool.rank_table)
        try:
            yield
        finally:
            self.sent = ()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager for a forward of the planned step."""
        self.segments = self._planned
        try:
            yield
        finally:
            self.segments = self._planned = []
            self.sent = ()


class LoraModule:
    """Satisfies layers.context.AdapterModule: the adapters of one `Linear`.

    projections   of the `Linear`, those that adapters change
    """

    def __init__(self, port: LoraPort, projections: Sequence[Projection]) -> None:
        self.port, self.projections = port, projections
        outputs = [(projection.first_output, projection.out_size) for projection in projections]
        self._outputs = (max(size for _, size in outputs),
                         all(number % ALIGNED == 0 for each in outputs for number in each))
        self._table = torch.tensor([(projection.index, projection.a // ALIGNED, projection.b // ALIGNED, *each)
                                    for projection, each in zip(projections, outputs)], dtype=torch.int32,
                                   device=port.device)

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add B (A x) of each row's adapter to y [T, outputs of the `Linear`]. Rows without one are not touched."""
        if self.port.sent:
            of_step, pages = (*self.port.sent, self._table), self.port.pool.pages
            shrunk = dispatch.kernel("lora_shrink", x.device)(x, pages, *of_step)
            dispatch.kernel("lora_expand_add", x.device)(y, shrunk, pages, *of_step, *self._outputs)
            return
        for first, end, adapter in self.port.segments:
            for projection in self.projections:
                rank = int(adapter.ranks[projection.index])
                if rank:
                    to = y[first:end, projection.first_output : projection.first_output + projection.out_size]
                    self._add(to, x[first:end], projection, adapter.runs, rank)

    def _add(self, sums: torch.Tensor, rows: torch.Tensor, projection: Projection,
             runs: Sequence[tuple[int, int, int]], rank: int) -> None:
        """Add two products for each run of adjacent pages, which are read where they are.

        With `deterministic`, add products of a copy, as the deterministic layers multiply.
        """
        pages = [self.port.pool.pages[page : page + min(count, rank - first)]
                 for first, page, count in runs if first < rank]
        parts = [(own[:, projection.a : projection.a + projection.in_size],
                  own[:, projection.b : projection.b + projection.out_size]) for own in pages]
        if self.port.deterministic:
            kernel = dispatch.kernel("deterministic_linear", rows.device)
            a, b = map(torch.cat, zip(*parts))
            sums.add_(kernel(kernel(rows.contiguous(), a), b.t().contiguous()))
            return
        for a, b in parts:
            sums.addmm_(rows @ a.t(), b)


def _slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)


def _aligned(size: int) -> int:
    return _multiple(size, ALIGNED)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
