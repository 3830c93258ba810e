"""Sources of a model's tensors: the protocol, and random weights, which need no file."""

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from ..loading_thread import check_interruption

Shape = Sequence[int]


class Weights(Protocol):
    """The protocol of sources of tensors. A source returns tensors by name, all on one device and in one dtype.

    num_bytes   size of all tensors returned so far, and of the copies of them that layers keep for speed
    """

    num_bytes: int

    def has(self, name: str) -> bool:
        """Whether the tensor exists. Model classes call this for names that differ between checkpoints."""
        ...

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        """Return the tensor `name`, contiguous. `shape` is () for a single number.

        Raises ModelLoadError if the tensor is missing or has another shape.
        """
        ...

    def stacked(self, parts: Sequence[tuple[str, Shape]]) -> torch.Tensor:
        """Return several tensors, concatenated along the first dimension, as one contiguous tensor.

        parts   (name, shape) of each tensor, in order; dimensions after the first must be equal
        Raises  ModelLoadError if a tensor is missing or has another shape
        """
        ...

    def tied(self, name: str, to: str) -> None:
        """Declare that the model uses the tensor `to` in place of `name`, and treat `name` as a requested tensor.

        Raises ModelLoadError if the checkpoint has a different tensor under `name`.
        """
        ...

    def count_copy(self, num_bytes: int) -> None:
        """Count a copy of `num_bytes` bytes that a layer keeps in addition to the original tensor."""
        ...


class DummyWeights:
    """Seeded random weights of any shape.

    Matrices are normally distributed with standard deviation 0.02. Norm weights are one, and biases are zero. The
    values depend only on seed, name, shape and the kind of device.
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
            # 32 bits are enough: a CPU generator ignores the others.
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            rows.normal_(0.0, 0.02, generator=generator)
