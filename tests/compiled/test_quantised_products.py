"""Products with the quantised blocks of GGUF files: exact, and the same bits in every form.

The expected bits are those of a model of the contract at the top of quantised.h, in numpy. Its readers of blocks are
written from the descriptions of the formats.
"""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from batch_manager.triton_kernels.cpu.native.library import QUANTISED_TYPES
from batch_manager.triton_kernels.cpu.native.matrix import QuantisedMatrix, QuantisedPanels, quantised_rows
from batch_manager.weights.matrices import GroupedType, grouped_rows
from tests.compiled.llama_cpp_blocks import BLOCKS as LLAMA_CPP_BLOCKS

pytestmark = pytest.mark.usefixtures("machine")
GROUPED = {"INT4": GroupedType("INT4", 64, torch.float16), "INT8": GroupedType("INT8", 2**20, torch.bfloat16)}
BLOCKS = [kind for kind in QUANTISED_TYPES if kind not in GROUPED]
HALVES = ("Q2_K", "Q3_K", "Q6_K")                              # a scale for each 16 inputs
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
KINDS = pytest.mark.parametrize("kind", QUANTISED_TYPES)
# A type of each structure for processors that have the vectors of another one, here or in test_other_processors.py.
OF_STRUCTURES = ("Q4_0", "Q5_1", "Q2_K", "Q6_K", "INT4")
ON_MACHINES = pytest.mark.parametrize(("machine", "kind"), [
    (name, kind) for name, kinds in (("native", QUANTISED_TYPES), ("x86-64-v4", OF_STRUCTURES),
                                     ("x86-64-v3", QUANTISED_TYPES), ("x86-64-v2", OF_STRUCTURES)) for kind in kinds],
    indirect=["machine"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROWS = pytest.mark.parametrize(("dtype", "in_bytes"), [(torch.float32, False), (torch.bfloat16, False),
                               (torch.bfloat16, True)], ids=["float32", "bfloat16", "bytes"])
NATIVE = pytest.mark.parametrize("machine", ["native"], indirect=True)


def fused(a, b, c):
    """a * b + c of float32, rounded once. Sums of float64 are rounded to odd, so that float32 rounds them correctly."""
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    is_even = (total.view(np.int64) & 1) == 0
    return np.where(is_even & (error != 0), np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def random_rows(kind, outputs, inputs, seed=0):
    """Return random blocks [outputs, bytes] of a GGUF type, with scales of ordinary sizes."""
    draw = np.random.default_rng(seed)
    if kind in GROUPED:
        groups = -(-inputs // min(GROUPED[kind].group, inputs))
        scales = torch.from_numpy(draw.uniform(-1e-3, 1e-3, (outputs, groups))).to(GROUPED[kind].scales)
        low, high = (0, 16) if kind == "INT4" else (-128, 128)
        return grouped_rows(draw.integers(low, high, (outputs, inputs), np.int8), scales,
                            draw.integers(low, high + 1, (outputs, groups), np.int16))
    if not kind.endswith("_K") and not kind.startswith("I"):
        return quantize((draw.standard_normal((outputs, inputs)) * 0.02).astype(np.float32),
                        gguf.GGMLQuantizationType[kind])
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (outputs, inputs // size, num_bytes), np.uint8)
    for begin in {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}.get(kind, (0,) if kind[0] == "I" else (0, 2)):
        halves = draw.uniform(-1e-3, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., begin : begin + 2] = halves.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(outputs, -1)


def parts_of(kind, rows):
    """Return levels, scales and zero points [outputs, groups] of rows in groups, see grouped_rows."""
    of_group = GROUPED[kind].scales.itemsize + 2
    inputs = rows.shape[1] - of_group if kind == "INT8" else rows.shape[1] * 64 // (64 + of_group)
    groups = (rows.shape[1] - inputs) // of_group
    scales = torch.from_numpy(rows[:, inputs : -2 * groups].copy()).view(GROUPED[kind].scales).float().numpy()
    levels = rows[:, :inputs].view(np.int8)
    return levels.astype(int), scales, np.ascontiguousarray(rows[:, -2 * groups :]).view(np.int16).astype(int)


def decoded(kind, rows):
    if kind in GROUPED:
        levels, scales, zeros = parts_of(kind, rows)
        zeros, scales = (np.repeat(each, levels.shape[1] // each.shape[1], 1) for each in (zeros, scales))
        return (levels - zeros).astype(np.float32) * scales
    with np.errstate(all="ignore"):
        return dequantize(rows, gguf.GGMLQuantizationType[kind])


def matrix_of(kind, rows, dtype, **options):
    inputs = decoded(kind, rows[:1]).shape[1]
    order = np.random.default_rng(1).permutation(len(rows))              # a file's rows come in any order
    panels = QuantisedPanels([(GROUPED.get(kind, kind), len(rows))], inputs, [(order, rows[order])])
    return QuantisedMatrix(panels, dtype, **options)


def rows_of_x(count, inputs, dtype, seed=2):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def read_blocks(kind, rows):
    """Return levels [outputs, blocks, 32], scales [outputs, blocks, 2] of the halves, and minima [outputs, blocks], or
    [outputs, blocks, 2] of the halves, or None."""
    outputs = len(rows)

    def half(blocks, begin):
        return np.ascontiguousarray(blocks[..., begin : begin + 2]).view(np.float16)[..., 0].astype(np.float32)

    if kind in GROUPED:
        levels, scales, zeros = parts_of(kind, rows)
        levels -= np.repeat(zeros, levels.shape[1] // zeros.shape[1], 1)
        scales = np.repeat(scales, levels.shape[1] // 32 // scales.shape[1], 1)
        return levels.reshape(outputs, -1, 32), np.repeat(scales[..., None], 2, -1), None
    if kind == "IQ4_XS":
        b = rows.reshape(outputs, -1, 136)
        low, high = b[..., 4:8], np.ascontiguousarray(b[..., 2:4]).view(np.uint16)
        sub = np.stack([low & 15, low >> 4], -1).reshape(outputs, -1, 8) | (high >> np.arange(0, 16, 2) & 3) << 4
        nibbles = b[..., 8:].reshape(outputs, -1, 8, 16)
        scales = (half(b, 0)[..., None] * (sub.astype(np.float32) - 32)).reshape(outputs, -1, 1)
        levels = TABLE[np.concatenate([nibbles & 15, nibbles >> 4], -1)]
        return levels.reshape(outputs, -1, 32), np.repeat(scales, 2, -1), None
    if kind in ("Q2_K", "Q3_K"):
        b = rows.reshape(outputs, -1, 84 if kind == "Q2_K" else 110)
        low = b[..., 16:80] if kind == "Q2_K" else b[..., 32:96]
        low = low.reshape(outputs, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        levels = low.astype(int).reshape(outputs, -1, 8, 32)
        if kind == "Q2_K":
            scales, minima = half(b, 80)[..., None] * (b[..., :16] & 15), -half(b, 82)[..., None] * (b[..., :16] >> 4)
            return (levels.reshape(outputs, -1, 32), scales.astype(np.float32).reshape(outputs, -1, 2),
                    minima.astype(np.float32).reshape(outputs, -1, 2))
        levels += 4 * (b[..., None, :32].astype(int) >> np.arange(8)[:, None] & 1) - 4
        six, top = b[..., 96:104], b[..., 104:108]
        sub = np.concatenate([six & 15, six >> 4], -1) | np.concatenate([top >> 2 * i & 3 for i in range(4)], -1) << 4
        scales = half(b, 108)[..., None] * (sub.astype(np.float32) - 32)
        return levels.reshape(outputs, -1, 32), scales.reshape(outputs, -1, 2), None
    if not kind.endswith("_K"):
        b = rows.reshape(outputs, -1, {"Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}.get(kind, 18))
        scales, minima = half(b, 0), half(b, 2) if kind in ("Q4_1", "Q5_1") else None
        if kind == "Q8_0":
            levels = b[..., 2:].view(np.int8).astype(int)
        else:
            levels = np.concatenate([b[..., -16:] & 15, b[..., -16:] >> 4], -1).astype(int)
            if kind[1] == "5":
                levels += 16 * np.unpackbits(b[..., -20:-16], axis=-1, bitorder="little")
            levels = TABLE[levels] if kind == "IQ4_NL" else levels - {"Q4_0": 8, "Q5_0": 16}.get(kind, 0)
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


def rounded_to_bytes(x):
    """Return the bytes [T, blocks, 32] of x [T, inputs], and their scales [T, blocks]."""
    blocks = x.float().numpy().reshape(len(x), -1, 32)
    largest = np.maximum(np.abs(blocks).max(-1), np.float32(2.0**-100))
    big = np.float32(1.5 * 2**23)                          # the sum is rounded to a whole number
    return fused(blocks, (127 / largest)[..., None], big) - big, largest / 127


def modelled(kind, rows, x, in_bytes=False):
    """Return the product of x [T, inputs] with the file's rows, rounded as the contract says: float32 [T, outputs]."""
    levels, scales, minima = read_blocks(kind, rows)
    blocks = x.float().numpy().reshape(len(x), -1, 32)
    if in_bytes:
        found, scale = rounded_to_bytes(x)
        words = [found]
    else:
        exponent = np.maximum(np.frexp(np.abs(blocks).max(-1))[1] - 1, -100)
        v = np.ldexp(blocks.astype(np.float64), 14 - exponent[..., None])
        words = [np.round(v)]
        if x.dtype == torch.float32:
            words = np.divmod(np.clip(np.round(256 * v), -(2**23), 2**23 - 1), 256)
        scale = np.ldexp(np.float32(1), exponent - 14)
    by_half = [word.reshape(*word.shape[:2], 2, 16).sum(-1) * 2.0 ** (-8 * i) for i, word in enumerate(words)]
    by_half = sum(by_half)
    total, totals = by_half.sum(-1).astype(np.float32) * scale, by_half.astype(np.float32) * scale[..., None]
    sums = np.zeros((len(x), len(rows)), np.float32)
    halves = range(2) if kind in HALVES else [slice(None)]
    for b in range(blocks.shape[1]):
        for half in halves:
            inputs = slice(16 * half, 16 * half + 16) if kind in HALVES else half
            found = [(word[:, b, inputs] @ levels[:, b, inputs].T).astype(np.float32) for word in words]
            block = found[0] if len(found) == 1 else fused(found[1], 2.0**-8, found[0])
            sums = fused(block, scales[:, b, half if kind in HALVES else 0] * scale[:, b, None], sums)
        if kind == "Q2_K":
            for half in range(2):
                sums = fused(minima[:, b, half], totals[:, b, half, None], sums)
        elif minima is not None:
            sums = fused(minima[:, b], total[:, b, None], sums)
    return torch.from_numpy(sums)


@ROWS
@ON_MACHINES
def test_the_bits_are_those_of_the_contract(machine, kind, dtype, in_bytes, threads):
    """On every instruction set, for any number of rows and threads, so all of these give the same bits."""
    rows, x = random_rows(kind, 149, 512), rows_of_x(19, 512, dtype)
    x[3, 40], x[4, 64:96], x[5] = 60.0, 0.0, 1e-38
    expected = modelled(kind, rows, x, in_bytes)
    matrix = matrix_of(kind, rows, dtype, has_byte_rows=in_bytes)
    for num_threads in (1, 3):
        threads(num_threads)
        assert torch.equal(matrix.multiply(x, torch.float32), expected)
    for begin, end in ((0, 1), (1, 3), (3, 7), (7, 15), (18, 19)):
        assert torch.equal(matrix.multiply(x[begin:end], torch.float32), expected[begin:end])
    indices, largest = matrix.largest(x)
    assert torch.equal(largest, expected.amax(1)) and torch.equal(indices, expected.argmax(1))
    bias, residual = torch.randn(149), torch.randn(19, 149).to(dtype)
    found = matrix_of(kind, rows, dtype, bias=bias, has_byte_rows=in_bytes).add_product(x, residual.clone())
    assert torch.equal(found, (expected + bias + residual.float()).to(dtype))


@NATIVE
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_that_llama_cpp_wrote_are_the_numbers_that_it_reads(machine, kind):
    with np.load(LLAMA_CPP_BLOCKS) as blocks:
        rows, expected = blocks[kind], torch.from_numpy(blocks[f"{kind} decoded"])
    matrix, x = matrix_of(kind, rows, torch.float32), rows_of_x(5, 512, torch.float32)
    assert torch.equal(matrix.rows(torch.arange(3)), expected)
    assert torch.equal(matrix.multiply(x), modelled(kind, rows, x))


@NATIVE
@DTYPES
@KINDS
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (16, 8192), (17, 512), (40, 256), (130, 768)])
def test_products_are_close_to_float64(machine, kind, outputs, inputs, dtype):
    rows = random_rows(kind, outputs, inputs)
    w, matrix = torch.from_numpy(decoded(kind, rows)).double(), matrix_of(kind, rows, dtype)
    x = rows_of_x(70, inputs, dtype)
    outlying = x.clone()
    outlying[:, [3, 70, 200]] *= 60                # in bfloat16, the numbers beside them keep 15 bits of theirs
    for each, bound in ((x, 1e-5), (outlying, 1e-4)):
        expected, found = each.double() @ w.T, matrix.multiply(each, torch.float32)
        size = (each.double().norm(dim=1)[:, None] * w.norm(dim=1)).square().mean().sqrt() / inputs**0.5
        error = (found - expected).square().mean().sqrt() / size
        assert error < (1e-6 if dtype == torch.float32 else bound)
        for count in (1, 2, 9):
            assert torch.equal(matrix.multiply(each[:count], torch.float32), found[:count])


@NATIVE
@KINDS
def test_products_with_bytes_differ_from_float64_by_the_rounding_of_x(machine, kind):
    """Each number of x is rounded by up to half a scale, evenly distributed: the variance is 1 / 12 of its square."""
    rows, x = random_rows(kind, 130, 512), rows_of_x(70, 512, torch.float32)
    x[:, [3, 70, 200]] *= 60
    w, variance = torch.from_numpy(decoded(kind, rows)).double(), np.square(rounded_to_bytes(x)[1], dtype=float) / 12
    deviation = (torch.from_numpy(variance) @ w.square().view(130, -1, 32).sum(2).T).sqrt()
    found = matrix_of(kind, rows, torch.float32, has_byte_rows=True).multiply(x)
    assert 0.9 < ((found - x.double() @ w.T) / deviation).square().mean().sqrt() < 1.1


@NATIVE
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind[-2:] not in ("_K", "XS")])      # those: 256 inputs
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
@ON_MACHINES
def test_rows_are_decoded(machine, kind, dtype):
    rows = random_rows(kind, 37, 512)
    assert torch.equal(matrix_of(kind, rows, dtype).rows(torch.arange(37)), torch.from_numpy(decoded(kind, rows)
                                                                                             ).to(dtype))


@NATIVE
@DTYPES
@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_are_decoded_as_the_gguf_library_does(machine, kind, dtype):
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


@ROWS
@ON_MACHINES
def test_a_row_that_is_not_finite_stays_alone(machine, kind, dtype, in_bytes):
    rows, x = random_rows(kind, 40, 256), rows_of_x(20, 256, dtype)
    matrix = matrix_of(kind, rows, dtype, has_byte_rows=in_bytes)
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
    kinds = {"Q4_0": 160, "Q6_K": 16, "INT4": 48, "Q5_K": 21}
    parts = [random_rows(kind, count, 512, seed) for seed, (kind, count) in enumerate(kinds.items())]
    starts = np.cumsum([0, *kinds.values()])
    panels = QuantisedPanels([(GROUPED.get(kind, kind), count) for kind, count in kinds.items()], 512, (
        (np.arange(start, start + len(part)), part) for start, part in zip(starts, parts)))
    assert panels.num_bytes >= sum(part.nbytes for kind, part in zip(kinds, parts) if kind not in GROUPED)
    x = rows_of_x(9, 512, dtype)
    expected = torch.cat([modelled(kind, part, x) for kind, part in zip(kinds, parts)], 1)
    assert torch.equal(QuantisedMatrix(panels, dtype).multiply(x, torch.float32), expected)
    assert torch.equal(QuantisedMatrix(panels, dtype, None, 0.5).multiply(x, torch.float32), expected * 0.5)
    outputs = torch.tensor([0, 160, 176, 224, 244])
    assert torch.equal(QuantisedMatrix(panels, dtype).rows(outputs), torch.from_numpy(np.concatenate(
        [decoded(kind, part) for kind, part in zip(kinds, parts)]))[outputs].to(dtype))


@ROWS
def test_sums_of_the_largest_numbers_do_not_overflow(dtype, in_bytes):
    """Of all types, levels of one byte and their zero points are the largest."""
    for sign in (1, -1):
        rows = grouped_rows(np.full((1, 64), 127 if sign > 0 else -128, np.int8), torch.ones(1, 1),
                            np.full((1, 1), -128 if sign > 0 else 128, np.int16))
        panels = QuantisedPanels([(GroupedType("INT8", 64, torch.float32), 1)], 64, [(np.arange(1), rows)])
        for x in (torch.full((1, 64), 1.9921875, dtype=dtype), torch.full((1, 64), -1.9921875, dtype=dtype)):
            found = QuantisedMatrix(panels, dtype, has_byte_rows=in_bytes).multiply(x, torch.float32).item()
            expected = x[0, 0].item() * 64 * (255 if sign > 0 else -256)          # words are 32,640 of 32,767
            assert found == pytest.approx(expected, rel=1e-6 if in_bytes else 0)


@NATIVE
@KINDS
def test_panels_take_no_more_than_the_file(machine, kind):
    """Of groups: 4 or 8 bits a weight, and the scale and the zero point of each group."""
    if kind in GROUPED:
        of_group = 64 if kind == "INT4" else 4096
        expected = 16 * 4096 * (0.5 if kind == "INT4" else 1) + 4096 // of_group * 16 * (3 if kind == "INT4" else 4)
    else:
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        expected = 16 * 4096 // size * num_bytes * (1.04 if kind == "Q3_K" else 1.03)
    panels = QuantisedPanels([(GROUPED.get(kind, kind), 16)], 4096, [])
    assert panels.num_bytes <= expected
