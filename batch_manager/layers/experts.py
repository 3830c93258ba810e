"""A mixture of experts: a feed-forward network in which a router chooses a few of many networks for each row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..triton_kernels import dispatch
from ..triton_kernels.cpu.fixed_pieces import elementwise, row_by_row
from ..weights.matrices import Dense, DenseSource, Part, Shape
from ..weights.source import Weights
from .context import LayerContext, Split
from .linear import Linear
from .mlp import GatedMlp
from .recording import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParameters:
    """The sizes of the experts of one layer.

    count         number of experts
    chosen        number of experts that compute each row
    size          intermediate size of an expert
    renormalises  whether the weights of a row's experts are divided by their sum
    shared_size   intermediate size of an expert that computes every row; 0: there is none
    """

    count: int
    chosen: int
    size: int
    renormalises: bool
    shared_size: int = 0

    @property
    def rows(self) -> int:
        """Number of rows of hidden size in the matrices of the layer's experts and router."""
        return self.count * (3 * self.size + 1) + 3 * self.shared_size + (self.shared_size > 0)

    def share(self, split: Split) -> "ExpertParameters":
        """Return the parameters of one of the processes of `split`, which divides every size."""
        return replace(self, size=self.size // split.size, shared_size=self.shared_size // split.size)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in the checkpoint, after that of the layer's MLP and without `.weight`.

    router         the router
    expert         of an expert, before its matrices, with a place for its number; "": each tensor has the matrices of
                   all experts, [experts, out, in]
    gate_up, down  the matrices of an expert: gate and up are two tensors, or one with gate before up
    """

    router: str = "gate"
    expert: str = "experts.{}."
    gate_up: Sequence[str] = ("gate_proj", "up_proj")
    down: str = "down_proj"


class Experts:
    """The sum of the chosen experts' outputs, each times its weight, plus the shared expert's output times its gate.

    The router computes a softmax over all experts in float32. The experts with the largest logits are chosen; among
    equal ones, those with lower numbers. Outputs are added in the order of the experts' numbers, in float32. With
    Triton's kernels and matrices of numbers, `GroupedProducts` computes the outputs of all experts. Otherwise each
    expert multiplies its rows as `GatedMlp` does. With `deterministic`, a row's bits depend on that row alone.

    Adapters apply to the shared expert alone. The router is never quantised.

    scale   factor on the output; None: no factor
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, hidden_size: int,
                 parameters: ExpertParameters, activation: str, names: ExpertNames = ExpertNames(),
                 scale: float | None = None) -> None:
        self.parameters, self._is_deterministic = parameters, context.deterministic
        # A process adds up what its parts of the experts compute, and the sum over the processes comes last.
        self._split, plain = context.split, replace(context, adapters=None)
        of_expert = replace(plain, split=_Unsummed(context.split))
        self.router = Linear(weights, replace(plain, quantization=None), [f"{name}.{names.router}"], hidden_size,
                             [parameters.count])
        stacked = f"{name}.{names.gate_up[0]}.weight"
        if not names.expert and not weights.has(stacked) and weights.has(f"{name}.experts.0.gate_proj.weight"):
            names = ExpertNames(names.router)              # a GGUF file has each matrix apart
        source = _source_of_experts(weights, context, name, hidden_size, parameters, names)
        has_kernel = dispatch.use_triton(context.device) and context.weight_form is None
        if has_kernel:
            of_expert = replace(of_expert, deterministic=False)    # the kernel is; a plain form tells its matrix
        self.experts = [GatedMlp(source(number), of_expert, f"{name}.{names.expert.format(number)}".rstrip("."),
                                 hidden_size, parameters.size, activation, gate_up=names.gate_up, down=names.down,
                                 scale=scale) for number in range(parameters.count)]
        self.grouped = None
        if has_kernel and all(isinstance(part.matrix, Dense) for expert in self.experts
                              for part in (expert.expand, expert.project)):
            self.grouped = GroupedProducts(self.experts, context)
        self.shared = self.shared_gate = None
        if parameters.shared_size:
            self.shared = GatedMlp(weights, context, f"{name}.shared_expert", hidden_size, parameters.shared_size,
                                   activation, scale=scale)
            self.shared_gate = Linear(weights, replace(plain, quantization=None), [f"{name}.shared_expert_gate"],
                                      hidden_size, [1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for x [T, hidden size] as a new tensor [T, hidden size]."""
        if isinstance(x, Rows):
            return self._recorded(x)
        y = self._split.sum(self._sum(x, *self._routed(x)))
        if self.shared is None:
            return y
        gate = self.shared_gate(x)
        gate = elementwise(torch.sigmoid, gate) if self._is_deterministic else torch.sigmoid(gate)
        return y.add_(self.shared(x).mul_(gate))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + the output. May overwrite `residual`."""
        if isinstance(x, Rows):
            is_one_sum = self.shared is None and self._split.size == 1
            return self._recorded(x, residual) if is_one_sum else residual + self._recorded(x)
        y = self(x)
        return residual.add_(y)

    def _recorded(self, x: Rows, adds_to: Rows | None = None) -> Rows:
        networks = [(expert.expand.matrix, expert.project.matrix) for expert in self.experts]
        y = x.mixed(self.router(x), networks, self.experts[0].activation, self.parameters.chosen,
                    self.parameters.renormalises, adds_to)
        if self._split.size > 1:
            y = y.summed()
        return y if self.shared is None else y + self.shared(x).gated_by(self.shared_gate(x))

    def _routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the experts of each row, and their weights in float32, both [T, chosen]."""
        logits = self.router(x).float()
        largest, order = logits.sort(dim=1, descending=True, stable=True)
        largest, chosen = largest[:, : self.parameters.chosen], order[:, : self.parameters.chosen]
        if self.parameters.renormalises:
            return chosen, self._softmax(largest)
        return chosen, self._softmax(logits).gather(1, chosen)

    def _softmax(self, logits: torch.Tensor) -> torch.Tensor:
        return row_by_row(_softmax, logits) if self._is_deterministic else _softmax(logits)

    def _sum(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, hidden size] of the outputs of each row's experts."""
        if self.grouped is not None:
            return self.grouped(x, chosen, weights)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.parameters.count, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(by_expert))
        rows, weights, first = by_expert // self.parameters.chosen, weights.flatten()[by_expert, None], 0
        for expert, count in zip(self.experts, counts.tolist()):
            if count:
                own = rows[first : first + count]            # each row once
                output = expert(x.index_select(0, own)).float()
                y.index_add_(0, own, output.mul_(weights[first : first + count]))
                first += count
        return y.to(x.dtype)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, 1)


