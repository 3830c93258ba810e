import pytest
import torch


@pytest.fixture
def sorted_rows(integers):
    """sorted_rows(counts, per_row) -> ends, in_rows and out_rows of experts with these numbers of rows"""

    def make(counts, per_row):
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(sum(counts)))
        return (integers(torch.tensor(counts).cumsum(0).tolist()), integers((order // per_row).tolist(), torch.int64),
                integers(order.tolist(), torch.int64))

    return make


@pytest.mark.parametrize("counts, size, columns", [
    ([3, 0, 1, 0], 33, 5), ([0, 0, 18], 64, 70), ([40, 0, 1, 17, 70], 40, 33)])
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(assert_equals_oracle, random, dtype, sorted_rows, counts,
                                                            size, columns):
    ends, in_rows, out_rows = sorted_rows(counts, 2)
    x, weight = random(sum(counts) // 2, size, dtype=dtype), random(len(counts), columns, size, dtype=dtype)
    found = assert_equals_oracle("moe_grouped_gemm", x, weight, ends, in_rows, reduction=size, dtype=dtype)
    assert_equals_oracle("moe_grouped_gemm", found, weight.mT.contiguous(), ends, None, out_rows, random(sum(counts)),
                         torch.full((sum(counts), size), torch.nan, device=x.device), reduction=columns, dtype=dtype)


def test_a_row_has_the_bits_of_the_deterministic_product_whatever_the_others_are(run_kernel, random, sorted_rows):
    counts, weight, x = [1, 0, 40, 3], random(4, 40, 48), random(44, 48)
    ends, in_rows, _ = sorted_rows(counts, 1)
    one_order = {"interpreted": {"dots_in_one_order": True}}
    found = run_kernel("moe_grouped_gemm", x, weight, ends, in_rows, **one_order)
    for expert, (begin, end) in enumerate(((0, 1), (1, 1), (1, 41), (41, 44))):
        alone = run_kernel("deterministic_linear", x[in_rows[begin:end]], weight[expert], **one_order)
        assert torch.equal(found[begin:end], alone)


def test_nothing_to_do(run_kernel, random, integers):
    assert run_kernel("moe_grouped_gemm", random(0, 8), random(2, 3, 8), integers([0, 0])).shape == (0, 3)
