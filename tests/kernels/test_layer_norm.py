import pytest
import torch


@pytest.mark.parametrize("size", [32, 96, 768, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows(assert_equals_oracle, random, dtype, size, with_residual, with_bias):
    # The oracle does not round the residual to the storage dtype before the norm, so one more rounding is allowed.
    residual = random(3, size, dtype=dtype) if with_residual else None
    bias = random(size, dtype=dtype) if with_bias else None
    assert_equals_oracle(
        "layer_norm", random(3, size, dtype=dtype), random(size, dtype=dtype), bias, 1e-5, residual=residual,
        roundings=2 if with_residual else 1, reduction=size, dtype=dtype,
    )


def test_a_large_mean_does_not_spoil_the_variance(run_kernel, random):
    hidden = random(2, 500) + 1000
    out = run_kernel("layer_norm", hidden, torch.ones_like(hidden[0]), None, 1e-5)
    wide = hidden.double()
    expected = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    # The mean is rounded to float32: an error of eps * 1000 in every entry.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * 1000 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("with_bias", [False, True])
def test_heads_with_weights_of_their_own(assert_equals_oracle, random, dtype, with_bias):
    heads = random(5, 7, 48, dtype=dtype)[:, 2:6]                      # of a wider row
    bias = random(48, dtype=dtype) if with_bias else None
    assert_equals_oracle("layer_norm", heads, random(4, 48, dtype=dtype), bias, 1e-5, reduction=48, dtype=dtype)


def test_in_place_on_strided_rows(assert_equals_oracle, random):
    packed = random(3, 2, 48)
    before = packed.clone()
    rows = packed[:, 0]
    assert_equals_oracle(
        "layer_norm", rows, random(48), random(48), 1e-5, out=rows, reduction=48, dtype=torch.float32
    )
    assert torch.equal(packed[:, 1], before[:, 1])
