"""Qwen2 and Qwen2.5: Llama with biases on query, key and value; upper layers can have a window.

Source   "Qwen2" (arXiv 2407.10671); checkpoints of transformers' Qwen2ForCausalLM.
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
from .spec_reading import layer_count, read_decoder_spec, read_layer_windows


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_size = spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.input_norm = RmsNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=True, split="heads")
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size],
                          split="rows")
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Qwen2(Decoder):
    """Implements Qwen2ForCausalLM of transformers."""

    layer = _Layer
    understands = ("sliding_window", "max_window_layers")

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        windows = read_layer_windows(config, layer_count(config))
        return read_decoder_spec(config, architecture, windows=windows, qkv_bias=True, num_kv_heads=32,
                                 max_positions=32768, default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
