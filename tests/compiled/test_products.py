"""Products with packed matrices agree with products in float64."""

import contextlib
import os
import threading
import time

import pytest
import torch

from batch_manager.triton_kernels.cpu.native.matrix import PackedMatrix

pytestmark = pytest.mark.usefixtures("machine")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SHAPES = [(32, 16), (64, 48), (576, 960), (100, 50), (33, 17), (1, 1), (31, 130), (256, 1000), (1100, 40)]


def made(inputs, outputs, dtype, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None


def rows(count, inputs, dtype, seed=1):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found, expected, inputs):
    # A sum of `inputs` products in float32, rounded once to the type of the result.
    rounding = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, atol=1e-6 * inputs + rounding, rtol=rounding)


@TYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_number_of_rows(shape, dtype, num_threads, threads):
    threads(num_threads)
    weight, bias = made(*shape, dtype, bias=True)
    matrix = PackedMatrix(weight, bias)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 96, 97, 300):
        x = rows(count, shape[0], dtype)
        expected = x.double() @ weight.double().T + bias.double()
        assert_close(matrix.multiply(x), expected, shape[0])
        assert_close(matrix.multiply(x, torch.float32), expected, shape[0])
        residual = rows(count, shape[1], dtype, seed=2)
        expected = expected + residual.double()
        found = matrix.add_product(x, residual)
        assert found.data_ptr() == residual.data_ptr()
        assert_close(found, expected, shape[0])


@TYPES
@pytest.mark.parametrize("machine", ["native"], indirect=True)       # the others are not optimised
@pytest.mark.parametrize("count", [1, 4, 32])
def test_a_product_takes_no_longer_than_torchs_in_float32(machine, count, dtype, threads):
    """A product takes less than four times as long as torch's in float32, in the fastest of 200 calls each.

    Well-compiled code takes 0.3 to 1.2 times as long. If the compiler keeps vectors in memory, which GCC does with
    vectors wider than the processor's registers, a product takes 5 to 60 times as long.
    """
    threads(1)
    weight, _ = made(576, 960, dtype)
    matrix, plain, x = PackedMatrix(weight, None), weight.float(), rows(count, 576, dtype)
    wide = x.float()
    ours = theirs = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        matrix.multiply(x)
        middle = time.perf_counter()
        torch.nn.functional.linear(wide, plain)
        ours, theirs = min(ours, middle - start), min(theirs, time.perf_counter() - middle)
    assert ours < 4 * theirs


@TYPES
@pytest.mark.parametrize("shape", [*SHAPES, (64, 3000)], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_largest_output_of_each_row(shape, dtype, num_threads, threads):
    threads(num_threads)
    matrix = PackedMatrix(*made(*shape, dtype, bias=shape[1] % 2 == 0))
    for count in (0, 1, 2, 7, 31, 32, 34, 100):
        x = rows(count, shape[0], dtype)
        products = matrix.multiply(x, torch.float32)
        indices, largest = matrix.largest(x)
        assert indices.tolist() == (products.argmax(1).tolist() if count else [])
        assert torch.equal(largest, products.amax(1)) if count else not len(largest)


@TYPES
def test_of_equal_outputs_the_first_one_is_the_largest_and_a_nan_is_larger_than_any(dtype, threads):
    threads(2)
    weight = torch.zeros(1000, 64, dtype=dtype)
    for outputs, expected in (([], 0), ([17, 18, 500], 17), ([999], 999), ([16 * 40, 3], 3)):
        weight.zero_()[outputs, 0] = 1.0
        x = torch.ones(3, 64, dtype=dtype)
        indices, largest = PackedMatrix(weight, None).largest(x)
        assert indices.tolist() == [expected] * 3 and largest.tolist() == [1.0 if outputs else 0.0] * 3
    bias = torch.full((1000,), -torch.inf)
    indices, largest = PackedMatrix(weight, bias.to(dtype)).largest(x)
    assert indices.tolist() == [0] * 3 and largest.tolist() == [-torch.inf] * 3
    bias[[3, 998]] = torch.tensor([torch.inf, torch.nan])
    assert PackedMatrix(weight, bias.to(dtype)).largest(x)[1].isnan().all()
    x[1] = torch.nan
    assert PackedMatrix(weight, None).largest(x)[1].isnan().tolist() == [False, True, False]


@TYPES
def test_rows_that_are_not_packed_and_a_weight_that_is_a_view(dtype):
    weight, _ = made(64, 40, dtype)
    matrix = PackedMatrix(weight.t().contiguous().t(), None)
    wide = rows(9, 200, dtype)
    for x in (wide[:, 3:67], wide[::2, :64], wide.t()[:64, :9].t()):
        assert_close(matrix.multiply(x), x.double() @ weight.double().T, 64)
    assert matrix.multiply(wide[:0, :64]).shape == (0, 40)


@TYPES
@pytest.mark.parametrize("inputs", [64, 50])
def test_a_row_that_is_not_finite_stays_alone(dtype, inputs):
    weight, _ = made(inputs, 40, dtype)
    x = rows(20, inputs, dtype)
    expected = PackedMatrix(weight, None).multiply(x)
    x[7], x[9, 0] = torch.nan, torch.inf
    found = PackedMatrix(weight, None).multiply(x)
    assert not found[7].isfinite().any() and not found[9].isfinite().any()
    rest = [row for row in range(20) if row not in (7, 9)]
    assert torch.equal(found[rest], expected[rest])


def test_wrong_rows_are_refused():
    matrix = PackedMatrix(made(64, 40, torch.float32)[0], None)
    for x in (rows(3, 65, torch.float32), rows(3, 64, torch.bfloat16), torch.zeros(64)):
        with pytest.raises(ValueError, match=r"x is torch.* \[rows, 64\]"):
            matrix.multiply(x)


def test_threads_that_compute_at_once_do_not_disturb_each_other(threads):
    """Four threads that compute at once get the right products. Only one of them at a time uses the helper threads."""
    weight, _ = made(256, 1000, torch.bfloat16)
    matrices = [PackedMatrix(weight, None) for _ in range(4)]
    inputs = [rows(count, 256, torch.bfloat16) for count in (1, 7, 40, 100)]
    expected = [matrix.multiply(x) for matrix, x in zip(matrices, inputs)]
    wrong = []

    def compute(matrix, x, right):
        torch.set_num_threads(3)
        wrong.append(sum(not torch.equal(matrix.multiply(x), right) for _ in range(200)))

    running = [threading.Thread(target=compute, args=arguments) for arguments in zip(matrices, inputs, expected)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert wrong == [0] * 4


def test_any_number_of_threads_gives_the_same_bits(threads):
    weight, bias = made(576, 960, torch.bfloat16, bias=True)
    matrix, x = PackedMatrix(weight, bias), rows(37, 576, torch.bfloat16)
    found = []
    for count in (1, 2, 3, 5, 16, 2, 1):
        threads(count)
        found.append(matrix.multiply(x))
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_forked_child_has_helpers_of_its_own(threads):
    threads(3)
    weight, _ = made(256, 1000, torch.bfloat16)
    matrix, x = PackedMatrix(weight, None), rows(40, 256, torch.bfloat16)
    expected = matrix.multiply(x)
    child = os.fork()
    if child == 0:
        # No computation in torch: its threads do not exist in the child.
        found, is_right = torch.empty_like(expected), False
        with contextlib.suppress(Exception):
            matrix._run(x, found, adds=False)
            is_right = found.view(torch.int16).numpy().tobytes() == expected.view(torch.int16).numpy().tobytes()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(matrix.multiply(x), expected)
