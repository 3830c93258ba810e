"""What the current GPU allows a kernel: read once per device, from triton's driver."""

import functools
from typing import NamedTuple

import triton


class DeviceLimits(NamedTuple):
    """shared_bytes: shared memory one program may use; multiprocessors: units that run programs."""

    shared_bytes: int
    multiprocessors: int


def device_limits() -> DeviceLimits:
    """Limits of the device kernels are launched on now; of an H200 when they are interpreted."""
    if triton.knobs.runtime.interpret:
        return DeviceLimits(shared_bytes=227 * 1024, multiprocessors=132)
    return _limits_of(triton.runtime.driver.active.get_current_device())


@functools.cache
def _limits_of(device_index: int) -> DeviceLimits:
    properties = triton.runtime.driver.active.utils.get_device_properties(device_index)
    return DeviceLimits(properties["max_shared_mem"], properties["multiprocessor_count"])
