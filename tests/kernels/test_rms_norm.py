import pytest
import torch


@pytest.mark.parametrize("size", [32, 96, 576, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rows(assert_equals_oracle, random, dtype, size, with_residual):
    # The oracle does not round the residual to the storage dtype before the norm, so one more rounding is allowed.
    residual = random(3, size, dtype=dtype) if with_residual else None
    assert_equals_oracle(
        "rms_norm", random(3, size, dtype=dtype), random(size, dtype=dtype), 1e-5, residual=residual,
        roundings=2 if with_residual else 1, reduction=size, dtype=dtype,
    )


def test_the_residual_receives_the_sum(run_kernel, random):
    hidden, residual = random(2, 64), random(2, 64)
    total = hidden + residual
    run_kernel("rms_norm", hidden, random(64), 1e-5, residual=residual)
    assert torch.equal(residual, total)


def test_heads_of_a_packed_tensor_in_place(assert_equals_oracle, random):
    packed = random(3, 6, 32)
    before = packed.clone()
    heads = packed[:, 1:5]
    assert_equals_oracle("rms_norm", heads, random(32), 1e-6, out=heads, reduction=32, dtype=torch.float32)
    assert torch.equal(packed[:, ::5], before[:, ::5]) and not torch.equal(packed, before)


def test_weights_stored_as_an_offset_from_one(assert_equals_oracle, random):
    assert_equals_oracle(
        "rms_norm", random(2, 64), random(64), 1e-6, weight_offset=1.0, reduction=64, dtype=torch.float32
    )


def test_a_row_of_zeros_stays_zero(run_kernel, random):
    out = run_kernel("rms_norm", torch.zeros_like(random(1, 64)), random(64), 1e-5)
    assert torch.equal(out, torch.zeros_like(out))
