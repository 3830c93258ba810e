"""Llama: RMSNorm, rotary positions, grouped-query attention, a gated MLP.

Source   "Llama 2" (arXiv 2307.09288) and the Llama 3 releases; checkpoints of transformers' LlamaForCausalLM.
"""

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import RmsNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, refuse_windows


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_size = spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.input_norm = RmsNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation,
                            bias=spec.mlp_bias)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Llama(Decoder):
    """Implements LlamaForCausalLM of transformers."""

    layer = _Layer

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        num_layers, bias = layer_count(config), config.flag("attention_bias", False)
        refuse_windows(config, num_layers)
        return read_decoder_spec(config, architecture, windows=(None,) * num_layers, qkv_bias=bias, out_bias=bias,
                                 mlp_bias=config.flag("mlp_bias", False), max_positions=2048, default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
