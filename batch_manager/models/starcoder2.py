"""StarCoder 2: Mistral with LayerNorm, biases and an ungated MLP.

Source   "StarCoder 2" (arXiv 2402.19173); checkpoints of transformers' Starcoder2ForCausalLM.
"""

import torch

from ..attention.interface import Attention
from ..layers.context import LayerContext
from ..layers.linear import Linear
from ..layers.mlp import Mlp
from ..layers.norm import LayerNorm
from ..layers.rotary import Rotary
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .spec import ModelSpec
from .spec_reading import read_decoder_spec, read_uniform_windows


class _Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str, index: int) -> None:
        self.index = index
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_size = spec.head_size
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.input_norm = LayerNorm(weights, context, f"{name}.input_layernorm", size, epsilon)
        self.qkv = Linear(weights, context, [f"{name}.self_attn.{part}_proj" for part in "qkv"], size,
                          spec.qkv_sizes, bias=spec.qkv_bias, split="heads")
        self.out = Linear(weights, context, [f"{name}.self_attn.o_proj"], spec.qkv_sizes[0], [size], bias=spec.out_bias,
                          split="rows")
        self.mlp_norm = LayerNorm(weights, context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = Mlp(weights, context, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", size, spec.intermediate_size,
                       spec.activation, bias=spec.mlp_bias)

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.head_size)
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        hidden = self.out.add_to(hidden, attention.run(self.index, query, key, value, rotary))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class StarCoder2(Decoder):
    """Implements Starcoder2ForCausalLM of transformers."""

    layer = _Layer
    last_norm = LayerNorm

    @staticmethod
    def read_spec(config: Fields, architecture: str) -> ModelSpec:
        windows = read_uniform_windows(config, config.count("sliding_window", None))
        bias = config.flag("use_bias", True)
        return read_decoder_spec(config, architecture, windows=windows, qkv_bias=bias, out_bias=bias,
                                 mlp_bias=bias, gated_mlp=False, num_kv_heads=2, max_positions=4096,
                                 tie_word_embeddings=True, default_activation="gelu_pytorch_tanh",
                                 norm_epsilon="norm_epsilon", default_norm_epsilon=1e-5, default_theta=10000.0)
