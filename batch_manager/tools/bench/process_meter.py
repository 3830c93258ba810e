"""What a process and its children use of the machine, and what others use meanwhile. Reads /proc, hence Linux."""

import os
import time
from pathlib import Path


class ProcessMeter:
    """What this process and its children used, and what others burnt meanwhile, between `start` and `stop`.

    cpu           cores, burnt by this process and its children (own_cores), by others (foreign_cores;
                  foreign_nice is the part at a positive nice level) and by the hypervisor (steal_cores); ncpu: of
                  the machine
    peak_rss_mb   since the processes began
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
    """Ticks of the whole machine: busy (nice included), nice, stolen."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return user + nice + system + irq + softirq, nice, steal


def _family() -> list[int]:
    """This process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    family = [os.getpid()]
    for process in family:              # grows while it is walked
        family += children.get(process, [])
    return family


def _stat_fields(process: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ... Empty for a process that has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _ticks_of(processes: list[int]) -> int:
    """User and system ticks, those of children already waited for included."""
    return sum(sum(map(int, _stat_fields(process)[11:15])) for process in processes)


def _peak_rss_kb(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
