"""What computes a step at fixed addresses: `fused` up to its most rows, else the layers; and the form that says so."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch_manager.handover import GenerationWork, ScheduledBatch
from batch_manager.runtime.block_tables import BlockTables
from batch_manager.runtime.device.running import Uploads
from batch_manager.runtime.forms.fixed.form import FixedForm
from batch_manager.runtime.forms.fixed.inputs import FixedInputs
from batch_manager.runtime.forms.fixed.launches import Launches
from batch_manager.runtime.forms.fixed.shapes import Shape
from batch_manager.runtime.forms.form import ROWS

from .test_inputs import LARGEST, SIZE, Attention

CPU, SLOTS = torch.device("cpu"), 6


class Model:
    """Hidden states are the tokens, plus 10 for each call of `forward`; logits are hidden states plus 1000."""

    def __init__(self, calls):
        self.calls = calls

    def embed(self, tokens):
        self.calls.append("embed")
        return tokens[:, None].float()

    def forward(self, hidden, positions, attention):
        self.calls.append("layers")
        return hidden + 10

    def logits(self, hidden):
        self.calls.append("head")
        return hidden + 1000


@pytest.mark.parametrize("shape, gives_logits, expected", [
    (Shape(4, False, False), True, ["embed", "fused"]),
    (Shape(4, False, False), False, ["embed", "fused", "head"]),
    (Shape(5, False, True), True, ["embed", "layers", "head"]),
    (Shape(4, False, True, 40, 3), True, ["embed", "layers", "head"])])
@pytest.mark.parametrize("has_table", [False, True])
def test_the_shape_decides_what_computes_a_step(shape, gives_logits, expected, has_table):
    calls, sampled = [], []
    decoder = SimpleNamespace(
        state=SimpleNamespace(last_tokens=SimpleNamespace(values=torch.arange(7 * 4).view(7, 4))),
        plain_counts=lambda rows: torch.ones(rows), sample_plain=lambda logits, slots, positions, counts, results: (
            sampled.append((logits, counts))))
    attention = Attention()
    attention.bind = lambda generation, contexts: calls.append("bind")
    attention.dispatch = "triton"
    parts = SimpleNamespace(attention=attention, tables=BlockTables(SLOTS, 9, copied=(SLOTS, 9)), uploads=Uploads(CPU),
                            device=CPU, num_slots=SLOTS, tokens_per_block=SIZE, decoder=decoder,
                            slots=SimpleNamespace(num_taken=0), adapters=None)
    fused = SimpleNamespace(most_rows=4, gives_logits=gives_logits, run=lambda hidden, positions, attention: (
        calls.append("fused") or hidden + 10 + 1000 * gives_logits))
    inputs = FixedInputs(parts, LARGEST)
    table = torch.arange(100.0)[:, None] if has_table else None
    launches = Launches(parts, inputs, Model(calls), table, fused)
    inputs.write_padding(shape)
    division = inputs.of(shape)
    for name, values in (("slots", np.arange(shape.num_sampled)), ("token_ids", 50 + np.arange(shape.context_tokens))):
        division.arrays[name][:] = values % 6 if name == "slots" else values
    inputs.send(shape)
    launches.launch(shape)
    assert [call for call in calls if call != "bind"] == expected[has_table:] and calls.count("bind") == 1
    ((logits, counts),) = sampled
    assert logits[: shape.rows, 0].tolist() == [1010 + 4 * (row % 6) for row in range(shape.rows)]
    assert (None if counts is None else len(counts)) == (shape.num_sampled if shape.samples else None)
    if shape.contexts:
        assert division.context_sums.tolist() == [60 + token for token in range(shape.context_tokens)]

    def obstacle(most_rows, rows):
        slots = np.arange(rows, dtype=np.int32)
        return FixedForm("fused", parts, inputs, launches, most_rows).misfit(
            ScheduledBatch(0, generation=GenerationWork(slots, slots)))

    assert (obstacle(4, 4), obstacle(4, 5), obstacle(None, 5)) == (0, ROWS, 0)
