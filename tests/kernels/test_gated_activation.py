import pytest
import torch


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("size", [40, 1500])
def test_kinds(assert_equals_oracle, random, dtype, kind, size):
    assert_equals_oracle("gated_activation", 2 * random(2, 2 * size, dtype=dtype), kind, reduction=16, dtype=dtype)


def test_silu_is_the_default_and_outputs_may_be_given(assert_equals_oracle, random):
    out = torch.full((3, 20), torch.nan, device=random(1).device)
    assert_equals_oracle("gated_activation", random(3, 40), out=out, reduction=16, dtype=torch.float32)
