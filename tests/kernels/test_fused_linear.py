import pytest
import torch

from batch_manager.triton_kernels.fused_linear_settings import (
    FEW_ROWS,
    MOST_ROWS,
    ROW_COUNTS,
    TILE_ROWS,
    fused_linear_settings,
    is_fused,
    reads_of_x,
)

# Input sizes and rows of the weight that do and do not divide a program's tiles.
SIZES = [(64, 32), (576, 80), (100, 70), (33, 5), (16, 16)]
MANY_ROWS = [17, 32, 33, 64, 100, 256]               # in one or several tiles, some of them not full
ROUNDINGS = {"none": 1, "norm": 8, "both": 12}       # a rounded norm is multiplied, a rounded product activated


def poisoned(values, spare_rows=1, spare_columns=3):
    """Return the same values in memory that holds NaN after each row and after the last row."""
    whole = values.new_full((len(values) + spare_rows, values.shape[1] + spare_columns), torch.nan)
    whole[: len(values), : values.shape[1]] = values
    return whole[: len(values), : values.shape[1]]


def contiguous_and_poisoned(values):
    """Return the same values in contiguous memory, with NaN after the last value."""
    whole = values.new_full((values.numel() + 64,), torch.nan)
    whole[: values.numel()] = values.flatten()
    return whole[: values.numel()].view(values.shape)


@pytest.fixture
def made(random, dtype):
    """made(rows, in_size, weight_rows, bias, norm) -> positional arguments, with NaN around them"""
    def make(rows, in_size, weight_rows, bias=False, norm="none"):
        x = poisoned(2 * random(rows, in_size, dtype=dtype) + 0.5)
        weight = contiguous_and_poisoned(random(weight_rows, in_size, dtype=dtype) / in_size**0.5)
        vectors = [contiguous_and_poisoned(random(size, dtype=dtype)) for size in (weight_rows, in_size, in_size)]
        return (x, weight, vectors[0] if bias else None, vectors[1] if norm != "none" else None,
                vectors[2] if norm == "layer" else None, 1e-5)
    return make


@pytest.mark.pairs
@pytest.mark.parametrize("rows, in_size, weight_rows", [
    *((rows, *size) for size in SIZES for rows in (1, 3, 16)),
    *((rows, *size) for size in ((576, 80), (100, 70)) for rows in MANY_ROWS)])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_products_behind_a_norm(assert_equals_oracle, made, dtype, rows, in_size, weight_rows, norm):
    result = assert_equals_oracle("fused_linear", *made(rows, in_size, weight_rows, rows in (3, 33), norm),
                                  roundings=ROUNDINGS["none" if norm == "none" else "norm"], reduction=2 * in_size,
                                  dtype=dtype)
    assert result.isfinite().all()


def test_what_is_added_to_the_weight_of_the_norm(assert_equals_oracle, made, dtype):
    assert_equals_oracle("fused_linear", *made(2, 40, 24, norm="rms"), weight_offset=1.0,
                         roundings=ROUNDINGS["norm"], reduction=80, dtype=dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias, norm", [(True, "layer"), (False, "rms")])
@pytest.mark.parametrize("rows", [5, 100])
def test_activations(assert_equals_oracle, made, dtype, kind, gated, bias, norm, rows):
    result = assert_equals_oracle("fused_linear", *made(rows, 70, 84, bias, norm), activation=kind, gated=gated,
                                  roundings=ROUNDINGS["both"], reduction=200, dtype=dtype)
    assert result.shape == (rows, 42 if gated else 84)


@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [16, 100])
def test_a_product_is_added_to_a_residual_in_place(assert_equals_oracle, made, random, dtype, norm, bias, rows):
    residual = poisoned(random(rows, 70, dtype=dtype))
    result = assert_equals_oracle("fused_linear", *made(rows, 100, 70, bias, norm), residual=residual,
                                  roundings=ROUNDINGS["none" if norm == "none" else "norm"], reduction=200,
                                  dtype=dtype)
    assert result.data_ptr() == residual.data_ptr() or result.device.type == "cpu"
    assert residual.isfinite().all()


def test_strided_rows_into_strided_rows(assert_equals_oracle, random):
    packed = random(5, 3, 40)
    out = torch.full((5, 2, 24), torch.nan, device=packed.device)
    assert_equals_oracle("fused_linear", packed[:, 1], random(24, 40), out=out[:, 0], reduction=40,
                         dtype=torch.float32)
    assert out[:, 1].isnan().all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("rows", [7, 70])
