import pytest
import torch


@pytest.mark.parametrize("kind", ["gelu", "gelu_new", "silu", "relu"])
@pytest.mark.parametrize("size", [40, 1500])
def test_kinds(assert_equals_oracle, random, dtype, kind, size):
    assert_equals_oracle("activation", 3 * random(2, size, dtype=dtype), kind, reduction=16, dtype=dtype)


def test_in_place_on_strided_rows_and_far_out(assert_equals_oracle, random, integers):
    packed = random(2, 2, 8)
    packed[0, 0] = integers([-1000, -100, -20, -1, 0, 20, 100, 1000], torch.float32)
    before = packed.clone()
    rows = packed[:, 0]
    for kind in ("gelu", "gelu_new", "silu"):
        rows.copy_(before[:, 0])
        assert_equals_oracle("activation", rows, kind, out=rows, reduction=16, dtype=torch.float32)
    assert torch.equal(packed[:, 1], before[:, 1])


def test_an_unknown_kind_is_refused(run_kernel, random):
    for kernel in ("activation", "gated_activation"):
        with pytest.raises(Exception, match="unknown activation 'swish'; expected one of gelu, gelu_new, silu, relu"):
            run_kernel(kernel, random(1, 8), "swish")
