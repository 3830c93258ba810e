"""Decides whether a linear layer is fused with its norm and activation, and computes its launch settings, on the host.

Up to FEW_ROWS rows, a product takes as long as reading its weight. A fused product reads the weight at the same speed,
so it pays if its programs together read at most MOST_READS times as many bytes of x as of the weight.

With more rows, a fused product is a little slower than a library's, because each of its programs multiplies its rows by
the norm's weight again, or computes their norm again. It pays if its additional time is shorter than the time of the
launches that it saves. The estimate divides a product into tiles of R rows of x and C rows of the weight, one per
program. With T rows, K inputs, a weight of W rows, elements of e bytes and M multiprocessors, of which the busiest runs
s = ceil(programs / M) programs, a product takes the longest of these times:

    W K e / MEMORY                                            the device reads the weight from memory once
    (reads T ceil(W / C) + ceil(T / R) W) K e / (M CACHE)     all programs read their tiles from the L2 cache
    s (reads R + C) K e / PORT                                the busiest multiprocessor reads its tiles
    s 2 R C K / (MATRIX share)                                and multiplies them, at a share of the peak

`reads` is how often a program reads its rows of x; see `reads_of_x`. `share` is LIBRARY_SHARE or FUSED_SHARE. A library
uses the fastest tile size of LIBRARY_TILES. Each separate launch of a norm, activation or sum takes LAUNCH_US. A norm
and a gated activation also take the time to read and write their rows in the L2 cache. Half-empty tiles count as full
ones, so all row counts with the same number of tiles get the same decision.

The constants are estimates for an H100, from vendors' bandwidths and latencies, not measured on a GPU.
`python -m tests.benchmarks.gpu_report` measures the time of fused launches and of separate launches. The ratios
of these times are meant to replace the estimates here.
"""

import functools
from typing import NamedTuple

import torch

MOST_ROWS = 256                     # rows of x; the limit of the kernel and of every decision
FEW_ROWS = 16                       # rows of one small tile of x: the minimum of a matrix instruction
TILE_ROWS = 64                      # rows of a tile of x if there are more: those of a Hopper matrix instruction
ROW_COUNTS = (FEW_ROWS, *range(TILE_ROWS, MOST_ROWS + 1, TILE_ROWS))    # the largest row counts of equal settings
MOST_STAGES = 5                     # pieces of the weight in flight, including the one in use
MOST_SHARED_BYTES = 100 * 1024      # per program, so that two fit on a multiprocessor
NARROW_RANGE = {torch.float16}      # dtypes that may not hold x times the norm's weight, without the norm's scale

# Up to FEW_ROWS rows.
COLUMNS = (64, 32, 16)              # columns of `out` per program, in order of preference; 16: see FEW_ROWS
WAVES = 2                           # minimum number of programs per multiprocessor to give a program more columns
STEP_BYTES = 512                    # bytes of a row of the weight that are loaded at once
MOST_READS = 2.0                    # bytes of x that all programs read in total, relative to those of the weight

# With more rows; times in microseconds.
WEIGHT_ROWS = (32, 64, 128)         # rows of the weight per program
TILE_STEP_BYTES = 128               # bytes of a row of x and of the weight that are loaded at once
LIBRARY_TILES = ((64, 32), (64, 64), (64, 128), (128, 128), (128, 256))
LAUNCH_US = 3.0                     # of a small kernel within a graph: it runs for 2, and 1 passes until the next
MEMORY = 2.9e6                      # bytes per microsecond from memory
CACHE = 45e3                        # bytes per microsecond from the L2 cache to each multiprocessor, if all read
PORT = 64e3                         # the same, if few read
MATRIX = 7.5e6                      # operations per microsecond of a multiprocessor in bfloat16
LIBRARY_SHARE, FUSED_SHARE = 0.75, 0.5
PASS_US = 0.4                       # until the first rows arrive, each time that a program reads x for a norm
EFFICIENCY = 0.85                   # time of a fused product in this model, relative to what it will really take


class FusedLinearSettings(NamedTuple):
    """Launch settings.

    rows      rows of a tile of x
    columns   columns of `out` per program
    step      elements of each row that are loaded at once
    """

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


