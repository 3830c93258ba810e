"""CPU time and memory of this process and its descendants, and CPU time of other processes, from /proc (Linux only)."""

import os
import time
from pathlib import Path


class ProcessMeter:
    """Measures CPU use between `start` and `stop`, and peak memory.

    cpu           mean number of cores used by this process and its descendants (own_cores), by other processes
                  (foreign_cores), by all processes at a positive nice level (foreign_nice) and by the hypervisor
                  (steal_cores), and the number of cores of the machine (ncpu)
    peak_rss_mb   sum of the peak resident memory of this process and its descendants, each since its start, in MiB
    """

    def __init__(self) -> None:
        self.cpu: dict[str, float | int] = {}
        self.peak_rss_mb = 0

    def start(self) -> None:
        self._began = time.perf_counter()
        self._machine, self._own = _machine_ticks(), _ticks_of(_family())

    def stop(self) -> None:
        family = _family()
        own = _ticks_of(family) - self._own
        busy, nice, steal = (after - before for after, before in zip(_machine_ticks(), self._machine, strict=True))
        ticks = (time.perf_counter() - self._began) * os.sysconf("SC_CLK_TCK")
        self.cpu = {
            "own_cores": round(own / ticks, 3),
            "foreign_nice": round(nice / ticks, 3),
            "foreign_cores": round(max(0, busy - own) / ticks, 3),
            "steal_cores": round(steal / ticks, 3),
            "ncpu": os.cpu_count() or 1,
        }
        self.peak_rss_mb = round(sum(_peak_rss_kb(process) for process in family) / 1024)


def _machine_ticks() -> tuple[int, int, int]:
    """Return the clock ticks of the whole machine: busy (including nice), nice, and stolen by the hypervisor."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return user + nice + system + irq + softirq, nice, steal


def _family() -> list[int]:
    """Return the ids of this process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    family = [os.getpid()]
    for process in family:              # the list grows during the loop
        family += children.get(process, [])
    return family


def _stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ... The list is empty for an ended process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _ticks_of(processes: list[int]) -> int:
    """Return the sum of the user and system ticks of the processes and of their reaped children."""
    return sum(sum(map(int, _stat_fields(process)[11:15])) for process in processes)


def _peak_rss_kb(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
