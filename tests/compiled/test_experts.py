"""A mixture of experts in the compiled step agrees with a float64 model of it, and gives a row the same bits alone."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional

from batch_manager.layers.recording import NotRecordableError, Recording, Rows
from batch_manager.triton_kernels.cpu.native.matrix import (
    PackedMatrix,
    QuantisedMatrix,
    QuantisedPanels,
    quantised_rows,
)

from .test_operations import hidden_states, recorded
from .test_rows_alone import recorded as recorded_on

pytestmark = pytest.mark.usefixtures("machine")
# (experts, chosen, rows, width, inner size, whether one expert has the largest logit in every row)
CASES = [(2, 1, 1, 64, 32, False), (8, 2, 5, 64, 48, False), (128, 8, 33, 96, 40, False), (5, 5, 70, 100, 33, False),
         (16, 1, 200, 64, 32, True), (3, 2, 600, 33, 10, True)]
FORMS = list(product((torch.float32, torch.bfloat16), (None, "Q8_0")))


def matrix_of(weight, kind):
    """Return the weight in panels, and its numbers in float64."""
    if kind is None:
        return PackedMatrix(weight, None, True), weight.double()
    rows, outputs = quantised_rows(weight, kind), len(weight)
    matrix = QuantisedMatrix(QuantisedPanels([(kind, outputs)], weight.shape[1], [(np.arange(outputs), rows)]),
                             weight.dtype)
    scales = rows.reshape(outputs, -1, 34)[:, :, :2].copy().view(np.float16).astype(np.float64)
    levels = rows.reshape(outputs, -1, 34)[:, :, 2:].view(np.int8)
    return matrix, torch.from_numpy((scales * levels).reshape(outputs, -1)[:, : weight.shape[1]])


def mixture(case, dtype, kind):
    """Return (x, logits, networks, a function that records the mixture of both, its float64 model)."""
    experts, chosen, rows, width, size, is_crowded = case
    torch.manual_seed(sum(case))
    made = [(matrix_of((torch.randn(2 * size, width) / width**0.5).to(dtype), kind),
             matrix_of((torch.randn(width, size) / size**0.5).to(dtype), kind)) for _ in range(experts)]
    logits = (torch.randn(rows, experts) * 2).round() / 2               # many are equal
    logits[:, -1] += 50 * is_crowded
    networks = [(gate_up[0], down[0]) for gate_up, down in made]

    def operate(hidden, renormalises):
        x, logits = hidden.split_with_sizes([width, experts], 1)
        return x.clamp(-1e4, 1e4).mixed(logits, networks, "silu", chosen, renormalises)

    def model(x, renormalises):
        order = logits.sort(dim=1, descending=True, stable=True)[1][:, :chosen]
        shares = logits.double().softmax(1).gather(1, order)
        if renormalises:
            shares /= shares.sum(1, keepdim=True)
        result = torch.zeros(rows, width, dtype=torch.float64)
        for expert, (gate_up, down) in enumerate(made):
            own, place = (order == expert).nonzero(as_tuple=True)
            gate, up = (x[own].double() @ gate_up[1].T).chunk(2, 1)
            result[own] += shares[own, place, None] * (functional.silu(gate) * up @ down[1].T)
        return result

    return hidden_states(width, dtype, rows), logits.to(dtype), operate, model


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sum_of_the_chosen_experts(case):
    for (dtype, kind), renormalises in product(FORMS, (False, True)):
        x, logits, operate, model = mixture(case, dtype, kind)
        record = partial(operate, renormalises=renormalises)
        expected, tolerance = model(x, renormalises), 1e-5 if dtype == torch.float32 else 0.02
        together = torch.cat([x, logits], 1)
        found = recorded(together, record)
        assert (found - expected).abs().max() < tolerance * expected.abs().max(), (dtype, kind, renormalises)
        for threads, row in enumerate(range(0, len(x), max(len(x) // 4, 1)), 1):
            alone = recorded_on(record, together[row : row + 1], 0, threads)
            assert torch.equal(alone[0], found[row]), (dtype, kind, row)


def test_a_row_that_is_not_a_number_has_no_effect_on_others():
    for place in ("x", "logits"):
        x, logits, operate, _ = mixture(CASES[2], torch.float32, None)
        record = partial(operate, renormalises=False)
        expected = recorded(torch.cat([x, logits], 1), record)
        {"x": x, "logits": logits}[place][7, 3] = torch.nan
        found = recorded(torch.cat([x, logits], 1), record)
        assert found[7].isnan().all() and torch.equal(found[:7], expected[:7]) and torch.equal(found[8:], expected[8:])


def test_gates_and_clamps():
    x = hidden_states(50, torch.float32)
    x[3, 4] = torch.nan
    found = recorded(x, lambda rows: rows.split_with_sizes([40, 10], 1)[0].gated_by(
        rows.split_with_sizes([1, 49], 1)[0]))
    torch.testing.assert_close(found, x[:, :40] * x[:, :1].sigmoid(), equal_nan=True, atol=2e-6, rtol=2e-6)
    assert torch.allclose(recorded(x, lambda rows: rows.clamp(-0.5, 0.5)), x.clamp(-0.5, 0.5), rtol=0, equal_nan=True)
    with pytest.raises(NotRecordableError, match="clamps its hidden states to 0.0 to 1.0"):
        recorded(x, lambda rows: rows.clamp(0.0, 1.0))


def test_matrices_of_several_kinds_are_refused():
    weight = torch.ones(64, 32)
    networks = [(matrix_of(weight, kind)[0], matrix_of(weight.T.contiguous(), None)[0]) for kind in (None, "Q8_0")]
    recording = Recording(torch.float32, strides=[64])
    x, logits = Rows(recording, 0, 0, 64).split_with_sizes([32, 32], 1)
    with pytest.raises(NotRecordableError, match="the matrices of its experts are of several kinds"):
        x.mixed(logits, networks, "silu", 1, False)
