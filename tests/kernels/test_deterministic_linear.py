import pytest
import torch


@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 64, 64), (3, 100, 70), (70, 33, 5), (65, 128, 130)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_shapes(assert_equals_oracle, random, dtype, rows, size, columns, with_bias):
    bias = random(columns, dtype=dtype) if with_bias else None
    try:
        assert_equals_oracle(
            "deterministic_linear", random(rows, size, dtype=dtype), random(columns, size, dtype=dtype), bias,
            reduction=size, dtype=dtype,
        )
    except RuntimeError as refusal:        # a CPU form refuses by name what torch does not compute row by row
        if columns > 5 or type(refusal).__name__ != "NoAgreeingSizeError":
            raise
        pytest.skip(f"refused on this machine: {refusal}")


def test_strided_rows_into_strided_rows(assert_equals_oracle, random):
    packed = random(5, 3, 40)
    out = torch.full((5, 2, 24), torch.nan, device=packed.device)
    assert_equals_oracle(
        "deterministic_linear", packed[:, 1], random(24, 40), out=out[:, 0], reduction=40, dtype=torch.float32
    )
    assert out[:, 1].isnan().all()


@pytest.mark.parametrize("size", [48, 100])
def test_a_row_has_the_same_bits_alone_and_anywhere_among_others(run_kernel, random, dtype, size):
    rows, weight = random(70, size, dtype=dtype), random(40, size, dtype=dtype)

    def product(rows):
        return run_kernel("deterministic_linear", rows, weight, interpreted={"dots_in_one_order": True})

    together = product(rows)
    for row in (0, 1, 31, 32, 69):
        assert torch.equal(product(rows[row : row + 1]), together[row : row + 1])
    order = torch.arange(70).roll(13)
    assert torch.equal(product(rows[order].contiguous()), together[order])


def test_nothing_to_do(run_kernel, random):
    assert run_kernel("deterministic_linear", random(0, 8), random(3, 8)).shape == (0, 3)
