import pytest
import torch

from batch_manager.triton_kernels.quantised_linear import quantised_linear_settings
from batch_manager.triton_kernels.reference.quantised_linear import decoded

# Bits, inputs of a group, zero points by group.
FORMATS = {"Q4_0": (4, 32, False), "Q8_0": (8, 32, False), "AWQ": (4, 64, True), "GPTQ": (8, 128, True),
           "compressed-tensors": (8, 0, False), "one group, 4 bits": (4, 0, True), "long groups": (4, 512, True)}


@pytest.fixture
def matrix(random):
    """matrix(format, outputs, inputs, scales) -> arguments of quantised_linear after x; unused levels have any value.

    scales   their dtype
    """

    def make(name, outputs, inputs, dtype=torch.float16):
        bits, group, has_zeros = FORMATS[name]
        groups = 1 if group == 0 else -(-inputs // group)
        levels = (random(-(-inputs * bits // 256), outputs, 32).abs() * 100).to(torch.uint8)
        scales = (random(outputs, groups) * 0.01).to(dtype)
        zeros = 2 ** (bits - 1)
        if has_zeros:
            zeros = (random(outputs, groups) * 2**bits / 6).clamp(-2 ** (bits - 1), 2 ** (bits - 1)).to(torch.int16)
            zeros += 2 ** (bits - 1)
        return levels, scales, zeros, bits, group
    return make


@pytest.mark.parametrize("name, rows, outputs, inputs", [
    ("Q4_0", 1, 70, 288), ("Q4_0", 70, 130, 96), ("Q8_0", 16, 33, 288), ("Q8_0", 17, 70, 33), ("AWQ", 5, 16, 320),
    ("AWQ", 64, 70, 100), ("GPTQ", 3, 20, 300), ("compressed-tensors", 2, 20, 200), ("compressed-tensors", 65, 5, 64),
    ("one group, 4 bits", 4, 20, 90), ("long groups", 3, 10, 600), ("long groups", 66, 10, 600)])
def test_shapes(assert_equals_oracle, random, matrix, dtype, name, rows, outputs, inputs):
    bias = random(outputs, dtype=dtype) if rows % 2 else None
    assert_equals_oracle("quantised_linear", random(rows, inputs, dtype=dtype), *matrix(name, outputs, inputs, dtype),
                         bias, 0.5, reduction=inputs, dtype=dtype)


@pytest.mark.parametrize("rows", [3, 20])
def test_a_product_is_added_to_a_residual_in_strided_rows(assert_equals_oracle, random, matrix, dtype, rows):
    packed, out = random(rows, 3, 96, dtype=dtype), random(rows, 2, 40, dtype=dtype)
    out[:, 1] = torch.nan
    assert_equals_oracle("quantised_linear", packed[:, 1], *matrix("Q4_0", 40, 96, dtype), residual=out[:, 0],
                         reduction=96, dtype=dtype)
    assert out[:, 1].isnan().all() and out[:, 0].isfinite().all()


def test_what_is_not_finite_stays_in_its_output_and_in_its_row(run_kernel, random, matrix):
    levels, scales, *others = matrix("Q4_0", 20, 96)
    scales[3, 1], scales[7, 2] = torch.nan, torch.inf
    x = random(5, 96)
    x[2, 40] = torch.nan
    found = run_kernel("quantised_linear", x, levels, scales, *others)
    assert (~found[2].isfinite()).all() and (~found[:, [3, 7]].isfinite()).all()
    assert found[[0, 1, 3, 4]][:, [n for n in range(20) if n not in (3, 7)]].isfinite().all()


def test_weights_are_not_rounded(run_kernel, is_recording, random, matrix):
    """Rows of a unit matrix give the weights, which have more bits than float16: those of a level and of a scale."""
    given = matrix("GPTQ", 40, 64, torch.bfloat16)
    weights = decoded(*given, 64)
    found = run_kernel("quantised_linear", torch.eye(64, device=weights.device), *given)
    assert is_recording or torch.equal(found.t(), weights) and not torch.equal(weights, weights.half().float())


def test_nothing_to_do(run_kernel, random, matrix):
    assert run_kernel("quantised_linear", random(0, 64), *matrix("Q8_0", 3, 64)).shape == (0, 3)


class Limits:
    """The part of DeviceLimits that the settings use."""

    def __init__(self, shared_kib, multiprocessors):
        self.shared_bytes, self.multiprocessors = shared_kib * 1024, multiprocessors


@pytest.mark.parametrize("limits", [Limits(227, 132), Limits(163, 108), Limits(64, 304)])
def test_settings_fit_the_device(limits):
    for rows in (1, 16, 17, 64, 65, 4096):
        for outputs in (3, 960, 4096, 151936):
            for bits, size in ((4, 2), (8, 2), (4, 4), (8, 4)):
                found = quantised_linear_settings(rows, outputs, bits, size, limits)
                step = found.chunks * 32 * (found.columns + found.rows * 8 // bits * size)
                assert found.num_stages >= 1 and found.num_stages * step < limits.shared_bytes
                assert rows > 16 or found.columns == 16 or -(-outputs // found.columns) >= 2 * limits.multiprocessors
