"""Norms over the last dimension."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..errors import ConfigError
from ..triton_kernels import dispatch
from ..triton_kernels.cpu.fixed_pieces import elementwise, row_by_row
from ..weights.matrices import changed_rows
from ..weights.source import Shape, Weights
from .context import ONE_PROCESS, LayerContext, Split
from .recording import NotRecordableError, Rows


class RmsNorm:
    """RMS norm: x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight), in float32, for x [..., size].

    weight_offset   1 for checkpoints that store the weight minus one (Gemma)
    split           whether x is this process's part of longer rows, which are normed as a whole; `size` is the part's
    copies          with `split`, the number of processes that have the same part
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, size: int, epsilon: float,
                 weight_offset: float = 0.0, split: bool = False, copies: int = 1) -> None:
        processes = context.split if split else ONE_PROCESS
        weight, part = weights.tensor(f"{name}.weight", (size * processes.size // copies,)), processes.rank // copies
        self.weight = weight[part * size : (part + 1) * size]
        self.epsilon, self.weight_offset = epsilon, weight_offset
        self._norm, self._is_deterministic = dispatch.kernel("rms_norm", context.device), context.deterministic
        self._is_of_parts = processes.size > 1
        if self._is_of_parts:
            if context.deterministic and context.device.type != "cpu":
                raise ConfigError(f"deterministic is True, and {name} norms rows over {processes.size} GPUs",
                                  "on GPUs the bits of such a sum depend on the number of rows",
                                  "leave deterministic out, or use one GPU")
            self._norm = partial(_norm_of_parts, processes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x, of two or three dimensions, as a new tensor."""
        if isinstance(x, Rows):
            if self._is_of_parts:
                raise NotRecordableError("it norms rows of which each rank has a part")
            return x.normed(self.weight, None, self.epsilon, self.weight_offset)
        return self._norm(x, self.weight, self.epsilon, weight_offset=self.weight_offset,
                          deterministic=self._is_deterministic)


def _norm_of_parts(processes: Split, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, weight_offset: float,
                   deterministic: bool) -> torch.Tensor:
    wide, in_pieces = x.float(), deterministic and x.device.type == "cpu"
    squares = processes.sum(row_by_row(_squared, wide) if in_pieces else _squared(wide))
    means = squares / (x.shape[-1] * processes.size) + epsilon        # a copied part counts once for each copy
    factor = elementwise(torch.rsqrt, means) if in_pieces else torch.rsqrt(means)
    return (wide * factor * (weight_offset + weight.float())).to(x.dtype)


def _squared(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1, keepdim=True)


class QueryKeyNorms:
    """Norms of the query heads and key heads of a layer, before rotation: `query` and `key`, each a norm."""

    def __init__(self, query: Any, key: Any) -> None:
        self._query, self._key = query, key

    def attend(self, attention: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               rotary: Any) -> torch.Tensor:
        """Return `attention.run` of the normed query and key."""
        return attention.run(layer, self._query(query), self._key(key), value, rotary)


class HeadNorms(QueryKeyNorms):
    """RMS norms of each query head and key head of a layer, before rotation.

    Attention applies them itself if it can (`norms_heads` of attention/interface.py), which saves two launches.

    query_weight, key_weight   [size]
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, size: int, epsilon: float,
                 weight_offset: float = 0.0) -> None:
        query, key = (RmsNorm(weights, context, f"{name}.{part}_norm", size, epsilon, weight_offset) for part in "qk")
        super().__init__(query, key)
        self.query_weight, self.key_weight = query.weight, key.weight
        self.epsilon, self.weight_offset = epsilon, weight_offset

    def attend(self, attention: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               rotary: Any) -> torch.Tensor:
        """Return `attention.run` of the normed query and key."""
        if getattr(attention, "norms_heads", False):
            return attention.run(layer, query, key, value, rotary, norms=self)
        return super().attend(attention, layer, query, key, value, rotary)


class LayerNorm:
    """Layer norm: (x - mean) / sqrt(variance + epsilon) * weight + bias, in float32, for x [..., size].

    weight, bias   whether the checkpoint has a weight and a bias; without them, the weight is 1 and the bias is 0
    """

    def __init__(self, weights: Weights, context: LayerContext, name: str, size: int, epsilon: float,
                 bias: bool = True, weight: bool = True) -> None:
        nothing = torch.zeros(size, dtype=context.dtype, device=context.device)
        self.weight = weights.tensor(f"{name}.weight", (size,)) if weight else torch.ones_like(nothing)
        self.bias = weights.tensor(f"{name}.bias", (size,)) if bias else nothing
        self.epsilon = epsilon
        self._norm, self._is_deterministic = dispatch.kernel("layer_norm", context.device), context.deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x, of two or three dimensions, as a new tensor."""
        if isinstance(x, Rows):
            return x.normed(self.weight, self.bias, self.epsilon)
        return self._norm(x, self.weight, self.bias, self.epsilon, deterministic=self._is_deterministic)


class HeadLayerNorm:
    """Layer norm of each head of x [T, heads, size], with separate weights for each head and no bias.

    parts         names and shapes of the tensors whose concatenation has the weights of the heads of all processes
    heads         number of heads of this process
    copies        number of processes that have the same heads
    entry_order   permutation of the weights of this process: entry i uses weight entry_order[i]; None: stored order
    """

    def __init__(self, weights: Weights, context: LayerContext, parts: Sequence[tuple[str, Shape]], heads: int,
                 size: int, epsilon: float, entry_order: torch.Tensor | None = None, copies: int = 1) -> None:
        weight = weights.stacked(parts).view(context.split.size // copies, -1)[context.split.rank // copies]
        self.weight = changed_rows(weight, entry_order, None).view(heads, size)
        self._no_bias = torch.zeros(size, dtype=context.dtype, device=context.device)
        self.epsilon = epsilon
        self._norm, self._is_deterministic = dispatch.kernel("layer_norm", context.device), context.deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x as a new tensor."""
        if isinstance(x, Rows):
            return x.normed(self.weight, self._no_bias, self.epsilon)
        return self._norm(x, self.weight, None, self.epsilon, deterministic=self._is_deterministic)
