"""What the current GPU allows a kernel: read once per device, from triton's driver."""

import functools
from typing import NamedTuple

import triton


class DeviceLimits(NamedTuple):
    """What launch settings depend on.

    shared_bytes         shared memory one program may use
    multiprocessors      units that run programs
    operands_in_shared   matrix instructions read their operands from shared memory (NVIDIA from sm_90 on); elsewhere
                         they come from registers, which then limit the size of a tile
    """

    shared_bytes: int
    multiprocessors: int
    operands_in_shared: bool


def device_limits() -> DeviceLimits:
    """Limits of the device kernels are launched on now; of an H200 when they are interpreted."""
    if triton.knobs.runtime.interpret:
        return DeviceLimits(shared_bytes=227 * 1024, multiprocessors=132, operands_in_shared=True)
    return _limits_of(triton.runtime.driver.active.get_current_device())


@functools.cache
def _limits_of(device_index: int) -> DeviceLimits:
    properties = triton.runtime.driver.active.utils.get_device_properties(device_index)
    target = triton.runtime.driver.active.get_current_target()
    return DeviceLimits(
        shared_bytes=properties["max_shared_mem"],
        multiprocessors=properties["multiprocessor_count"],
        operands_in_shared=target.backend == "cuda" and 90 <= target.arch < 120,
    )
