"""Products with the quantised blocks of GGUF files: exact, and the same bits in every form.

The expected bits are those of a model of the contract at the top of quantised.h, in numpy. Its readers of blocks are
written from the descriptions of the formats.
"""

import ctypes
import ctypes.util

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from batch_manager.triton_kernels.cpu.native.library import QUANTISED_TYPES, load_library
from batch_manager.triton_kernels.cpu.native.matrix import QuantisedMatrix, QuantisedPanels, quantised_rows

pytestmark = pytest.mark.usefixtures("machine")
KINDS = pytest.mark.parametrize("kind", QUANTISED_TYPES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
NATIVE = pytest.mark.parametrize("machine", ["native"], indirect=True)

_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.restype, _fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
_fused = np.frompyfunc(_fmaf, 3, 1)


def fused(a, b, c):
    return np.asarray(_fused(*(np.asarray(x, np.float64) for x in (a, b, c))), np.float64).astype(np.float32)


def random_rows(kind, outputs, inputs, seed=0):
    """Return random blocks [outputs, bytes] of a GGUF type, with scales of ordinary sizes."""
    draw = np.random.default_rng(seed)
    if not kind.endswith("_K"):
        return quantize((draw.standard_normal((outputs, inputs)) * 0.02).astype(np.float32),
                        gguf.GGMLQuantizationType[kind])
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (outputs, inputs // size, num_bytes), np.uint8)
    for begin in (208,) if kind == "Q6_K" else (0, 2):
        halves = draw.uniform(-1e-3, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., begin : begin + 2] = halves.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(outputs, -1)


def decoded(kind, rows):
    with np.errstate(all="ignore"):
        return dequantize(rows, gguf.GGMLQuantizationType[kind])


def matrix_of(kind, rows, dtype, **options):
    inputs = decoded(kind, rows[:1]).shape[1]
    order = np.random.default_rng(1).permutation(len(rows))              # a file's rows come in any order
    return QuantisedMatrix(QuantisedPanels([(kind, len(rows))], inputs, [(order, rows[order])]), dtype, **options)


def rows_of_x(count, inputs, dtype, seed=2):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def read_blocks(kind, rows):
    """Return levels [outputs, blocks, 32], scales [outputs, blocks, 2] of the halves, minima [outputs, blocks] or None.
    """
    outputs = len(rows)

    def half(blocks, begin):
        return np.ascontiguousarray(blocks[..., begin : begin + 2]).view(np.float16)[..., 0].astype(np.float32)

    if not kind.endswith("_K"):
        b = rows.reshape(outputs, -1, {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[kind])
        scales, minima = half(b, 0), half(b, 2) if kind in ("Q4_1", "Q5_1") else None
        if kind == "Q8_0":
            levels = b[..., 2:].view(np.int8).astype(int)
        else:
            levels = np.concatenate([b[..., -16:] & 15, b[..., -16:] >> 4], -1).astype(int)
            if kind[1] == "5":
                levels += 16 * np.unpackbits(b[..., -20:-16], axis=-1, bitorder="little")
            levels -= {"Q4_0": 8, "Q5_0": 16}.get(kind, 0)
        return levels, np.repeat(scales[..., None], 2, -1), minima
    b = rows.reshape(outputs, -1, {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind])
    if kind == "Q6_K":
        low, high = b[..., :128].reshape(outputs, -1, 2, 64), b[..., 128:192].reshape(outputs, -1, 2, 1, 32)
        sub = b[..., 192:208]
        low = np.stack([low & 15, low >> 4], 3).reshape(outputs, -1, 2, 4, 32)
        high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        scales = half(b, 208)[..., None] * sub.view(np.int8).astype(np.float32)
        return (low.astype(int) + 16 * high - 32).reshape(outputs, -1, 32), scales.reshape(outputs, -1, 2), None
    sub, low = b[..., 4:16].astype(int), b[..., -128:].reshape(outputs, -1, 4, 32)
    levels = np.stack([low & 15, low >> 4], 3).reshape(outputs, -1, 8, 32).astype(int)
    if kind == "Q5_K":
        levels += 16 * (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1)
    scale = np.concatenate([sub[..., :4] & 63, sub[..., 8:] & 15 | sub[..., :4] >> 6 << 4], -1)
    minimum = np.concatenate([sub[..., 4:8] & 63, sub[..., 8:] >> 4 | sub[..., 4:8] >> 6 << 4], -1)
    scales = half(b, 0)[..., None] * scale.astype(np.float32)
    minima = -half(b, 2)[..., None] * minimum.astype(np.float32)
    return (levels.reshape(outputs, -1, 32), np.repeat(scales.reshape(outputs, -1)[..., None], 2, -1),
            minima.reshape(outputs, -1))


def modelled(kind, rows, x):
    """Return the product of x [T, inputs] with the file's rows, rounded as the contract says: float32 [T, outputs]."""
    levels, scales, minima = read_blocks(kind, rows)
    blocks = x.float().numpy().reshape(len(x), -1, 32)
    exponent = np.maximum(np.frexp(np.abs(blocks).max(-1))[1] - 1, -100)
    v = np.ldexp(blocks.astype(np.float64), 14 - exponent[..., None])
    words = [np.clip(np.round(v), -32767, 32767)]
    if x.dtype == torch.float32:
        words.append(np.round((v - words[0]) * 2.0**15))
    scale = np.ldexp(np.float32(1), exponent - 14)
    total = sum(word.sum(-1) * 2.0 ** (-15 * i) for i, word in enumerate(words)).astype(np.float32) * scale
    sums = np.zeros((len(x), len(rows)), np.float32)
    halves = range(2) if kind == "Q6_K" else [slice(None)]
    for b in range(blocks.shape[1]):
        for half in halves:
            inputs = slice(16 * half, 16 * half + 16) if kind == "Q6_K" else half
            found = [(word[:, b, inputs] @ levels[:, b, inputs].T).astype(np.float32) for word in words]
            block = found[0] if len(found) == 1 else fused(found[1], 2.0**-15, found[0])
            sums = fused(block, scales[:, b, half if kind == "Q6_K" else 0] * scale[:, b, None], sums)
        if minima is not None:
            sums = fused(minima[:, b], total[:, b, None], sums)
    return torch.from_numpy(sums)


@DTYPES
@KINDS
def test_the_bits_are_those_of_the_contract(kind, dtype, threads):
    """On every instruction set, for any number of rows and threads, so all of these give the same bits."""
    rows, x = random_rows(kind, 37, 512), rows_of_x(15, 512, dtype)
    x[3, 40], x[4, 64:96], x[5] = 60.0, 0.0, 1e-38
    expected, matrix = modelled(kind, rows, x), matrix_of(kind, rows, dtype)
    for num_threads in (1, 3):
        threads(num_threads)
        assert torch.equal(matrix.multiply(x, torch.float32), expected)
    for begin, end in ((0, 1), (1, 3), (3, 7), (7, 15), (14, 15)):
        assert torch.equal(matrix.multiply(x[begin:end], torch.float32), expected[begin:end])
    indices, largest = matrix.largest(x)
    assert torch.equal(largest, expected.amax(1)) and torch.equal(indices, expected.argmax(1))
    bias, residual = torch.randn(37), torch.randn(15, 37).to(dtype)
    found = matrix_of(kind, rows, dtype, bias=bias).add_product(x, residual.clone())
    assert torch.equal(found, (expected + bias + residual.float()).to(dtype))


@NATIVE
@DTYPES
@KINDS
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (16, 8192), (17, 512), (40, 256), (130, 768)])
def test_products_are_close_to_float64(machine, kind, outputs, inputs, dtype):
    rows = random_rows(kind, outputs, inputs)
    w, matrix = torch.from_numpy(decoded(kind, rows)).double(), matrix_of(kind, rows, dtype)
    for count in (1, 2, 9, 70):
        x = rows_of_x(count, inputs, dtype)
        outlying = x.clone()
        outlying[:, [3, 70, 200]] *= 60            # in bfloat16, the numbers beside them keep 15 bits of theirs
        for each, bound in ((x, 1e-5), (outlying, 1e-4)):
            expected, found = each.double() @ w.T, matrix.multiply(each, torch.float32).double()
            size = (each.double().norm(dim=1)[:, None] * w.norm(dim=1)).square().mean().sqrt() / inputs**0.5
            error = (found - expected).square().mean().sqrt() / size
            assert error < (1e-6 if dtype == torch.float32 else bound)


@NATIVE
@pytest.mark.parametrize("kind", [kind for kind in QUANTISED_TYPES if not kind.endswith("_K")])   # those: 256 inputs
def test_short_rows_odd_numbers_of_blocks_and_a_part_of_a_block(machine, kind):
    for inputs in (32, 96, 160):
        rows, x = random_rows(kind, 19, inputs), rows_of_x(5, inputs, torch.float32)
        expected = modelled(kind, rows, x)
        assert torch.equal(matrix_of(kind, rows, torch.float32).multiply(x), expected)
        x[:, -20:] = 0
        matrix = QuantisedMatrix(QuantisedPanels([(kind, 19)], inputs - 20, [(np.arange(19), rows)]), torch.float32)
        assert torch.equal(matrix.multiply(x[:, :-20]), modelled(kind, rows, x))
        assert torch.equal(matrix.rows(torch.arange(19)), torch.from_numpy(decoded(kind, rows))[:, :-20])


@DTYPES
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_weights_are_quantised_as_a_model_in_numpy_does(kind, dtype):
    """The nearest levels; with 4 bits, the best of five scales. Also for zeros, tiny, huge, infinite and NaN ones."""
    weight = torch.randn(40, 77, generator=torch.Generator().manual_seed(4)) * 0.02
    weight[3, :32], weight[4], weight[5], weight[6, 0] = 0, weight[4] * 1e-6, weight[5] * 1e5, 1e9
    weight[7, 40], weight[8, 70], weight[9, 1] = torch.inf, -torch.inf, torch.nan
    weight = weight.to(dtype)
    found = quantised_rows(weight, kind)
    blocks = np.pad(weight.float().numpy(), ((0, 0), (0, 19))).reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    best, least = np.zeros_like(found.reshape(len(blocks), -1)), np.full(len(blocks), np.inf)
    with np.errstate(all="ignore"):
        for divisor in (127,) if kind == "Q8_0" else (-8, -7.5, -7, -8.5, -9):
            scale = ((np.abs(largest) if kind == "Q8_0" else largest) / np.float32(divisor)).astype(np.float16)
            inverse = np.where(scale == 0, np.float32(0), 1 / scale.astype(np.float32))
            levels = np.rint((blocks * inverse).clip(*(-127, 127) if kind == "Q8_0" else (-8, 7)))
            error = np.square(levels * scale.astype(np.float32) - blocks.astype(np.float64)).sum(1)
            stored = levels.astype(np.int8).view(np.uint8) if kind == "Q8_0" else (levels + 8).astype(np.uint8)
            if kind == "Q4_0":
                stored = stored[:, :16] | stored[:, 16:] << 4
            better = (error < least) | (divisor == 127)
            best[better] = np.concatenate([scale.view(np.uint8), stored], 1)[better]
            least[better] = error[better]
    is_finite = np.isfinite(decoded(kind, found).reshape(-1, 32)).all(1)
    assert (~is_finite).sum() == 4 and np.array_equal(found.reshape(len(blocks), -1)[is_finite], best[is_finite])
    finite = np.where(is_finite[:, None], blocks, 0)
    errors = np.abs(np.where(is_finite[:, None], decoded(kind, found).reshape(-1, 32), 0) - finite)
    assert (errors <= np.abs(finite).max(1, keepdims=True) / (127 if kind == "Q8_0" else 4) + 1e-6).all()


@DTYPES
@KINDS
def test_rows_are_decoded_as_the_gguf_library_does(kind, dtype):
    """For any bytes, among them scales that are denormal, infinite or NaN."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = np.random.default_rng(3).integers(0, 256, (500, 1024 // size * num_bytes), np.uint8)
    expected = torch.from_numpy(decoded(kind, rows)).to(dtype)
    matrix = matrix_of(kind, rows, dtype)
    found = matrix.rows(torch.tensor([0, 499, 7, *range(500)]))[3:]
    assert not expected.isfinite().all()
    assert torch.equal(found.nan_to_num(1e9, 1e10, -1e10), expected.nan_to_num(1e9, 1e10, -1e10))
    for wrong in (-1, 500):
        with pytest.raises(IndexError, match=f"outputs are {wrong} to {wrong}; expected 0 to 499"):
            matrix.rows(torch.tensor([wrong]))


@DTYPES
@KINDS
def test_a_row_that_is_not_finite_stays_alone(kind, dtype):
    rows, x = random_rows(kind, 40, 256), rows_of_x(20, 256, dtype)
    matrix = matrix_of(kind, rows, dtype)
    expected = matrix.multiply(x, torch.float32)
    x[7, 255], x[9, 0], x[12] = torch.nan, torch.inf, -torch.inf
    found = matrix.multiply(x, torch.float32)
    assert found[[7, 9, 12]].isnan().all() and matrix.largest(x)[1].isnan().nonzero().flatten().tolist() == [7, 9, 12]
    rest = [row for row in range(20) if row not in (7, 9, 12)]
    assert torch.equal(found[rest], expected[rest])


@NATIVE
@DTYPES
def test_a_stack_of_types_and_a_factor(machine, dtype):
    """Ranges of outputs with types of their own, over pieces that several threads take."""
    kinds = {"Q4_0": 160, "Q6_K": 16, "Q4_1": 48, "Q5_K": 21}
    parts = [random_rows(kind, count, 512, seed) for seed, (kind, count) in enumerate(kinds.items())]
    starts = np.cumsum([0, *kinds.values()])
    panels = QuantisedPanels(list(kinds.items()), 512, (
        (np.arange(start, start + len(part)), part) for start, part in zip(starts, parts)))
    assert panels.num_bytes >= sum(part.nbytes for part in parts)
    x = rows_of_x(9, 512, dtype)
    expected = torch.cat([modelled(kind, part, x) for kind, part in zip(kinds, parts)], 1)
    assert torch.equal(QuantisedMatrix(panels, dtype).multiply(x, torch.float32), expected)
    assert torch.equal(QuantisedMatrix(panels, dtype, None, 0.5).multiply(x, torch.float32), expected * 0.5)
    outputs = torch.tensor([0, 160, 176, 224, 244])
    assert torch.equal(QuantisedMatrix(panels, dtype).rows(outputs), torch.from_numpy(np.concatenate(
        [decoded(kind, part) for kind, part in zip(kinds, parts)]))[outputs].to(dtype))


@NATIVE
@KINDS
def test_no_sum_overflows_and_panels_take_no_more_than_the_file(machine, kind):
    levels = {"Q8_0": 128, "Q6_K": 64, "Q4_0": 16, "Q4_1": 16, "Q4_K": 16}.get(kind, 32)       # stored, unsigned
    assert levels * 32767 * (16 if kind == "Q6_K" else 32) * 2 < 2**31                       # with the offset's product
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = load_library().quantised_panel_bytes(QUANTISED_TYPES.index(kind), 4096)
    assert found <= 16 * 4096 // size * num_bytes * 1.03