def test_it_is_what_separate_launches_give(run_kernel, is_recording, made, dtype, norm, rows):
    """The fused kernel rounds where separate launches round, unless an RMSNorm scales the product.

    The results then differ only by the order of sums.
    """
    x, weight, bias, norm_weight, norm_bias, epsilon = made(rows, 200, 96, True, norm)
    if norm == "rms":
        normed = run_kernel("rms_norm", x, norm_weight, epsilon)
    else:
        normed = run_kernel("layer_norm", x, norm_weight, norm_bias, epsilon)
    product = (normed.double() @ weight.double().t() + bias.double()).to(dtype)
    expected = run_kernel("gated_activation", product, "silu").double()
    found = run_kernel("fused_linear", x, weight, bias, norm_weight, norm_bias, epsilon, activation="silu",
                       gated=True).double()
    step = torch.finfo(dtype).eps * expected.abs().max()
    assert (found - expected).abs().max() <= 4 * step
    rounds_alike = dtype != torch.float32 and reads_of_x(norm, dtype) > 1
    assert is_recording or (found == expected).double().mean() > (0.9 if rounds_alike else 0.1)


# The kernel with a norm that scales the product in float16 too. The interpreter computes products of bfloat16 wrongly.
SCALES_THE_PRODUCT = {"replaced_settings": {"NARROW_RANGE": ()}}


@pytest.mark.parametrize("rows, options", [
    (1, {"weight_offset": 1.0}), (16, {"activation": "silu", "gated": True}), (100, {"weight_offset": 0.0}),
    (100, {"activation": "gelu", "gated": True}), (3, {}), (70, {})])            # {}: added to a residual
@pytest.mark.parametrize("in_size, bias", [(576, False), (100, True)])
@pytest.mark.parametrize("dtype", [torch.float16])
def test_a_norm_scales_the_product_of_rounded_rows(assert_equals_oracle, made, random, dtype, rows, options, in_size,
                                                   bias):
    residual = None if options else poisoned(random(rows, 80, dtype=dtype))
    assert_equals_oracle("fused_linear", *made(rows, in_size, 80, bias, "rms"), **options, residual=residual,
                         roundings=ROUNDINGS["both"], reduction=2 * in_size, dtype=dtype,
                         interpreted=SCALES_THE_PRODUCT)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [3, 70])
def test_each_part_of_an_rms_norm_matters(assert_equals_oracle, run_oracle, random, dtype, rows, gated):
    """Rows as small as the square root of epsilon, so that epsilon decides the scale; one row is zero.

    The largest difference of what a norm without one of its parts gives is far larger than the allowed error.
    """
    x, weight, norm_weight = 0.003 * random(rows, 96), random(80, 96) / 10, random(96)
    x[1] = 0
    given = [value.to(dtype) for value in (x, weight, norm_weight)]
    options = {"activation": "relu", "gated": True} if gated else {}
    found = assert_equals_oracle("fused_linear", *given[:2], None, given[2], None, 1e-5, weight_offset=0.5, **options,
                                 roundings=ROUNDINGS["both"], reduction=200, dtype=dtype)
    assert not found[1].any()
    allowed = 20 * torch.finfo(dtype).eps
    wide = [value.double() for value in given]
    expected = run_oracle("fused_linear", *wide[:2], None, wide[2], None, 1e-5, weight_offset=0.5, **options)
    for norm_weight, epsilon, offset in ((torch.ones_like(wide[2]), 1e-5, 0.5), (wide[2], 1e-9, 0.5),
                                         (wide[2], 1e-5, 0.0)):
        other = run_oracle("fused_linear", *wide[:2], None, norm_weight, None, epsilon, weight_offset=offset, **options)
        assert (other - expected).abs().max() > 2 * allowed * expected.abs().max()


