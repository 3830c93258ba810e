"""The layer of the families: a norm, attention and a residual sum, then a norm, a feed-forward network and a sum.

A family inherits from `Layer` and replaces what differs from Llama.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp, Mlp
from ..layers.norm import QueryKeyNorms, RmsNorm
from ..layers.rotary import Rotary
from ..weights.source import Weights
from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names in the checkpoint, without `.weight`, after the name of the layer and a dot.

    qkv        names of query, key and value, or of the one tensor that has all three
    mlp_norm   ""; the feed-forward network reads the rows that attention reads
    expand     names of gate and up, or of the one tensor that has both; of an ungated network the name of up
    """

    input_norm: str = "input_layernorm"
    qkv: Sequence[str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    expand: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


class Layer:
    """One layer. The members have Llama's values; a family replaces those in which it differs.

    names        names in the checkpoint
    norm         norm(weights, context, name, size, epsilon) makes a norm of the hidden states
    transposed   whether the checkpoint stores matrices as [in, out]
    """

    names = LayerNames()
    norm: Callable[..., Any] = RmsNorm
    transposed = False

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        names, size = self.names_of(spec), spec.hidden_size
        self.spec, self.index, self.head_size = spec, index, spec.head_size
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.input_norm = self.make_norm(spec, weights, context, f"{name}.{names.input_norm}")
        self.qkv = Linear(weights, context, [f"{name}.{part}" for part in names.qkv], size, spec.qkv_sizes,
                          bias=spec.qkv_bias, transposed=self.transposed, split="heads",
                          **self.order_of_heads(spec, context))
        self.head_norms = self.make_head_norms(spec, weights, context, f"{name}.self_attn")
        self.out = Linear(weights, context, [f"{name}.{names.out}"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          transposed=self.transposed, split="rows", scale=self.residual_scale(spec))
        self.mlp_norm = self.make_norm(spec, weights, context, f"{name}.{names.mlp_norm}") if names.mlp_norm else None
        self.mlp = self.make_mlp(spec, weights, context, name)

    # ------------------------------------------------------------------ the parts of a layer

    def names_of(self, spec: ModelSpec) -> LayerNames:
        return self.names

    def make_norm(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str) -> Any:
        return self.norm(weights, context, name, spec.hidden_size, spec.norm_epsilon)

    def order_of_heads(self, spec: ModelSpec, context: LayerContext) -> dict[str, Any]:
        """Return `by_head` or `row_order` of the projection to queries, keys and values, as in Linear."""
        return {}

    def make_head_norms(self, spec: ModelSpec, weights: Weights, context: LayerContext,
                        name: str) -> QueryKeyNorms | None:
        """Return the norms of queries and keys; None: they are not normed.

        name   name of attention in the checkpoint
        """
        return None

    def residual_scale(self, spec: ModelSpec) -> float | None:
        """Return the factor on the outputs of attention and of the feed-forward network; None: no factor."""
        return None

    def make_mlp(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str) -> Any:
        """Return the feed-forward network of the layer `name`."""
        names, sizes = self.names_of(spec), (spec.hidden_size, spec.intermediate_size)
        if spec.gated_mlp:
            return GatedMlp(weights, context, name, *sizes, spec.activation, bias=spec.mlp_bias, gate_up=names.expand,
                            down=names.down, scale=self.residual_scale(spec))
        return Mlp(weights, context, f"{name}.{names.expand[0]}", f"{name}.{names.down}", *sizes, spec.activation,
                   transposed=self.transposed, bias=spec.mlp_bias)

    # ------------------------------------------------------------------ a step

    def __call__(self, hidden: torch.Tensor, rotary: Rotary | None, attention: Attention) -> torch.Tensor:
        """Return the hidden states [T, hidden size] after the layer. May overwrite `hidden`."""
        normed = self.input_norm(hidden)
        hidden = self.out.add_to(hidden, self.attended(normed, rotary, attention))
        return self.mlp.add_to(hidden, normed if self.mlp_norm is None else self.mlp_norm(hidden))

    def attended(self, rows: torch.Tensor, rotary: Rotary | None, attention: Attention) -> torch.Tensor:
        """Return what attention gives for the rows [T, hidden size], before the output projection."""
        query, key, value = self.qkv(rows).view(len(rows), -1, self.head_size).split_with_sizes(self.heads, 1)
        if self.head_norms is not None:
            return self.head_norms.attend(attention, self.index, query, key, value, rotary)
        return attention.run(self.index, query, key, value, rotary)
