"""Decides whether a linear layer is fused with its norm and activation, and computes its launch settings, on the host.

The constants are estimates from vendors' bandwidths and latencies, not measured on a GPU.
`python -m batch_manager.tools.gpu_report` times fused against separate launches.
"""

import functools
from typing import NamedTuple

MOST_ROWS = 16                      # rows of x: the minimum of a matrix instruction
COLUMNS = (64, 32, 16)              # columns of `out` per program, in order of preference; 16: see MOST_ROWS
WAVES = 2                           # minimum number of programs per multiprocessor to give a program more columns
STEP_BYTES = 512                    # bytes of a row of the weight that are loaded at once
MOST_STAGES = 5                     # pieces of the weight in flight, including the one in use
MOST_SHARED_BYTES = 100 * 1024      # per program, so that two fit on a multiprocessor
MOST_READS = 2.0                    # bytes of x that all programs read in total, relative to those of the weight


class FusedLinearSettings(NamedTuple):
    """Launch settings.

    columns   columns of `out` per program
    step      elements of each weight row that are loaded at once
    """

    columns: int
    step: int
    num_warps: int
    num_stages: int


@functools.cache
def fused_linear_settings(in_size, out_size, gated, element_size_bytes, limits) -> FusedLinearSettings:
    """Return the launch settings, for any number of rows.

    out_size   columns of the result: half of the rows of the weight when gated
    limits     a DeviceLimits
    """
    columns = next((count for count in COLUMNS if -(-out_size // count) >= WAVES * limits.multiprocessors), COLUMNS[-1])
    if gated and columns > COLUMNS[-1]:
        columns //= 2                                    # each column needs two rows of the weight
    step = STEP_BYTES // element_size_bytes
    while step // 2 >= max(in_size, 16):
        step //= 2
    weight_rows = columns * (2 if gated else 1)
    piece_bytes = (weight_rows + MOST_ROWS) * step * element_size_bytes
    room = min(MOST_SHARED_BYTES, limits.shared_bytes - 1024)
    num_stages = max(1, min(MOST_STAGES, room // piece_bytes, -(-in_size // step) + 1))
    return FusedLinearSettings(columns, step, 4, num_stages)


def is_fused(num_rows, in_size, out_size, gated, norm, element_size_bytes, limits) -> bool:
    """Whether the fused launch is expected to be faster than separate launches, for a step of `num_rows` rows.

    norm   the fused norm: "none", "rms" or "layer"
    """
    if num_rows > MOST_ROWS:
        return False
    settings = fused_linear_settings(in_size, out_size, gated, element_size_bytes, limits)
    reads = {"none": 1, "rms": 2, "layer": 3}[norm]
    return reads * num_rows <= MOST_READS * settings.columns * (2 if gated else 1)
