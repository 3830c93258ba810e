"""The launches of a greedy generation step of the models that the goals for a GPU name, counted without a GPU.

The models have their real sizes, and weights without memory. `FusedBody` decides what is fused, as when an engine
loads the model. Run with `-s` to see the counts that docs/devices.md has.
"""

from collections import Counter

import numpy as np
import pytest
import torch

from batch_manager.layers import weight_form
from batch_manager.layers.context import LayerContext
from batch_manager.models.loading import LoadedModel
from batch_manager.models.registry import find_model
from batch_manager.runtime.forms.fixed.fused import FusedBody, record_launches
from batch_manager.triton_kernels import fused_linear_settings
from batch_manager.triton_kernels.decode_work_list import decode_work_list
from batch_manager.triton_kernels.device_limits import DeviceLimits
from batch_manager.weights.json_file import Fields
from batch_manager.weights.source import DummyWeights
from tests.benchmarks.gpu_report.shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, QWEN3_600M

H100, META, BLOCK_TOKENS = DeviceLimits(227 * 1024, 132, True), torch.device("meta"), 64
AROUND = 3                          # prepare_step, and two kernels of sample_token; test_recorded_steps.py counts them
# name -> shape, rows, tokens of a sequence, launches of a step
GOALS = {
    "Qwen3-0.6B x 256": (QWEN3_600M, 256, 900, 145),
    "8B x 32": (LLAMA_8B, 32, 1024, 229),
    "135M x 256": (LLAMA_135M, 256, 512, 155),
    "1B x 1": (LLAMA_1B, 1, 1024, 100),
}


class NoWeights(DummyWeights):
    def __init__(self):
        super().__init__(0, META, torch.bfloat16)

    def _fill(self, name, rows):
        pass


def fused_step(shape, monkeypatch):
    monkeypatch.setattr(weight_form, "_packed", lambda weight: weight)             # as on a GPU
    config = shape.config()
    made = find_model(config["architectures"][0])
    spec = made.read_spec(Fields(config, "config.json"), config["architectures"][0])
    model = made(spec, NoWeights(), LayerContext(device=META, dtype=torch.bfloat16))
    recording, gives_logits = record_launches(LoadedModel(spec, model, 0, META, torch.bfloat16), spec, norms_heads=True)
    assert gives_logits
    return FusedBody(recording, META, H100, gives_logits=True)


@pytest.mark.parametrize("name", GOALS)
def test_launches_of_a_step(name, monkeypatch):
    shape, rows, tokens, expected = GOALS[name]
    fused = fused_step(shape, monkeypatch)
    attention = pytest.importorskip("batch_manager.triton_kernels.paged_attention_decode", reason="needs triton")
    resident = attention.decode_settings(shape.head_size, BLOCK_TOKENS, 2, H100).resident_programs
    _, part_starts = decode_work_list(np.full(rows, tokens), BLOCK_TOKENS, shape.kv_heads, resident)
    merges = shape.layers * bool(part_starts[-1])
    counts = {}
    for label, reads in (("before", {torch.bfloat16}), ("now", fused_linear_settings.NARROW_RANGE)):
        monkeypatch.setattr(fused_linear_settings, "NARROW_RANGE", reads)
        steps = fused._steps(rows)
        counts[label] = len(steps) + merges + AROUND
        kinds = Counter(type(step).__name__ for step in steps)
    print(f"{name}: {counts['now']} launches, {counts['before']} if an RMS norm reads its rows twice; {dict(kinds)}, "
          f"{merges} merges")
    assert counts["now"] == expected
