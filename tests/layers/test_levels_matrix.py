"""Matrices of levels, read from rows of files; without a GPU, the oracle of the kernel multiplies them."""

import numpy as np
import pytest
import torch

from batch_manager.layers.levels_matrix import LevelsMatrix
from batch_manager.weights.matrices import Blocks, GroupedType, grouped_rows
from tests.compiled.test_quantised_products import decoded, random_rows

CPU = torch.device("cpu")


def of_groups(name, outputs, inputs, group, dtype, has_one_zero):
    """Return random rows of a GroupedType, and the weights that they have."""
    draw, groups = np.random.default_rng(3), -(-inputs // min(group, inputs))
    low, high = (0, 16) if name == "INT4" else (-128, 128)
    levels = draw.integers(low, high, (outputs, inputs), np.int16)
    zeros = draw.integers(low, high, (outputs, groups), np.int16)
    zeros = np.full_like(zeros, 8) if has_one_zero else zeros
    scales = torch.from_numpy(draw.uniform(-1e-3, 1e-3, (outputs, groups))).to(dtype)
    of_group = np.arange(inputs) // group
    weights = (levels - zeros[:, of_group]).astype(np.float32) * scales.float().numpy()[:, of_group]
    return GroupedType(name, group, dtype), grouped_rows(levels.astype(np.uint8), scales, zeros), weights


@pytest.mark.parametrize("of", ["Q4_0", "Q8_0", ("INT4", 128, torch.float16, False), ("INT4", 96, torch.float32, True),
                                ("INT8", 64, torch.bfloat16, False), ("INT8", 2**40, torch.float32, False)], ids=str)
def test_rows_and_products_are_those_of_the_decoded_weights(of):
    """Two ranges of outputs, of which the first has Q8_0; rows come in any order."""
    inputs, first = 288, random_rows("Q8_0", 16, 288)
    kind, rows, weights = (of, random_rows(of, 21, inputs), None) if isinstance(of, str) else of_groups(
        of[0], 21, inputs, *of[1:])
    weights = torch.from_numpy(decoded(kind, rows) if weights is None else weights)
    order = np.random.default_rng(1).permutation(21)

    def read(start=0):
        for some in (order[:7], order[7:]):
            yield start + some, rows[some]

    alone = LevelsMatrix(Blocks([(kind, 21)], inputs, read, None), CPU, torch.float32)
    some = torch.tensor([20, 0, 7, 7])
    assert torch.equal(alone.rows(some), weights[some])

    def of_both():
        yield from read(16)
        yield np.arange(16), first

    bias = torch.randn(37)
    stacked = LevelsMatrix(Blocks([("Q8_0", 16), (kind, 21)], inputs, of_both, bias, 0.5), CPU, torch.float32)
    x, whole = torch.randn(5, inputs), torch.cat([torch.from_numpy(decoded("Q8_0", first)), weights])
    expected = 0.5 * (x.double() @ whole.double().T) + bias
    torch.testing.assert_close(stacked.multiply(x).double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(stacked.add_product(x, torch.ones(5, 37)).double(), expected + 1, rtol=0, atol=1e-6)
    other = stacked.sharing(None, 2.0)
    torch.testing.assert_close(other.multiply(x).double(), 4 * (expected - bias), rtol=0, atol=4e-6)
