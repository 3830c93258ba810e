"""The settings with which layers are constructed, apart from their weights, and the ports of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..weights.matrices import Share, StoredMatrix

if TYPE_CHECKING:
    from .weight_form import WeightForm


class Split(Protocol):
    """The processes that share the weights of a layer, and what they exchange.

    rank   index of this process
    size   number of processes
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all processes. May overwrite `x`."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` of all processes, in order of rank, concatenated along the last dimension."""
        ...


class OneProcess:
    """The Split of a model that one process computes."""

    rank, size = 0, 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


ONE_PROCESS = OneProcess()


class AdapterModule(Protocol):
    """The adapters of one `Linear`."""

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the outputs of the step's adapters for x [T, in] to y [T, out], in place."""
        ...


class AdapterPort(Protocol):
    """The low-rank adapters of a model: their modules, and what each step uploads for them."""

    def of(self, names: Sequence[str], in_size: int, sizes: Sequence[int], *, row_order: torch.Tensor | None,
           scale: float | None, share: Share) -> AdapterModule | None:
        """Return the module for a `Linear`; None: it has no adapters. See `Weights.linear` for the arguments."""
        ...

    def plan(self, step: Any) -> Sequence[np.ndarray] | None:
        """Return the arrays that the adapters of a PackedStep need on the device, as `Attention.plan` does."""
        ...

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the uploaded arrays of `plan`, in the same order."""
        ...


class WeightForms(Protocol):
    """Chooses how a matrix is stored and multiplied, in place of weight_form.py."""

    def __call__(self, stored: StoredMatrix, context: "LayerContext") -> "WeightForm | None":
        """Return the form of a matrix as its source stores it; None: weight_form.py chooses."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The settings shared by all layers of a loaded model. A model passes them to each layer that it constructs.

    device          device on which the layers compute
    dtype           dtype of weights and hidden states
    deterministic   make the results for a row independent of the other rows of the step, to the bit
    compiled_step   on a CPU, store matrices in the layout of the compiled step, which runs a recorded forward in one
                    call; see recording.py
    quantization    how `Linear` quantises matrices of numbers, a key of QUANTIZATIONS in weight_form.py; None: not
    quantized_activations   "int8": products with quantised matrices round their input to 8 bits; None: they do not

    The next fields are ports. A layer asks them once, in its constructor.

    split           the processes that share the weights
    kv_copies       processes that have the same key and value heads; 1: each process has heads of its own
    weight_form     how a matrix is stored and multiplied; None: the fastest form of weight_form.py
    adapters        adapters whose outputs are added to the output of a `Linear`; None: no adapters
    """

    device: torch.device
    dtype: torch.dtype
    deterministic: bool = False
    compiled_step: bool = False
    quantization: str | None = None
    quantized_activations: str | None = None
    split: Split = ONE_PROCESS
    kv_copies: int = 1
    weight_form: WeightForms | None = None
    adapters: AdapterPort | None = None
