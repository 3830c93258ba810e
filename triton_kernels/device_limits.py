"""Limits of the current GPU, read once per device from Triton's driver."""

import functools
from typing import NamedTuple

import triton


class DeviceLimits(NamedTuple):
    """The limits that launch settings depend on.

    shared_bytes         shared memory available to one program
    multiprocessors      number of multiprocessors
    operands_in_shared   whether matrix instructions read operands from shared memory (sm_90 to sm_11x); otherwise from
                         registers, which then limit the size of a tile
    rows_pass_shared     whether query rows and attention weights take room in shared memory on their way to a matrix
                         instruction (NVIDIA)
    widens_fp8           whether an instruction widens numbers of e4m3 (sm_89 and later)
    """

    shared_bytes: int
    multiprocessors: int
    operands_in_shared: bool
    rows_pass_shared: bool = True
    widens_fp8: bool = False


def device_limits() -> DeviceLimits:
    """Return the limits of the current device, or those of an H200 under Triton's interpreter."""
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
        rows_pass_shared=target.backend == "cuda",
        widens_fp8=target.backend == "cuda" and target.arch >= 89,
    )
