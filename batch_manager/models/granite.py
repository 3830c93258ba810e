"""Granite: Llama with factors for embeddings, residual branches, attention scores and logits.

Source   "Granite 3.0 Language Models" (IBM, 2024); checkpoints of transformers' GraniteForCausalLM.
"""

from dataclasses import dataclass

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import RmsNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, refuse_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteSpec(ModelSpec):
    """The spec of Granite models.

    embedding_scale   factor by which the embeddings are multiplied
    residual_scale    factor by which the outputs of attention and MLP are multiplied in each layer
    logits_divisor    number by which the logits are divided
    """

    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0


def unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def read_factors(config: Fields) -> dict[str, float]:
    """Return the factors of a config.json as arguments of `read_decoder_spec`."""
    return {"scale": config.number("attention_multiplier", 1.0),
            "embedding_scale": config.number("embedding_multiplier", 1.0),
            "residual_scale": config.number("residual_multiplier", 1.0),
            "logits_divisor": config.number("logits_scaling", 1.0)}


class _Layer:
    def __init__(self, spec: GraniteSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_size = spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.input_norm = RmsNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        scale = unless_one(spec.residual_scale)
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows", scale=scale)
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation,
                            bias=spec.mlp_bias, scale=scale)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Granite(Decoder):
    """Implements GraniteForCausalLM of transformers."""

    layer = _Layer

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> GraniteSpec:
        num_layers, bias = layer_count(config), config.flag("attention_bias", False)
        refuse_windows(config, num_layers)
        return read_decoder_spec(config, architecture, windows=(None,) * num_layers, qkv_bias=bias, out_bias=bias,
                                 mlp_bias=config.flag("mlp_bias", False), max_positions=2048, default_norm_epsilon=1e-6,
                                 default_theta=10000.0, spec_class=GraniteSpec, **read_factors(config))

    def make_embedding(self, spec: GraniteSpec, weights: Weights, context: LayerContext) -> Embedding:
        self.prompt_tuning_scale = spec.embedding_scale    # as in transformers
        return super().make_embedding(spec, weights, context, scale=unless_one(spec.embedding_scale))

    def make_head(self, spec: GraniteSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, scale=unless_one(1 / spec.logits_divisor))
