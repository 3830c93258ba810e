"""Qwen3: Llama with queries and keys normed per head; upper layers can have a window.

Source   "Qwen3" (arXiv 2505.09388); checkpoints of transformers' Qwen3ForCausalLM.
"""

from ..layers.context import LayerContext
from ..layers.norm import HeadNorms
from ..weights.json_file import Fields
from ..weights.source import Weights
from .decoder import Decoder
from .layer import Layer
from .spec import ModelSpec
from .spec_reading import layer_count, read_decoder_spec, read_layer_windows


class _Layer(Layer):
    def make_head_norms(self, spec: ModelSpec, weights: Weights, context: LayerContext, name: str) -> HeadNorms:
        return HeadNorms(weights, context, name, spec.head_size, spec.norm_epsilon)


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
