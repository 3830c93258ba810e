"""What the sections of a report share: the device, its clock, the rates that earlier sections measured, a deadline."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .device_clock import DryClock, GpuClock

# A correct kernel that rounds its result once has 2.4e-3 in bfloat16 and up to 7.5e-4 in float16.
ALLOWED_ERRORS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


class OutOfTimeError(Exception):
    """Too little time is left for the next measurement."""


@dataclass(slots=True)
class Bench:
    """One run of the report.

    clock        clock of the device
    dtype        data type of kernels and engines; float32 in a dry run, because the interpreter has no bfloat16
    folder       temporary folder of all sections, for example for checkpoints
    peers        folder with another attention kernel, or results of other engines, to compare with; None: no comparison
    rates        rates of the device by name, which the section `rates` measures; see RATES in denominators.py
    lines        lines of the report so far
    deadline     value of `now` by which the current section must end
    estimated    in a dry run, the value of `now`
    """

    clock: GpuClock | DryClock
    dtype: torch.dtype
    folder: Path
    peers: Path | None = None
    rates: dict[str, float] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    deadline: float = float("inf")
    estimated: float = 0.0
    _seed: int = 0

    @property
    def is_dry(self) -> bool:
        return self.clock.is_dry

    @property
    def allowed_error(self) -> float:
        """Largest allowed relative error of a kernel's result: the rounding error of the dtype, with a margin."""
        return ALLOWED_ERRORS[self.dtype]

    @property
    def copy_bytes_s(self) -> float:
        return self._rate("copy_bytes_s")

    @property
    def read_bytes_s(self) -> float:
        return self._rate("read_bytes_s")

    @property
    def matmul_flop_s(self) -> float:
        return self._rate("matmul_flop_s")

    def _rate(self, name: str) -> float:
        if name not in self.rates:
            raise OutOfTimeError("the rates of the device were not measured; --rates takes those of an earlier report")
        return self.rates[name]

    @property
    def device(self) -> torch.device:
        return self.clock.device

    def pick(self, real: Any, dry: Any) -> Any:
        """Return `dry` in a dry run, otherwise `real`."""
        return dry if self.is_dry else real

    @property
    def now(self) -> float:
        """The time in seconds. In a dry run, it is the sum of the estimates given to `require` so far."""
        return self.estimated if self.is_dry else time.monotonic()

    @property
    def seconds_left(self) -> float:
        return self.deadline - self.now

    def require(self, seconds: float) -> None:
        """Announce a measurement of about `seconds`.

        Raises OutOfTimeError if the current section of the report has less time left. In a dry run, `now` advances
        by `seconds`.
        """
        if self.seconds_left < seconds:
            raise OutOfTimeError(f"{max(self.seconds_left, 0.0):.0f} s were left; "
                                 f"the measurement needs {seconds:.0f} s")
        self.estimated += seconds

    def has_time(self, seconds: float) -> bool:
        """Announce a measurement of about `seconds`, and return whether the section has that much time left."""
        try:
            self.require(seconds)
        except OutOfTimeError:
            return False
        return True

    def add_text(self, name: str, text: str) -> None:
        """Let the report end with `text`, in Markdown. A later text of the same name replaces it."""
        (self.folder / f"{name}.md").write_text(text)

    def texts(self) -> list[str]:
        """Return the texts of `add_text`."""
        return [path.read_text() for path in sorted(self.folder.glob("*.md"))]

    def generator(self) -> torch.Generator:
        """Return a random generator on the device. Each call uses another seed."""
        self._seed += 1
        return torch.Generator(self.device).manual_seed(self._seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of normally distributed random numbers. Each call returns other numbers."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return values.normal_(generator=self.generator())

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return a tensor of random integers from `low` to `high` - 1. Each call returns other numbers."""
        return torch.randint(low, high, shape, dtype=dtype, device=self.device, generator=self.generator())

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of NaN for the output of a kernel. An entry that the kernel does not write stays NaN."""
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device="cpu").to(self.device)
