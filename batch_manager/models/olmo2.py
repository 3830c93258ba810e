"""OLMo 2: Llama with norms after attention and MLP instead of before, and queries and keys normed over all heads.

Source   "2 OLMo 2 Furious" (arXiv 2501.00656); checkpoints of transformers' Olmo2ForCausalLM.
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
from .spec_reading import read_decoder_spec


class Olmo2Layer:
    """Attention and a feed-forward network, each with a norm of its result; norms of whole queries and keys."""

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.head_size = spec.head_size
        self.sizes = spec.qkv_sizes
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        self.query_norm = RmsNorm(weights, context, f"{name}.self_attn.q_norm", spec.qkv_sizes[0], epsilon, split=True)
        self.key_norm = RmsNorm(weights, context, f"{name}.self_attn.k_norm", spec.qkv_sizes[1], epsilon, split=True,
                                copies=spec.kv_copies)
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.attention_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_feedforward_layernorm", size, epsilon)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        query, key, value = self.qkv(hidden).split_with_sizes(self.sizes, 1)
        query, key, value = (rows.view(len(hidden), -1, self.head_size)
                             for rows in (self.query_norm(query), self.key_norm(key), value))
        hidden = hidden + self.attention_norm(self.out(attention.run(self.index, query, key, value, rotary)))
        return hidden + self.mlp_norm(self.mlp(hidden))


class Olmo2(Decoder):
    """Implements Olmo2ForCausalLM of transformers."""

    layer = Olmo2Layer

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        bias = config.flag("attention_bias", False)
        return read_decoder_spec(config, architecture, qkv_bias=bias, out_bias=bias,
                                 qk_norm=True, max_positions=2048, default_norm_epsilon=1e-5, default_theta=10000.0)
