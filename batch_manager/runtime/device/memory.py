"""How much memory of a GPU and of the host is free or used."""

import os
from pathlib import Path

import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")    # control group of this process, in a container


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated, including memory that torch has cached but does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_host_memory()


def used_memory(device: torch.device) -> int:
    """Wait for all launched work. Return the number of bytes in use on the GPU, as the driver reports; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def release_memory(device: torch.device) -> None:
    """Return torch's unused GPU memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_host_memory() -> int:
    """Return the free bytes of the machine or those of the control group, whichever are fewer.

    Page cache counts as free.
    """
    free = _meminfo_available()
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit, used = (int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
        page_cache = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
        return max(0, min(free, limit - used + page_cache))
    except (OSError, ValueError):                   # no control group, or no limit in it
        return free


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
