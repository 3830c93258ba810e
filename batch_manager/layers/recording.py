"""Records the operations of a model's forward once, so that later steps replay them in one call.

`record` calls the `forward` of a model with `Rows` in place of a tensor. Each layer appends its operations to the
recording. The operations read and write registers. A model that needs an operation that is not supported here is not
recorded and runs in torch. A `Recording` has the operations of triton_kernels/cpu/native/step.c. Other recordings have
the same methods and record other operations, such as kernel launches on a GPU in runtime/forms/fixed/recording.py.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..triton_kernels.cpu.native.library import (
    ACTIVATE,
    ADD,
    ADD_LOOKED_UP,
    ATTEND,
    CLAMP,
    COMBINE,
    EXPAND_ADD,
    GATE,
    GATHER,
    INPUTS_ALIGNED,
    LAYER_NORM,
    OPERATION_NUMBERS,
    PREPARE,
    PRODUCT,
    PRODUCT_OF_EXPERTS,
    PROJECTIONS_AT_ONCE,
    RMS_NORM,
    ROTATE_AND_APPEND,
    ROUTE,
    SHRINK,
    routing_words,
)
from ..triton_kernels.cpu.native.matrix import PanelMatrix, QuantisedMatrix
from .context import AdapterModule

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_new": 2, "relu": 3}
ANY_ROWS = 1_000_000_007           # `len` of recorded rows, whose number is unknown; `view` accepts it as a size


class NotRecordableError(Exception):
    """The model uses an operation that cannot be recorded. The message names the operation."""


class Rows:
    """A stand-in for a tensor of hidden states with one row for each token of a step.

    The entries of each row are a range of columns in a register.

    recording   the Recording, or an object with its methods, to which operations on the rows are appended
    heads       number of heads into which the columns are divided, each of `size` entries; None: not divided
    """

    __slots__ = ("recording", "register", "column", "width", "heads")

    def __init__(self, recording: Any, register: int, column: int, width: int, heads: int | None = None) -> None:
        self.recording, self.register, self.column, self.width, self.heads = recording, register, column, width, heads

    @property
    def size(self) -> int:
        return self.width if self.heads is None else self.width // self.heads

    def __len__(self) -> int:
        return ANY_ROWS

    def __getattr__(self, name: str) -> Any:
        raise NotRecordableError(f"it uses the attribute {name} of its hidden states")

    def view(self, *shape: int) -> "Rows":
        if len(shape) == 2 and shape[0] == ANY_ROWS and shape[1] in (-1, self.width):
            return Rows(self.recording, self.register, self.column, self.width)
        if len(shape) == 3 and shape[0] == ANY_ROWS and shape[2] > 0 and self.width % shape[2] == 0 and (
                shape[1] in (-1, self.width // shape[2])):
            return Rows(self.recording, self.register, self.column, self.width, self.width // shape[2])
        raise NotRecordableError(f"it views its hidden states as {shape}")

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> list["Rows"]:
        unit = 1 if self.heads is None else self.size
        if dim != 1 or sum(sizes) * unit != self.width:
            raise NotRecordableError(f"it splits its hidden states into {sizes} along dimension {dim}")
        parts, column = [], self.column
        for count in sizes:
            parts.append(Rows(self.recording, self.register, column, count * unit,
                              None if self.heads is None else count))
            column += count * unit
        return parts

    def __add__(self, other: Any) -> "Rows":
        is_table = isinstance(other, LookedUp) and other.table.shape[1] == self.width
        if not is_table and not (isinstance(other, Rows) and (other.width, other.heads) == (self.width, self.heads)):
            raise NotRecordableError(f"it adds an object of type {type(other).__name__} to its hidden states")
        return self.recording.sum(self, other)

    # ------------------------------------------------------------------ operations of layers

    def normed(self, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, offset: float = 0.0) -> "Rows":
        """Record a norm of each row, or of each head of a row: LayerNorm with a bias, RMSNorm if bias is None.

        weight   [size] or [heads, size]
        """
        return self.recording.norm(self, weight, bias, epsilon, offset)

    def multiplied(self, matrix: Any, outputs: int, adds_to: "Rows | None" = None,
                   adapter: AdapterModule | None = None) -> "Rows":
        """Record the product of these rows and the weight of a layer. `matrix` is the weight in the form
        `WeightForm.matrix`.

        adds_to   rows to which the product is added; None: the product is written to a new register
        adapter   the adapters of the layer
        """
        result = self.recording.product(self, matrix, outputs, adds_to)
        if adapter is not None:
            self.recording.adapt(self, result, adapter)
        return result

    def summed(self) -> "Rows":
        """Record that these rows, a whole register, are replaced by their sum over the processes that share the layer.
        """
        return self.recording.sum_over_processes(self)

    def activated(self, kind: str, *, gated: bool) -> "Rows":
        """Record an activation. With `gated`, the first half of the columns is activated and multiplied by the second.
        """
        return self.recording.activation(self, kind, gated)

    def mixed(self, logits: "Rows", networks: Sequence[tuple[Any, Any]], activation: str, chosen: int,
              renormalises: bool, adds_to: "Rows | None" = None) -> "Rows":
        """Record a mixture of experts, see `Experts`.

        logits      of the router
        networks    the weights of each expert's gate and up, and of its down, in the form `WeightForm.matrix`
        adds_to     rows to which the sum is added; None: the sum is written to a new register
        """
        return self.recording.mixture(self, logits, networks, activation, chosen, renormalises, adds_to)

    def clamp(self, low: float, high: float) -> "Rows":
        """Record that entries above `high` become `high`, and those below `low` = -high become `low`."""
        if low != -high:
            raise NotRecordableError(f"it clamps its hidden states to {low} to {high}")
        return self.recording.clamp(self, high)

    def gated_by(self, gate: "Rows") -> "Rows":
        """Record that each row is multiplied by the sigmoid of its gate, [rows, 1]."""
        return self.recording.gate(self, gate)


@dataclass(slots=True)
class Recording:
    """The recorded operations of a model's forward, which step.c runs on a CPU (the compiled step).

    dtype       dtype of all rows
    operations  a list of integers for each operation, its kind first; all lists are equally long, see step.c
    uses        for each operation, the registers that it reads or writes
    strides     for each register, the distance from one row to the next, in entries. Register 0 is the input of the
                forward, the hidden states
    several     register -> its rows for each token, if there are several
    whole       registers other than register 0 whose rows have no padding
    result      the register of the output
    kept        objects that the operations point to, kept alive
    cuts        (number of operations before it, its rows) of each sum over the processes that share the model
    prepared    (register, column, width) of rows -> the register that has them prepared for quantised matrices
    """

    dtype: torch.dtype
    operations: list[list[int]] = field(default_factory=list)
    uses: list[list[int]] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)
    several: dict[int, int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    result: int = 0
    kept: list[Any] = field(default_factory=list)
    cuts: list[tuple[int, Rows]] = field(default_factory=list)
    prepared: dict[tuple[int, int, int], Rows] = field(default_factory=dict)

    def incoming(self, width: int) -> Rows:
        """Create register 0, the input. Must be called once, before any other register is created."""
        self.strides.append(width)
        return Rows(self, 0, 0, width)

    def add(self, kind: int, rows: Sequence[Rows], numbers: Sequence[int] = ()) -> None:
        """Append an operation.

        kind      number of one of the kinds of operations in step.c
        rows      operands of the operation, in the order that step.c expects; the last one has as many rows as the
                  operation has to compute
        numbers   further arguments of the operation
        """
        operands = ((one.register, self.strides[one.register], one.column) for one in rows)
        operation = [kind, *chain.from_iterable(operands), *numbers]
        padding = [0] * (OPERATION_NUMBERS - 1 - len(operation))
        self.operations.append([*operation, *padding, self.several.get(rows[-1].register, 0)])
        self.uses.append([one.register for one in rows])

    def register(self, width: int, several: int = 0) -> Rows:
        """Create a register of `width` columns, and return the Rows with all its columns.

        several   number of rows for each token, if there are several
        """
        register = len(self.strides)
        if several:
            self.several[register] = several
        self.strides.append(-(-width // INPUTS_ALIGNED) * INPUTS_ALIGNED)
        if width % INPUTS_ALIGNED == 0:
            self.whole.add(register)
        return Rows(self, register, 0, width)

    def floats(self, tensor: torch.Tensor) -> int:
        """Return the address of a contiguous float32 version of the tensor, which the recording keeps alive."""
        kept = tensor.detach().to(torch.float32).contiguous()
        self.kept.append(kept)
        return kept.data_ptr()

    # ------------------------------------------------------------------ called by Rows

    def sum(self, rows: Rows, other: "Rows | LookedUp") -> Rows:
        result = self.register(rows.width)
        if isinstance(other, LookedUp):
            table = other.table.contiguous()
            self.kept.append(table)
            self.add(ADD_LOOKED_UP, [rows, result], [rows.width, table.data_ptr()])
        else:
            self.add(ADD, [rows, result, other], [rows.width])
        result.heads = rows.heads
        return result

    def sum_over_processes(self, rows: Rows) -> Rows:
        self.cuts.append((len(self.operations), rows))
        self._written(rows)
        return rows

    def norm(self, rows: Rows, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, offset: float) -> Rows:
        result = self.register(rows.width)
        result.heads = rows.heads
        self.add(RMS_NORM if bias is None else LAYER_NORM, [rows, result], [
            rows.size, rows.heads or 1, self.floats(weight),
            0 if bias is None else self.floats(bias), _bits(epsilon), _bits(offset),
            rows.size if weight.dim() == 2 else 0])
        return result

    def product(self, rows: Rows, matrix: Any, outputs: int, adds_to: Rows | None) -> Rows:
        source = self._input(rows, matrix)
        result = self.register(outputs) if adds_to is None else adds_to
        self.kept.append(matrix)
        self.add(PRODUCT, [source, result], [matrix.address, int(adds_to is not None), matrix.type])
        self._written(result)
        return Rows(self, result.register, result.column, result.width)

    def _input(self, rows: Rows, matrix: Any) -> Rows:
        """Return `rows` as products with the matrix read them. Raises NotRecordableError if they cannot."""
        if not isinstance(matrix, PanelMatrix):
            raise NotRecordableError("one of its matrices is not packed for the compiled step")
        # A product reads whole vectors. If the width is not a multiple of a vector, it reads past the last column,
        # where numbers must be finite: zero padding or other columns of a register. The input has no padding.
        if (rows.register == 0 or rows.column % INPUTS_ALIGNED) and rows.width % INPUTS_ALIGNED:
            raise NotRecordableError(f"the input of one of its products has {rows.width} columns, not a multiple of "
                                     f"{INPUTS_ALIGNED}, and these columns "
                                     f"{'have no padding' if rows.register == 0 else 'are not aligned'}")
        return self._prepared(rows, matrix) if isinstance(matrix, QuantisedMatrix) else rows

    def _prepared(self, rows: Rows, matrix: QuantisedMatrix) -> Rows:
        """Return `rows`, prepared for quantised matrices. Products of the same rows share them."""
        key = (rows.register, rows.column, rows.width)
        if key not in self.prepared:
            self.prepared[key] = to = self.register(matrix.prepared_entries, self.several.get(rows.register, 0))
            self.add(PREPARE, [rows, to], [rows.width, int(matrix.has_byte_rows)])
        return self.prepared[key]

    def _written(self, rows: Rows) -> None:
        """Forget what was prepared of a register that is written again."""
        self.prepared = {key: prepared for key, prepared in self.prepared.items() if key[0] != rows.register}

    def adapt(self, rows: Rows, result: Rows, adapter: Any) -> None:
        """Record that `result` is a product of `rows`, to which the adapters of the layer are added.

        adapter   an AdapterModule with `projections`, see runtime/adapters/pool.py
        """
        own = adapter.projections
        if len(own) > PROJECTIONS_AT_ONCE:
            raise NotRecordableError(f"one of its layers has {len(own)} projections that adapters change")

        def column(name: str) -> list[int]:
            return [getattr(one, name) for one in own] + [0] * (PROJECTIONS_AT_ONCE - len(own))

        inputs, empty = -(-rows.width // INPUTS_ALIGNED) * INPUTS_ALIGNED, [0] * 3
        self.add(SHRINK, [rows], [*empty, inputs, len(own), *column("index"), *column("a"), *column("b")])
        self.add(EXPAND_ADD, [result], [*empty, inputs, len(own), *column("index"), *column("b"),
                                        *column("first_output"), *column("out_size")])
        self._written(result)

    def activation(self, rows: Rows, kind: str, gated: bool) -> Rows:
        width = rows.width // 2 if gated else rows.width
        result = self.register(width, self.several.get(rows.register, 0))
        self.add(ACTIVATE, [rows, result], [width, ACTIVATIONS[kind], int(gated)])
        return result

    def mixture(self, rows: Rows, logits: Rows, networks: Sequence[tuple[Any, Any]], activation: str, chosen: int,
                renormalises: bool, adds_to: Rows | None) -> Rows:
        sizes = [len(networks), chosen]
        gate_ups, downs = zip(*networks)
        source = self._input(rows, gate_ups[0])
        routing = self.register(routing_words(*sizes) * 4 // self.dtype.itemsize)
        self.add(ROUTE, [logits, routing], [int(renormalises), 0, 0, 0, *sizes])
        # Each row once for each of its experts. Products read the padding, too.
        gathered = self.register(-(-source.width // INPUTS_ALIGNED) * INPUTS_ALIGNED, chosen)
        self.add(GATHER, [source, routing, gathered], [gathered.width, *sizes])
        inner = self.activation(self._product_of_experts(gathered, routing, gate_ups, sizes), activation, gated=True)
        outer = self._product_of_experts(self._input(inner, downs[0]), routing, downs, sizes)
        result = self.register(outer.width) if adds_to is None else adds_to
        self.add(COMBINE, [outer, routing, result], [outer.width, *sizes, int(adds_to is not None)])
        self._written(result)
        return Rows(self, result.register, result.column, result.width)

    def _product_of_experts(self, rows: Rows, routing: Rows, matrices: Sequence[PanelMatrix], sizes: Sequence[int]
                            ) -> Rows:
        """Record the products of gathered rows, as `_input` returns them, and the matrices of their experts."""
        if len({(type(matrix), matrix.inputs, matrix.outputs) for matrix in matrices}) > 1:
            raise NotRecordableError("the matrices of its experts are of several kinds")
        addresses = np.array([matrix.address for matrix in matrices], np.uintp)
        self.kept += [addresses, matrices]
        result = self.register(matrices[0].outputs, sizes[1])
        self.add(PRODUCT_OF_EXPERTS, [rows, routing, result], [addresses.ctypes.data, *sizes])
        return result

    def clamp(self, rows: Rows, bound: float) -> Rows:
        result = self.register(rows.width)
        result.heads = rows.heads
        self.add(CLAMP, [rows, result], [rows.width, _bits(bound)])
        return result

    def gate(self, rows: Rows, gate: Rows) -> Rows:
        result = self.register(rows.width)
        self.add(GATE, [rows, gate, result], [rows.width])
        return result

    def attention(self, layer: int, query: Rows, key: Rows, value: Rows, rotary: Any, how: Any, sink: int,
                  sink_logits: torch.Tensor | None) -> Rows:
        """Record the rotation of query and key, the writing of key and value to the cache, and attention.

        how    the LayerAttention of the layer
        sink   number of sink tokens
        """
        if how.has_sink_logits != (sink_logits is not None):
            called = "without" if sink_logits is None else "with"
            raise NotRecordableError(f"its attention is called {called} sink_logits in layer {layer}, where "
                                     f"has_sink_logits is {how.has_sink_logits}")
        slopes = 0 if how.alibi_slopes is None else self.floats(torch.tensor(how.alibi_slopes, dtype=torch.float32,
                                                                             device="cpu"))
        tables = (0, 0, 0)
        if rotary is not None:
            tables = (self.floats(rotary.cos), self.floats(rotary.sin), rotary.cos.shape[1])
        scales = [_bits(how.key_scale), _bits(how.value_scale)]
        self.add(ROTATE_AND_APPEND, [query, key, value], [layer, *tables, *scales])
        self._written(query)
        result = self.register(query.width)
        self.add(ATTEND, [query, result], [layer, _bits(how.scale * how.key_scale), _bits(how.softcap or 0.0),
                                           how.window or 0, sink, slopes, _bits(how.alibi_bfloat16_factor or 0.0),
                                           self.floats(sink_logits) if how.has_sink_logits else 0, scales[1]])
        return result


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A stand-in for the rows that an Embedding looks up in `table`, by the positions or ids of the tokens."""

    table: torch.Tensor