class GroupedProducts:
    """The outputs of all experts in two products, whatever the number of rows of each; the host waits for nothing.

    experts   in order of their numbers, with Dense matrices, which are copied; the list is empty afterwards
    """

    def __init__(self, experts: list[GatedMlp], context: LayerContext) -> None:
        self.activation, self._is_deterministic = experts[0].activation, context.deterministic
        self._numbers = torch.arange(len(experts), dtype=torch.int64, device=context.device)
        self._multiply, self._activate = (dispatch.kernel(name, context.device)
                                          for name in ("moe_grouped_gemm", "gated_activation"))
        gate_ups = [expert.expand.matrix.weight for expert in experts]
        downs = [expert.project.matrix.weight for expert in experts]
        experts.clear()
        self.gate_up = torch.stack(gate_ups)
        gate_ups.clear()
        self.down = torch.stack(downs)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, hidden size] of the outputs of each row's experts.

        chosen, weights   [T, n] numbers of the experts of each row, and their weights in float32
        """
        chosen, order = chosen.sort(1)                     # outputs are added in the order of the experts' numbers
        expert, place = chosen.flatten().sort(stable=True)                  # places in [T * n], by expert
        ends = torch.searchsorted(expert, self._numbers, right=True, out_int32=True)
        gate_up = self._multiply(x, self.gate_up, ends, place // chosen.shape[1])
        hidden = self._activate(gate_up, self.activation, deterministic=self._is_deterministic)
        outputs = self._multiply(hidden, self.down, ends, None, place, weights.gather(1, order).flatten()
                                 ).view(*chosen.shape, -1)
        y = outputs[:, 0]
        for number in range(1, chosen.shape[1]):
            y = y + outputs[:, number]
        return y.to(x.dtype)


class _Unsummed:
    """A Split whose processes do not exchange anything: the sum is made later."""

    def __init__(self, split: Split) -> None:
        self.rank, self.size = split.rank, split.size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("an expert gathers nothing")


class _OneExpert(DenseSource):
    """The Weights of one expert in tensors with the matrices of all experts, [experts, out, in]."""

    def __init__(self, weights: Weights, context: LayerContext, stacked: dict[str, torch.Tensor], number: int) -> None:
        super().__init__(context.device, context.dtype)
        self._stacked, self._number, self.count_copy = stacked, number, weights.count_copy

    def _check(self, name: str, shape: Shape) -> str:
        return name

    def _load(self, target: torch.Tensor, stored_name: str, part: Part) -> None:
        target.copy_(self._stacked[stored_name][self._number][part.index])


def _source_of_experts(weights: Weights, context: LayerContext, name: str, hidden_size: int,
                       parameters: ExpertParameters, names: ExpertNames) -> Callable[[int], Weights]:
    """Return a function of an expert's number that returns the Weights with its matrices."""
    if names.expert:
        return lambda number: weights
    (gate_up,), size = names.gate_up, parameters.size * context.split.size
    shapes = {f"{name}.{gate_up}.weight": (2 * size, hidden_size), f"{name}.{names.down}.weight": (hidden_size, size)}
    stacked = {full: weights.tensor(full, (parameters.count, *shape)) for full, shape in shapes.items()}
    return lambda number: _OneExpert(weights, context, stacked, number)
