"""Records a model's forward pass as a list of operations, which fused.py launches on a GPU.

See layers/recording.py.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from ....layers.recording import LookedUp, NotRecordableError, Rows
from ....weights.matrices import Dense


@dataclass(frozen=True, slots=True)
class Norm:
    """result = norm of x, of each head separately if x has heads. RMS norm if bias is None, else layer norm."""

    x: Rows
    result: Rows
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float
    offset: float


@dataclass(frozen=True, slots=True)
class Product:
    """result = x W^T + b; with `adds`, result += x W^T + b."""

    x: Rows
    result: Rows
    matrix: Dense
    adds: bool


@dataclass(frozen=True, slots=True)
class Activation:
    """result = f(x); with `gated`, f(first half of x) * second half of x."""

    x: Rows
    result: Rows
    kind: str
    gated: bool


@dataclass(frozen=True, slots=True)
class Sum:
    """result = x + other."""

    x: Rows
    result: Rows
    other: Rows | LookedUp


@dataclass(frozen=True, slots=True)
class Attend:
    """result = the attention of `layer` for query, key and value. The operation may overwrite these three.

    more   further arguments of the attention's `run`
    """

    layer: int
    query: Rows
    key: Rows
    value: Rows
    rotary: Any
    more: dict[str, Any]
    result: Rows


Operation = Norm | Product | Activation | Sum | Attend


def is_whole(rows: Rows, widths: list[int]) -> bool:
    """Whether `rows` have all columns of their register and are not divided into heads."""
    return rows.heads is None and rows.width == widths[rows.register]


def read_by(operation: Operation) -> list[int]:
    """Return the registers that an operation reads."""
    if isinstance(operation, Attend):
        return [rows.register for rows in (operation.query, operation.key, operation.value)]
    rows = [operation.x]
    if isinstance(operation, Sum) and isinstance(operation.other, Rows):
        rows.append(operation.other)
    if isinstance(operation, Product) and operation.adds:
        rows.append(operation.result)
    return [one.register for one in rows]


def written_by(operation: Operation) -> list[int]:
    """Return the registers that an operation writes."""
    written = [operation.result.register]
    return written + read_by(operation) if isinstance(operation, Attend) else written


@dataclass(slots=True)
class LaunchRecording:
    """The operations of a model's forward, and of its head if the head is recorded too.

    dtype       dtype of all registers
    operations  the operations in order
    widths      number of columns of each register; register 0 has the input, which is the hidden states
    result      index of the output's register
    """

    dtype: torch.dtype
    operations: list[Operation] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    result: int = 0

    def incoming(self, width: int) -> Rows:
        return self.register(width)

    def register(self, width: int, heads: int | None = None) -> Rows:
        self.widths.append(width)
        return Rows(self, len(self.widths) - 1, 0, width, heads)

    # ------------------------------------------------------------------ called by Rows

    def sum(self, rows: Rows, other: Rows | LookedUp) -> Rows:
        result = self.register(rows.width, rows.heads)
        self.operations.append(Sum(rows, result, other))
        return result

    def norm(self, rows: Rows, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, offset: float) -> Rows:
        result = self.register(rows.width, rows.heads)
        self.operations.append(Norm(rows, result, weight, bias, epsilon, offset))
        return result

    def product(self, rows: Rows, matrix: Any, outputs: int, adds_to: Rows | None) -> Rows:
        if not isinstance(matrix, Dense):
            raise NotRecordableError("it multiplies by a matrix that is not stored as a plain tensor")
        if adds_to is not None and adds_to.register == rows.register:
            raise NotRecordableError("it adds a product to the rows that it multiplies")
        result = self.register(outputs) if adds_to is None else adds_to
        self.operations.append(Product(rows, result, matrix, adds_to is not None))
        return Rows(self, result.register, result.column, result.width)

    def adapt(self, rows: Rows, result: Rows, adapter: Any) -> None:
        """Record nothing: fused launches serve no sequence with an adapter."""

    def activation(self, rows: Rows, kind: str, gated: bool) -> Rows:
        result = self.register(rows.width // 2 if gated else rows.width)
        self.operations.append(Activation(rows, result, kind, gated))
        return result

    def mixture(self, rows: Rows, *more: Any) -> Rows:
        raise NotRecordableError("its layers have experts")

    def clamp(self, rows: Rows, bound: float) -> Rows:
        raise NotRecordableError("it clamps its hidden states")

    def attention(self, layer: int, query: Rows, key: Rows, value: Rows, rotary: Any, how: Any, sink: int,
                  sink_logits: torch.Tensor | None, norms: Any = None) -> Rows:
        result, given = self.register(query.width), {"sink_logits": sink_logits, "norms": norms}
        more = {name: value for name, value in given.items() if value is not None}
        self.operations.append(Attend(layer, query, key, value, rotary, more, result))
        return result
