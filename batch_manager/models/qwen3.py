"""Qwen3: Llama with queries and keys normed per head; upper layers can have a window.

Source   "Qwen3" (arXiv 2505.09388); checkpoints of transformers' Qwen3ForCausalLM.
"""

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import HeadNorms, RmsNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, read_layer_windows


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_size = spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.input_norm = RmsNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        self.head_norms = HeadNorms(weights, context, f"{name}.self_attn", spec.head_size, epsilon)
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        attended = self.head_norms.attend(attention, self.index, query, key, value, rotary)
        hidden = self.out.add_to(hidden, attended)
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Qwen3(Decoder):
    """Implements Qwen3ForCausalLM of transformers."""

    layer = _Layer
    understands = ("sliding_window", "max_window_layers")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        windows, bias = read_layer_windows(config, layer_count(config)), config.flag("attention_bias", False)
        return read_decoder_spec(config, architecture, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True,
                                 head_size=128, num_kv_heads=32, max_positions=32768, default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
