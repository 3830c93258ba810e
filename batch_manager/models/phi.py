"""Phi-1, Phi-1.5, Phi-2: parallel attention and MLP, an ungated MLP, partial rotary positions, biases.

Source   "Textbooks Are All You Need" (arXiv 2306.11644, 2309.05463); checkpoints of transformers' PhiForCausalLM.
"""

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Head
from ..layers.linear import Linear
from ..layers.mlp import Mlp
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder, Names
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, refuse_windows


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        size = spec.hidden_size
        self.index, self.head_size, self.has_norms = index, spec.head_size, spec.qk_norm
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.input_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, spec.norm_epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=True, split="heads")
        if spec.qk_norm:
            self.query_norm, self.key_norm = (
                LayerNorm(weights, context, f"{name}.self_attn.{part}_layernorm", spec.head_size, spec.norm_epsilon)
                for part in "qk")
        self.out = Linear(weights, context, [f"{name}.self_attn.dense"], spec.qkv_sizes[0], [size], bias=True,
                          split="rows")
        self.mlp = Mlp(weights, context, f"{name}.mlp.fc1", f"{name}.mlp.fc2", size, spec.intermediate_size,
                       spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        normed = self.input_norm(hidden)
        qkv = self.qkv(normed).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        if self.has_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, normed)


class Phi(Decoder):
    """Implements PhiForCausalLM of transformers."""

    layer = _Layer
    names = Names(norm="model.final_layernorm")
    last_norm = LayerNorm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        num_layers = layer_count(config)
        refuse_windows(config, num_layers)
        return read_decoder_spec(
            config, architecture, windows=(None,) * num_layers, qkv_bias=True, out_bias=True, mlp_bias=True,
            gated_mlp=False, qk_norm=config.flag("qk_layernorm", False), max_positions=2048,
            default_activation="gelu_new", norm_epsilon="layer_norm_eps", default_norm_epsilon=1e-5,
            default_theta=10000.0, partial_rotary_factor=0.5)

    def make_head(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Head:
        return super().make_head(spec, weights, context, bias=True)