@pytest.mark.parametrize("size", ["large", "small"])
@pytest.mark.parametrize("rows", [3, 70])
def test_rows_near_the_ends_of_the_range(assert_equals_oracle, run_kernel, random, is_recording, dtype, size, rows):
    """In float16, x times the norm's weight is infinite for the large rows, and has few bits for the small ones."""
    x = random(rows, 96).clamp(-2, 2) * (30_000.0 if size == "large" else 1e-5)
    norm_weight = (random(96).abs() + 1) * (8.0 if size == "large" else 0.01)
    given = x.to(dtype), (random(40, 96) / 10).to(dtype), None, norm_weight.to(dtype), None, 1e-14
    options = {"roundings": ROUNDINGS["norm"], "reduction": 200, "dtype": dtype}
    assert_equals_oracle("fused_linear", *given, **options)
    if dtype == torch.float16 and x.device.type == "cpu" and not is_recording:
        with pytest.raises(AssertionError, match="not close"):
            assert_equals_oracle("fused_linear", *given, **options, interpreted=SCALES_THE_PRODUCT)


@pytest.mark.parametrize("norm, dtype, reads", [
    ("none", torch.float32, 1), ("rms", torch.float32, 1), ("rms", torch.float16, 2), ("layer", torch.float32, 3)])