class Positions:
    """A stand-in for the tensor of positions that a model's `forward` gets."""

    def __getattr__(self, name: str) -> Any:
        raise NotRecordableError(f"it uses the attribute {name} of the positions")


class RecordedAttention:
    """Passed to a model's `forward` in place of an Attention: records each call of `run`.

    heads   (query heads, kv heads, head size)
    layers  the LayerAttention of each layer, with its effective window
    sink    number of sink tokens
    norms_heads   whether the attention norms heads itself; see attention/interface.py
    """

    dispatch = "native"

    def __init__(self, heads: tuple[int, int, int], layers: Sequence[Any], sink: int, norms_heads: bool = False
                 ) -> None:
        (self._query_heads, self._kv_heads, self._size), self._layers, self._sink = heads, layers, sink
        self.norms_heads = norms_heads

    def plan(self, step: Any) -> None:
        pass

    def run(self, layer: int, query: Rows, key: Rows, value: Rows, rotary: Any,
            sink_logits: torch.Tensor | None = None, norms: Any = None) -> Rows:
        expected = ((query, self._query_heads), (key, self._kv_heads), (value, self._kv_heads))
        if not all(isinstance(rows, Rows) and rows.heads == heads and rows.size == self._size
                   for rows, heads in expected):
            raise NotRecordableError("it calls attention with a query, key or value that is not hidden states viewed "
                                     "as [tokens, heads, head size]")
        more = {} if norms is None else {"norms": norms}
        return query.recording.attention(layer, query, key, value, rotary, self._layers[layer], self._sink, sink_logits,
                                         **more)


