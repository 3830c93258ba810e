"""Where a model's tensors come from: the protocol, and the source that needs no file."""

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from ..loading_thread import check_interruption

Shape = Sequence[int]


class Weights(Protocol):
    """Tensors by name, all on one device and in one dtype.

    num_bytes   of everything handed out, and of the copies that layers made of it for speed
    """

    num_bytes: int

    def has(self, name: str) -> bool:
        """Whether the tensor exists: for names that differ from checkpoint to checkpoint."""
        ...

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """The tensor, contiguous; a single number has the shape (). Raises ModelLoadError when it is missing or has
        another shape."""
        ...

    def stacked(self, parts: Sequence[tuple[str, Shape]]) -> torch.Tensor:
        """Several tensors of equal trailing shape, one below the other, as one contiguous tensor."""
        ...

    def tied(self, name: str, to: str) -> None:
        """Say that `name` is not asked for because it is `to`. Raises ModelLoadError when a file says otherwise."""
        ...

    def count_copy(self, num_bytes: int) -> None:
        """Add a copy that a layer keeps beside the tensor it was handed to `num_bytes`."""
        ...


class DummyWeights:
    """Seeded random weights of any shape: matrices normal with standard deviation 0.02, norms one, biases zero.

    The values are a function of (seed, name, shape) on one kind of device, in any order of asking.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.seed, self.device, self.dtype = seed, device, dtype
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        return True

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.stacked([(name, shape)]) if shape else self.stacked([(name, (1,))])[0]

    def stacked(self, parts: Sequence[tuple[str, Shape]]) -> torch.Tensor:
        check_interruption()
        rows = sum(shape[0] for _, shape in parts)
        result = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in parts:
            self._fill(name, result[start : start + shape[0]])
            start += shape[0]
        self.num_bytes += result.nbytes
        return result

    def tied(self, name: str, to: str) -> None:
        pass

    def count_copy(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _fill(self, name: str, rows: torch.Tensor) -> None:
        if rows.dim() == 1:
            rows.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            # One number of 32 bits: a CPU generator looks at no more of its seed.
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            rows.normal_(0.0, 0.02, generator=generator)
