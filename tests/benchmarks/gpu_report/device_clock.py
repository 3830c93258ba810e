"""Clocks that time launches: a clock for a GPU, and a substitute for a dry run.

The GPU clock captures launches as a graph and records events around each replay, so that no figure includes host time
between launches.
"""

import contextlib
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

WARM_SECONDS = 1.0         # of computing before the first measurement: idle clock rates can be a fifth of the full rate
DRY_LAUNCHES = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """The measured time of a launch.

    seconds   mean seconds of a launch in each repetition of the measurement
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Relative difference of the medians of both halves of the repetitions: larger / smaller - 1."""
        half = len(self.seconds) // 2
        if not half:
            return 0.0
        first, second = median(self.seconds[:half]), median(self.seconds[half:])
        return max(first, second) / min(first, second) - 1


@dataclass(frozen=True, slots=True)
class DeviceActivity:
    """Activity of the device within `watch`.

    busy_seconds   time in which at least one kernel, copy or fill ran
    launches       number of kernels that ran
    uploads        number of copies from the host to the device
    kernels        name of a kernel, copy or fill -> (how often it ran, seconds in all)
    gaps           seconds between the end of a kernel, copy or fill and the start of the next, without overlaps
    """

    busy_seconds: float
    launches: int
    uploads: int
    kernels: dict[str, tuple[int, float]]
    gaps: list[float]


class GpuClock:
    """The clock of a GPU. `device` must be the current device."""

    is_dry = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)

    @property
    def name(self) -> str:
        properties = self._module.get_device_properties(self.device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def warm(self) -> None:
        """Keep the device busy with matrix products for WARM_SECONDS."""
        a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self.device)
        until = time.monotonic() + WARM_SECONDS
        while time.monotonic() < until:
            for _ in range(20):
                torch.mm(a, a)
            self.synchronize()

    def time(self, launch: Callable[[int], object], *, launches: int = 20, repeats: int = 20) -> Timing:
        """Return the mean time of `launch(0)` to `launch(launches - 1)` in each of `repeats` repetitions.

        The launches run once and are then captured as a graph. They must not depend on work of the host.
        """
        stream = self._module.Stream(self.device)
        stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(stream):
            for number in range(launches):
                launch(number)
        self.synchronize()
        graph = self._module.CUDAGraph()
        with self._module.graph(graph, stream=stream):
            for number in range(launches):
                launch(number)
        events = [(self._event(), self._event()) for _ in range(repeats)]
        graph.replay()
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        self.synchronize()
        timing = Timing(tuple(begin.elapsed_time(end) / 1e3 / launches for begin, end in events))
        graph.reset()
        return timing

    def _event(self) -> Any:
        return self._module.Event(enable_timing=True)

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[DeviceActivity]]:
        """Context manager that yields a list, to which the end of `with` appends the activity of the device.

        The device is traced within `with`. Launches are slower during this time.
        """
        found: list[DeviceActivity] = []
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        with profile:
            yield found
            self.synchronize()
        events = [event for event in profile.events() if event.device_type != torch.autograd.DeviceType.CPU]
        spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
        found.append(activity_of(spans))

    @contextlib.contextmanager
    def refusing_hidden_waits(self) -> Iterator[None]:
        """Within `with`, operations that wait for the device raise RuntimeError."""
        self._module.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._module.set_sync_debug_mode("default")

    def forget(self) -> None:
        """Release the device memory that torch has cached."""
        self._module.empty_cache()


def activity_of(spans: list[tuple[float, float, str]]) -> DeviceActivity:
    """Return the activity of the device, computed from the time spans of its kernels and copies.

    The time of overlapping spans counts once.

    spans   (begin, end, name) of each kernel and copy, in microseconds
    """
    busy, reached = 0.0, float("-inf")
    kernels: dict[str, tuple[int, float]] = {}
    gaps = []
    for begin, end, name in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        if float("-inf") < reached < begin:
            gaps.append((begin - reached) / 1e6)
        reached = max(reached, end)
        count, seconds = kernels.get(name, (0, 0.0))
        kernels[name] = count + 1, seconds + (end - begin) / 1e6
    copies = [name for _, _, name in spans if name.startswith(("Memcpy", "Memset"))]
    return DeviceActivity(busy / 1e6, len(spans) - len(copies), sum("HtoD" in name for name in copies), kernels, gaps)


class DryClock:
    """A substitute for GpuClock that needs no GPU: everything runs on the CPU, and every duration is one second."""

    is_dry = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        return f"dry run on {platform.machine()}"

    def synchronize(self) -> None:
        pass

    def warm(self) -> None:
        torch.mm(*2 * [torch.ones(4, 4, dtype=torch.float32, device=self.device)])

    def time(self, launch: Callable[[int], object], *, launches: int = 20, repeats: int = 20) -> Timing:
        for number in range(min(launches, DRY_LAUNCHES)):
            launch(number)
        return Timing((1.0,) * repeats)

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[DeviceActivity]]:
        found: list[DeviceActivity] = []
        yield found
        found.append(activity_of([(0.0, 5e5, "kernel"), (2e5, 1e6, "Memcpy HtoD")]))

    @contextlib.contextmanager
    def refusing_hidden_waits(self) -> Iterator[None]:
        yield

    def forget(self) -> None:
        pass
