"""Finds a device by its name."""

import torch

from ...errors import ConfigError, counted


def resolve_device(name: str | None) -> torch.device:
    """Return the device with this name, such as "cuda", "cuda:1" or "cpu". None: a GPU if there is one, else the CPU.

    Raises ConfigError if the name is unknown or torch does not find the device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = named_device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if device.index is None and count == 0 else device.index
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        raise ConfigError(f"device is {name!r}, but torch finds {counted(count, 'GPU')}",
                          "expected a GPU that torch finds; the first GPU has number 0",
                          'use another GPU, use device="cpu", or install a driver and a build of torch that find the '
                          'GPU')
    return torch.device("cuda", index)


def named_device(name: str) -> torch.device:
    """Return the torch device with this name. A GPU need not exist. Raises ConfigError for an unknown name."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}", 'expected "cpu", "cuda", "cuda:1", ..., or None',
                          "leave device unset to use a GPU if there is one")
    if device.type == "cpu" and device.index:
        raise ConfigError(f"device is {name!r}", 'expected "cpu" or "cpu:0", because all CPU cores are one device',
                          'use device="cpu", and num_threads to limit its threads')
    return device


def device_name(device: torch.device) -> str:
    """Return the device's name for logs and messages."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. For a CPU and an absent GPU, it is the number of an H200."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_gpus() -> int:
    """Return the number of GPUs of this machine that this process sees."""
    return torch.cuda.device_count()