def test_how_often_a_program_reads_its_rows(calls_within, random, norm, dtype, reads):
    vectors = [random(300, dtype=dtype) if norm in normed else None for normed in (("rms", "layer"), ("layer",))]
    calls = calls_within("fused_linear", random(3, 300, dtype=dtype), random(4, 300, dtype=dtype), None, *vectors, 1e-5,
                         of="_rows_of")
    step = fused_linear_settings(3, 300, 4, False, norm, dtype, Limits(227, 132)).step
    assert len(calls) == reads * -(-300 // step)
    assert reads_of_x(norm, dtype) == reads and reads_of_x("rms", torch.bfloat16) == 1


@pytest.mark.parametrize("rows", [4, 65])
def test_a_row_that_is_not_finite_is_alone(run_kernel, random, rows):
    x = random(rows, 48)
    x[1, 7], x[2, 0] = torch.nan, torch.inf
    found = run_kernel("fused_linear", x, random(20, 48), None, random(48), None, 1e-5)
    assert found.isfinite().all(1).tolist() == [True, False, False] + [True] * (rows - 3)


def test_the_bits_of_a_row_do_not_depend_on_the_rows_of_other_tiles(run_kernel, random):
    """All row counts up to a multiple of TILE_ROWS have the same settings, and rows of other tiles do not matter."""
    x, weight, norm_weight = random(256, 96), random(40, 96), random(96)

    def product(x):
        return run_kernel("fused_linear", x, weight, None, norm_weight, None, 1e-5,
                          interpreted={"dots_in_one_order": True})

    of_all = product(x)
    others = torch.cat([random(TILE_ROWS, 96), x[TILE_ROWS:]])
    assert torch.equal(product(others)[TILE_ROWS:], of_all[TILE_ROWS:])
    assert torch.equal(product(x[:200]), of_all[:200])


def test_nothing_to_do(run_kernel, random):
    assert run_kernel("fused_linear", random(0, 8), random(3, 8)).shape == (0, 3)


def test_an_unknown_kind_of_activation_is_refused(run_kernel, random):
    with pytest.raises((AssertionError, ValueError, KeyError), match="swish"):
        run_kernel("fused_linear", random(1, 8), random(4, 8), activation="swish")


class Limits:
    """The part of DeviceLimits that the settings use."""

    def __init__(self, shared_kib, multiprocessors):
        self.shared_bytes, self.multiprocessors = shared_kib * 1024, multiprocessors


@pytest.mark.parametrize("limits", [Limits(227, 132), Limits(163, 108), Limits(64, 304)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_size, out_size, gated", [
    (4096, 6144, False), (4096, 14336, True), (576, 960, False), (4096, 128256, False), (5, 3, False), (8, 40, True)])
def test_settings_fit_the_device_and_cover_it(limits, dtype, in_size, out_size, gated):
    rows, columns, step, _, num_stages = fused_linear_settings(FEW_ROWS, in_size, out_size, gated, "rms", dtype, limits)
    assert rows == FEW_ROWS
    weight_rows = columns * (1 + gated)
    pieces = num_stages * (weight_rows + rows) * step * dtype.itemsize
    assert num_stages >= 1 and pieces < limits.shared_bytes
    assert 16 <= step <= 512 // dtype.itemsize and (step == 16 or step < 2 * in_size)
    programs = -(-out_size // columns)
    assert columns == 16 or programs >= 2 * limits.multiprocessors
    assert weight_rows <= 64
    assert gated or columns == 64 or out_size / (2 * columns) < 2 * limits.multiprocessors


@pytest.mark.parametrize("limits", [Limits(227, 132), Limits(163, 108), Limits(64, 304)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_size, out_size, gated", [
    (2048, 8192, True), (576, 960, False), (576, 1536, True), (576, 49152, False), (5, 3, False), (8, 40, True)])
def test_settings_of_many_rows_fit_the_device_and_are_those_of_their_tiles(limits, dtype, in_size, out_size, gated):
    found = [fused_linear_settings(rows, in_size, out_size, gated, "rms", dtype, limits)
             for rows in range(FEW_ROWS + 1, MOST_ROWS + 1)]
    assert len(set(found)) <= len(ROW_COUNTS) - 1
    for index, settings in enumerate(found):
        assert settings == found[min(-(-(FEW_ROWS + 1 + index) // TILE_ROWS) * TILE_ROWS, MOST_ROWS) - FEW_ROWS - 1]
        weight_rows = settings.columns * (1 + gated)
        pieces = settings.num_stages * (weight_rows + settings.rows) * settings.step * dtype.itemsize
        assert settings.rows == TILE_ROWS and settings.columns >= 16 and settings.step >= 16
        assert settings.num_stages >= 1 and pieces < limits.shared_bytes


def test_which_products_of_few_rows_are_fused():
    limits = Limits(227, 132)
    assert is_fused(16, 4096, 6144, False, "rms", 1, torch.bfloat16, limits)
    # A layer norm reads x three times: with few weight rows per program, fusing pays only for fewer rows of x.
    assert is_fused(10, 768, 2304, False, "layer", 1, torch.bfloat16, limits)
    assert not is_fused(11, 768, 2304, False, "layer", 1, torch.bfloat16, limits)
    assert is_fused(16, 4096, 128256, False, "layer", 1, torch.bfloat16, limits)
    for gated in (False, True):
        for norm in ("none", "rms", "layer"):
            fused = [is_fused(rows, 576, 960, gated, norm, 1, torch.bfloat16, limits)
                     for rows in range(1, FEW_ROWS + 1)]
            assert fused[0] and fused == sorted(fused, reverse=True)      # what is fused for some rows is for fewer


# name -> (columns of the input, columns of the result, gated, saved launches), largest number of rows that are fused
# behind an RMSNorm in bfloat16, and in float16, where a program reads its rows twice
OF_THE_GOALS = {
    "qkv 135M": ((576, 960, False, 1), 256, 256), "gate up 135M": ((576, 1536, True, 2), 256, 256),
    "head 135M": ((576, 49152, False, 1), FEW_ROWS, FEW_ROWS),
    "qkv 0.6B": ((1024, 4096, False, 1), 256, FEW_ROWS), "gate up 0.6B": ((1024, 3072, True, 2), 256, 128),
    "head 0.6B": ((1024, 151936, False, 1), FEW_ROWS, FEW_ROWS),
    "qkv 1B": ((2048, 3072, False, 1), 256, FEW_ROWS), "gate up 1B": ((2048, 8192, True, 2), 64, 64),
    "qkv 8B": ((4096, 6144, False, 1), 64, FEW_ROWS), "gate up 8B": ((4096, 14336, True, 2), FEW_ROWS, FEW_ROWS),
}


@pytest.mark.parametrize("name", OF_THE_GOALS)
def test_up_to_how_many_rows_the_products_of_the_goals_are_fused_on_an_h100(name):
    (in_size, out_size, gated, saved), *most = OF_THE_GOALS[name]
    for dtype, most_rows in zip((torch.bfloat16, torch.float16), most, strict=True):
        fused = [is_fused(rows, in_size, out_size, gated, "rms", saved, dtype, Limits(227, 132))
                 for rows in range(1, 2 * MOST_ROWS)]
        assert fused == [rows <= most_rows for rows in range(1, 2 * MOST_ROWS)]


def test_what_is_saved_decides_and_float32_is_never_fused_for_many_rows():
    limits = Limits(227, 132)
    assert is_fused(256, 768, 3072, False, "layer", 2, torch.bfloat16, limits)
    assert not is_fused(256, 768, 3072, False, "layer", 1, torch.bfloat16, limits)
    assert not is_fused(17, 576, 1536, True, "rms", 2, torch.float32, limits)
    assert is_fused(16, 576, 1536, True, "rms", 2, torch.float32, limits)
