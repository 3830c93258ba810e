"""Makes steps at fixed addresses run on a CPU without Triton: an attention in torch, and graphs that call again."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch

from batch_manager.attention.interface import PackedStep
from batch_manager.attention.torch_paged import TorchPagedAttention
from batch_manager.runtime import build_backend
from batch_manager.tools.stub_model import BindableStubAttention


class CallingGraph:
    """A graph that calls the captured function again."""

    device_type = "cpu"

    def __init__(self, device, memory_of=None):
        self.replay = None

    def capture(self, function):
        self.replay = function


@contextlib.contextmanager
def calling_graphs() -> Iterator[None]:
    """Context manager: engines with a `BindableTorchAttention` that are built within it have the form `graph`."""
    wanted, defaults = build_backend.wanted_forms, build_backend.build_native_backend.__kwdefaults__
    with (mock.patch.object(build_backend, "wanted_forms", lambda asked: {
              name: reason for name, reason in wanted(asked).items() if name != "graph"}),
          mock.patch.dict(defaults, {"graph": CallingGraph})):
        yield


class BindableTorchAttention(BindableStubAttention):
    """A BindableAttention over `TorchPagedAttention`. Padding rows are left out and give zeros."""

    norms_heads = False

    def __init__(self, spec, pool):
        super().__init__(pool.shape[4])
        self._parts = [TorchPagedAttention(spec, pool) for _ in range(2)]
        self._block = pool.shape[4]

    def plan(self, step):
        self._parts[0].plan(step)
        self._rows = [(self._parts[0], slice(None))]

    def bind(self, generation, contexts):
        lengths, self._rows = generation.kv_lengths.numpy(), []
        tables = generation.block_tables.numpy()
        rows = np.flatnonzero(lengths)
        if len(rows):
            of_rows, kv_lengths = tables[generation.table_rows.numpy()[rows]], lengths[rows]
            positions = kv_lengths - 1
            blocks = of_rows[np.arange(len(rows)), positions // self._block].astype(np.int64)
            self._parts[0].plan(PackedStep(
                0 * positions, positions, blocks * self._block + positions % self._block, 0 * positions,
                np.arange(len(rows) + 1, dtype=np.int32), kv_lengths, of_rows, 0, np.arange(len(rows))))
            self._rows.append((self._parts[0], torch.from_numpy(rows)))
        if contexts is not None and int(contexts.query_starts[-1]):
            starts = contexts.query_starts.numpy()
            count = int(np.diff(starts).astype(bool).sum())
            tokens = slice(0, int(starts[-1]))
            positions = contexts.positions.numpy()[tokens].astype(np.int32)
            self._parts[1].plan(PackedStep(
                0 * positions, positions, contexts.pool_slots.numpy()[tokens], np.zeros(count, np.int32),
                starts[: count + 1], contexts.kv_lengths.numpy()[:count],
                tables[contexts.table_rows.numpy()[:count]], count, starts[1 : count + 1] - 1))
            self._rows.append((self._parts[1], torch.arange(tokens.stop) + len(lengths)))

    def run(self, layer, query, key, value, rotary, sink_logits=None):
        result = query.new_zeros((len(query), query[0].numel()))
        for attention, rows in self._rows:
            result[rows] = attention.run(layer, query[rows], key[rows], value[rows], rotary).flatten(1)
        return result
