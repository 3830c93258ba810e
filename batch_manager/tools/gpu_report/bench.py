"""What sections are handed: the device, its clock, what was measured before them, and how long they have."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .device_clock import DryClock, GpuClock


class OutOfTimeError(Exception):
    """The section's time does not suffice for what comes next."""


@dataclass(slots=True)
class Bench:
    """One run of the report.

    clock        of the device
    dtype        that kernels and engines compute in; float32 in a dry run, whose interpreter has no bfloat16
    folder       of the run, for checkpoints and the like
    peers        of what others are compared with; None: nothing
    copy_bytes_s, read_bytes_s, matmul_flop_s   what the device does, from the section of denominators
    """

    clock: GpuClock | DryClock
    dtype: torch.dtype
    folder: Path
    peers: Path | None = None
    goals: tuple[str, ...] = ()
    copy_bytes_s: float = 0.0
    read_bytes_s: float = 0.0
    matmul_flop_s: float = 0.0
    deadline: float = float("inf")
    _seed: int = 0

    @property
    def is_dry(self) -> bool:
        return self.clock.is_dry

    @property
    def allowed_error(self) -> float:
        """Relative, of a kernel's result: the rounding of operands and result to the dtype, with room."""
        return 1e-2 if self.dtype == torch.bfloat16 else 1e-4

    @property
    def device(self) -> torch.device:
        return self.clock.device

    def pick(self, real: Any, dry: Any) -> Any:
        """A size for the GPU, or the one for a dry run."""
        return dry if self.is_dry else real

    def wants(self, *names: str) -> bool:
        """Whether one of these goals was asked for."""
        return not self.goals or any(name in self.goals for name in names)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def require(self, seconds: float) -> None:
        """Raise OutOfTimeError unless so much of the section's time is left. A dry run has time."""
        if not self.is_dry and self.seconds_left < seconds:
            raise OutOfTimeError(f"{max(self.seconds_left, 0.0):.0f} of the {seconds:.0f} s needed were left")

    def generator(self) -> torch.Generator:
        """Random numbers on the device that no call before it had."""
        self._seed += 1
        return torch.Generator(self.device).manual_seed(self._seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, fresh ones in every call."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return values.normal_(generator=self.generator())

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers from low to high - 1."""
        return torch.randint(low, high, shape, dtype=dtype, device=self.device, generator=self.generator())

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """NaN everywhere: what a kernel leaves out is seen."""
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device="cpu").to(self.device)
