"""Whether a linear map runs in one launch with its norm and activation, and how. Arithmetic on the host.

No GPU has measured any of it: the constants are estimates from the bandwidths and latencies that vendors state.
`python -m batch_manager.tools.gpu_report` times fused against separate launches.
"""

import functools
from typing import NamedTuple

MOST_ROWS = 16                      # of x: the least that a matrix instruction takes
COLUMNS = (64, 32, 16)              # rows of the weight that one program may read; 16 is the least an instruction takes
WAVES = 2                           # programs for each multiprocessor, at least, before a program reads more rows
STEP_BYTES = 512                    # of a row of the weight that are loaded at once
MOST_STAGES = 5                     # pieces of the weight that are in flight, and the one in use
MOST_SHARED_BYTES = 100 * 1024      # of a program, so that two fit a multiprocessor
MOST_READS = 2.0                    # bytes of x that all programs read together, as a share of the weight's


class FusedLinearSettings(NamedTuple):
    """columns: of `out`, and step: of a row of the weight, that one program works on at a time, in elements."""

    columns: int
    step: int
    num_warps: int
    num_stages: int


@functools.cache
def fused_linear_settings(in_size, out_size, gated, element_size_bytes, limits) -> FusedLinearSettings:
    """How to launch, for any number of rows.

    out_size   of the result: half of the rows of the weight when gated
    limits     a DeviceLimits
    """
    columns = next((count for count in COLUMNS if -(-out_size // count) >= WAVES * limits.multiprocessors), COLUMNS[-1])
    if gated and columns > COLUMNS[-1]:
        columns //= 2                                    # it reads two rows of the weight for each column
    step = STEP_BYTES // element_size_bytes
    while step // 2 >= max(in_size, 16):
        step //= 2
    weight_rows = columns * (2 if gated else 1)
    piece_bytes = (weight_rows + MOST_ROWS) * step * element_size_bytes
    room = min(MOST_SHARED_BYTES, limits.shared_bytes - 1024)
    num_stages = max(1, min(MOST_STAGES, room // piece_bytes, -(-in_size // step) + 1))
    return FusedLinearSettings(columns, step, 4, num_stages)


def is_fused(num_rows, in_size, out_size, gated, norm, element_size_bytes, limits) -> bool:
    """Whether one launch is expected to take less time than the launches that it stands for.

    norm   "none", "rms" or "layer"
    """
    if num_rows > MOST_ROWS:
        return False
    settings = fused_linear_settings(in_size, out_size, gated, element_size_bytes, limits)
    reads = {"none": 1, "rms": 2, "layer": 3}[norm]
    return reads * num_rows <= MOST_READS * settings.columns * (2 if gated else 1)