def fused_linear_settings(num_rows, in_size, out_size, gated, norm, dtype, limits) -> FusedLinearSettings:
    """Return the launch settings.

    All row counts up to FEW_ROWS get the same settings. Larger row counts get the same settings as each other if they
    have the same number of row tiles.

    out_size   columns of the result: half of the rows of the weight when gated
    norm       the fused norm: "none", "rms" or "layer"
    dtype      of x and the weight
    limits     a DeviceLimits
    """
    if num_rows <= FEW_ROWS:
        return settings_of_few_rows(in_size, out_size, gated, dtype.itemsize, limits)
    return _plan(-(-num_rows // TILE_ROWS), in_size, out_size, gated, reads_of_x(norm, dtype), dtype.itemsize,
                 limits)[1]


def is_fused(num_rows, in_size, out_size, gated, norm, saved_launches, dtype, limits) -> bool:
    """Whether the fused launch is expected to be faster than separate launches, for a step of `num_rows` rows.

    norm             the fused norm: "none", "rms" or "layer"
    saved_launches   number of launches that the fused launch saves. A norm that n products read counts as 1 / n of a
                     launch for each of them
    """
    reads = reads_of_x(norm, dtype)
    if num_rows <= FEW_ROWS:
        settings = settings_of_few_rows(in_size, out_size, gated, dtype.itemsize, limits)
        return reads * num_rows <= MOST_READS * settings.columns * (2 if gated else 1)
    # float32 has no matrix instruction that keeps its precision: large tiles of it are slow.
    if num_rows > MOST_ROWS or dtype.itemsize > 2:
        return False
    row_tiles = -(-num_rows // TILE_ROWS)
    fused_us, _ = _plan(row_tiles, in_size, out_size, gated, reads, dtype.itemsize, limits)
    return fused_us / EFFICIENCY < _separate_us(row_tiles, in_size, out_size, gated, norm, saved_launches,
                                                dtype.itemsize, limits)


def reads_of_x(norm, dtype) -> int:
    """Return the number of times that a program reads its rows of x.

    1: without a norm, or with an RMSNorm that scales the product. 2: with an RMSNorm that scales x, because the dtype
    is one of NARROW_RANGE. 3: with a layer norm.
    """
    return {"none": 1, "rms": 2 if dtype in NARROW_RANGE else 1, "layer": 3}[norm]


@functools.cache
def settings_of_few_rows(in_size, out_size, gated, element_size_bytes, limits) -> FusedLinearSettings:
    """Return the launch settings for up to FEW_ROWS rows. Arguments as in `fused_linear_settings`."""
    columns = next((count for count in COLUMNS if -(-out_size // count) >= WAVES * limits.multiprocessors), COLUMNS[-1])
    if gated and columns > COLUMNS[-1]:
        columns //= 2                                    # each column needs two rows of the weight
    return _settings(FEW_ROWS, columns, gated, STEP_BYTES, in_size, element_size_bytes, limits)


@functools.cache
def _plan(row_tiles, in_size, out_size, gated, reads, element_size_bytes, limits) -> tuple[float, FusedLinearSettings]:
    """Return (estimated time, settings) of the fastest fused launch with `row_tiles` tiles of TILE_ROWS rows."""
    num_rows, per_column = row_tiles * TILE_ROWS, 2 if gated else 1
    times = {weight_rows: _product_us(num_rows, in_size, out_size * per_column, reads, (TILE_ROWS, weight_rows),
                                      FUSED_SHARE, element_size_bytes, limits) for weight_rows in WEIGHT_ROWS}
    weight_rows = min(times, key=times.get)
    settings = _settings(TILE_ROWS, weight_rows // per_column, gated, TILE_STEP_BYTES, in_size, element_size_bytes,
                         limits)
    return times[weight_rows] + PASS_US * (reads - 1), settings


def _settings(rows, columns, gated, step_bytes, in_size, element_size_bytes, limits) -> FusedLinearSettings:
    """Return the settings for tiles of `rows` rows and `columns` columns, with as many pipeline stages as fit."""
    step = step_bytes // element_size_bytes
    while step // 2 >= max(in_size, 16):
        step //= 2
    return FusedLinearSettings(rows, columns, step, 4,
                               most_stages(rows, columns, gated, step, in_size, element_size_bytes, limits))


def most_stages(rows, columns, gated, step, in_size, element_size_bytes, limits) -> int:
    """Return the largest number of pipeline stages, up to MOST_STAGES, that fit into shared memory and are of use.

    `rows`, `columns` and `step` are as in FusedLinearSettings, the other arguments as in `fused_linear_settings`.
    """
    piece_bytes = (columns * (2 if gated else 1) + rows) * step * element_size_bytes
    room = min(MOST_SHARED_BYTES, limits.shared_bytes - 1024)
    return max(1, min(MOST_STAGES, room // piece_bytes, -(-in_size // step) + 1))


def _separate_us(row_tiles, in_size, out_size, gated, norm, saved_launches, element_size_bytes, limits) -> float:
    """Return the estimated time in microseconds of separate launches: a library's product, norm, activation and sum."""
    num_rows, weight_rows = row_tiles * TILE_ROWS, out_size * (2 if gated else 1)
    product_us = min(_product_us(num_rows, in_size, weight_rows, 1, tile, LIBRARY_SHARE, element_size_bytes, limits)
                     for tile in LIBRARY_TILES)
    moved = (2 * in_size if norm != "none" else 0) + (weight_rows + out_size if gated else 0)
    return (product_us + saved_launches * LAUNCH_US
            + num_rows * moved * element_size_bytes / (limits.multiprocessors * CACHE))


def _product_us(num_rows, in_size, weight_rows, reads, tile, share, element_size_bytes, limits) -> float:
    """Return the estimated time of a product, in microseconds.

    reads, share   see the module docstring
    tile           (rows of x, rows of the weight) of one program
    """
    rows, columns = tile
    tiles = -(-num_rows // rows), -(-weight_rows // columns)
    busiest = -(-tiles[0] * tiles[1] // limits.multiprocessors)
    row_bytes = in_size * element_size_bytes
    return max(weight_rows * row_bytes / MEMORY,
               (reads * num_rows * tiles[1] + tiles[0] * weight_rows) * row_bytes / (limits.multiprocessors * CACHE),
               busiest * (reads * rows + columns) * row_bytes / PORT,
               busiest * 2 * rows * columns * in_size / (MATRIX * share))
