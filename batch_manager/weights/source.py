"""Sources of a model's tensors: the protocol, and random weights, which need no file."""

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch

from .matrices import WHOLE_MATRIX, DenseSource, Part, Shape, Share, StoredMatrix


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

    def linear(self, names: Sequence[str], in_size: int, sizes: Sequence[int], *, bias: bool = False,
               transposed: bool = False, row_order: torch.Tensor | None = None, scale: float | None = None,
               share: Share = WHOLE_MATRIX) -> StoredMatrix:
        """Return the matrix of one linear layer, as the source stores it. Reads only this rank's part.

        names        prefixes of the projections, whose `.weight` and `.bias` are stacked in order
        in_size      number of inputs, of this rank's part
        sizes        number of outputs of each projection, of this rank's part; several sizes with one name are
                     projections that are stored as one tensor
        bias         whether the projections have a bias
        transposed   the tensors are stored [in, out]
        row_order    permutation of the part's rows, on the CPU: output i is row row_order[i]; None: stored order
        scale        factor on weight and bias; None: no factor
        share        the part of the stored tensors that this rank has; their shapes follow from it
        Raises       ModelLoadError if a tensor is missing or has another shape
        """
        ...

    def tied(self, name: str, to: str) -> None:
        """Declare that the model uses the tensor `to` in place of `name`, and treat `name` as a requested tensor.

        Raises ModelLoadError if the checkpoint has a different tensor under `name`.
        """
        ...

    def count_copy(self, num_bytes: int) -> None:
        """Count a copy of `num_bytes` bytes that a layer keeps beside the original tensor; negative: one it drops."""
        ...


class DummyWeights(DenseSource):
    """Seeded random weights of any shape.

    Matrices are normally distributed with standard deviation 0.02. Norm weights are one, and biases are zero. The
    values depend only on seed, name, shape and the kind of device. A part has the values that it has in the whole.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.seed = seed

    def has(self, name: str) -> bool:
        return True

    def tied(self, name: str, to: str) -> None:
        pass

    def _check(self, name: str, shape: Shape) -> str:
        return name

    def _load(self, target: torch.Tensor, stored_name: str, part: Part) -> None:
        if part.is_whole and not part.transposed:
            self._fill(stored_name, target)
            return
        whole = torch.empty(tuple(part.shape), dtype=self.dtype, device=self.device)
        self._fill(stored_name, whole)
        found = whole[part.index]
        target.copy_(found.t() if part.transposed else found)

    def _fill(self, name: str, rows: torch.Tensor) -> None:
        if rows.dim() < 2:
            rows.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            # 32 bits are enough: a CPU generator ignores the others.
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            rows.normal_(0.0, 0.02, generator=generator)
