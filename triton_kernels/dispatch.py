"""Selects the implementation of an operation for a device: Triton kernel, CPU version or oracle.

    triton   on a GPU (CUDA or HIP) with Triton installed; or anywhere if TRITON_INTERPRET=1 is in the environment when
             the kernels are first imported: Triton's interpreter then runs them on the CPU, slowly, for debugging
    torch    otherwise: `cpu/<name>.py` on a CPU if it exists, else the oracle `reference/<name>.py`

Triton is imported only when `kernel` selects a Triton kernel.
"""

import functools
import importlib
import importlib.util
import logging
import os

import torch

logger = logging.getLogger(__name__)


def use_triton(device) -> bool:
    """Whether operations on `device` (a torch.device or its name) run as Triton kernels."""
    return kernel_backend(device) == "triton"


def kernel_backend(device) -> str:
    """Return the backend for `device`, "triton" or "torch". The first result for each device type is logged."""
    return _decide(torch.device(device).type)


def kernel(name: str, device):
    """Return the function `name` for tensors on `device`. All implementations have the same signature."""
    if use_triton(device):
        folder = ""
    elif torch.device(device).type == "cpu" and _has_cpu_twin(name):
        folder = ".cpu"
    else:
        folder = ".reference"
    return getattr(importlib.import_module(f"{__package__}{folder}.{name}"), name)


def _has_cpu_twin(name: str) -> bool:
    return importlib.util.find_spec(f"{__package__}.cpu.{name}") is not None


@functools.cache
def _decide(device_type: str) -> str:
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"):
        backend, reason = "triton", "TRITON_INTERPRET is set: interpreted, slow"
    elif device_type != "cuda":                                     # torch calls HIP devices "cuda" too
        backend, reason = "torch", f"no Triton kernels for a {device_type} device"
    elif importlib.util.find_spec("triton") is None:
        backend, reason = "torch", "triton is not installed"
    else:
        backend, reason = "triton", "a GPU with triton installed"
    logger.info("operations on %s devices run in %s (%s)", device_type, backend, reason)
    return backend
