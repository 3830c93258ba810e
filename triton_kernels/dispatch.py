"""Which function runs an operation on a device: a Triton kernel, the CPU's own, or the oracle. One logged decision.

    triton   on a GPU (CUDA or HIP) with triton installed, or anywhere with TRITON_INTERPRET=1 in the environment when
             the kernels are first imported: then triton's interpreter runs them on the CPU, slowly, for debugging
    torch    everywhere else: `cpu/<name>.py` on a CPU where there is one, else the oracle `reference/<name>.py`

Imports triton only when a kernel is asked for and the answer is "triton".
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
    """ "triton" or "torch": what runs operations on `device`. The first answer per kind of device is logged."""
    return _decide(torch.device(device).type)


def kernel(name: str, device):
    """The function `name` for tensors on `device`. All three forms have one signature.

    On "triton" it is that of `<name>.py`. On "torch" it is that of `cpu/<name>.py` where `device` is a CPU and the file
    exists, else the oracle of `reference/<name>.py`.
    """
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
