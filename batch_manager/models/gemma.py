"""Gemma: Llama with scaled embeddings, norm weights that are stored minus one, an explicit head size and tanh GELU.

Source   "Gemma" (arXiv 2403.08295); checkpoints of transformers' GemmaForCausalLM.
"""

from dataclasses import replace
from functools import partial

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.embedding import Embedding
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
        self.input_norm = RmsNorm(weights, context, f"{name}.input_layernorm", size, epsilon, weight_offset=1.0)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp_norm = RmsNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon, weight_offset=1.0)
        self.mlp = GatedMlp(weights, context, f"{name}.mlp", size, spec.intermediate_size, spec.activation)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Gemma(Decoder):
    """Implements GemmaForCausalLM of transformers."""

    layer = _Layer
    last_norm = staticmethod(partial(RmsNorm, weight_offset=1.0))

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        num_layers = layer_count(config)
        refuse_windows(config, num_layers)
        bias = config.flag("attention_bias", False)
        spec = read_decoder_spec(config, architecture, windows=(None,) * num_layers, qkv_bias=bias, out_bias=bias,
                                 head_size=256, num_kv_heads=16, max_positions=8192, tie_word_embeddings=True,
                                 default_activation="gelu_pytorch_tanh", default_norm_epsilon=1e-6,
                                 default_theta=10000.0)
        # Early checkpoints say "gelu" but use the tanh approximation; transformers treats them the same way.
        return replace(spec, activation="gelu_new") if config.text("hidden_act", "") == "gelu" else spec

    def make_embedding(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Embedding:
        return super().make_embedding(spec, weights, context, scale=spec.hidden_size**0.5)
