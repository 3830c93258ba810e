"""An Attention that compiles and runs one layer's attention per call: rotation, KV cache writes and result."""

import torch

from batch_manager.layers.recording import ANY_ROWS, RecordedAttention, Recording, Rows
from batch_manager.runtime.forms.compiled.forward import CompiledForward
from batch_manager.runtime.forms.compiled.thread_governor import ThreadGovernor
from batch_manager.runtime.packing import ModelCall
from tests.harness.compiled import library_or_skip


class CompiledAttention:
    dispatch = "compiled"

    def __init__(self, layout, pool, sink=0, dtype=None):
        library_or_skip()
        self.layout, self.pool, self.sink = layout, pool, sink

    def plan(self, step):
        self.step = step

    def run(self, layer, query, key, value, rotary, sink_logits=None):
        layout, rows = self.layout, torch.cat([query, key, value], 1).flatten(1)
        heads = [layout.num_heads, layout.num_kv_heads, layout.num_kv_heads]
        recording = Recording(rows.dtype, strides=[rows.shape[1]])
        parts = Rows(recording, 0, 0, rows.shape[1]).view(ANY_ROWS, -1, layout.head_size).split_with_sizes(heads, 1)
        attention = RecordedAttention((*heads[:2], layout.head_size), layout.attention, self.sink)
        recording.result = attention.run(layer, *parts, rotary, sink_logits).register
        compiled = CompiledForward(recording, self.pool, layout.num_heads, ThreadGovernor(2))
        return compiled.run(ModelCall(self.step), rows, None, ())[:, : layout.num_heads * layout.head_size]