def record(forward: Callable[..., Any], hidden_size: int, dtype: torch.dtype, attention: RecordedAttention,
           make: Callable[[torch.dtype], Any] = Recording, may_be_input: bool = False) -> Any:
    """Record `forward(hidden, positions, attention)` in a new recording, `make(dtype)`, and return the recording.

    may_be_input   whether the result may be in the register of the hidden states that it was given
    Raises NotRecordableError if an operation of `forward` cannot be recorded.
    """
    recording = make(dtype)
    hidden = recording.incoming(hidden_size)
    try:
        result = forward(hidden, Positions(), attention)
    except NotRecordableError:
        raise
    except Exception as error:              # torch, or the model, rejects stand-ins for tensors
        fault = f"{type(error).__name__}: {error}"
        raise NotRecordableError(f"its forward failed while it was recorded: {fault}") from error
    if (not isinstance(result, Rows) or result.width != hidden_size or result.column
            or result.register == 0 and not may_be_input):
        raise NotRecordableError("its forward does not return rows of the hidden size")
    recording.result = result.register
    return recording


def record_head(logits: Callable[..., Any], hidden_size: int, dtype: torch.dtype) -> Any:
    """Return the PanelMatrix of a model's head if `logits(hidden)` only multiplies by this matrix, else None."""
    recording = Recording(dtype, strides=[0])           # `hidden` is not register 0, whose rows have no padding
    hidden = recording.register(hidden_size)
    try:
        result = logits(hidden)
    except Exception:                       # an operation that cannot be recorded, or a function of tensors only
        return None
    kinds = [operation[0] for operation in recording.operations]
    is_product = isinstance(result, Rows) and kinds in ([PRODUCT], [PREPARE, PRODUCT])
    return recording.kept[0] if is_product and result.register != hidden.register else None


def record_embedding(embed: Callable[..., Any]) -> torch.Tensor | None:
    """Return the table [vocab, hidden size] if `embed(token_ids)` is a single lookup in a table, else None."""
    try:
        result = embed(Positions())         # a stand-in for token ids
    except Exception:                       # it computes with the ids or with the rows
        return None
    return result.table if isinstance(result, LookedUp) else None


def _bits(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]
